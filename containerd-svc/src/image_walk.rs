//! Walks from an image's target to all content that this node needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::documents::{ImageConfig, ImageIndex, ImageManifest, IndexEntry, JsonDescriptor, TargetKind};
use crate::error::{ArchivedImageError, BundleError};
use crate::image::{Descriptor, ImageLayer, Labels};
use crate::store::ImageStore;
use crate::{Digest, ImportLimits, Namespace, Platform};

/// The store, namespace, platform and limits of a walk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageScope<'a> {
    pub(crate) store: &'a dyn ImageStore,
    pub(crate) namespace: &'a Namespace,
    pub(crate) platform: &'a Platform,
    pub(crate) limits: &'a ImportLimits,
}

impl ImageScope<'_> {
    /// Reads a document of this size; `None` if the store does not have it.
    pub(crate) async fn read_document<T: DeserializeOwned>(
        &self,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<T>, BundleError> {
        let limit = self.limits.document_bytes;
        if size > limit {
            return Err(ArchivedImageError::Limit { limit, of: "bytes of a document" }.into());
        }
        let Some(bytes) = self.store.read_content(self.namespace, digest, size).await? else {
            return Ok(None);
        };
        let document = serde_json::from_slice(&bytes);
        let document = document.map_err(|source| ArchivedImageError::InvalidDocument {
            what: digest.to_string(),
            source: Arc::new(source),
        })?;
        Ok(Some(document))
    }
}

/// The configuration and layers of an image for this platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunnableImage {
    pub(crate) config: Digest,
    pub(crate) layers: Vec<ImageLayer>,
}

/// The content of a target that this node needs. All of it exists.
#[derive(Debug, Default)]
pub(crate) struct TargetContent {
    /// The content, with its size in bytes.
    pub(crate) needed: BTreeMap<Digest, u64>,
    /// Labels of content, which keep the content that it refers to.
    pub(crate) labels: BTreeMap<Digest, Labels>,
    /// The images for this platform; none if the target is nothing that this node runs.
    pub(crate) runnable_images: Vec<RunnableImage>,
    /// The other platforms of the target.
    pub(crate) others: Vec<Platform>,
    /// A media type of the target that is not one of an image.
    pub(crate) artifact: Option<String>,
}

/// Walks the targets of a bundle, each alone: the error of one does not affect the others.
#[derive(Debug)]
pub(crate) struct ImageWalk<'a> {
    scope: ImageScope<'a>,
    /// Counted for all targets together.
    seen: u32,
    /// The targets so far: many names often have the same one.
    known: BTreeMap<Digest, Result<Arc<TargetContent>, ArchivedImageError>>,
}

impl<'a> ImageWalk<'a> {
    pub(crate) fn new(scope: ImageScope<'a>) -> Self {
        Self { scope, seen: 0, known: BTreeMap::new() }
    }

    /// Follows a target to the content for this node.
    pub(crate) async fn follow_target(
        &mut self,
        target: &Descriptor,
    ) -> Result<Arc<TargetContent>, BundleError> {
        if let Some(known) = self.known.get(&target.digest) {
            return Ok(known.clone()?);
        }
        let followed = match self.walk_target(target).await {
            Ok(content) => Ok(Arc::new(content)),
            Err(BundleError::Image(error)) => Err(error),
            // Of the store, which may answer the next time.
            Err(error) => return Err(error),
        };
        self.known.insert(target.digest, followed.clone());
        Ok(followed?)
    }

    async fn walk_target(&mut self, target: &Descriptor) -> Result<TargetContent, BundleError> {
        let mut content = TargetContent::default();
        let mut pending = vec![(target.clone(), 0)];
        while let Some((descriptor, depth)) = pending.pop() {
            // Indexes may refer to each other in any way: the count and the depth bound the walk.
            self.count_descriptors(1)?;
            match descriptor.target_kind() {
                TargetKind::Index if depth > self.scope.limits.nesting => {
                    let limit = self.scope.limits.nesting.into();
                    return Err(ArchivedImageError::Limit { limit, of: "nested indexes" }.into());
                }
                TargetKind::Index => {
                    let children = self.read_index(&descriptor, &mut content).await?;
                    pending.extend(children.into_iter().map(|child| (child, depth + 1)));
                }
                TargetKind::Manifest => self.read_manifest(&descriptor, &mut content).await?,
                TargetKind::Other => content.artifact = Some(descriptor.media_type),
            }
        }
        Ok(content)
    }

