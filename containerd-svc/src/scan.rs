//! What lies in the directory of bundles.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, Entry, Error, FileKind};

use crate::digest::Hasher;
use crate::error::ImportError;
use crate::plan::{Bundle, Fingerprint};
use crate::{Digest, Namespace};

/// The ends of the names of bundles.
const ENDS: [&str; 5] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"];

/// How much of a file's begin and end is looked at.
const PART: u64 = 64 << 10;

/// Something in the directory that is no bundle, and is left alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    /// What.
    pub path: PathBuf,
    /// Why it is none.
    pub why: &'static str,
}

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// In the order of namespaces and names.
    pub(crate) bundles: Vec<Bundle>,
    pub(crate) strays: Vec<Stray>,
    /// Those that can't be opened.
    pub(crate) failed: Vec<ImportError>,
}

/// Lists the directory; nothing where there is none. Links in it are not followed.
pub(crate) fn scan(directory: &Path) -> Result<Found, Error> {
    let mut found = Found::default();
    let top = match Dir::open(directory) {
        Ok(top) => top,
        Err(error) if error.is_not_found() => return Ok(found),
        Err(error) => return Err(error),
    };
    for entry in top.list()? {
        let path = directory.join(entry.name.as_os_str());
        match namespace(&entry) {
            // One that can't be read keeps no other from being imported.
            Ok(Some(namespace)) => {
                let opened = top.open_dir(entry.name.as_os_str());
                if let Err(source) = opened.and_then(|dir| files(&dir, &namespace, &mut found)) {
                    found.failed.push(ImportError::Open { path, source });
                }
            }
            Ok(None) => {}
            Err(why) => found.strays.push(Stray { path, why }),
        }
    }
    Ok(found)
}

fn namespace(entry: &Entry) -> Result<Option<Namespace>, &'static str> {
    let name = entry.name.as_os_str().to_str();
    if name.is_some_and(|name| name.starts_with('.')) {
        return Ok(None);
    }
    if entry.kind != FileKind::Dir {
        return Err("bundles lie in directories that are called like their namespace");
    }
    let valid = name.and_then(|name| name.parse().ok());
    valid.map(Some).ok_or("no namespace can be called so")
}

fn files(directory: &Dir, namespace: &Namespace, found: &mut Found) -> Result<(), Error> {
    for entry in directory.list()? {
        let path = directory.path().join(entry.name.as_os_str());
        let Some(file) = entry.name.as_os_str().to_str() else {
            found.strays.push(Stray { path, why: "its name is no text" });
            continue;
        };
        let why = match entry.kind {
            _ if file.starts_with('.') => continue,
            FileKind::Dir => Some("it is a directory within a namespace"),
            FileKind::File if repository(file).is_some() => None,
            FileKind::File => Some("its name ends in none of .tar, .tar.gz, .tgz, .tar.zst, .tzst"),
            _ => Some("it is no regular file; links are not followed"),
        };
        if let Some(why) = why {
            found.strays.push(Stray { path, why });
            continue;
        }
        let opened = directory.open_file(file).and_then(|open| {
            fingerprint(&open)
                .map_err(|error| Error::new(nodekeel_localstorage::Operation::Read, &path, error))
        });
        match opened {
            Ok(fingerprint) => {
                let (namespace, file) = (namespace.clone(), file.to_owned());
                found.bundles.push(Bundle { namespace, file, fingerprint });
            }
            Err(source) => found.failed.push(ImportError::Open { path, source }),
        }
    }
    Ok(())
}

/// The name of a bundle without its end, which is the repository of images that have but a tag.
pub(crate) fn repository(file: &str) -> Option<&str> {
    ENDS.iter().find_map(|end| file.strip_suffix(end)).filter(|stem| !stem.is_empty())
}

/// Opens a bundle as it is now.
pub(crate) fn open(directory: &Path, bundle: &Bundle) -> Result<File, Error> {
    Dir::open(directory)?.open_file(Path::new(bundle.namespace.as_str()).join(&bundle.file))
}

fn fingerprint(file: &File) -> std::io::Result<Fingerprint> {
    let metadata = file.metadata()?;
    let size = metadata.size();
    let mut hasher = Hasher::default();
    for number in [size.cast_signed(), metadata.mtime(), metadata.mtime_nsec()] {
        hasher.update(&number.to_le_bytes());
    }
    for at in [0, size.saturating_sub(PART).max(PART.min(size))] {
        let mut part = vec![0; usize::try_from(size.saturating_sub(at).min(PART)).unwrap_or_default()];
        file.read_exact_at(&mut part, at)?;
        hasher.update(&part);
    }
    let digest: Digest = hasher.finish();
    Ok(Fingerprint(digest))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_directory_means_nothing_to_do() {
        let found = scan(Path::new("/nowhere/at/all")).expect("nothing");
        assert!(found.bundles.is_empty() && found.strays.is_empty());
    }

    #[test]
    fn bundles_are_found_in_order_and_what_is_stray_is_told() {
        let scratch = tempfile::tempdir().expect("a directory");
        let at = |path: &str| scratch.path().join(path);
        for directory in ["k8s.io/deep", "empty", "not a namespace", ".hidden"] {
            fs::create_dir_all(at(directory)).expect("made");
        }
        for file in
            ["top.tar", "k8s.io/b.tar", "k8s.io/a.tar.zst", "k8s.io/README", "k8s.io/.tar", "k8s.io/.x.tar"]
        {
            fs::write(at(file), file).expect("written");
        }
        symlink(at("k8s.io/b.tar"), at("k8s.io/link.tar")).expect("linked");
        symlink(at("k8s.io"), at("link")).expect("linked");
        let found = scan(scratch.path()).expect("listed");
        let files: Vec<_> = found.bundles.iter().map(|bundle| bundle.file.as_str()).collect();
        assert_eq!(files, ["a.tar.zst", "b.tar"]);
        let strays: Vec<_> = found.strays.iter().map(|stray| stray.path.clone()).collect();
        let expected =
            ["k8s.io/README", "k8s.io/deep", "k8s.io/link.tar", "link", "not a namespace", "top.tar"];
        assert_eq!(strays, expected.map(at));
    }

    #[test]
    fn a_fingerprint_changes_with_size_time_begin_and_end() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("file");
        let time = std::time::SystemTime::UNIX_EPOCH;
        let print = |content: &[u8], time| {
            fs::write(&path, content).expect("written");
            let file = File::options().write(true).read(true).open(&path).expect("there");
            file.set_modified(time).expect("set");
            fingerprint(&file).expect("read")
        };
        let mut content = vec![0; 200_000];
        let first = print(&content, time);
        assert_eq!(first, print(&content, time));
        assert_ne!(first, print(&content, time + std::time::Duration::from_nanos(1)));
        for at in [0, 65_535, 140_000, 199_999] {
            content[at] = 1;
            assert_ne!(first, print(&content, time), "{at}");
            content[at] = 0;
        }
        for size in [0, 1, 65_535, 65_536, 65_537, 131_072] {
            assert_ne!(first, print(&content[..size], time));
        }
    }

    #[test]
    fn the_repository_is_the_name_without_its_end() {
        assert_eq!(repository("pause.tar.gz"), Some("pause"));
        assert_eq!(repository("pause-3.9.tzst"), Some("pause-3.9"));
        assert_eq!((repository(".tar"), repository("pause"), repository("pause.tar.xz")), (None, None, None));
    }
}
