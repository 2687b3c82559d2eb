//! Plans a pass: a pure function of the bundles in the directory and of the listed images with their marks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::image::{Image, Labels};
use crate::{Descriptor, Digest, ImageName, Namespace};

/// Key prefix of the label that names a bundle of a listed image: its mark.
pub const BUNDLE_LABEL_PREFIX: &str = "nodekeel.preseed/";

/// Key prefix of the marks of another instance.
pub(crate) const OTHER_LABEL_PREFIX: &str = "nodekeel.preseed.";

/// Key prefix, in plans alone, of the marks of an instance whose names come first.
pub(crate) const PRIOR_LABEL_PREFIX: &str = "nodekeel.preseed<";

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

/// One of the directories of bundles.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BundleDirectory {
    /// The number of directories before it, whose bundles come first.
    pub rank: usize,
    /// The path.
    pub path: PathBuf,
}

/// A bundle file in a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bundle {
    /// The namespace of its images: the name of the directory with the file.
    pub namespace: Namespace,
    /// The directory with those of the namespaces.
    pub directory: BundleDirectory,
    /// The file name, such as `pause.tar`.
    pub file: String,
    /// The identity.
    pub fingerprint: BundleFingerprint,
}

/// The bundles of the directories, and the state of those.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WantedBundles {
    /// The bundles, in the order of namespaces, directories and names: the first one that brings a name owns it.
    pub bundles: Vec<Bundle>,
    /// Files that exist but could not be read, with the [rank](BundleDirectory::rank) of their directory; `None` stands for a
    /// whole namespace. What they brought earlier stays as it is.
    pub unreadable: BTreeSet<(Namespace, usize, Option<String>)>,
    /// The namespaces whose directories were listed, with the rank of the directory. Nothing is known of the others, and what they
    /// brought earlier stays: a directory that is gone, renamed or not mounted is no deleted bundle.
    pub listed: BTreeSet<(Namespace, usize)>,
    /// The number of directories; 0 counts as one.
    pub directory_count: usize,
}

/// The plan of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PreseedPlan {
    /// The action for each bundle, in their order.
    pub bundles: Vec<(Bundle, BundleAction)>,
    /// The changes of listed images, which are due after the imports.
    pub images: Vec<ImageUpdate>,
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
    /// The layers were not unpacked, and unpacking is enabled now.
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
pub struct ImageUpdate {
    /// The namespace.
    pub namespace: Namespace,
    /// The change.
    pub kind: ImageUpdateKind,
    /// The image after the change, for [`ImportSession::put_image`](crate::ImportSession::put_image): a label
    /// to be removed is empty.
    pub image: Image,
}

/// The change of a listed image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageUpdateKind {
    /// No bundle brings it any more: it loses its marks and its pin, and stays listed.
    Unpin,
    /// The image loses the mark of a bundle that does not bring it any more; another bundle does.
    Unmark,
    /// The name gets the target that its bundle has for it, which the store already has.
    Repoint,
}

/// The content of a mark: the file, how many of its images are listed, its target for this one, the name of that, how
/// many images a fault has left out, which of them the policy has refused, and whether it is unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BundleMark {
    pub(crate) fingerprint: BundleFingerprint,
    pub(crate) count: usize,
    /// The target in this bundle, also where the name belongs to another one.
    pub(crate) target: Digest,
    /// The name of the image that the import marked; an image with another name is a copy with all labels, as
    /// `ctr images tag` makes it. `None` in a mark of a release that did not write it.
    pub(crate) image: Option<String>,
    pub(crate) left_out: usize,
    pub(crate) refused: Vec<(ImageName, Digest)>,
    pub(crate) unpacked: bool,
}

/// The part of a mark that all images of one import have.
#[derive(Debug, Clone, Default)]
pub(crate) struct ImportMark {
    pub(crate) count: usize,
    pub(crate) left_out: usize,
    pub(crate) refused: Vec<(ImageName, Digest)>,
    pub(crate) unpacked: bool,
}

/// The prefix of the name in a mark.
const IMAGE_PREFIX: &str = "image=";

/// The prefix of the number in a mark, if images are left out.
const LEFT_OUT_PREFIX: &str = "left-out=";

/// The prefix of the images in a mark that the policy has refused: `NAME=DIGEST`, with commas between them.
const REFUSED_PREFIX: &str = "refused=";

/// The bytes of refused images up to which a mark names them: containerd's labels have at most 4096 with their keys.
const MAX_REFUSED_BYTES: usize = 2048;

/// The suffix of a mark if layers are unpacked.
const UNPACKED_SUFFIX: &str = "unpacked";

