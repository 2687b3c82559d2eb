//! An import under a lease, which keeps what is not listed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    self as wire, CreateImageRequest, CreateRequest, DeleteRequest, UpdateImageRequest, UpdateRequest,
};
use prost_types::{FieldMask, Timestamp};
use tonic::{Code, Request, Status};

use super::writer::Writer;
use super::{ContainerdImages, failed, is, request, to_wire};
use crate::image::{Image, Labels, Layer};
use crate::store::{BlobWriter, Import, Incoming, StoreError};
use crate::{Digest, Namespace};

/// After that the lease of an import that was killed is no lease any more.
const EXPIRES: Duration = Duration::from_secs(24 * 60 * 60);

/// What belongs to one import.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) images: ContainerdImages,
    pub(super) namespace: Namespace,
    pub(super) id: String,
    /// Counts what has to be called somehow.
    number: AtomicU64,
}

impl Lease {
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        request(message, &self.namespace, Some(&self.id))
    }

    /// A name that nobody else has.
    pub(super) fn unique(&self, what: &str) -> String {
        format!("{}-{what}-{}", self.id, self.number.fetch_add(1, Ordering::Relaxed))
    }

    async fn delete(&self) -> Result<(), Status> {
        let mut leases = LeasesClient::new(self.images.channel.clone());
        // What it was for is collected before the answer comes.
        let asked = DeleteRequest { id: self.id.clone(), sync: true };
        match leases.delete(request(asked, &self.namespace, None)).await {
            Err(status) if is(&status, Code::NotFound) => Ok(()),
            done => done.map(drop),
        }
    }
}

#[derive(Debug)]
pub(super) struct ContainerdImport {
    lease: Arc<Lease>,
    ended: bool,
}

impl ContainerdImport {
    pub(super) async fn begin(images: ContainerdImages, namespace: Namespace) -> Result<Self, StoreError> {
        let now = SystemTime::now();
        let nanoseconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let number = images.imports.fetch_add(1, Ordering::Relaxed);
        let id = format!("nodekeel-{}-{nanoseconds}-{number}", std::process::id());
        let expires = Timestamp::from(now + EXPIRES).to_string();
        let labels = [("containerd.io/gc.expire".to_owned(), expires)].into();
        let asked = request(CreateRequest { id: id.clone(), labels }, &namespace, None);
        let created = LeasesClient::new(images.channel.clone()).create(asked).await;
        created.map_err(|status| failed(status, "a lease", StoreError::Begin))?;
        let lease = Lease { images, namespace, id, number: AtomicU64::new(0) };
        Ok(Self { lease: Arc::new(lease), ended: false })
    }

    async fn put(&self, image: wire::Image) -> Result<(), Status> {
        let mut images = ImagesClient::new(self.lease.images.channel.clone());
        let create = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
        match images.create(self.lease.request(create)).await {
            Err(status) if is(&status, Code::AlreadyExists) => {}
            done => return done.map(drop),
        }
        let update_mask = Some(FieldMask { paths: vec!["target".into(), "labels".into()] });
        let update = UpdateImageRequest { image: Some(image), update_mask, source_date_epoch: None };
        images.update(self.lease.request(update)).await.map(drop)
    }
}

#[async_trait]
impl Import for ContainerdImport {
    async fn blob(&mut self, blob: &Incoming) -> Result<Option<Box<dyn BlobWriter>>, StoreError> {
        let writer = Writer::open(&self.lease, blob).await?;
        Ok(writer.map(|writer| Box::new(writer) as Box<dyn BlobWriter>))
    }

    async fn label(&mut self, digest: &Digest, labels: &Labels) -> Result<(), StoreError> {
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let labels = labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let info = wire::Info { digest: digest.to_string(), labels, ..wire::Info::default() };
        let asked = UpdateRequest { info: Some(info), update_mask: Some(FieldMask { paths }) };
        let done = self.lease.images.content().update(self.lease.request(asked)).await;
        let wrong = |source| StoreError::Label { digest: *digest, source };
        done.map(drop).map_err(|status| failed(status, "labels", wrong))
    }

    async fn unpack(&mut self, layers: &[Layer]) -> Result<Labels, StoreError> {
        super::unpack::unpack(&self.lease, layers).await
    }

    async fn list(&mut self, image: &Image) -> Result<(), StoreError> {
        let listed = wire::Image {
            name: image.name.clone(),
            labels: image.labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
            target: Some(to_wire(&image.target)),
            ..wire::Image::default()
        };
        let wrong = |source| StoreError::Put { name: image.name.clone(), source };
        self.put(listed).await.map_err(|status| failed(status, &image.name, wrong))
    }

    async fn end(mut self: Box<Self>) -> Result<(), StoreError> {
        self.ended = true;
        self.lease.delete().await.map_err(|status| StoreError::End(status.into()))
    }
}

impl Drop for ContainerdImport {
    /// Gives up what has not been ended. Where that isn't possible any more, the lease expires.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let lease = Arc::clone(&self.lease);
            runtime.spawn(async move { lease.delete().await });
        }
    }
}
