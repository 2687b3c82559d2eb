//! The states of the images that bundles bring.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::SystemTime;

use super::damage_record::{self, DamageRecord};
use super::{BundleOutcome, DamagedImage};
use crate::error::LeftOutImage;
use crate::import::error_chain;
use crate::plan::{Bundle, BundleDirectory, WantedBundles};
use crate::{Digest, Image, Namespace};

/// How far an image of a bundle has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ImageStage {
    /// It is to be imported, or could not be.
    Wanted,
    /// The [policy](crate::ImagePolicy) refuses it, and it stays as it is.
    Refused,
    /// Content of it is missing or has other bytes, and is to be written again.
    Damaged,
    /// containerd lists it, and has all content that this node needs of it.
    Listed,
    /// The CRI knows its name, too.
    Answered,
}

impl ImageStage {
    /// All stages, in their order.
    pub const ALL: [Self; 5] = [Self::Wanted, Self::Refused, Self::Damaged, Self::Listed, Self::Answered];

    /// The stage in one word: `wanted`, `refused`, `damaged`, `listed` or `answered`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wanted => "wanted",
            Self::Refused => "refused",
            Self::Damaged => "damaged",
            Self::Listed => "listed",
            Self::Answered => "answered",
        }
    }
}

/// The state of an image of a bundle, as the last pass has found it, or a later event or comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageState {
    /// The namespace.
    pub namespace: Namespace,
    /// The name; `None` stands for all images of a bundle that could not be read yet.
    pub name: Option<String>,
    /// The file name of its bundle.
    pub bundle: String,
    /// The directory of bundles with that.
    pub directory: PathBuf,
    /// How far it has come.
    pub stage: ImageStage,
    /// The time since which it is there.
    pub since: SystemTime,
    /// The digest of its manifest, or of the index of manifests; `None` if it is not imported.
    pub target: Option<Digest>,
    /// The bytes of all content that this node needs of it, as it is stored; `None` if it is not imported.
    pub bytes: Option<u64>,
    /// True if its layers are unpacked, so that its first container starts without that delay.
    pub is_unpacked: bool,
    /// The reason why it has not come further; `None` if nothing is wrong.
    pub problem: Option<String>,
    /// The reason why the last comparison has not looked at all of it, as a lack of free space; `None` if it has, or was none.
    pub not_compared: Option<String>,
    /// While its bundle is read: the bytes of the file that were read, and all.
    pub progress: Option<(u64, u64)>,
}

/// An image of a bundle that is complete in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredImage {
    pub(super) name: String,
    pub(super) target: Digest,
    pub(super) bytes: u64,
    pub(super) is_unpacked: bool,
}

/// A bundle, whatever is in its file.
pub(super) type BundleId = (Namespace, BundleDirectory, String);

pub(super) fn bundle_id(bundle: &Bundle) -> BundleId {
    (bundle.namespace.clone(), bundle.directory.clone(), bundle.file.clone())
}

/// The states of all images, by bundle.
#[derive(Debug, Default)]
pub(super) struct ImageStates {
    by_bundle: BTreeMap<BundleId, Vec<ImageState>>,
    /// The targets with damaged unpacked layers that are not discarded, with the reason.
    damaged_layers: BTreeMap<(Namespace, Digest), String>,
}

impl ImageStates {
    /// Forgets the bundles that are gone, and adds those that are new. Where nothing is known, nothing is changed.
    pub(super) fn begin_pass(&mut self, wanted: &WantedBundles, directories: &[PathBuf]) {
        let known: BTreeSet<_> = wanted.bundles.iter().map(bundle_id).collect();
        self.by_bundle.retain(|key, _| {
            let (namespace, BundleDirectory { rank, .. }, file) = key;
            let is_unreadable = |file| wanted.unreadable.contains(&(namespace.clone(), *rank, file));
            known.contains(key)
                || !wanted.listed.contains(&(namespace.clone(), *rank))
                || is_unreadable(Some(file.clone()))
                || is_unreadable(None)
        });
        for key in known {
            let new = || vec![new_state(&key, None, None)];
            self.by_bundle.entry(key.clone()).or_insert_with(new);
        }
        for (namespace, rank, file) in &wanted.unreadable {
            let (Some(file), Some(path)) = (file, directories.get(*rank)) else { continue };
            let directory = BundleDirectory { rank: *rank, path: path.clone() };
            let key = (namespace.clone(), directory, file.clone());
            let rows = self.by_bundle.entry(key.clone()).or_insert_with(|| vec![new_state(&key, None, None)]);
            let problem = "its bundle can't be read: `nodectl logs root.containerd.preseed`";
            rows.iter_mut().for_each(|row| row.problem = Some(problem.to_owned()));
        }
    }