impl fmt::Display for BundleMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.fingerprint.0.to_hex(), self.count, self.target)?;
        if let Some(image) = &self.image {
            write!(f, " {IMAGE_PREFIX}{image}")?;
        }
        if self.left_out > 0 {
            write!(f, " {LEFT_OUT_PREFIX}{}", self.left_out)?;
        }
        let refused: Vec<_> = self.refused.iter().map(|(name, digest)| format!("{name}={digest}")).collect();
        let refused = refused.join(",");
        if !refused.is_empty() && refused.len() <= MAX_REFUSED_BYTES {
            write!(f, " {REFUSED_PREFIX}{refused}")?;
        }
        if self.unpacked { write!(f, " {UNPACKED_SUFFIX}") } else { Ok(()) }
    }
}

impl FromStr for BundleMark {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ').peekable();
        let mut next = || parts.next().ok_or(());
        let fingerprint = BundleFingerprint(Digest::from_hex(next()?).ok_or(())?);
        let count = next()?.parse().map_err(drop)?;
        let target = next()?.parse().map_err(drop)?;
        let image = parts.next_if(|part| part.starts_with(IMAGE_PREFIX));
        let image = image.map(|part| part[IMAGE_PREFIX.len()..].to_owned());
        let left_out = parts.next_if(|part| part.starts_with(LEFT_OUT_PREFIX));
        let left_out = left_out.map_or(Ok(0), |part| part[LEFT_OUT_PREFIX.len()..].parse().map_err(drop))?;
        let refused = parts.next_if(|part| part.starts_with(REFUSED_PREFIX));
        let refused = refused.map(|part| part[REFUSED_PREFIX.len()..].split(',')).into_iter().flatten();
        let refused = refused.map(|image| {
            let (name, digest) = image.rsplit_once('=').ok_or(())?;
            Ok((name.parse().map_err(drop)?, digest.parse().map_err(drop)?))
        });
        let refused = refused.collect::<Result<_, ()>>()?;
        let unpacked = parts.next_if_eq(&UNPACKED_SUFFIX).is_some();
        if parts.next().is_some() {
            Err(())
        } else {
            Ok(Self { fingerprint, count, target, image, left_out, refused, unpacked })
        }
    }
}

impl BundleMark {
    /// Returns whether an image with this name has the mark only because it is a copy.
    fn is_copied_to(&self, name: &str) -> bool {
        self.image.as_deref().is_some_and(|image| image != name)
    }
}

/// A bundle of a namespace, as the key of a mark names it in a plan: those of the first directory by their file alone, the others
/// by `RANK/FILE`. The mark of a directory that is none of them any more comes last, and so does one of which the store does not
/// say the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BundleKey<'a> {
    pub(crate) rank: usize,
    pub(crate) file: &'a str,
}

impl<'a> BundleKey<'a> {
    /// The rank of the bundles of a directory that is not known.
    pub(crate) const UNKNOWN_RANK: usize = usize::MAX;

    /// The rank of the bundles of a directory that is not among the directories any more.
    pub(crate) const REMOVED_RANK: usize = usize::MAX - 1;

    /// Stands for the directory of a mark that names none, where it is not known.
    pub(crate) const UNKNOWN_DIRECTORY: &'static str = "?";

    pub(crate) fn parse(text: &'a str) -> Self {
        match text.split_once('/') {
            None => Self { rank: 0, file: text },
            Some((Self::UNKNOWN_DIRECTORY, _)) => Self { rank: Self::UNKNOWN_RANK, file: text },
            Some((rank, file)) => match rank.parse() {
                Ok(rank) => Self { rank, file },
                Err(_) => Self { rank: Self::REMOVED_RANK, file: text },
            },
        }
    }

    pub(crate) fn of_label(key: &'a str) -> Option<Self> {
        key.strip_prefix(BUNDLE_LABEL_PREFIX).map(Self::parse)
    }
}

impl fmt::Display for BundleKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            0 | Self::REMOVED_RANK | Self::UNKNOWN_RANK => f.write_str(self.file),
            rank => write!(f, "{rank}/{}", self.file),
        }
    }
}

