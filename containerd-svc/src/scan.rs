//! Scans the directory of bundles.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, DirEntry, Error, FileKind, FileOperation, TrustError};

use crate::archive::read_outline;
use crate::digest::DigestHasher;
use crate::error::ImportError;
use crate::import::error_chain;
use crate::plan::{Bundle, BundleDirectory, BundleFingerprint, WantedBundles};
use crate::{Digest, Namespace};

/// The suffixes of bundle file names.
const BUNDLE_SUFFIXES: [&str; 5] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst"];

/// Bytes at the start and the end of a file that its fingerprint covers.
const FINGERPRINT_PART_BYTES: u64 = 64 << 10;

/// Links that are followed one after the other to a bundle.
///
/// *Source:* `MAXSYMLINKS` of POSIX is at least 8.
const MAX_LINKS: usize = 8;

/// An entry of the directory that is not a bundle, and is skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedEntry {
    /// The path.
    pub path: PathBuf,
    /// The reason why it is not a bundle.
    pub reason: &'static str,
}

/// Directories that are looked into for misplaced archives, one below the other.
const MAX_MISPLACED_DEPTH: usize = 4;

/// Archives in a directory of bundles that no bundle can be: they lie above or below the directory of a namespace, or in one that has no
/// name of a namespace. Only names are read; what can't be listed has none.
pub fn find_misplaced_archives(directory: &Path) -> Vec<SkippedEntry> {
    let mut found = Vec::new();
    let mut add = |path: &Path, reason| found.push(SkippedEntry { path: path.to_owned(), reason });
    for (name, path) in list_visible(directory) {
        let is_link = path.is_symlink();
        if !path.is_dir() {
            if repository_name(&name).is_some() {
                add(&path, "move it into the directory of a namespace, as k8s.io");
            }
        } else if is_link && has_archives(&path, MAX_MISPLACED_DEPTH) {
            add(
                &path,
                "links to directories are not followed: put the directory itself there, or link its archives",
            );
        } else if name.parse::<Namespace>().is_err() && has_archives(&path, MAX_MISPLACED_DEPTH) {
            add(&path, "no namespace can have its name: rename it");
        } else {
            for (_, inner) in list_visible(&path) {
                if inner.is_dir() && has_archives(&inner, MAX_MISPLACED_DEPTH) {
                    add(&inner, "move its archives up, into the directory of the namespace");
                }
            }
        }
    }
    found
}

/// Returns whether there is an archive in the directory, or in one below.
fn has_archives(directory: &Path, depth: usize) -> bool {
    list_visible(directory).iter().any(|(name, path)| match path.is_dir() {
        // A link may lead up again.
        true => depth > 1 && !path.is_symlink() && has_archives(path, depth - 1),
        false => repository_name(name).is_some(),
    })
}

/// The entries without those that are hidden, by their names.
fn list_visible(directory: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let visible = entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
    let mut visible: Vec<_> = visible.filter(|(name, _)| !name.starts_with('.')).collect();
    visible.sort();
    visible
}

/// The result of a scan.
#[derive(Debug, Default)]
pub(crate) struct ScanResult {
    pub(crate) wanted: WantedBundles,
    pub(crate) skipped: Vec<SkippedEntry>,
    pub(crate) misplaced: Vec<SkippedEntry>,
    /// Bundles and namespaces that cannot be opened.
    pub(crate) failed: Vec<ImportError>,
    /// The directories that say nothing of their bundles: their disks may not be mounted.
    pub(crate) absent: Vec<AbsentDirectory>,
}

/// A directory of bundles that is missing, unreadable, or empty like the mount point of a disk that is not mounted. Nothing is known of
/// its bundles, and their images stay as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsentDirectory {
    /// The path.
    pub path: PathBuf,
    /// The reason; `None` if it is empty.
    pub reason: Option<String>,
}

impl AbsentDirectory {
    /// What is wrong, and what to do.
    pub(crate) fn describe(&self) -> String {
        let path = self.path.display();
        match &self.reason {
            Some(reason) => format!(
                "can't list the bundles in the preseed directory {path}: {reason}: mount its disk, create it, or correct its mode"
            ),
            None => format!(
                "the preseed directory {path} is empty, so images stay as they are: mount its disk, or put bundles or a \
                 directory named after a namespace into it"
            ),
        }
    }
}

/// None of the directories can be read.
#[derive(Debug)]
pub(crate) struct UnlistedDirectories {
    /// The error of the first.
    pub(crate) first: Error,
    pub(crate) others: Vec<AbsentDirectory>,
}