    /// Learns which unpacked layers earlier processes have found damaged, and forgets those of targets that neither a bundle nor an
    /// image refers to any more.
    pub(super) fn begin_plan(&mut self, listed: &BTreeMap<Namespace, Vec<Image>>) {
        for (namespace, images) in listed {
            for (target, record) in damage_record::read_all(images) {
                if let DamageRecord::Layers(reason) = record {
                    self.damaged_layers.entry((namespace.clone(), target)).or_insert(reason);
                }
            }
        }
        let rows = self.by_bundle.values().flatten();
        let known = rows.filter_map(|row| Some((&row.namespace, row.target?)));
        let images = listed
            .iter()
            .flat_map(|(namespace, images)| images.iter().map(move |image| (namespace, image.target.digest)));
        let known: BTreeSet<_> = known.chain(images).collect();
        self.damaged_layers.retain(|(namespace, target), _| known.contains(&(namespace, *target)));
    }

    /// Records what has become of a bundle.
    pub(super) fn record_outcome(
        &mut self,
        bundle: &Bundle,
        outcome: &BundleOutcome,
        stored: &[StoredImage],
    ) {
        let key = bundle_id(bundle);
        let mut rows: Vec<_> = match outcome {
            BundleOutcome::Imported { left_out, .. } | BundleOutcome::Unchanged { left_out, .. } => {
                let faults = left_out.iter().filter(|image| !image.is_foreign());
                let fault = |image: &LeftOutImage| {
                    let state = new_state(&key, Some(image.name.clone()), Some(error_chain(&image.reason)));
                    match image.refused() {
                        Some(_) => ImageState { stage: ImageStage::Refused, ..state },
                        None => state,
                    }
                };
                stored.iter().map(|image| listed_state(&key, image)).chain(faults.map(fault)).collect()
            }
            BundleOutcome::KnownInvalid { reason, .. } | BundleOutcome::Delayed { reason, .. } => {
                vec![new_state(&key, None, Some(reason.clone()))]
            }
            BundleOutcome::Failed(error) => vec![new_state(&key, None, Some(error_chain(error)))],
        };
        for row in rows.iter_mut().filter(|row| row.stage == ImageStage::Listed) {
            let damaged = row.target.and_then(|target| self.damaged_layers.get(&(key.0.clone(), target)));
            if let Some(reason) = damaged {
                (row.stage, row.problem) = (ImageStage::Damaged, Some(reason.clone()));
            }
        }
        let before = self.by_bundle.remove(&key).unwrap_or_default();
        for row in &mut rows {
            let known = before.iter().find(|known| known.name == row.name && known.target == row.target);
            // What the CRI has answered for holds until it is asked again.
            if let Some(known) = known
                && (known.stage == row.stage
                    || (known.stage, row.stage) == (ImageStage::Answered, ImageStage::Listed))
            {
                (row.stage, row.since) = (known.stage, known.since);
                row.not_compared.clone_from(&known.not_compared);
            }
        }
        self.by_bundle.insert(key, rows);
    }

    /// Records which of the listed images of a namespace its CRI lists.
    #[cfg(feature = "client")]
    pub(super) fn record_answers(&mut self, namespace: &Namespace, unlisted: &BTreeSet<String>) {
        self.change(|row, name| match (row.stage, unlisted.contains(name)) {
            _ if row.namespace != *namespace => None,
            (ImageStage::Listed, false) => Some((ImageStage::Answered, None)),
            (ImageStage::Listed | ImageStage::Answered, true) => {
                let problem = "the CRI does not list it: `nodectl logs root.containerd` has the reason";
                Some((ImageStage::Listed, Some(problem.to_owned())))
            }
            _ => None,
        });
    }