impl Bundle {
    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.directory.path.join(self.namespace.as_str()).join(&self.file)
    }

    pub(crate) fn key(&self) -> BundleKey<'_> {
        BundleKey { rank: self.directory.rank, file: &self.file }
    }

    /// The key of the mark on its images.
    pub(crate) fn label_key(&self) -> String {
        format!("{BUNDLE_LABEL_PREFIX}{}", self.key())
    }

    /// The label with the mark on one of its images.
    pub(crate) fn image_labels(&self, name: &str, target: Digest, import: &ImportMark) -> Labels {
        let (fingerprint, image) = (self.fingerprint, Some(name.to_owned()));
        let ImportMark { count, left_out, refused, unpacked } = import.clone();
        let mark = BundleMark { fingerprint, count, target, image, left_out, refused, unpacked };
        Labels::from([(self.label_key(), mark.to_string())])
    }

    /// The images that a fault has left out of the bundle that these belong to, where that was the policy alone; `None` where
    /// only the bundle says which they are.
    pub(crate) fn find_refused(&self, images: &[Image]) -> Option<Vec<(ImageName, Digest)>> {
        // One whose names all belong to others has no mark here.
        let Some(mark) = self.own_marks(images.iter()).pop() else { return Some(Vec::new()) };
        (mark.refused.len() == mark.left_out).then_some(mark.refused)
    }

    /// The marks of this very file on the images that it brings, without those that are copies. Marks without
    /// names count only while none has one: an import gives a name to each.
    fn own_marks<'i>(&self, images: impl Iterator<Item = &'i Image>) -> Vec<BundleMark> {
        let key = self.label_key();
        let own = |image: &Image| {
            let mark: BundleMark = image.labels.get(&key)?.parse().ok()?;
            (mark.fingerprint == self.fingerprint && !mark.is_copied_to(&image.name)).then_some(mark)
        };
        let mut marks: Vec<_> = images.filter_map(own).collect();
        let has_names = marks.iter().any(|mark| mark.image.is_some());
        marks.retain(|mark| mark.image.is_some() || !has_names);
        marks
    }
}

/// Plans a pass over the bundles and the listed images of each namespace; `unpack` tells whether layers should
/// be unpacked. Layers that are already unpacked stay unpacked.
///
/// A name belongs to the first bundle that brings it. A bundle that has to be imported, or that can't be read,
/// keeps what it brought earlier until that has succeeded.
pub fn plan_preseed(
    wanted: &WantedBundles,
    listed: &BTreeMap<Namespace, Vec<Image>>,
    unpack: bool,
) -> PreseedPlan {
    plan_until(wanted, listed, unpack, || false).expect("nothing cancels it")
}

/// As [`plan_preseed`]; `None` once it is canceled.
pub(crate) fn plan_until(
    wanted: &WantedBundles,
    listed: &BTreeMap<Namespace, Vec<Image>>,
    unpack: bool,
    is_canceled: impl Fn() -> bool,
) -> Option<PreseedPlan> {
    let mut plan = PreseedPlan::default();
    let unlisted = wanted.bundles.iter().map(|bundle| (&bundle.namespace, &[][..]));
    let listed = listed.iter().map(|(namespace, images)| (namespace, &images[..]));
    // Where a namespace has both, the listed images replace the empty list: the last entry wins.
    let namespaces: BTreeMap<&Namespace, &[Image]> = unlisted.chain(listed).collect();
    for (namespace, images) in namespaces {
        let files = BundleFiles::new(wanted, namespace, images, unpack, |_| true);
        let targets: BTreeMap<_, _> =
            images.iter().rev().map(|image| (image.target.digest, &image.target)).collect();
        let plan_image = |image| (!is_canceled()).then(|| files.plan_image(image, &targets));
        let changes: Vec<_> = images.iter().map(plan_image).collect::<Option<_>>()?;
        let mut owned: BTreeMap<BundleKey<'_>, Vec<(&Image, &PlannedImage<'_>)>> = BTreeMap::new();
        for (image, planned) in images.iter().zip(&changes) {
            if let Some((bundle, _)) = planned.owner {
                owned.entry(bundle).or_default().push((image, planned));
            }
        }
        for bundle in wanted.bundles.iter().filter(|bundle| bundle.namespace == *namespace) {
            if is_canceled() {
                return None;
            }
            let owned = owned.get(&bundle.key()).map_or(&[][..], Vec::as_slice);
            plan.bundles.push((bundle.clone(), files.plan_bundle(bundle, owned)));
        }
        let change = |(kind, image)| ImageUpdate { namespace: namespace.clone(), kind, image };
        plan.images.extend(changes.into_iter().filter_map(|planned| planned.change).map(change));
    }
    Some(plan)
}

