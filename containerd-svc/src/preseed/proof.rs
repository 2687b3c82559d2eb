//! Compares the images of a store with their digests, and has what is wrong written again.

use std::collections::{BTreeMap, BTreeSet};

use super::Preseed;
use super::damage_record::{self, DamageRecord};
use crate::error::{ArchivedImageError, BundleError};
use crate::image::{Image, ImageLayer};
use crate::image_walk::{ImageScope, ImageWalk};
use crate::import::error_chain;
use crate::store::{ImageStore, ImageStoreError, ReadPace};
use crate::{Digest, Namespace};

/// A comparison of images with their digests. Each blob is read once, however many images have it.
///
/// # Cancel safety
/// [`run`](Self::run) can be dropped and called again: it goes on with the blob that it was reading.
#[derive(Debug)]
pub struct ImageProof {
    subjects: Vec<ProofSubject>,
    /// The number of subjects that are done.
    done: usize,
    known: BTreeMap<Digest, bool>,
    sizes: BTreeMap<Digest, u64>,
    kind: ProofKind,
    image_count: usize,
    damaged: Vec<DamagedImage>,
    not_compared: Vec<UncomparedImage>,
    /// The damage that the store has a record of.
    recorded: BTreeMap<(Namespace, Digest), DamageRecord>,
}

/// The effort of a comparison. In each, damaged content does not exist for the store from then on, so that the next pass over
/// the bundles writes it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProofKind {
    /// Compares content, counts the files of unpacked layers, and names what is wrong.
    Verify,
    /// The same, and discards unpacked layers that are damaged, or whose layer is, so that they are unpacked again.
    Discard,
    /// The same, and unpacks each unpacked layer again to compare all of its files.
    Repair,
}

/// An image whose content is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedImage {
    /// The namespace.
    pub namespace: Namespace,
    /// The name.
    pub name: String,
    /// What is wrong.
    pub reason: String,
}

/// An image whose unpacked layers could not be compared for lack of free space, or not byte by byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UncomparedImage {
    /// The namespace.
    pub namespace: Namespace,
    /// The name.
    pub name: String,
    /// The reason, and what is to be done.
    pub reason: String,
}

#[derive(Debug)]
struct ProofSubject {
    namespace: Namespace,
    name: String,
    target: Digest,
    content: BTreeMap<Digest, u64>,
    layers: Vec<Vec<ImageLayer>>,
}

impl ImageProof {
    /// Looks for the content of these images. An image that is none for this node is left out.
    ///
    /// # Errors
    /// [`ImageStoreError`]; a retry can help.
    pub async fn new(
        store: &dyn ImageStore,
        preseed: &Preseed,
        images: &[(Namespace, Image)],
        kind: ProofKind,
    ) -> Result<Self, ImageStoreError> {
        let mut proof = Self {
            subjects: Vec::new(),
            done: 0,
            known: BTreeMap::new(),
            sizes: BTreeMap::new(),
            kind,
            image_count: 0,
            damaged: Vec::new(),
            not_compared: Vec::new(),
            recorded: BTreeMap::new(),
        };
        // Also under names that are not compared.
        for namespace in images.iter().map(|(namespace, _)| namespace).collect::<BTreeSet<_>>() {
            let listed = store.list_images(namespace).await?;
            let records = damage_record::read_all(&listed).into_iter();
            proof.recorded.extend(records.map(|(target, record)| ((namespace.clone(), target), record)));
        }
        for (namespace, image) in images {
            let scope = ImageScope {
                store,
                namespace,
                platform: &preseed.target_platform,
                limits: &preseed.import_limits,
            };
            let reason = match ImageWalk::new(scope).follow_target(&image.target).await {
                Ok(content) if content.runnable_images.is_empty() => continue,
                Ok(content) => {
                    proof.image_count += 1;
                    proof.sizes.extend(content.needed.iter().map(|(digest, size)| (*digest, *size)));
                    proof.subjects.push(ProofSubject {
                        namespace: namespace.clone(),
                        name: image.name.clone(),
                        target: image.target.digest,
                        content: content.needed.clone(),
                        layers: content.runnable_images.iter().map(|image| image.layers.clone()).collect(),
                    });
                    continue;
                }
                Err(BundleError::Store(error)) => return Err(error),
                Err(error) => match describe_missing(&error) {
                    Some(reason) => reason,
                    None => continue,
                },
            };
            proof.image_count += 1;
            proof.record(store, namespace, image.target.digest, Some(DamageRecord::Content)).await;
            proof.add_damage(namespace.clone(), image.name.clone(), reason);
        }
        Ok(proof)
    }

