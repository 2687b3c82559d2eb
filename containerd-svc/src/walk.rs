//! From an image's target to everything that this node needs of it.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;

use crate::documents::{Config, Index, Leads, Listed, Manifest};
use crate::error::{ImageError, Wrong};
use crate::image::{Descriptor, Labels, Layer, media};
use crate::store::ImageStore;
use crate::{Digest, Limits, Namespace, Platform};

/// Where images lie and for whom they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) store: &'a dyn ImageStore,
    pub(crate) namespace: &'a Namespace,
    pub(crate) platform: &'a Platform,
    pub(crate) limits: &'a Limits,
}

impl Place<'_> {
    /// Reads a document; `None` where it isn't there.
    pub(crate) async fn document<T: DeserializeOwned>(&self, digest: &Digest) -> Result<Option<T>, Wrong> {
        let Some(bytes) = self.store.read(self.namespace, digest, self.limits.document_bytes).await? else {
            return Ok(None);
        };
        let document = serde_json::from_slice(&bytes);
        let document =
            document.map_err(|source| ImageError::Document { what: digest.to_string(), source })?;
        Ok(Some(document))
    }
}

/// An image that runs here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Runnable {
    pub(crate) config: Digest,
    pub(crate) layers: Vec<Layer>,
}

/// Everything that has been found of some images.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    place: Place<'a>,
    seen: u32,
    /// What the node needs, and how many bytes it has.
    pub(crate) needed: BTreeMap<Digest, u64>,
    /// The labels that keep what content leads to.
    pub(crate) labels: BTreeMap<Digest, Labels>,
    pub(crate) runnables: Vec<Runnable>,
}

/// What came of one target.
#[derive(Debug, Default)]
pub(crate) struct Fit {
    pub(crate) runs: bool,
    /// For which other platforms it is.
    pub(crate) others: Vec<Platform>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(place: Place<'a>) -> Self {
        let (needed, labels) = Default::default();
        Self { place, seen: 0, needed, labels, runnables: Vec::new() }
    }

    /// Follows a target as far as this node is concerned. What it needs is there when this returns.
    pub(crate) async fn follow(&mut self, target: &Descriptor) -> Result<Fit, Wrong> {
        let mut fit = Fit::default();
        let mut pending = vec![(target.clone(), 0)];
        while let Some((descriptor, depth)) = pending.pop() {
            self.count(1)?;
            match descriptor.leads() {
                Leads::ToIndex if depth > self.place.limits.nesting => {
                    let limit = self.place.limits.nesting.into();
                    return Err(ImageError::Limit { limit, of: "indexes within each other" }.into());
                }
                Leads::ToIndex => {
                    let children = self.index(&descriptor, &mut fit).await?;
                    pending.extend(children.into_iter().map(|child| (child, depth + 1)));
                }
                Leads::ToManifest => self.manifest(&descriptor, &mut fit).await?,
                Leads::Elsewhere => {}
            }
        }
        Ok(fit)
    }

    fn count(&mut self, more: usize) -> Result<(), ImageError> {
        self.seen = self.seen.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
        let limit = self.place.limits.descriptors;
        if self.seen > limit {
            return Err(ImageError::Limit { limit: limit.into(), of: "manifests, layers and names" });
        }
        Ok(())
    }

    /// The children of an index that this node may run.
    async fn index(&mut self, descriptor: &Descriptor, fit: &mut Fit) -> Result<Vec<Descriptor>, Wrong> {
        let index: Index = self.needed_document(descriptor, "the archive").await?;
        self.count(index.manifests.len())?;
        let mut children = Vec::new();
        let mut labels = Labels::new();
        for (place, child) in index.manifests.iter().enumerate() {
            let is_there = self.is_there(child).await?;
            if is_there {
                labels.insert(format!("containerd.io/gc.ref.content.m.{place}"), child.digest.to_string());
            }
            match &child.platform {
                Some(platform) if !self.place.platform.runs(platform) => fit.others.push(platform.clone()),
                // What it is for would be known by its configuration.
                None if !is_there => {}
                _ => children.push(child.descriptor()),
            }
        }
        self.labels.entry(descriptor.digest).or_default().extend(labels);
        Ok(children)
    }

    async fn manifest(&mut self, descriptor: &Descriptor, fit: &mut Fit) -> Result<(), Wrong> {
        let manifest: Manifest = self.needed_document(descriptor, "the archive").await?;
        self.count(manifest.layers.len() + 1)?;
        let config_type = manifest.config.descriptor().media_type;
        if ![OCI_CONFIG, media::DOCKER_CONFIG].contains(&config_type.as_str()) {
            // A chart, or another artifact that only looks like an image.
            return Ok(());
        }
        let by = descriptor.digest.to_string();
        let config: Config = self.needed_document(&manifest.config.descriptor(), &by).await?;
        let platform = config.platform;
        let is_stated = !(platform.os.is_empty() && platform.architecture.is_empty());
        if is_stated && !self.place.platform.runs(&platform) {
            fit.others.push(platform);
            return Ok(());
        }
        let (layers, told) = (manifest.layers.len(), config.rootfs.diff_ids.len());
        if layers != told {
            return Err(ImageError::Layers { manifest: descriptor.digest, layers, told }.into());
        }
        let mut labels = Labels::new();
        labels.insert("containerd.io/gc.ref.content.config".into(), manifest.config.digest.to_string());
        for (place, layer) in manifest.layers.iter().enumerate() {
            self.need(layer, &by).await?;
            labels.insert(format!("containerd.io/gc.ref.content.l.{place}"), layer.digest.to_string());
        }
        self.labels.entry(descriptor.digest).or_default().extend(labels);
        let blobs = manifest.layers.iter().map(Listed::descriptor);
        let layers = blobs.zip(config.rootfs.diff_ids).map(|(blob, diff_id)| Layer { blob, diff_id });
        self.runnables.push(Runnable { config: manifest.config.digest, layers: layers.collect() });
        fit.runs = true;
        Ok(())
    }

    /// Reads a document that must be there.
    async fn needed_document<T: DeserializeOwned>(&mut self, of: &Descriptor, by: &str) -> Result<T, Wrong> {
        match self.place.document(&of.digest).await? {
            Some(document) => {
                self.needed.insert(of.digest, of.size);
                Ok(document)
            }
            None => Err(missing(&of.digest, by)),
        }
    }

    async fn need(&mut self, listed: &Listed, by: &str) -> Result<(), Wrong> {
        match self.is_there(listed).await? {
            true => {
                self.needed.insert(listed.digest, listed.size);
                Ok(())
            }
            false => Err(missing(&listed.digest, by)),
        }
    }

    async fn is_there(&self, listed: &Listed) -> Result<bool, Wrong> {
        let size = self.place.store.size(self.place.namespace, &listed.digest).await?;
        Ok(size == Some(listed.size))
    }
}

const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";

fn missing(digest: &Digest, by: &str) -> Wrong {
    ImageError::Missing { what: digest.to_string(), by: by.to_owned() }.into()
}

/// Whether everything is there that this node needs of an image.
pub(crate) async fn is_whole(place: Place<'_>, target: &Descriptor) -> Result<bool, Wrong> {
    match Walk::new(place).follow(target).await {
        Ok(fit) => Ok(fit.runs),
        Err(Wrong::Store(error)) => Err(error.into()),
        Err(_) => Ok(false),
    }
}
