//! Plans a pass: a pure function of the bundles in the directory and of the listed images with their marks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::image::{Image, Labels};
use crate::{Descriptor, Digest, Namespace};

/// Key prefix of the label that names a bundle of a listed image: its mark.
pub const BUNDLE_LABEL_PREFIX: &str = "nodekeel.preseed/";

/// The label of a pinned image, which the kubelet keeps also on a full disk.
///
/// *Source:* containerd 1.7 and later, `pkg/cri/labels`; older releases ignore it.
pub(crate) const PINNED_LABEL: (&str, &str) = ("io.cri-containerd.pinned", "pinned");

/// Identifies a file without reading all of it.
///
/// It covers the size, the modification time, and the first and last 64 KiB. Of a larger file it also covers,
/// where it is an uncompressed tar, all headers and all files of at most 64 KiB: the index, the manifests and
/// the configurations, which have the digests of all other content. Where it is compressed, it covers the
/// change time, which every write sets and no program can choose. So it sees a changed file also where size
/// and modification time are the same. The exception is a compressed file on an image of a read-only file
/// system whose times are all fixed: there the checksum at its end, which gzip and zstd write by default, has
/// to differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BundleFingerprint(pub Digest);

/// A bundle file in the directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bundle {
    /// The namespace of its images: the name of its directory.
    pub namespace: Namespace,
    /// Its file name, such as `pause.tar`.
    pub file: String,
    /// Its identity.
    pub fingerprint: BundleFingerprint,
}

/// What the directory of bundles brings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WantedBundles {
    /// The bundles, in the order of namespaces and names: the first one that brings a name owns it.
    pub bundles: Vec<Bundle>,
    /// Files that exist but could not be read; `None` stands for a whole namespace. What they brought earlier
    /// stays as it is.
    pub unreadable: BTreeSet<(Namespace, Option<String>)>,
}

/// The plan of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PreseedPlan {
    /// The action for each bundle, in their order.
    pub bundles: Vec<(Bundle, BundleAction)>,
    /// The changes of listed images, which are due after the imports.
    pub images: Vec<ImageChange>,
}

/// The planned action for a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BundleAction {
    /// All of its images are listed: check that the content of those that it owns exists, and import it
    /// otherwise.
    Verify(Vec<Image>),
    /// Import it.
    Import(ImportReason),
}

/// The reason for an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportReason {
    /// None of its images is listed.
    New,
    /// The file changed since it was imported.
    Changed,
    /// An image of it was removed, or its name has another target now.
    Incomplete,
    /// Its layers were not unpacked, and unpacking is enabled now.
    NotUnpacked,
}

impl fmt::Display for ImportReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "new",
            Self::Changed => "changed",
            Self::Incomplete => "an image was removed",
            Self::NotUnpacked => "not unpacked",
        })
    }
}

/// A change of a listed image. No image is ever removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageChange {
    /// Its namespace.
    pub namespace: Namespace,
    /// What changes.
    pub kind: ImageChangeKind,
    /// The image after the change, for [`ImportSession::put_image`](crate::ImportSession::put_image): a label
    /// to be removed is empty.
    pub image: Image,
}

/// What changes of a listed image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageChangeKind {
    /// No bundle brings it any more: it loses its marks and its pin, and stays listed.
    Unpin,
    /// It loses the mark of a bundle that does not bring it any more; another bundle does.
    Unmark,
    /// Its name gets the target that its bundle has for it, which the store already has.
    Repoint,
}

/// The content of a mark: the file, how many images it names, its target for this one, and whether that is
/// unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BundleMark {
    pub(crate) fingerprint: BundleFingerprint,
    pub(crate) count: usize,
    /// The target in this bundle, also where the name belongs to another one.
    pub(crate) target: Digest,
    pub(crate) unpacked: bool,
}

/// The suffix of a mark if layers are unpacked.
const UNPACKED_SUFFIX: &str = "unpacked";

impl fmt::Display for BundleMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.fingerprint.0.to_hex(), self.count, self.target)?;
        if self.unpacked { write!(f, " {UNPACKED_SUFFIX}") } else { Ok(()) }
    }
}

impl FromStr for BundleMark {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ');
        let mut next = || parts.next().ok_or(());
        let fingerprint = BundleFingerprint(Digest::from_hex(next()?).ok_or(())?);
        let count = next()?.parse().map_err(drop)?;
        let target = next()?.parse().map_err(drop)?;
        let unpacked = match parts.next() {
            None => false,
            Some(UNPACKED_SUFFIX) => true,
            Some(_) => return Err(()),
        };
        if parts.next().is_some() { Err(()) } else { Ok(Self { fingerprint, count, target, unpacked }) }
    }
}