    /// Reads the content at a pace, until all of it was read, and reports after each image. Damaged content does not exist for
    /// the store from then on, and the states of its images are those of damaged ones. A full disk ends no comparison: see
    /// [`not_compared`](Self::not_compared).
    ///
    /// # Errors
    /// [`ImageStoreError`]; a retry can help.
    pub async fn run(
        &mut self,
        store: &dyn ImageStore,
        preseed: &Preseed,
        pace: &ReadPace,
        mut report: impl FnMut(&Self) + Send,
    ) -> Result<(), ImageStoreError> {
        report(self);
        // Those whose documents could not be read were found before.
        preseed.record_damage(&self.damaged);
        while let Some(subject) = self.subjects.get(self.done) {
            let mut damaged = None;
            for (digest, size) in &subject.content {
                let is_intact = match self.known.get(digest) {
                    Some(known) => *known,
                    None => {
                        let is_intact = store.verify_content(&subject.namespace, digest, *size, pace).await?;
                        *self.known.entry(*digest).or_insert(is_intact)
                    }
                };
                if !is_intact {
                    damaged.get_or_insert(*digest);
                }
            }
            let mut reason = damaged.map(|digest| format!("its content {digest} is missing or damaged"));
            let (mut full_disk, mut stays) = (None, false);
            for layers in &subject.layers {
                // What was unpacked from a layer whose file is damaged now may be damaged as well.
                let from = layers.iter().position(|layer| self.known.get(&layer.blob.digest) == Some(&false));
                let is_compared = from.is_none();
                let from = match from {
                    Some(from) => Some(from),
                    None => find_damaged_layer(store, subject, layers, self.kind, &mut full_disk).await?,
                };
                let Some(from) = from else { continue };
                let layer = layers[from].blob.digest;
                let reason =
                    reason.get_or_insert_with(|| format!("files of its unpacked layer {layer} are damaged"));
                if self.kind == ProofKind::Verify {
                    stays |= is_compared;
                } else if !store.discard_unpacked(&subject.namespace, layers, from).await? {
                    let ProofSubject { namespace, name, .. } = subject;
                    let repair = format!("`nodectl images repair --namespace {namespace} {name}`");
                    *reason += &match is_compared {
                        true => {
                            format!(", and a container uses it: delete the pods that use it, then {repair}")
                        }
                        false => format!(
                            "; what a container has unpacked from layer {layer} is in use: {repair} compares it"
                        ),
                    };
                    stays = true;
                }
            }
            let ProofSubject { namespace, name, target, .. } = subject;
            let (namespace, name, target) = (namespace.clone(), name.clone(), *target);
            match &reason {
                Some(reason) if stays => {
                    preseed.record_damaged_layers(&namespace, target, Some(reason));
                    self.record(store, &namespace, target, Some(DamageRecord::Layers(reason.clone()))).await;
                }
                Some(_) => {
                    // Otherwise what was known of its unpacked layers has not been looked at.
                    if self.kind != ProofKind::Verify {
                        preseed.record_damaged_layers(&namespace, target, None);
                        self.record(store, &namespace, target, None).await;
                    }
                    if damaged.is_some() {
                        self.record(store, &namespace, target, Some(DamageRecord::Content)).await;
                    }
                }
                None => {
                    preseed.record_compared(&namespace, target, full_disk.as_deref());
                    if full_disk.is_none() {
                        self.record(store, &namespace, target, None).await;
                    }
                }
            }
            self.done += 1;
            match (reason, full_disk) {
                (Some(reason), _) => self.add_damage(namespace, name, reason),
                (None, Some(reason)) => {
                    tracing::warn!("image {name} in {namespace} is not compared completely: {reason}");
                    self.not_compared.push(UncomparedImage { namespace, name, reason });
                }
                (None, None) => {}
            }
            preseed.record_damage(&self.damaged);
            report(self);
        }
        preseed.refresh_damage(store).await;
        Ok(())
    }

    /// Records damage in the store, or takes it back. It has to outlive this process; where it can't, the comparison goes on.
    async fn record(
        &mut self,
        store: &dyn ImageStore,
        namespace: &Namespace,
        target: Digest,
        damage: Option<DamageRecord>,
    ) {
        let key = (namespace.clone(), target);
        match (&damage, self.recorded.get(&key)) {
            (None, None) => return,
            // It is known as damaged, and its layers were not looked at.
            (Some(DamageRecord::Content), Some(DamageRecord::Layers(_))) => return,
            _ => {}
        }
        match damage_record::write(store, namespace, target, damage.as_ref()).await {
            Ok(()) => {
                self.recorded.remove(&key);
                self.recorded.extend(damage.map(|damage| (key, damage)));
            }
            Err(error) => tracing::warn!(
                "containerd can't record whether {target} in {namespace} is damaged: {}",
                error_chain(&error)
            ),
        }
    }