/// Scans the directories, in their order.
///
/// # Errors
/// Those of all if none can be read.
pub(crate) fn scan_directories(directories: &[PathBuf]) -> Result<ScanResult, UnlistedDirectories> {
    let mut found = ScanResult::default();
    found.wanted.directory_count = directories.len();
    let mut first_error = None;
    for (rank, path) in directories.iter().enumerate() {
        let directory = BundleDirectory { rank, path: path.clone() };
        let reason = match scan_bundles(&directory, &mut found) {
            Ok(true) => {
                found.misplaced.extend(find_misplaced_archives(path));
                continue;
            }
            Ok(false) => None,
            Err(error) => {
                let reason = error_chain(&error);
                first_error.get_or_insert(error);
                Some(reason)
            }
        };
        found.absent.push(AbsentDirectory { path: path.clone(), reason });
    }
    // One name belongs to the first bundle of its namespace.
    found.wanted.bundles.sort();
    match first_error {
        Some(first)
            if found.absent.iter().all(|absent| absent.reason.is_some())
                && found.absent.len() == directories.len() =>
        {
            Err(UnlistedDirectories { first, others: found.absent.split_off(1) })
        }
        _ => Ok(found),
    }
}

/// Scans a directory; false if it is empty, like the mount point of a disk that is not mounted, which does not
/// mean that there are no bundles. Links to files are followed, links to directories are not.
fn scan_bundles(directory: &BundleDirectory, found: &mut ScanResult) -> Result<bool, Error> {
    let top = Dir::open(&directory.path)?;
    // An image that another user put there would run with the rights of the pods that use it.
    top.check_owner_and_parents().map_err(|error| refuse(&top, error))?;
    let entries = top.list()?;
    if entries.is_empty() {
        return Ok(false);
    }
    for entry in entries {
        let path = directory.path.join(entry.name.as_os_str());
        match parse_namespace(&entry) {
            // An unreadable namespace does not affect the others.
            Ok(Some(namespace)) => {
                let opened = top.open_dir(entry.name.as_os_str()).and_then(|dir| {
                    dir.check_owner().map_err(|error| refuse(&dir, error))?;
                    Ok(dir)
                });
                if let Err(source) = opened.and_then(|dir| scan_namespace(&dir, &namespace, directory, found))
                {
                    found.failed.push(ImportError::Open { path, source });
                    found.wanted.unreadable.insert((namespace, directory.rank, None));
                }
            }
            Ok(None) => {}
            Err(why) => found.skipped.push(SkippedEntry { path, reason: why }),
        }
    }
    Ok(true)
}

fn refuse(dir: &Dir, error: TrustError) -> Error {
    Error::new(FileOperation::Open, dir.path(), io::Error::new(io::ErrorKind::PermissionDenied, error))
}

fn parse_namespace(entry: &DirEntry) -> Result<Option<Namespace>, &'static str> {
    let name = entry.name.as_os_str().to_str();
    if name.is_some_and(|name| name.starts_with('.')) {
        return Ok(None);
    }
    if entry.kind != FileKind::Dir {
        return Err("not a directory: put bundles into a directory named after their namespace");
    }
    let valid = name.and_then(|name| name.parse().ok());
    valid.map(Some).ok_or("not a valid namespace name")
}

fn scan_namespace(
    directory: &Dir,
    namespace: &Namespace,
    of: &BundleDirectory,
    found: &mut ScanResult,
) -> Result<(), Error> {
    let entries = directory.list()?;
    found.wanted.listed.insert((namespace.clone(), of.rank));
    for entry in entries {
        let path = directory.path().join(entry.name.as_os_str());
        let Some(file) = entry.name.as_os_str().to_str() else {
            found.skipped.push(SkippedEntry { path, reason: "its name is not UTF-8" });
            continue;
        };
        let why = match entry.kind {
            // Hidden files are no bundles: rsync, for one, writes a file under such a name until it is
            // complete.
            _ if file.starts_with('.') => continue,
            FileKind::Dir => Some("a directory within a namespace"),
            FileKind::File | FileKind::Symlink if repository_name(file).is_some() => None,
            FileKind::File | FileKind::Symlink => {
                Some("unknown suffix: use .tar, .tar.gz, .tgz, .tar.zst or .tzst")
            }
            _ => Some("not a regular file"),
        };
        if let Some(why) = why {
            found.skipped.push(SkippedEntry { path, reason: why });
            continue;
        }
        let opened = open_linked_file(directory, file).and_then(|open| {
            compute_fingerprint(&open).map_err(|error| Error::new(FileOperation::Read, &path, error))
        });
        let (namespace, file) = (namespace.clone(), file.to_owned());
        match opened {
            Ok(fingerprint) => {
                let directory = of.clone();
                found.wanted.bundles.push(Bundle { namespace, directory, file, fingerprint });
            }
            Err(source) => {
                found.failed.push(ImportError::Open { path, source });
                // The images that it brought earlier keep their marks.
                found.wanted.unreadable.insert((namespace, of.rank, Some(file)));
            }
        }
    }
    Ok(())
}

