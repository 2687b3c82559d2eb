//! A store in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use crate::image::{Image, Labels, Layer};
use crate::store::{BlobWriter, Cause, ImageStore, Import, Incoming, StoreError};
use crate::{Digest, Namespace};

/// Images in memory. What no image leads to is gone as soon as the last import has ended.
#[derive(Debug, Clone, Default)]
pub struct MemStore(Arc<Mutex<Inner>>);

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Call {
    /// [`ImageStore::images`]
    Images,
    /// [`ImageStore::begin`]
    Begin,
    /// [`Import::blob`]
    Blob,
    /// [`BlobWriter::write`]
    Write,
    /// [`BlobWriter::commit`]
    Commit,
    /// [`Import::label`]
    Label,
    /// [`Import::list`]
    List,
    /// [`Import::end`]
    End,
}

#[derive(Debug, Default)]
struct Inner {
    spaces: BTreeMap<Namespace, Space>,
    calls: BTreeMap<Call, usize>,
    /// The calls that fail, by their number from 0.
    failures: BTreeSet<(Call, usize)>,
    /// Bytes that were written, also of what is gone.
    written: u64,
}

#[derive(Debug, Default)]
struct Space {
    content: BTreeMap<Digest, (Bytes, Labels)>,
    images: BTreeMap<String, Image>,
    /// What imports keep: once for each of them.
    kept: Vec<Digest>,
}

impl Space {
    /// Drops what no image and no import leads to.
    fn collect(&mut self) {
        let roots = self.images.values().map(|image| image.target.digest);
        let mut pending: Vec<Digest> = roots.chain(self.kept.iter().copied()).collect();
        let mut reached = BTreeSet::new();
        while let Some(digest) = pending.pop() {
            if let Some((_, labels)) = self.content.get(&digest)
                && reached.insert(digest)
            {
                let leads = labels.iter().filter(|(key, _)| key.starts_with("containerd.io/gc.ref.content."));
                pending.extend(leads.filter_map(|(_, to)| to.parse::<Digest>().ok()));
            }
        }
        self.content.retain(|digest, _| reached.contains(digest));
    }
}

impl MemStore {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes one call of a kind fail: that of this number, counted from now on from 0.
    pub fn fail(&self, call: Call, number: usize) {
        let mut inner = self.lock();
        let made = inner.calls.get(&call).copied().unwrap_or_default();
        inner.failures.insert((call, made + number));
    }

    /// How many calls of a kind were made.
    pub fn calls(&self, call: Call) -> usize {
        self.lock().calls.get(&call).copied().unwrap_or_default()
    }

    /// How many bytes were written, also of what is gone.
    pub fn written(&self) -> u64 {
        self.lock().written
    }

    /// The content of a namespace.
    pub fn content(&self, namespace: &Namespace) -> Vec<Digest> {
        let inner = self.lock();
        inner.spaces.get(namespace).into_iter().flat_map(|space| space.content.keys().copied()).collect()
    }

    /// Takes content away behind everybody's back, as a damaged disk does.
    pub fn lose(&self, namespace: &Namespace, digest: &Digest) {
        self.lock().space(namespace).content.remove(digest);
    }

    /// Takes an image off the list, as `ctr images rm` does.
    pub fn remove(&self, namespace: &Namespace, name: &str) {
        let mut inner = self.lock();
        let space = inner.space(namespace);
        space.images.remove(name);
        space.collect();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn called(&self, call: Call) -> Result<(), Cause> {
        let mut inner = self.lock();
        let number = inner.calls.entry(call).or_default();
        let this = (call, *number);
        *number += 1;
        if inner.failures.contains(&this) { Err(format!("{call:?} was made to fail").into()) } else { Ok(()) }
    }
}

impl Inner {
    fn space(&mut self, namespace: &Namespace) -> &mut Space {
        self.spaces.entry(namespace.clone()).or_default()
    }
}

#[async_trait]
impl ImageStore for MemStore {
    async fn images(&self, namespace: &Namespace) -> Result<Vec<Image>, StoreError> {
        let failed = |source| StoreError::List { namespace: namespace.clone(), source };
        self.called(Call::Images).map_err(failed)?;
        Ok(self.lock().space(namespace).images.values().cloned().collect())
    }

    async fn size(&self, namespace: &Namespace, digest: &Digest) -> Result<Option<u64>, StoreError> {
        Ok(self.lock().space(namespace).content.get(digest).map(|(bytes, _)| bytes.len() as u64))
    }

