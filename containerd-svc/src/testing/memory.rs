//! An image store in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::Notify;

use crate::image::{Image, ImageLayer, Labels};
use crate::store::{
    BlobWriter, ErrorSource, ImageStore, ImageStoreError, ImportSession, IncomingBlob, ReadPace,
};
use crate::{Digest, DiskReserve, DiskSpace, DiskUsage, Namespace};

/// An image store in memory. Content that no image refers to is removed when the last import session has
/// finished.
#[derive(Debug, Clone, Default)]
pub struct MemStore(Arc<Mutex<StoreState>>);

/// A call that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StoreCall {
    /// [`ImageStore::list_images`]
    ListImages,
    /// [`ImageStore::read_content`]
    ReadContent,
    /// [`ImageStore::begin_import`]
    BeginImport,
    /// [`ImportSession::open_writer`]
    OpenWriter,
    /// [`BlobWriter::write`]
    Write,
    /// [`BlobWriter::commit`]
    Commit,
    /// [`ImportSession::label_content`]
    LabelContent,
    /// [`ImportSession::put_image`]
    PutImage,
    /// [`ImportSession::finish`]
    Finish,
}

#[derive(Debug, Default)]
struct StoreState {
    namespaces: BTreeMap<Namespace, NamespaceContent>,
    calls: BTreeMap<StoreCall, usize>,
    /// The calls that fail, numbered from 0.
    failures: BTreeSet<(StoreCall, usize)>,
    /// All bytes written, including those of removed content.
    written: u64,
    /// The size of the disk; `None` for an unknown one.
    disk_bytes: Option<u64>,
    /// Told by each write, if writes hang.
    stalled: Option<Arc<Notify>>,
    sessions: usize,
    /// The content that is committed only after other content.
    commits_after: BTreeMap<Digest, Digest>,
    /// Told by each commit.
    committed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct NamespaceContent {
    content: BTreeMap<Digest, (Bytes, Labels)>,
    images: BTreeMap<String, Image>,
    /// Content that open sessions hold: once for each session.
    leased: Vec<Digest>,
}

impl NamespaceContent {
    /// Removes content that neither an image nor a session refers to.
    fn collect_garbage(&mut self) {
        let roots = self.images.values().map(|image| image.target.digest);
        let mut pending: Vec<Digest> = roots.chain(self.leased.iter().copied()).collect();
        let mut reached = BTreeSet::new();
        while let Some(digest) = pending.pop() {
            // Labels may lead in a circle, and to content that does not exist.
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
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the size of the disk, of which [`DiskReserve::default`] stays free. Default: unknown.
    pub fn set_disk_bytes(&self, bytes: u64) {
        self.lock_state().disk_bytes = Some(bytes);
    }

    /// The bytes of all content.
    pub fn content_bytes(&self) -> u64 {
        let state = self.lock_state();
        let content = state.namespaces.values().flat_map(|space| space.content.values());
        content.map(|(bytes, _)| bytes.len() as u64).sum()
    }

    /// Makes one call of this kind fail: the one with this number, counted from 0 from now on.
    pub fn fail_call(&self, call: StoreCall, number: usize) {
        let mut inner = self.lock_state();
        let previous = inner.calls.get(&call).copied().unwrap_or_default();
        inner.failures.insert((call, previous + number));
    }

    /// Makes every [`BlobWriter::write`] hang from now on, as one to a disk that does not answer. Each notifies the value
    /// that is returned.
    pub fn stall_writes(&self) -> Arc<Notify> {
        Arc::clone(self.lock_state().stalled.get_or_insert_default())
    }

    /// Makes the commit of some content wait until other content exists, in any namespace.
    pub fn commit_after(&self, content: Digest, other: Digest) {
        self.lock_state().commits_after.insert(content, other);
    }

    async fn wait_commit_order(&self, content: &Digest) {
        loop {
            let (other, committed) = {
                let state = self.lock_state();
                let Some(other) = state.commits_after.get(content).copied() else { return };
                (other, Arc::clone(&state.committed))
            };
            // Before the look, so that no commit is missed.
            let mut next = std::pin::pin!(committed.notified());
            next.as_mut().enable();
            if self.lock_state().namespaces.values().any(|space| space.content.contains_key(&other)) {
                return;
            }
            next.await;
        }
    }

    /// The number of import sessions that are neither finished nor dropped.
    pub fn session_count(&self) -> usize {
        self.lock_state().sessions
    }

    /// The number of calls of this kind so far.
    pub fn call_count(&self, call: StoreCall) -> usize {
        self.lock_state().calls.get(&call).copied().unwrap_or_default()
    }

    /// All bytes written, including those of removed content.
    pub fn written_bytes(&self) -> u64 {
        self.lock_state().written
    }

    /// The digests of all content of a namespace.
    pub fn content_digests(&self, namespace: &Namespace) -> Vec<Digest> {
        let inner = self.lock_state();
        inner.namespaces.get(namespace).into_iter().flat_map(|space| space.content.keys().copied()).collect()
    }

    /// Removes content without updating images, as a damaged disk does.
    pub fn lose_content(&self, namespace: &Namespace, digest: &Digest) {
        self.lock_state().namespace_mut(namespace).content.remove(digest);
    }

    /// Changes a byte of content, as a damaged disk does; its size is the same.
    pub fn damage_content(&self, namespace: &Namespace, digest: &Digest) {
        let mut state = self.lock_state();
        if let Some((bytes, _)) = state.namespace_mut(namespace).content.get_mut(digest) {
            let mut changed = bytes.to_vec();
            changed.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            *bytes = changed.into();
        }
    }

    /// Removes an image, as `ctr images rm` does.
    pub fn remove_image(&self, namespace: &Namespace, name: &str) {
        let mut inner = self.lock_state();
        let space = inner.namespace_mut(namespace);
        space.images.remove(name);
        space.collect_garbage();
    }

    fn lock_state(&self) -> MutexGuard<'_, StoreState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_call(&self, call: StoreCall) -> Result<(), ErrorSource> {
        let mut inner = self.lock_state();
        let number = inner.calls.entry(call).or_default();
        let this = (call, *number);
        *number += 1;
        if inner.failures.contains(&this) {
            Err(format!("{call:?} was previous to fail").into())
        } else {
            Ok(())
        }
    }
}

impl StoreState {
    fn namespace_mut(&mut self, namespace: &Namespace) -> &mut NamespaceContent {
        self.namespaces.entry(namespace.clone()).or_default()
    }
}

#[async_trait]
impl ImageStore for MemStore {
    async fn list_namespaces(&self) -> Result<Vec<Namespace>, ImageStoreError> {
        Ok(self.lock_state().namespaces.keys().cloned().collect())
    }

    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError> {
        let failed = |source| ImageStoreError::ListImages { namespace: namespace.clone(), source };
        self.record_call(StoreCall::ListImages).map_err(failed)?;
        Ok(self.lock_state().namespace_mut(namespace).images.values().cloned().collect())
    }