/// The name of a bundle without its suffix: the repository of images with only a tag.
pub(crate) fn repository_name(file: &str) -> Option<&str> {
    BUNDLE_SUFFIXES.iter().find_map(|end| file.strip_suffix(end)).filter(|stem| !stem.is_empty())
}

/// Opens the current file of a bundle.
pub(crate) fn open_bundle(bundle: &Bundle) -> Result<File, Error> {
    open_linked_file(&Dir::open(&bundle.directory.path)?.open_dir(bundle.namespace.as_str())?, &bundle.file)
}

/// Opens a regular file, also behind links, which the operator put there. Nothing else is opened: a link to a
/// pipe or a device neither blocks nor reads.
fn open_linked_file(directory: &Dir, file: &str) -> Result<File, Error> {
    let mut opened = directory.open_file(file);
    let mut path = directory.path().join(file);
    for _ in 0..MAX_LINKS {
        match opened {
            Err(error) if error.is_symlink() => {}
            opened => return opened,
        }
        let linked =
            // `Dir` follows no links itself, so each one is read and followed here.
            std::fs::read_link(&path).map_err(|error| Error::new(FileOperation::Open, &path, error))?;
        let parent = path.parent().unwrap_or(Path::new("/")).to_owned();
        path = parent.join(linked);
        opened = match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => Dir::open(parent).and_then(|parent| parent.open_file(name)),
            _ => {
                return Err(Error::new(
                    FileOperation::Open,
                    &path,
                    std::io::Error::from(std::io::ErrorKind::IsADirectory),
                ));
            }
        };
    }
    match opened {
        Err(error) if error.is_symlink() => Err(Error::new(
            FileOperation::Open,
            &path,
            std::io::Error::other("too many links, or a loop of them"),
        )),
        opened => opened,
    }
}