    async fn read(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let bytes = self.lock().space(namespace).content.get(digest).map(|(bytes, _)| bytes.to_vec());
        if bytes.as_ref().is_some_and(|bytes| bytes.len() as u64 > limit) {
            return Err(StoreError::Read {
                digest: *digest,
                source: format!("more than {limit} bytes").into(),
            });
        }
        Ok(bytes)
    }

    async fn begin(&self, namespace: &Namespace) -> Result<Box<dyn Import>, StoreError> {
        self.called(Call::Begin).map_err(StoreError::Begin)?;
        Ok(Box::new(MemImport { store: self.clone(), namespace: namespace.clone(), kept: Arc::default() }))
    }
}

#[derive(Debug)]
struct MemImport {
    store: MemStore,
    namespace: Namespace,
    kept: Arc<Mutex<Vec<Digest>>>,
}

#[derive(Debug)]
struct MemWriter {
    store: MemStore,
    namespace: Namespace,
    kept: Arc<Mutex<Vec<Digest>>>,
    incoming: Incoming,
    bytes: Vec<u8>,
}

fn keep(store: &MemStore, namespace: &Namespace, kept: &Mutex<Vec<Digest>>, digest: Digest) {
    store.lock().space(namespace).kept.push(digest);
    kept.lock().unwrap_or_else(PoisonError::into_inner).push(digest);
}

#[async_trait]
impl Import for MemImport {
    async fn blob(&mut self, blob: &Incoming) -> Result<Option<Box<dyn BlobWriter>>, StoreError> {
        let failed = |source| StoreError::Write { file: blob.file.clone(), source };
        self.store.called(Call::Blob).map_err(failed)?;
        if let Some(digest) = blob.digest
            && self.store.size(&self.namespace, &digest).await?.is_some()
        {
            keep(&self.store, &self.namespace, &self.kept, digest);
            return Ok(None);
        }
        Ok(Some(Box::new(MemWriter {
            store: self.store.clone(),
            namespace: self.namespace.clone(),
            kept: Arc::clone(&self.kept),
            incoming: blob.clone(),
            bytes: Vec::new(),
        })))
    }

    async fn label(&mut self, digest: &Digest, labels: &Labels) -> Result<(), StoreError> {
        let failed = |source| StoreError::Label { digest: *digest, source };
        self.store.called(Call::Label).map_err(failed)?;
        let mut inner = self.store.lock();
        let content = inner.space(&self.namespace).content.get_mut(digest);
        let (_, known) = content.ok_or_else(|| failed("it isn't there".into()))?;
        known.extend(labels.clone());
        Ok(())
    }

    async fn unpack(&mut self, _: &[Layer]) -> Result<Labels, StoreError> {
        Ok(Labels::new())
    }

    async fn list(&mut self, image: &Image) -> Result<(), StoreError> {
        let failed = |source| StoreError::Put { name: image.name.clone(), source };
        self.store.called(Call::List).map_err(failed)?;
        self.store.lock().space(&self.namespace).images.insert(image.name.clone(), image.clone());
        Ok(())
    }

    async fn end(self: Box<Self>) -> Result<(), StoreError> {
        self.store.called(Call::End).map_err(StoreError::End)
    }
}

impl Drop for MemImport {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        let mut inner = self.store.lock();
        let space = inner.space(&self.namespace);
        for digest in kept {
            if let Some(place) = space.kept.iter().position(|other| *other == digest) {
                space.kept.swap_remove(place);
            }
        }
        space.collect();
    }
}

#[async_trait]
impl BlobWriter for MemWriter {
    async fn write(&mut self, chunk: Bytes) -> Result<(), StoreError> {
        let failed = |source| StoreError::Write { file: self.incoming.file.clone(), source };
        self.store.called(Call::Write).map_err(failed)?;
        self.store.lock().written += chunk.len() as u64;
        self.bytes.extend_from_slice(&chunk);
        Ok(())
    }

    async fn commit(self: Box<Self>, digest: &Digest) -> Result<(), StoreError> {
        let failed = |source| StoreError::Write { file: self.incoming.file.clone(), source };
        self.store.called(Call::Commit).map_err(failed)?;
        let is_right = Digest::of(&self.bytes) == *digest && self.bytes.len() as u64 == self.incoming.size;
        if !is_right {
            return Err(failed("it has another digest or size".into()));
        }
        let Self { store, namespace, kept, bytes, .. } = *self;
        keep(&store, &namespace, &kept, *digest);
        let mut inner = store.lock();
        inner.space(&namespace).content.entry(*digest).or_insert_with(|| (bytes.into(), Labels::new()));
        Ok(())
    }
}
