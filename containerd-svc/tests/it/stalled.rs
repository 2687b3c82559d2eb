//! A store that doesn't answer any more.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use nodekeel_containerd_svc::testing::{Archive, MemStore, Shape};
use nodekeel_containerd_svc::{
    BlobWriter, Digest, Image, ImageStore, Import, Incoming, Labels, Layer, Namespace, Preseed, StoreError,
};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::bundles::{Bundles, k8s};

/// What is written into it never arrives; for the rest it is one in memory.
#[derive(Debug, Clone, Default)]
struct Stalled {
    store: MemStore,
    /// Somebody waits in it.
    waits: Arc<Notify>,
    /// Nobody holds its import any more.
    free: Arc<Notify>,
}

#[derive(Debug)]
struct Open(Stalled);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.free.notify_one();
    }
}

#[async_trait]
impl ImageStore for Stalled {
    async fn images(&self, namespace: &Namespace) -> Result<Vec<Image>, StoreError> {
        self.store.images(namespace).await
    }

    async fn size(&self, namespace: &Namespace, digest: &Digest) -> Result<Option<u64>, StoreError> {
        self.store.size(namespace, digest).await
    }

    async fn read(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(namespace, digest, limit).await
    }

    async fn begin(&self, _: &Namespace) -> Result<Box<dyn Import>, StoreError> {
        Ok(Box::new(Open(self.clone())))
    }
}

#[async_trait]
impl Import for Open {
    async fn blob(&mut self, _: &Incoming) -> Result<Option<Box<dyn BlobWriter>>, StoreError> {
        Ok(Some(Box::new(self.0.clone())))
    }

    async fn label(&mut self, _: &Digest, _: &Labels) -> Result<(), StoreError> {
        unreachable!("nothing of it has come")
    }

    async fn unpack(&mut self, _: &[Layer]) -> Result<Labels, StoreError> {
        unreachable!("nothing of it has come")
    }

    async fn list(&mut self, _: &Image) -> Result<(), StoreError> {
        unreachable!("nothing of it has come")
    }

    async fn end(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}

#[async_trait]
impl BlobWriter for Stalled {
    async fn write(&mut self, _: Bytes) -> Result<(), StoreError> {
        self.waits.notify_one();
        std::future::pending().await
    }

    async fn commit(self: Box<Self>, _: &Digest) -> Result<(), StoreError> {
        unreachable!("nothing of it has come")
    }
}

/// Reference 10, `cancellation during a blocking import`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_is_given_up_while_its_store_stalls_holds_nothing() {
    let bundles = Bundles::new();
    bundles.put("a.tar", &Archive::new(Shape::Layout).image(&["localhost/a:1"], b"a").tar());
    let store = Stalled::default();
    let preseed = Preseed::new(bundles.directory.path());
    tokio::select! {
        report = preseed.run(&store) => panic!("{report:?}"),
        () = store.waits.notified() => {}
    }
    // The thread that reads has the import, and gives it up on its own.
    timeout(Duration::from_secs(20), store.free.notified()).await.expect("the thread ends");
    assert_eq!(store.images(&k8s()).await.unwrap(), []);
}