    /// Takes back the states of images that don't exist.
    #[cfg(feature = "client")]
    pub(super) fn record_missing(&mut self, missing: &[(Namespace, String)]) {
        let missing: BTreeSet<_> =
            missing.iter().map(|(namespace, name)| (namespace, name.as_str())).collect();
        self.change(|row, name| {
            let problem = || Some("it was deleted, and is to be imported again".to_owned());
            missing.contains(&(&row.namespace, name)).then(|| (ImageStage::Wanted, problem()))
        });
    }

    /// Takes back the states of images whose content is damaged.
    pub(super) fn record_damage(&mut self, damaged: &[DamagedImage]) {
        let reason =
            |image: &'_ DamagedImage| ((image.namespace.clone(), image.name.clone()), image.reason.clone());
        let reasons: BTreeMap<_, _> = damaged.iter().map(reason).collect();
        self.change(|row, name| {
            let reason = reasons.get(&(row.namespace.clone(), name.to_owned()))?;
            Some((ImageStage::Damaged, Some(reason.clone())))
        });
    }

    /// Records the reason why unpacked layers of a target are damaged; `None` if they are discarded, or were not.
    pub(super) fn record_damaged_layers(
        &mut self,
        namespace: &Namespace,
        target: Digest,
        reason: Option<&str>,
    ) {
        let key = (namespace.clone(), target);
        match reason {
            Some(reason) => drop(self.damaged_layers.insert(key, reason.to_owned())),
            None => drop(self.damaged_layers.remove(&key)),
        }
    }

    /// The reason why unpacked layers of a target are damaged, as far as it is known.
    pub(super) fn damaged_layers(&self, namespace: &Namespace, target: Digest) -> Option<&str> {
        self.damaged_layers.get(&(namespace.clone(), target)).map(String::as_str)
    }

    /// Records that nothing is wrong with a target, as far as it was compared; with the reason why that was not all of it.
    pub(super) fn record_compared(&mut self, namespace: &Namespace, target: Digest, rest: Option<&str>) {
        let rows = self.by_bundle.values_mut().flatten();
        for row in rows.filter(|row| row.namespace == *namespace && row.target == Some(target)) {
            row.not_compared = rest.map(str::to_owned);
        }
        if rest.is_some() {
            return;
        }
        self.damaged_layers.remove(&(namespace.clone(), target));
        self.change(|row, _| {
            let is_taken_back =
                row.stage == ImageStage::Damaged && row.namespace == *namespace && row.target == Some(target);
            is_taken_back.then_some((ImageStage::Listed, None))
        });
    }

    /// Sets the stage and the problem of each image with a name for which there is a new one.
    fn change(&mut self, mut change: impl FnMut(&ImageState, &str) -> Option<(ImageStage, Option<String>)>) {
        for row in self.by_bundle.values_mut().flatten() {
            let Some((stage, problem)) = row.name.as_deref().and_then(|name| change(row, name)) else {
                continue;
            };
            if row.stage != stage {
                row.since = SystemTime::now();
            }
            (row.stage, row.problem) = (stage, problem);
        }
    }

    pub(super) fn list(&self, progress: impl Fn(&BundleId) -> Option<(u64, u64)>) -> Vec<ImageState> {
        let with_progress = |(bundle, rows): (&BundleId, &Vec<ImageState>)| {
            let progress = progress(bundle);
            rows.iter().map(move |row| ImageState { progress, ..row.clone() }).collect::<Vec<_>>()
        };
        self.by_bundle.iter().flat_map(with_progress).collect()
    }
}

fn new_state(
    (namespace, directory, file): &BundleId,
    name: Option<String>,
    problem: Option<String>,
) -> ImageState {
    ImageState {
        namespace: namespace.clone(),
        name,
        bundle: file.clone(),
        directory: directory.path.clone(),
        stage: ImageStage::Wanted,
        since: SystemTime::now(),
        target: None,
        bytes: None,
        is_unpacked: false,
        problem,
        not_compared: None,
        progress: None,
    }
}

fn listed_state(key: &BundleId, image: &StoredImage) -> ImageState {
    ImageState {
        stage: ImageStage::Listed,
        target: Some(image.target),
        bytes: Some(image.bytes),
        is_unpacked: image.is_unpacked,
        ..new_state(key, Some(image.name.clone()), None)
    }
}
