//! A store that stops answering.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use nodekeel_containerd_svc::testing::MemStore;
use nodekeel_containerd_svc::{
    BlobWriter, Digest, Image, ImageLayer, ImageStore, ImageStoreError, ImportSession, IncomingBlob, Labels,
    Namespace, Preseed,
};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::bundles::{BundleFixture, k8s_namespace};

/// A store in memory whose writes never complete.
#[derive(Debug, Clone, Default)]
struct StalledStore {
    store: MemStore,
    /// A write has stalled.
    write_stalled: Arc<Notify>,
    /// The import session was dropped.
    import_dropped: Arc<Notify>,
}

#[derive(Debug)]
struct StalledImport(StalledStore);

impl Drop for StalledImport {
    fn drop(&mut self) {
        self.0.import_dropped.notify_one();
    }
}

#[async_trait]
impl ImageStore for StalledStore {
    async fn list_namespaces(&self) -> Result<Vec<Namespace>, ImageStoreError> {
        self.store.list_namespaces().await
    }

    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError> {
        self.store.list_images(namespace).await
    }

    async fn content_size(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        self.store.content_size(namespace, digest).await
    }

    async fn read_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError> {
        self.store.read_content(namespace, digest, limit).await
    }

    async fn begin_import(&self, _: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError> {
        Ok(Box::new(StalledImport(self.clone())))
    }
}

#[async_trait]
impl ImportSession for StalledImport {
    async fn open_writer(
        &mut self,
        _: &IncomingBlob,
    ) -> Result<Option<Box<dyn BlobWriter>>, ImageStoreError> {
        Ok(Some(Box::new(self.0.clone())))
    }

    async fn label_content(&mut self, _: &Digest, _: &Labels) -> Result<(), ImageStoreError> {
        unreachable!("no blob was committed")
    }

    async fn unpack_layers(&mut self, _: &[ImageLayer]) -> Result<Labels, ImageStoreError> {
        unreachable!("no blob was committed")
    }

    async fn put_image(&mut self, _: &Image) -> Result<(), ImageStoreError> {
        unreachable!("no blob was committed")
    }

    async fn finish(self: Box<Self>) -> Result<(), ImageStoreError> {
        Ok(())
    }
}

#[async_trait]
impl BlobWriter for StalledStore {
    async fn write(&mut self, _: Bytes) -> Result<(), ImageStoreError> {
        self.write_stalled.notify_one();
        std::future::pending().await
    }

    async fn commit(self: Box<Self>, _: &Digest) -> Result<(), ImageStoreError> {
        unreachable!("no blob was committed")
    }
}

/// Reference 10, `cancellation during a blocking import`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_cancelled_while_its_store_stalls_is_released() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a");
    let store = StalledStore::default();
    let preseed = Preseed::new(bundles.directory.path());
    tokio::select! {
        report = preseed.run(&store) => panic!("{report:?}"),
        () = store.write_stalled.notified() => {}
    }
    // The reading thread owns the session and drops it.
    timeout(Duration::from_secs(20), store.import_dropped.notified()).await.expect("the thread exits");
    assert_eq!(store.list_images(&k8s_namespace()).await.unwrap(), []);
}