    fn count_descriptors(&mut self, more: usize) -> Result<(), ArchivedImageError> {
        self.seen = self.seen.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
        let limit = self.scope.limits.descriptors;
        if self.seen > limit {
            return Err(ArchivedImageError::Limit { limit: limit.into(), of: "manifests, layers and names" });
        }
        Ok(())
    }

    /// Reads an index and returns the children for this platform.
    async fn read_index(
        &mut self,
        descriptor: &Descriptor,
        content: &mut TargetContent,
    ) -> Result<Vec<Descriptor>, BundleError> {
        let index: ImageIndex = self.read_needed_document(descriptor, "the archive", content).await?;
        self.count_descriptors(index.manifests.len())?;
        let mut children = Vec::new();
        let mut labels = Labels::new();
        for (position, child) in index.manifests.iter().enumerate() {
            // Nothing that this node could read, so nothing that it needs.
            let IndexEntry::Descriptor(child) = child else { continue };
            let is_present = self.is_present(child).await?;
            // Children for other platforms, too, as far as they exist: the label keeps them.
            if is_present {
                labels.insert(format!("containerd.io/gc.ref.content.m.{position}"), child.digest.to_string());
            }
            match &child.platform {
                Some(platform) if !self.scope.platform.can_run(platform) => {
                    content.others.push(platform.clone());
                }
                // Its platform is in its configuration, which does not exist.
                None if !is_present => {}
                // If it is missing, reading it fails: the node needs it.
                _ => children.push(child.to_descriptor()),
            }
        }
        content.labels.entry(descriptor.digest).or_default().extend(labels);
        Ok(children)
    }

    async fn read_manifest(
        &mut self,
        descriptor: &Descriptor,
        content: &mut TargetContent,
    ) -> Result<(), BundleError> {
        let manifest: ImageManifest = self.read_needed_document(descriptor, "the archive", content).await?;
        self.count_descriptors(manifest.layers.len() + 1)?;
        if let Some(media_type) = manifest.artifact_type() {
            // A chart, a signature or another artifact that has the form of an image.
            content.artifact = Some(media_type.to_owned());
            return Ok(());
        }
        let (by, config_target) = (descriptor.digest.to_string(), manifest.config.to_descriptor());
        let config: ImageConfig = self.read_needed_document(&config_target, &by, content).await?;
        let platform = config.platform;
        if platform.is_stated() && !self.scope.platform.can_run(&platform) {
            content.others.push(platform);
            return Ok(());
        }
        let (layers, expected) = (manifest.layers.len(), config.rootfs.diff_ids.len());
        if layers != expected {
            return Err(
                ArchivedImageError::LayerCount { manifest: descriptor.digest, layers, expected }.into()
            );
        }
        let mut labels = Labels::new();
        labels.insert("containerd.io/gc.ref.content.config".into(), manifest.config.digest.to_string());
        for (position, layer) in manifest.layers.iter().enumerate() {
            if !self.is_present(layer).await? {
                return Err(missing_content(&layer.digest, &by));
            }
            content.needed.insert(layer.digest, layer.size);
            labels.insert(format!("containerd.io/gc.ref.content.l.{position}"), layer.digest.to_string());
        }
        content.labels.entry(descriptor.digest).or_default().extend(labels);
        let blobs = manifest.layers.iter().map(JsonDescriptor::to_descriptor);
        let layers = blobs.zip(config.rootfs.diff_ids);
        let layers = layers.map(|(blob, diff_id)| ImageLayer { blob, diff_id, unpacked: None });
        let image = RunnableImage { config: manifest.config.digest, layers: layers.collect() };
        content.runnable_images.push(image);
        Ok(())
    }

    /// Reads a document that must exist.
    async fn read_needed_document<T: DeserializeOwned>(
        &self,
        of: &Descriptor,
        by: &str,
        content: &mut TargetContent,
    ) -> Result<T, BundleError> {
        let document = self.scope.read_document(&of.digest, of.size).await?;
        content.needed.insert(of.digest, of.size);
        document.ok_or_else(|| missing_content(&of.digest, by))
    }

    /// Content of another size is not what the descriptor means.
    async fn is_present(&self, listed: &JsonDescriptor) -> Result<bool, BundleError> {
        let size = self.scope.store.content_size(self.scope.namespace, &listed.digest).await?;
        Ok(size == Some(listed.size))
    }
}

fn missing_content(digest: &Digest, by: &str) -> BundleError {
    ArchivedImageError::MissingContent { what: digest.to_string(), by: by.to_owned() }.into()
}
