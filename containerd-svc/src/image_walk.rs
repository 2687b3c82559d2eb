//! Walks from an image's target to all content that this node needs.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;

use crate::documents::{ImageConfig, ImageIndex, ImageManifest, JsonDescriptor, TargetKind};
use crate::error::{ArchivedImageError, BundleError};
use crate::image::{Descriptor, ImageLayer, Labels, media};
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
    /// Reads a document; `None` if it does not exist.
    pub(crate) async fn read_document<T: DeserializeOwned>(
        &self,
        digest: &Digest,
    ) -> Result<Option<T>, BundleError> {
        let Some(bytes) = self.store.read_content(self.namespace, digest, self.limits.document_bytes).await?
        else {
            return Ok(None);
        };
        let document = serde_json::from_slice(&bytes);
        let document = document
            .map_err(|source| ArchivedImageError::InvalidDocument { what: digest.to_string(), source })?;
        Ok(Some(document))
    }
}

/// The configuration and layers of an image for this platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunnableImage {
    pub(crate) config: Digest,
    pub(crate) layers: Vec<ImageLayer>,
}

/// The content found by following image targets.
#[derive(Debug)]
pub(crate) struct ImageWalk<'a> {
    scope: ImageScope<'a>,
    seen: u32,
    /// The content that the node needs, with its size in bytes.
    pub(crate) needed: BTreeMap<Digest, u64>,
    /// Labels of content, which keep the content that it refers to.
    pub(crate) labels: BTreeMap<Digest, Labels>,
    pub(crate) runnable_images: Vec<RunnableImage>,
}

/// The platforms for which a target has images.
#[derive(Debug, Default)]
pub(crate) struct PlatformMatch {
    pub(crate) runs: bool,
    /// The other platforms of the target.
    pub(crate) others: Vec<Platform>,
}

impl<'a> ImageWalk<'a> {
    pub(crate) fn new(scope: ImageScope<'a>) -> Self {
        let (needed, labels) = Default::default();
        Self { scope, seen: 0, needed, labels, runnable_images: Vec::new() }
    }

    /// Follows a target to the content for this node. All of that content exists when this returns.
    pub(crate) async fn follow_target(&mut self, target: &Descriptor) -> Result<PlatformMatch, BundleError> {
        let mut fit = PlatformMatch::default();
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
                    let children = self.read_index(&descriptor, &mut fit).await?;
                    pending.extend(children.into_iter().map(|child| (child, depth + 1)));
                }
                TargetKind::Manifest => self.read_manifest(&descriptor, &mut fit).await?,
                TargetKind::Other => {}
            }
        }
        Ok(fit)
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
        fit: &mut PlatformMatch,
    ) -> Result<Vec<Descriptor>, BundleError> {
        let index: ImageIndex = self.read_needed_document(descriptor, "the archive").await?;
        self.count_descriptors(index.manifests.len())?;
        let mut children = Vec::new();
        let mut labels = Labels::new();
        for (position, child) in index.manifests.iter().enumerate() {
            let is_present = self.is_present(child).await?;
            // Children for other platforms, too, as far as they exist: the label keeps them.
            if is_present {
                labels.insert(format!("containerd.io/gc.ref.content.m.{position}"), child.digest.to_string());
            }
            match &child.platform {
                Some(platform) if !self.scope.platform.can_run(platform) => fit.others.push(platform.clone()),
                // Its platform is in its configuration, which does not exist.
                None if !is_present => {}
                // If it is missing, reading it fails: the node needs it.
                _ => children.push(child.to_descriptor()),
            }
        }
        self.labels.entry(descriptor.digest).or_default().extend(labels);
        Ok(children)
    }

    async fn read_manifest(
        &mut self,
        descriptor: &Descriptor,
        fit: &mut PlatformMatch,
    ) -> Result<(), BundleError> {
        let manifest: ImageManifest = self.read_needed_document(descriptor, "the archive").await?;
        self.count_descriptors(manifest.layers.len() + 1)?;
        let config_type = manifest.config.to_descriptor().media_type;
        if ![OCI_CONFIG, media::DOCKER_CONFIG].contains(&config_type.as_str()) {
            // A chart or another artifact that has the form of an image.
            return Ok(());
        }
        let by = descriptor.digest.to_string();
        let config: ImageConfig = self.read_needed_document(&manifest.config.to_descriptor(), &by).await?;
        let platform = config.platform;
        // An image that states no platform is accepted on every one.
        let is_stated = !(platform.os.is_empty() && platform.architecture.is_empty());
        if is_stated && !self.scope.platform.can_run(&platform) {
            fit.others.push(platform);
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
            self.require_content(layer, &by).await?;
            labels.insert(format!("containerd.io/gc.ref.content.l.{position}"), layer.digest.to_string());
        }
        self.labels.entry(descriptor.digest).or_default().extend(labels);
        let blobs = manifest.layers.iter().map(JsonDescriptor::to_descriptor);
        let layers = blobs.zip(config.rootfs.diff_ids).map(|(blob, diff_id)| ImageLayer { blob, diff_id });
        self.runnable_images.push(RunnableImage { config: manifest.config.digest, layers: layers.collect() });
        fit.runs = true;
        Ok(())
    }

    /// Reads a document that must exist.
    async fn read_needed_document<T: DeserializeOwned>(
        &mut self,
        of: &Descriptor,
        by: &str,
    ) -> Result<T, BundleError> {
        match self.scope.read_document(&of.digest).await? {
            Some(document) => {
                self.needed.insert(of.digest, of.size);
                Ok(document)
            }
            None => Err(missing_content(&of.digest, by)),
        }
    }

    async fn require_content(&mut self, listed: &JsonDescriptor, by: &str) -> Result<(), BundleError> {
        match self.is_present(listed).await? {
            true => {
                self.needed.insert(listed.digest, listed.size);
                Ok(())
            }
            false => Err(missing_content(&listed.digest, by)),
        }
    }

    async fn is_present(&self, listed: &JsonDescriptor) -> Result<bool, BundleError> {
        let size = self.scope.store.content_size(self.scope.namespace, &listed.digest).await?;
        // Content of another size is not what the descriptor means.
        Ok(size == Some(listed.size))
    }
}

const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";

fn missing_content(digest: &Digest, by: &str) -> BundleError {
    ArchivedImageError::MissingContent { what: digest.to_string(), by: by.to_owned() }.into()
}

/// Returns whether all content that this node needs of an image exists.
pub(crate) async fn is_complete(scope: ImageScope<'_>, target: &Descriptor) -> Result<bool, BundleError> {
    match ImageWalk::new(scope).follow_target(target).await {
        Ok(fit) => Ok(fit.runs),
        Err(BundleError::Store(error)) => Err(error.into()),
        // Missing or invalid content is no failure here: the bundle is imported again.
        Err(_) => Ok(false),
    }
}