impl Bundle {
    /// The key of the mark on its images.
    pub(crate) fn label_key(&self) -> String {
        format!("{BUNDLE_LABEL_PREFIX}{}", self.file)
    }

    /// The mark on one of its images.
    pub(crate) fn image_labels(&self, count: usize, target: Digest, unpacked: bool) -> Labels {
        let mark = BundleMark { fingerprint: self.fingerprint, count, target, unpacked };
        Labels::from([(self.label_key(), mark.to_string())])
    }

    /// The valid marks of this very file.
    fn marked_images<'a>(&self, images: &'a [Image]) -> Vec<(&'a Image, BundleMark)> {
        let key = self.label_key();
        let marked = images.iter().filter_map(|image| {
            let mark: BundleMark = image.labels.get(&key)?.parse().ok()?;
            (mark.fingerprint == self.fingerprint).then_some((image, mark))
        });
        marked.collect()
    }
}

/// Plans a pass over the bundles and the listed images of each namespace; `unpack` says whether layers should
/// be unpacked. Layers that are already unpacked stay unpacked.
///
/// A name belongs to the first bundle that brings it. A bundle that has to be imported, or that can't be read,
/// keeps what it brought earlier until that has succeeded.
pub fn plan_preseed(
    wanted: &WantedBundles,
    listed: &BTreeMap<Namespace, Vec<Image>>,
    unpack: bool,
) -> PreseedPlan {
    let mut plan = PreseedPlan::default();
    let unlisted = wanted.bundles.iter().map(|bundle| (&bundle.namespace, &[][..]));
    let listed = listed.iter().map(|(namespace, images)| (namespace, &images[..]));
    let namespaces: BTreeMap<&Namespace, &[Image]> = unlisted.chain(listed).collect();
    for (namespace, images) in namespaces {
        let files = BundleFiles::new(wanted, namespace, images, unpack);
        let changes: Vec<_> = images.iter().map(|image| files.plan_image(image, images)).collect();
        for bundle in wanted.bundles.iter().filter(|bundle| bundle.namespace == *namespace) {
            plan.bundles.push((bundle.clone(), files.plan_bundle(bundle, images, &changes)));
        }
        let change = |(kind, image)| ImageChange { namespace: namespace.clone(), kind, image };
        plan.images.extend(changes.into_iter().filter_map(|planned| planned.change).map(change));
    }
    plan
}

/// The listed image that keeps a name when this bundle is imported: one of an earlier bundle.
pub(crate) fn find_name_owner<'a>(
    wanted: &WantedBundles,
    bundle: &Bundle,
    images: &'a [Image],
    name: &str,
) -> Option<&'a Image> {
    let files = BundleFiles::new(wanted, &bundle.namespace, images, false);
    let image = images.iter().find(|image| image.name == name)?;
    let (owner, _) = files.live_marks(image).into_iter().next()?;
    (owner < bundle.file.as_str()).then_some(image)
}

/// Removes the marks of this file from images that it does not bring: copies of its images with their labels, as
/// `ctr images tag` makes them. Without a mark of another file, a copy loses the pin too. The result has only the
/// labels that change.
pub(crate) fn unmark_copies(bundle: &Bundle, images: &[Image], brought: &BTreeSet<&str>) -> Vec<Image> {
    let key = bundle.label_key();
    let marked = bundle.marked_images(images).into_iter().map(|(image, _)| image);
    let copies = marked.filter(|image| !brought.contains(image.name.as_str()));
    let unmark = |image: &Image| {
        let mut removed = vec![key.clone()];
        if !image.labels.keys().any(|label| label.starts_with(BUNDLE_LABEL_PREFIX) && *label != key) {
            removed.extend(image.labels.contains_key(PINNED_LABEL.0).then(|| PINNED_LABEL.0.to_owned()));
        }
        let labels = removed.into_iter().map(|label| (label, String::new())).collect();
        Image { labels, ..image.clone() }
    };
    copies.map(unmark).collect()
}

/// The files of a namespace, and how far the listed images have them.
struct BundleFiles<'a> {
    files: BTreeMap<&'a str, BundleFileState>,
    /// Nothing is known of the namespace.
    is_unreadable: bool,
}

#[derive(Debug, Clone, Copy)]
enum BundleFileState {
    /// It can't be read, or has to be imported: what it brought earlier stays.
    Pending(Option<ImportReason>),
    /// All of its images are listed, with marks of this file.
    Imported(BundleFingerprint),
}

/// The plan of one image.
struct PlannedImage {
    /// The change, with the image after it.
    change: Option<(ImageChangeKind, Image)>,
    /// The file that owns the name, with the target that it has for it.
    owner: Option<(String, Digest)>,
    /// Whether the store has that target.
    is_present: bool,
}