    async fn content_size(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        Ok(self
            .lock_state()
            .namespace_mut(namespace)
            .content
            .get(digest)
            .map(|(bytes, _)| bytes.len() as u64))
    }

    async fn read_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError> {
        let failed = |source| ImageStoreError::ReadContent { digest: *digest, source };
        self.record_call(StoreCall::ReadContent).map_err(failed)?;
        let bytes =
            self.lock_state().namespace_mut(namespace).content.get(digest).map(|(bytes, _)| bytes.to_vec());
        Ok(bytes.filter(|bytes| bytes.len() as u64 == size && Digest::of_content(bytes) == *digest))
    }

    async fn verify_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
        pace: &ReadPace,
    ) -> Result<bool, ImageStoreError> {
        pace.spend(size).await;
        let is_intact = self.read_content(namespace, digest, size).await?.is_some();
        if !is_intact {
            self.lose_content(namespace, digest);
        }
        Ok(is_intact)
    }

    async fn begin_import(&self, namespace: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError> {
        self.record_call(StoreCall::BeginImport).map_err(ImageStoreError::BeginImport)?;
        self.lock_state().sessions += 1;
        Ok(Box::new(MemImport { store: self.clone(), namespace: namespace.clone(), leased: Arc::default() }))
    }
}

#[derive(Debug)]
struct MemImport {
    store: MemStore,
    namespace: Namespace,
    leased: Arc<Mutex<Vec<Digest>>>,
}

#[derive(Debug)]
struct MemWriter {
    store: MemStore,
    namespace: Namespace,
    leased: Arc<Mutex<Vec<Digest>>>,
    blob: IncomingBlob,
    bytes: Vec<u8>,
}

fn lease_content(store: &MemStore, namespace: &Namespace, leased: &Mutex<Vec<Digest>>, digest: Digest) {
    store.lock_state().namespace_mut(namespace).leased.push(digest);
    leased.lock().unwrap_or_else(PoisonError::into_inner).push(digest);
}

#[async_trait]
impl ImportSession for MemImport {
    async fn open_writer(
        &mut self,
        blob: &IncomingBlob,
    ) -> Result<Option<Box<dyn BlobWriter>>, ImageStoreError> {
        let failed = |source| ImageStoreError::WriteContent { file: blob.file.clone(), source };
        self.store.record_call(StoreCall::OpenWriter).map_err(failed)?;
        if let Some(digest) = blob.digest
            && let Some(size) = self.store.content_size(&self.namespace, &digest).await?
            // What is damaged is lost, and replaced.
            && self.store.verify_content(&self.namespace, &digest, size, &ReadPace::new(None)).await?
        {
            lease_content(&self.store, &self.namespace, &self.leased, digest);
            return Ok(None);
        }
        Ok(Some(Box::new(MemWriter {
            store: self.store.clone(),
            namespace: self.namespace.clone(),
            leased: Arc::clone(&self.leased),
            blob: blob.clone(),
            bytes: Vec::new(),
        })))
    }