/// See [`BundleFingerprint`].
fn compute_fingerprint(file: &File) -> std::io::Result<BundleFingerprint> {
    let metadata = file.metadata()?;
    let size = metadata.size();
    let mut hasher = DigestHasher::default();
    for number in [size.cast_signed(), metadata.mtime(), metadata.mtime_nsec()] {
        hasher.update(&number.to_le_bytes());
    }
    // The second part begins where the first one ends, or later: no byte counts twice.
    for at in [0, size.saturating_sub(FINGERPRINT_PART_BYTES).max(FINGERPRINT_PART_BYTES.min(size))] {
        let mut part =
            vec![0; usize::try_from(size.saturating_sub(at).min(FINGERPRINT_PART_BYTES)).unwrap_or_default()];
        file.read_exact_at(&mut part, at)?;
        hasher.update(&part);
    }
    // Of a smaller file, that was all.
    if size > 2 * FINGERPRINT_PART_BYTES {
        match read_outline(|buffer, at| file.read_exact_at(buffer, at), 0)? {
            Some(outline) => hasher.update(outline.digest.to_hex().as_bytes()),
            None => {
                for number in [metadata.ctime(), metadata.ctime_nsec()] {
                    hasher.update(&number.to_le_bytes());
                }
            }
        }
    }
    let digest: Digest = hasher.finish();
    Ok(BundleFingerprint(digest))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn scan(directory: &Path) -> Result<ScanResult, Error> {
        scan_directories(&[directory.to_owned()]).map_err(|none| none.first)
    }

    #[test]
    fn a_missing_directory_is_an_error_and_an_empty_one_says_nothing() {
        let (empty, missing) = (tempfile::tempdir().expect("created"), Path::new("/nowhere/at/all"));
        assert!(scan(missing).expect_err("it is missing").is_not_found());
        let found = scan(empty.path()).expect("listed");
        assert!(found.absent[0].reason.is_none() && found.wanted.listed.is_empty());
        // One of several that is missing says nothing of its bundles.
        let both = [missing.to_owned(), empty.path().to_owned()];
        let found = scan_directories(&both).expect("one is listed");
        let absent: Vec<_> =
            found.absent.iter().map(|absent| (&absent.path, absent.reason.is_some())).collect();
        assert_eq!(absent, [(&both[0], true), (&both[1], false)]);
    }

    #[test]
    fn bundles_that_other_users_could_have_put_there_are_not_imported() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (top, namespace) = (scratch.path().join("images"), scratch.path().join("images/k8s.io"));
        fs::create_dir_all(&namespace).expect("created");
        fs::write(namespace.join("a.tar"), "").expect("written");
        let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("set");
        open(&namespace);
        let found = scan(&top).expect("listed");
        let says = |error: &dyn std::error::Error| error.source().expect("a cause").to_string();
        assert!(found.wanted.bundles.is_empty(), "{:?}", found.wanted.bundles);
        assert!(says(&found.failed[0]).starts_with("can't open"), "{:?}", found.failed);
        open(&top);
        let error = says(&scan(&top).expect_err("others can write"));
        assert!(error.contains(&format!("type: chmod go-w {}", top.display())), "{error}");
    }

    #[test]
    fn bundles_are_found_in_order_and_other_entries_are_reported() {
        let scratch = tempfile::tempdir().expect("a directory");
        let at = |path: &str| scratch.path().join(path);
        for directory in ["k8s.io/deep", "empty", "not a namespace", ".hidden"] {
            fs::create_dir_all(at(directory)).expect("created");
        }
        for file in
            ["top.tar", "k8s.io/b.tar", "k8s.io/a.tar.zst", "k8s.io/README", "k8s.io/.tar", "k8s.io/.x.tar"]
        {
            fs::write(at(file), file).expect("written");
        }
        symlink(at("k8s.io/b.tar"), at("k8s.io/link.tar")).expect("linked");
        symlink(at("k8s.io"), at("link")).expect("linked");
        let found = scan(scratch.path()).expect("listed");
        let files: Vec<_> = found.wanted.bundles.iter().map(|bundle| bundle.file.as_str()).collect();
        assert_eq!(files, ["a.tar.zst", "b.tar", "link.tar"]);
        let skipped: Vec<_> = found.skipped.iter().map(|entry| entry.path.clone()).collect();
        let expected = ["k8s.io/README", "k8s.io/deep", "link", "not a namespace", "top.tar"];
        assert_eq!(skipped, expected.map(at));
    }

    #[test]
    fn archives_at_a_wrong_depth_are_found_and_other_files_are_not() {
        let scratch = tempfile::tempdir().expect("a directory");
        let at = |path: &str| scratch.path().join("images").join(path);
        for directory in ["k8s.io/docs", "k8s.io/x/y", "not a namespace", "no archives here", ".hidden"] {
            fs::create_dir_all(at(directory)).expect("created");
        }
        let files = ["top.tar.zst", "README", "k8s.io/a.tar", "k8s.io/docs/README", "k8s.io/x/y/deep.tgz"];
        for file in files.into_iter().chain(["not a namespace/b.tar", ".hidden/c.tar", ".top.tar"]) {
            fs::write(at(file), file).expect("written");
        }
        symlink(at("k8s.io"), at("link")).expect("linked");
        symlink(at("."), at("loop")).expect("linked");
        symlink("nowhere", at("dangling.tar")).expect("linked");
        let found: Vec<_> = find_misplaced_archives(&at("")).into_iter().map(|entry| entry.path).collect();
        let expected = ["dangling.tar", "k8s.io/x", "link", "loop", "not a namespace", "top.tar.zst"];
        assert_eq!(found, expected.map(at));
        assert_eq!(find_misplaced_archives(&at("missing")), []);
    }

    #[test]
    fn a_fingerprint_changes_with_size_time_start_and_end() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("file");
        let time = std::time::SystemTime::UNIX_EPOCH;
        let print = |content: &[u8], time| {
            fs::write(&path, content).expect("written");
            let file = File::options().write(true).read(true).open(&path).expect("there");
            file.set_modified(time).expect("set");
            compute_fingerprint(&file).expect("read")
        };
        let mut content = vec![0; 131_072];
        let first = print(&content, time);
        assert_eq!(first, print(&content, time));
        assert_ne!(first, print(&content, time + std::time::Duration::from_nanos(1)));
        for at in [0, 65_535, 65_536, 131_071] {
            content[at] = 1;
            assert_ne!(first, print(&content, time), "{at}");
            content[at] = 0;
        }
        for size in [0, 1, 65_535, 65_536, 65_537, 131_071] {
            assert_ne!(first, print(&content[..size], time));
        }
    }

    #[test]
    fn the_repository_is_the_file_name_without_its_suffix() {
        assert_eq!(repository_name("pause.tar.gz"), Some("pause"));
        assert_eq!(repository_name("pause-3.9.tzst"), Some("pause-3.9"));
        assert_eq!(
            (repository_name(".tar"), repository_name("pause"), repository_name("pause.tar.xz")),
            (None, None, None)
        );
    }
}