impl<'a> BundleFiles<'a> {
    fn new(wanted: &'a WantedBundles, namespace: &Namespace, images: &[Image], unpack: bool) -> Self {
        let unreadable = wanted.unreadable.iter().filter(|(of, _)| of == namespace);
        let pending = |file: &'a Option<String>| Some((file.as_deref()?, BundleFileState::Pending(None)));
        let mut files: BTreeMap<_, _> = unreadable.clone().filter_map(|(_, file)| pending(file)).collect();
        for bundle in wanted.bundles.iter().filter(|bundle| bundle.namespace == *namespace) {
            files.insert(&bundle.file, BundleFileState::of_bundle(bundle, images, unpack));
        }
        Self { files, is_unreadable: unreadable.clone().any(|(_, file)| file.is_none()) }
    }

    /// The marks of an image that count, in the order of their files; the target is that of an imported file.
    fn live_marks<'i>(&self, image: &'i Image) -> Vec<(&'i str, Option<Digest>)> {
        let marks = image.labels.iter().filter_map(|(key, text)| {
            let file = key.strip_prefix(BUNDLE_LABEL_PREFIX)?;
            match (self.files.get(file), text.parse::<BundleMark>()) {
                (Some(BundleFileState::Pending(_)), _) => Some((file, None)),
                (Some(BundleFileState::Imported(of)), Ok(mark)) if mark.fingerprint == *of => {
                    Some((file, Some(mark.target)))
                }
                (None, _) if self.is_unreadable => Some((file, None)),
                _ => None,
            }
        });
        marks.collect()
    }

    fn plan_image(&self, image: &Image, images: &[Image]) -> PlannedImage {
        let live = self.live_marks(image);
        let is_dead = |key: &&String| {
            let file = key.strip_prefix(BUNDLE_LABEL_PREFIX);
            file.is_some_and(|file| live.iter().all(|(known, _)| *known != file))
        };
        let dead: Vec<&String> = image.labels.keys().filter(is_dead).collect();
        let mut changed = image.clone();
        changed.labels.extend(dead.iter().map(|key| ((*key).clone(), String::new())));
        let mut kind = (!dead.is_empty()).then_some(ImageChangeKind::Unmark);
        if live.is_empty() && kind.is_some() {
            kind = Some(ImageChangeKind::Unpin);
            changed.labels.entry(PINNED_LABEL.0.to_owned()).and_modify(String::clear);
        }
        let owner = live.first().and_then(|(file, target)| Some(((*file).to_owned(), (*target)?)));
        let mut is_present = true;
        if let Some((_, target)) = &owner
            && *target != image.target.digest
        {
            match images.iter().find(|other| other.target.digest == *target) {
                Some(other) => {
                    changed.target = Descriptor::clone(&other.target);
                    kind = Some(ImageChangeKind::Repoint);
                }
                None => is_present = false,
            }
        }
        PlannedImage { change: kind.map(|kind| (kind, changed)), owner, is_present }
    }

    fn plan_bundle(&self, bundle: &Bundle, images: &[Image], planned: &[PlannedImage]) -> BundleAction {
        if let Some(BundleFileState::Pending(Some(reason))) = self.files.get(bundle.file.as_str()) {
            return BundleAction::Import(*reason);
        }
        let is_owned =
            |planned: &PlannedImage| planned.owner.as_ref().is_some_and(|(file, _)| *file == bundle.file);
        let owned: Vec<_> = images.iter().zip(planned).filter(|(_, planned)| is_owned(planned)).collect();
        if owned.iter().any(|(_, planned)| !planned.is_present) {
            return BundleAction::Import(ImportReason::Incomplete);
        }
        let after = |(image, planned): (&Image, &PlannedImage)| {
            planned.change.as_ref().map_or_else(|| image.clone(), |(_, after)| after.clone())
        };
        BundleAction::Verify(owned.into_iter().map(after).collect())
    }
}

impl BundleFileState {
    fn of_bundle(bundle: &Bundle, images: &[Image], unpack: bool) -> Self {
        let marked = bundle.marked_images(images);
        let key = bundle.label_key();
        let reason = if marked.is_empty() {
            let was_imported = images.iter().any(|image| image.labels.contains_key(&key));
            if was_imported { ImportReason::Changed } else { ImportReason::New }
        } else if marked.iter().any(|(_, mark)| mark.count != marked.len()) {
            ImportReason::Incomplete
        } else if unpack && marked.iter().any(|(_, mark)| !mark.unpacked) {
            ImportReason::NotUnpacked
        } else {
            return Self::Imported(bundle.fingerprint);
        };
        Self::Pending(Some(reason))
    }
}

#[cfg(test)]
#[path = "plan_test.rs"]
mod tests;