    /// The targets among these images of a namespace that a comparison has found damaged, also one of an earlier process, and that
    /// have neither been repaired nor found intact since, with the reasons. Nothing else is looked at.
    ///
    /// # Errors
    /// [`ImageStoreError`]; a retry can help.
    pub async fn list_recorded(
        store: &dyn ImageStore,
        preseed: &Preseed,
        namespace: &Namespace,
        images: &[Image],
    ) -> Result<BTreeMap<Digest, String>, ImageStoreError> {
        let mut damaged = BTreeMap::new();
        for (target, record) in damage_record::read_all(images) {
            let scope = ImageScope {
                store,
                namespace,
                platform: &preseed.target_platform,
                limits: &preseed.import_limits,
            };
            let listed = images.iter().find(|image| image.target.digest == target);
            match (record, listed) {
                (DamageRecord::Layers(reason), _) => drop(damaged.insert(target, reason)),
                // It may have been written again since.
                (DamageRecord::Content, Some(image)) => {
                    match ImageWalk::new(scope).follow_target(&image.target).await {
                        Err(BundleError::Store(error)) => return Err(error),
                        Err(error) => {
                            damaged.extend(describe_missing(&error).map(|reason| (target, reason)));
                        }
                        Ok(_) => {}
                    }
                }
                (DamageRecord::Content, None) => {}
            }
        }
        Ok(damaged)
    }

    fn add_damage(&mut self, namespace: Namespace, name: String, reason: String) {
        tracing::warn!("image {name} in {namespace} is damaged: {reason}");
        self.damaged.push(DamagedImage { namespace, name, reason });
    }

    /// The damaged images so far.
    pub fn damaged(&self) -> &[DamagedImage] {
        &self.damaged
    }

    /// The images whose content is intact so far, and whose unpacked layers there was no room to compare. Nothing else is
    /// recorded about them.
    pub fn not_compared(&self) -> &[UncomparedImage] {
        &self.not_compared
    }

    /// The number of images.
    pub fn image_count(&self) -> usize {
        self.image_count
    }

    /// The bytes of all content.
    pub fn total_bytes(&self) -> u64 {
        self.sizes.values().sum()
    }

    /// The bytes of the content that was read.
    pub fn done_bytes(&self) -> u64 {
        self.known.keys().filter_map(|digest| self.sizes.get(digest)).sum()
    }
}

impl Preseed {
    /// Reads again which images are [known to be damaged](Self::damaged_without_bundle), after an import of one of them. What can't
    /// be read stays as it is.
    pub async fn refresh_damage(&self, store: &dyn ImageStore) {
        match list_damaged(store, self).await {
            Ok(damaged) => self.lock_memory().damaged = damaged,
            Err(error) => tracing::warn!("can't read which images are damaged: {}", error_chain(&error)),
        }
    }
}

async fn list_damaged(
    store: &dyn ImageStore,
    preseed: &Preseed,
) -> Result<Vec<DamagedImage>, ImageStoreError> {
    let mut damaged = Vec::new();
    for namespace in store.list_namespaces().await? {
        let images = store.list_images(&namespace).await?;
        let known = ImageProof::list_recorded(store, preseed, &namespace, &images).await?;
        damaged.extend(images.into_iter().filter_map(|image| {
            let reason = known.get(&image.target.digest)?.clone();
            Some(DamagedImage { namespace: namespace.clone(), name: image.name, reason })
        }));
    }
    Ok(damaged)
}

/// The reason why an image that can't be followed to its end is damaged.
fn describe_missing(error: &BundleError) -> Option<String> {
    match error {
        BundleError::Image(ArchivedImageError::MissingContent { what, .. }) => {
            Some(format!("its content {what} is missing or damaged"))
        }
        BundleError::Image(error) => Some(error_chain(error)),
        _ => None,
    }
}

/// Looks for damaged unpacked layers as thoroughly as the free space allows; the reason is set if that is less than wanted.
async fn find_damaged_layer(
    store: &dyn ImageStore,
    subject: &ProofSubject,
    layers: &[ImageLayer],
    kind: ProofKind,
    full_disk: &mut Option<String>,
) -> Result<Option<usize>, ImageStoreError> {
    // To count files takes next to no space; to unpack a layer again takes all of its own.
    let attempts = if kind == ProofKind::Repair { &[true, false][..] } else { &[false] };
    for thorough in attempts {
        match store.find_damaged_layer(&subject.namespace, layers, *thorough).await {
            Err(error @ ImageStoreError::NoSpace { .. }) => *full_disk = Some(error_chain(&error)),
            found => return found,
        }
    }
    Ok(None)
}
