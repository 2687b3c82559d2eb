//! The names of marks in the store, which outlive a change of the directories and of their order.

use std::path::{Path, PathBuf};

use crate::image::Labels;
use crate::plan::{BUNDLE_LABEL_PREFIX, BundleKey, BundleMark, WantedBundles};
use crate::{Digest, InstanceId, Namespace};

/// Characters of the digest of a path that name a directory.
const DIRECTORY_ID_DIGITS: usize = 12;

/// Translates the marks of an instance between the store and a plan.
///
/// In the store, the marks of the only directory are named after their files, as every release has written them; those of one of
/// several `DIRECTORY/FILE`. The images of either are those of the other when a directory is added, or only one is left.
#[derive(Debug, Clone)]
pub(crate) struct LabelNames {
    instance: InstanceId,
    /// In the order of their ranks.
    directories: Vec<String>,
}

impl LabelNames {
    pub(crate) fn new(instance: InstanceId, directories: &[PathBuf]) -> Self {
        Self { instance, directories: directories.iter().map(|path| directory_id(path)).collect() }
    }

    /// Labels of the store as a plan sees them.
    pub(crate) fn read(&self, labels: Labels, namespace: &Namespace, wanted: &WantedBundles) -> Labels {
        let labels = self.instance.read_labels(labels);
        let (own, mut read): (Labels, Labels) =
            labels.into_iter().partition(|(key, _)| key.starts_with(BUNDLE_LABEL_PREFIX));
        let mut own: Vec<_> = own.into_iter().collect();
        // If an image has both forms, the one that is written at present counts.
        own.sort_by_key(|(key, _)| key[BUNDLE_LABEL_PREFIX.len()..].contains('/') != self.has_several());
        for (key, value) in own {
            let name = &key[BUNDLE_LABEL_PREFIX.len()..];
            let (rank, file, unknown) = match name.split_once('/') {
                Some((id, file)) => {
                    (self.directories.iter().position(|known| known == id), file, name.to_owned())
                }
                None if self.has_several() => (
                    find_rank(name, &value, namespace, wanted),
                    name,
                    format!("{}/{name}", BundleKey::UNKNOWN_DIRECTORY),
                ),
                None => (Some(0), name, name.to_owned()),
            };
            let known = rank.map(|rank| format!("{BUNDLE_LABEL_PREFIX}{}", BundleKey { rank, file }));
            let known = known.filter(|key| !read.contains_key(key));
            read.insert(known.unwrap_or_else(|| format!("{BUNDLE_LABEL_PREFIX}{unknown}")), value);
        }
        read
    }

    /// The reverse of [`read`](Self::read). A mark that is taken back is taken back in both forms.
    pub(crate) fn write(&self, labels: Labels) -> Labels {
        let mut written = Labels::new();
        for (key, value) in labels {
            let Some(name) = key.strip_prefix(BUNDLE_LABEL_PREFIX) else {
                written.insert(key, value);
                continue;
            };
            let BundleKey { rank, file } = BundleKey::parse(name);
            let unknown =
                name.strip_prefix(BundleKey::UNKNOWN_DIRECTORY).and_then(|name| name.strip_prefix('/'));
            let names = match (self.directories.get(rank), unknown) {
                (Some(id), _) if value.is_empty() => vec![file.to_owned(), format!("{id}/{file}")],
                (Some(id), _) if self.has_several() => vec![format!("{id}/{file}")],
                (Some(_), _) => vec![file.to_owned()],
                (None, Some(file)) => vec![file.to_owned()],
                (None, None) => vec![name.to_owned()],
            };
            let named = |name| (format!("{BUNDLE_LABEL_PREFIX}{name}"), value.clone());
            written.extend(names.into_iter().map(named));
        }
        self.instance.write_labels(written)
    }

    fn has_several(&self) -> bool {
        self.directories.len() > 1
    }
}

/// The directory with the bundle of a mark that names none: the very file, else the first with that name.
fn find_rank(file: &str, mark: &str, namespace: &Namespace, wanted: &WantedBundles) -> Option<usize> {
    let bundles =
        wanted.bundles.iter().filter(|bundle| bundle.namespace == *namespace && bundle.file == file);
    let fingerprint = mark.parse::<BundleMark>().ok().map(|mark| mark.fingerprint);
    let same = bundles.clone().find(|bundle| Some(bundle.fingerprint) == fingerprint);
    let found = same.or_else(|| bundles.clone().next()).map(|bundle| bundle.directory.rank);
    let unreadable = wanted.unreadable.iter();
    let mut unreadable = unreadable
        .filter(|(of, _, name)| of == namespace && name.as_deref() == Some(file))
        .map(|(_, rank, _)| *rank);
    found.or_else(|| unreadable.next())
}