/// The listed image that keeps a name when this bundle is imported, with its bundle: an earlier one, or that of another
/// instance, which is not known.
pub(crate) fn find_name_owner<'a>(
    wanted: &'a WantedBundles,
    bundle: &Bundle,
    images: &'a [Image],
    name: &str,
) -> Option<(&'a Image, Option<&'a Bundle>)> {
    let image = images.iter().find(|image| image.name == name)?;
    if has_label(image, PRIOR_LABEL_PREFIX) {
        return Some((image, None));
    }
    // Only the files that the image has marks of, since this is asked for each name.
    let is_marked = |bundle: &Bundle| image.labels.contains_key(&bundle.label_key());
    let files = BundleFiles::new(wanted, &bundle.namespace, images, false, is_marked);
    let (owner, _) = files.live_marks(image).into_iter().next()?;
    let mut bundles = wanted.bundles.iter().filter(|other| other.namespace == bundle.namespace);
    (owner < bundle.key()).then(|| (image, bundles.find(|bundle| bundle.key() == owner)))
}

fn has_label(image: &Image, prefix: &str) -> bool {
    image.labels.keys().any(|key| key.starts_with(prefix))
}

/// The files of a namespace, and how far the listed images have them.
struct BundleFiles<'a> {
    files: BTreeMap<BundleKey<'a>, BundleFileState>,
    /// The ranks of the directories of which nothing is known.
    unknown: BTreeSet<usize>,
}

#[derive(Debug, Clone, Copy)]
enum BundleFileState {
    /// The bundle can't be read, or has to be imported: what it brought earlier stays.
    Pending(Option<ImportReason>),
    /// All of its images are listed, with marks of this file.
    Imported {
        fingerprint: BundleFingerprint,
        /// True if the marks have names.
        has_names: bool,
    },
}

/// The plan of one image.
struct PlannedImage<'i> {
    /// The change, with the image after it.
    change: Option<(ImageUpdateKind, Image)>,
    /// The bundle that owns the name, with the target that it has for it.
    owner: Option<(BundleKey<'i>, Digest)>,
    /// True if the store has that target.
    is_present: bool,
}