    async fn label_content(&mut self, digest: &Digest, labels: &Labels) -> Result<(), ImageStoreError> {
        let failed = |source| ImageStoreError::LabelContent { digest: *digest, source };
        self.store.record_call(StoreCall::LabelContent).map_err(failed)?;
        let mut inner = self.store.lock_state();
        let content = inner.namespace_mut(&self.namespace).content.get_mut(digest);
        let (_, known) = content.ok_or_else(|| failed("not found".into()))?;
        known.extend(labels.clone());
        Ok(())
    }

    async fn unpack_layers(&mut self, _: &[ImageLayer]) -> Result<Labels, ImageStoreError> {
        Ok(Labels::new())
    }

    async fn put_image(&mut self, image: &Image) -> Result<(), ImageStoreError> {
        let failed = |source| ImageStoreError::PutImage { name: image.name.clone(), source };
        self.store.record_call(StoreCall::PutImage).map_err(failed)?;
        let mut state = self.store.lock_state();
        let images = &mut state.namespace_mut(&self.namespace).images;
        let listed = images.entry(image.name.clone()).or_insert_with(|| image.clone());
        listed.target = image.target.clone();
        listed.labels.extend(image.labels.clone());
        listed.labels.retain(|_, value| !value.is_empty());
        Ok(())
    }

    async fn finish(self: Box<Self>) -> Result<(), ImageStoreError> {
        self.store.record_call(StoreCall::Finish).map_err(ImageStoreError::FinishImport)
    }

    async fn disk_space(&self) -> Result<Option<DiskSpace>, ImageStoreError> {
        let used = self.store.content_bytes();
        let disk = self.store.lock_state().disk_bytes;
        let space = |disk: u64| {
            let [all, free] = [disk, disk.saturating_sub(used)].map(|bytes| DiskUsage { bytes, inodes: 0 });
            DiskSpace::above_reserve(DiskReserve::default(), all, free, free.bytes)
        };
        Ok(disk.map(space))
    }
}

impl Drop for MemImport {
    fn drop(&mut self) {
        let leased = std::mem::take(&mut *self.leased.lock().unwrap_or_else(PoisonError::into_inner));
        let mut inner = self.store.lock_state();
        inner.sessions -= 1;
        let space = inner.namespace_mut(&self.namespace);
        for digest in leased {
            // Once only: another session may hold the same content.
            if let Some(position) = space.leased.iter().position(|other| *other == digest) {
                space.leased.swap_remove(position);
            }
        }
        space.collect_garbage();
    }
}

#[async_trait]
impl BlobWriter for MemWriter {
    async fn write(&mut self, chunk: Bytes) -> Result<(), ImageStoreError> {
        let failed = |source| ImageStoreError::WriteContent { file: self.blob.file.clone(), source };
        self.store.record_call(StoreCall::Write).map_err(failed)?;
        let stalled = self.store.lock_state().stalled.clone();
        if let Some(stalled) = stalled {
            stalled.notify_one();
            return std::future::pending().await;
        }
        self.store.lock_state().written += chunk.len() as u64;
        self.bytes.extend_from_slice(&chunk);
        Ok(())
    }

    async fn commit(self: Box<Self>, digest: &Digest) -> Result<(), ImageStoreError> {
        let failed = |source| ImageStoreError::WriteContent { file: self.blob.file.clone(), source };
        self.store.record_call(StoreCall::Commit).map_err(failed)?;
        self.store.wait_commit_order(digest).await;
        let is_right =
            Digest::of_content(&self.bytes) == *digest && self.bytes.len() as u64 == self.blob.size;
        if !is_right {
            return Err(failed("digest or size mismatch".into()));
        }
        let Self { store, namespace, leased, bytes, .. } = *self;
        lease_content(&store, &namespace, &leased, *digest);
        let mut inner = store.lock_state();
        inner
            .namespace_mut(&namespace)
            .content
            .entry(*digest)
            .or_insert_with(|| (bytes.into(), Labels::new()));
        inner.committed.notify_waiters();
        Ok(())
    }
}