/// Names a directory by its path; it begins with a letter, unlike a rank.
fn directory_id(path: &Path) -> String {
    let path: PathBuf = path.components().collect();
    let digest = Digest::of_content(path.as_os_str().as_encoded_bytes());
    format!("d{}", &digest.to_hex()[..DIRECTORY_ID_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Bundle, BundleDirectory, BundleFingerprint, ImportMark};

    fn bundle(rank: usize, path: &str, file: &str, content: &str) -> Bundle {
        let fingerprint = BundleFingerprint(Digest::of_content(content.as_bytes()));
        let directory = BundleDirectory { rank, path: path.into() };
        Bundle {
            namespace: "k8s.io".parse().expect("a namespace"),
            directory,
            file: file.into(),
            fingerprint,
        }
    }

    /// The labels of an image as they are in the store, and as a plan sees them with these directories.
    fn read(labels: &Labels, directories: &[&str], bundles: &[Bundle]) -> (LabelNames, Labels) {
        let paths: Vec<PathBuf> = directories.iter().map(PathBuf::from).collect();
        let names = LabelNames::new(InstanceId::default(), &paths);
        let wanted = WantedBundles { bundles: bundles.to_vec(), ..WantedBundles::default() };
        let read = names.read(labels.clone(), &"k8s.io".parse().expect("a namespace"), &wanted);
        (names, read)
    }

    #[test]
    fn marks_keep_their_bundles_when_directories_are_added_reordered_and_removed() {
        let mark = |bundle: &Bundle| {
            bundle.image_labels(
                "x",
                Digest::of_content(b"x"),
                &ImportMark { count: 1, ..ImportMark::default() },
            )
        };
        let alone = bundle(0, "/a", "a.tar", "a");
        let (names, _) = read(&Labels::new(), &["/a"], &[]);
        let stored = names.write(mark(&alone));
        assert_eq!(stored.keys().collect::<Vec<_>>(), ["nodekeel.preseed/a.tar"]);
        // Another directory comes first, with a file of the same name.
        let (first, second) = (bundle(0, "/b", "a.tar", "b"), bundle(1, "/a", "a.tar", "a"));
        let both = [first.clone(), second.clone()];
        let (names, seen) = read(&stored, &["/b", "/a"], &both);
        assert_eq!(seen, mark(&second));
        let mut stored = names.write(mark(&first).into_iter().chain(mark(&second)).collect());
        assert!(
            stored.len() == 2 && stored.keys().all(|key| key.starts_with("nodekeel.preseed/d")),
            "{stored:?}"
        );
        // In another order, by other spellings of the paths, and with one that is not mounted.
        let (names, seen) = read(&stored, &["/a/", "/c", "/b/./"], &[]);
        let marks = [bundle(0, "", "a.tar", "a"), bundle(2, "", "a.tar", "b")];
        assert_eq!(seen, marks.iter().flat_map(mark).collect());
        assert_eq!(names.write(seen), stored);
        // One is left: what the other has brought is that of a directory which was removed.
        let (names, seen) = read(&stored, &["/a"], &[]);
        let keys: Vec<_> = seen.keys().filter_map(|key| BundleKey::of_label(key)).collect();
        assert_eq!(keys.iter().filter(|key| key.rank == 0 && key.file == "a.tar").count(), 1, "{seen:?}");
        assert_eq!(keys.iter().filter(|key| key.rank == BundleKey::REMOVED_RANK).count(), 1, "{seen:?}");
        // What is taken back leaves nothing in either form.
        stored.extend(mark(&alone));
        let removed = names.write(seen.into_keys().map(|key| (key, String::new())).collect());
        assert!(removed.values().all(String::is_empty));
        assert_eq!(removed.keys().collect::<Vec<_>>(), stored.keys().collect::<Vec<_>>());
        // A name without a directory that no directory has is kept as it is.
        let (names, seen) = read(&mark(&alone), &["/b", "/a"], &[]);
        assert_eq!(seen.keys().collect::<Vec<_>>(), ["nodekeel.preseed/?/a.tar"]);
        assert_eq!(names.write(seen), mark(&alone));
    }
}