impl<'a> BundleFiles<'a> {
    /// The files of these bundles, and those that can't be read.
    fn new(
        wanted: &'a WantedBundles,
        namespace: &Namespace,
        images: &[Image],
        unpack: bool,
        is_included: impl Fn(&Bundle) -> bool,
    ) -> Self {
        let unreadable = wanted.unreadable.iter().filter(|(of, ..)| of == namespace);
        let pending = |(_, rank, file): &'a (Namespace, usize, Option<String>)| {
            Some((BundleKey { rank: *rank, file: file.as_deref()? }, BundleFileState::Pending(None)))
        };
        let mut files: BTreeMap<_, _> = unreadable.clone().filter_map(pending).collect();
        // Looked up for each bundle, of which there may be as many as images.
        let mut marked: BTreeMap<BundleKey<'_>, Vec<&Image>> = BTreeMap::new();
        for image in images {
            for bundle in image.labels.keys().filter_map(|key| BundleKey::of_label(key)) {
                marked.entry(bundle).or_default().push(image);
            }
        }
        for bundle in wanted.bundles.iter().filter(|bundle| bundle.namespace == *namespace) {
            if is_included(bundle) {
                let marked = marked.get(&bundle.key()).map_or(&[][..], Vec::as_slice);
                files.insert(bundle.key(), BundleFileState::of_bundle(bundle, marked, unpack));
            }
        }
        let mut unknown: BTreeSet<_> =
            unreadable.filter(|(.., file)| file.is_none()).map(|(_, rank, _)| *rank).collect();
        let is_unlisted = |rank: &usize| !wanted.listed.contains(&(namespace.clone(), *rank));
        unknown.extend((0..wanted.directory_count.max(1)).filter(is_unlisted));
        if !unknown.is_empty() {
            // It may be one of them.
            unknown.insert(BundleKey::UNKNOWN_RANK);
        }
        Self { files, unknown }
    }

    /// The marks of an image that count, in the order of their bundles; the target is that of an imported one.
    fn live_marks<'i>(&self, image: &'i Image) -> Vec<(BundleKey<'i>, Option<Digest>)> {
        let marks = image.labels.iter().filter_map(|(key, text)| {
            let bundle = BundleKey::of_label(key)?;
            let mark = text.parse::<BundleMark>().ok();
            if mark.as_ref().is_some_and(|mark| mark.is_copied_to(&image.name)) {
                return None;
            }
            match (self.files.get(&bundle), mark) {
                // It keeps what it brought earlier, until its import has succeeded.
                (Some(BundleFileState::Pending(_)), _) => Some((bundle, None)),
                (Some(BundleFileState::Imported { fingerprint, has_names }), Some(mark))
                    if mark.fingerprint == *fingerprint && mark.image.is_some() == *has_names =>
                {
                    Some((bundle, Some(mark.target)))
                }
                // Nothing is known of the namespace, so none of its marks is dropped.
                (None, _) if self.unknown.contains(&bundle.rank) => Some((bundle, None)),
                // The mark is of a file that is gone, or of an earlier content of it.
                _ => None,
            }
        });
        let mut marks: Vec<_> = marks.collect();
        marks.sort_by_key(|(bundle, _)| *bundle);
        marks
    }

    /// The targets are those that the store has.
    fn plan_image<'i>(&self, image: &'i Image, targets: &BTreeMap<Digest, &Descriptor>) -> PlannedImage<'i> {
        let live = self.live_marks(image);
        let is_dead = |key: &&String| {
            BundleKey::of_label(key).is_some_and(|bundle| live.iter().all(|(known, _)| *known != bundle))
        };
        let dead: Vec<&String> = image.labels.keys().filter(is_dead).collect();
        let mut changed = image.clone();
        // An empty value: `put_image` removes such a label, and keeps those of other clients.
        changed.labels.extend(dead.iter().map(|key| ((*key).clone(), String::new())));
        let mut kind = (!dead.is_empty()).then_some(ImageUpdateKind::Unmark);
        // Another instance may still bring it.
        let has_others =
            [PRIOR_LABEL_PREFIX, OTHER_LABEL_PREFIX].iter().any(|prefix| has_label(image, prefix));
        if live.is_empty() && kind.is_some() && !has_others {
            kind = Some(ImageUpdateKind::Unpin);
            changed.labels.entry(PINNED_LABEL.0.to_owned()).and_modify(String::clear);
        }
        // A pending file has no known target yet, so that its names are not repointed.
        let owner = live.first().filter(|_| !has_label(image, PRIOR_LABEL_PREFIX));
        let owner = owner.and_then(|(bundle, target)| Some((*bundle, (*target)?)));
        let mut is_present = true;
        if let Some((_, target)) = &owner
            && *target != image.target.digest
        {
            // Another image has the same target, so its content exists; otherwise the bundle has to be read.
            match targets.get(target) {
                Some(other) => {
                    changed.target = Descriptor::clone(other);
                    kind = Some(ImageUpdateKind::Repoint);
                }
                None => is_present = false,
            }
        }
        PlannedImage { change: kind.map(|kind| (kind, changed)), owner, is_present }
    }

    /// The images are those whose names the bundle owns.
    fn plan_bundle(&self, bundle: &Bundle, owned: &[(&Image, &PlannedImage<'_>)]) -> BundleAction {
        if let Some(BundleFileState::Pending(Some(reason))) = self.files.get(&bundle.key()) {
            return BundleAction::Import(*reason);
        }
        if owned.iter().any(|(_, planned)| !planned.is_present) {
            return BundleAction::Import(ImportReason::Incomplete);
        }
        let after = |(image, planned): &(&Image, &PlannedImage<'_>)| {
            planned.change.as_ref().map_or_else(|| Image::clone(image), |(_, after)| after.clone())
        };
        BundleAction::Verify(owned.iter().map(after).collect())
    }
}

impl BundleFileState {
    /// The images are those with a mark of the file.
    fn of_bundle(bundle: &Bundle, images: &[&Image], unpack: bool) -> Self {
        let marks = bundle.own_marks(images.iter().copied());
        let key = bundle.label_key();
        let reason = if marks.is_empty() {
            let texts: Vec<_> = images.iter().filter_map(|image| image.labels.get(&key)).collect();
            match texts.iter().any(|text| is_of_file(text, bundle.fingerprint)) {
                // Only copies are left of its images.
                true => ImportReason::Incomplete,
                false if texts.is_empty() => ImportReason::New,
                false => ImportReason::Changed,
            }
        } else if marks.iter().any(|mark| mark.count != marks.len()) {
            // Each mark has the number of images of the bundle: fewer marks mean that one was removed.
            ImportReason::Incomplete
        } else if unpack && marks.iter().any(|mark| !mark.unpacked) {
            ImportReason::NotUnpacked
        } else {
            let has_names = marks[0].image.is_some();
            return Self::Imported { fingerprint: bundle.fingerprint, has_names };
        };
        Self::Pending(Some(reason))
    }
}

fn is_of_file(mark: &str, fingerprint: BundleFingerprint) -> bool {
    mark.parse::<BundleMark>().is_ok_and(|mark| mark.fingerprint == fingerprint)
}

#[cfg(test)]
#[path = "plan_test.rs"]
mod tests;
