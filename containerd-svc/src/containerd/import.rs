//! An import session under a lease, which keeps content until its image is listed.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    self as wire, AddResourceRequest, CreateImageRequest, CreateRequest, DeleteRequest, InfoRequest,
    ListRequest, Resource, UpdateImageRequest, UpdateRequest,
};
use prost_types::{FieldMask, Timestamp};
use tonic::{Code, Request, Status};

use super::writer::ContentWriter;
use super::{ContainerdImages, descriptor_to_proto, has_code, namespaced_request, store_error};
use crate::image::{Image, ImageLayer, Labels};
use crate::store::{BlobWriter, ImageStoreError, ImportSession, IncomingBlob};
use crate::{Digest, DiskSpace, InstanceId, Namespace};

/// Time after which the lease of a killed import expires.
const LEASE_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// Lease ids begin with it, and go on with the process, the time and a number.
const LEASE_PREFIX: &str = "nodekeel-";

/// The label of a lease with the instance that it belongs to; without it, that is the only one.
const INSTANCE_LABEL: &str = "nodekeel.instance";

/// The leases of this process's sessions.
static OPEN_LEASES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn lock_open_leases() -> MutexGuard<'static, BTreeSet<String>> {
    OPEN_LEASES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether a lease is that of an import of this instance that no session of this process belongs to.
fn is_abandoned(id: &str, labels: &HashMap<String, String>, instance: &InstanceId) -> bool {
    if labels.get(INSTANCE_LABEL).map_or("", String::as_str) != instance.to_string() {
        return false;
    }
    let Some(rest) = id.strip_prefix(LEASE_PREFIX) else { return false };
    let parts: Vec<_> = rest.split('-').map(str::parse::<u128>).collect();
    // Exactly the form that `begin` gives it: an operator's lease may have the same prefix.
    parts.len() == 3 && parts.iter().all(Result::is_ok) && !lock_open_leases().contains(id)
}

/// Deletes the leases of killed imports, and with them the content that these have written.
pub(super) async fn discard_abandoned_imports(
    images: &ContainerdImages,
    namespace: &Namespace,
) -> Result<(), ImageStoreError> {
    let to_error = |status: Status| ImageStoreError::BeginImport(status.into());
    let mut leases = LeasesClient::new(images.channel.clone());
    let listed = leases.list(namespaced_request(ListRequest::default(), namespace, None)).await;
    let leases = listed.map_err(to_error)?.into_inner().leases.into_iter();
    for lease in leases.filter(|lease| is_abandoned(&lease.id, &lease.labels, &images.instance)) {
        tracing::info!("discarding what the killed import {} in {namespace} has written", lease.id);
        delete_lease(images, namespace, lease.id).await.map_err(to_error)?;
    }
    Ok(())
}

async fn delete_lease(images: &ContainerdImages, namespace: &Namespace, id: String) -> Result<(), Status> {
    let mut leases = LeasesClient::new(images.channel.clone());
    // Synchronous: garbage is collected before the response arrives.
    let request = DeleteRequest { id, sync: true };
    match leases.delete(namespaced_request(request, namespace, None)).await {
        Err(status) if has_code(&status, Code::NotFound) => Ok(()),
        done => done.map(drop),
    }
}

/// The lease of one import.
#[derive(Debug)]
pub(super) struct ImportLease {
    pub(super) images: ContainerdImages,
    pub(super) namespace: Namespace,
    pub(super) id: String,
    /// Makes keys unique.
    key_count: AtomicU64,
}

impl ImportLease {
    pub(super) fn leased_request<T>(&self, message: T) -> Request<T> {
        namespaced_request(message, &self.namespace, Some(&self.id))
    }

    /// A key that no other request uses.
    pub(super) fn unique_key(&self, what: &str) -> String {
        format!("{}-{what}-{}", self.id, self.key_count.fetch_add(1, Ordering::Relaxed))
    }

    /// Keeps what some content refers to by its labels, also when that content is removed.
    pub(super) async fn keep_references(&self, digest: &Digest) -> Result<(), Status> {
        let request = InfoRequest { digest: digest.to_string() };
        let labels = match self.images.content_client().info(self.leased_request(request)).await {
            Ok(answer) => answer.into_inner().info.unwrap_or_default().labels,
            Err(status) if has_code(&status, Code::NotFound) => return Ok(()),
            Err(status) => return Err(status),
        };
        let mut leases = LeasesClient::new(self.images.channel.clone());
        for (key, id) in labels {
            // *Source:* containerd's `metadata/gc.go`: a suffix names the single reference, or the snapshotter.
            let r#type = if key.starts_with("containerd.io/gc.ref.content") {
                "content".to_owned()
            } else if let Some(snapshotter) = key.strip_prefix("containerd.io/gc.ref.snapshot.") {
                format!("snapshots/{}", snapshotter.split('/').next().unwrap_or_default())
            } else {
                continue;
            };
            let resource = Some(Resource { id, r#type });
            let request = AddResourceRequest { id: self.id.clone(), resource };
            leases.add_resource(namespaced_request(request, &self.namespace, None)).await?;
        }
        Ok(())
    }

    /// Keeps some content, which may not exist any more.
    pub(super) async fn keep_content(&self, digest: &Digest) -> Result<(), Status> {
        let resource = Some(Resource { id: digest.to_string(), r#type: "content".to_owned() });
        let request = AddResourceRequest { id: self.id.clone(), resource };
        let mut leases = LeasesClient::new(self.images.channel.clone());
        leases.add_resource(namespaced_request(request, &self.namespace, None)).await.map(drop)
    }

    async fn delete_lease(&self) -> Result<(), Status> {
        delete_lease(&self.images, &self.namespace, self.id.clone()).await
    }
}

impl Drop for ImportLease {
    fn drop(&mut self) {
        lock_open_leases().remove(&self.id);
    }
}

#[derive(Debug)]
pub(super) struct ContainerdImport {
    lease: Arc<ImportLease>,
    finished: bool,
}

impl ContainerdImport {
    pub(super) async fn begin(
        images: ContainerdImages,
        namespace: Namespace,
    ) -> Result<Self, ImageStoreError> {
        let now = SystemTime::now();
        let nanoseconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let number = images.import_count.fetch_add(1, Ordering::Relaxed);
        let id = format!("{LEASE_PREFIX}{}-{nanoseconds}-{number}", std::process::id());
        // If this node never imports again, containerd's garbage collector removes the lease by itself.
        let expires = Timestamp::from(now + LEASE_TTL).to_string();
        let labels = [("containerd.io/gc.expire", expires), (INSTANCE_LABEL, images.instance.to_string())];
        // A label has a value: the only instance has none.
        let labels = labels.into_iter().filter(|(_, value)| !value.is_empty());
        let labels = labels.map(|(key, value)| (key.to_owned(), value)).collect();
        let request = namespaced_request(CreateRequest { id: id.clone(), labels }, &namespace, None);
        // Before the lease exists: a concurrent discard must not take it for an abandoned one.
        lock_open_leases().insert(id.clone());
        // Made before the call: if that fails, the drop removes the id from the open ones.
        let lease = ImportLease { images, namespace, id, key_count: AtomicU64::new(0) };
        let created = LeasesClient::new(lease.images.channel.clone()).create(request).await;
        created.map_err(|status| store_error(status, "a lease", ImageStoreError::BeginImport))?;
        Ok(Self { lease: Arc::new(lease), finished: false })
    }

    pub(super) fn lease(&self) -> &ImportLease {
        &self.lease
    }

    async fn create_or_update_image(&self, image: wire::Image) -> Result<(), Status> {
        let mut images = ImagesClient::new(self.lease.images.channel.clone());
        let create = CreateImageRequest { image: Some(image.clone()), source_date_epoch: None };
        // containerd has no single call that creates an image or updates it.
        match images.create(self.lease.leased_request(create)).await {
            Err(status) if has_code(&status, Code::AlreadyExists) => {}
            done => return done.map(drop),
        }
        // Of each label alone: the CRI adds its own at the same time. An empty value removes a label.
        let labels = image.labels.keys().map(|key| format!("labels.{key}"));
        let paths = std::iter::once("target".to_owned()).chain(labels).collect();
        let update_mask = Some(FieldMask { paths });
        let update = UpdateImageRequest { image: Some(image), update_mask, source_date_epoch: None };
        images.update(self.lease.leased_request(update)).await.map(drop)
    }
}

#[async_trait]
impl ImportSession for ContainerdImport {
    async fn open_writer(
        &mut self,
        blob: &IncomingBlob,
    ) -> Result<Option<Box<dyn BlobWriter>>, ImageStoreError> {
        let writer = ContentWriter::open(&self.lease, blob).await?;
        Ok(writer.map(|writer| Box::new(writer) as Box<dyn BlobWriter>))
    }

    async fn label_content(&mut self, digest: &Digest, labels: &Labels) -> Result<(), ImageStoreError> {
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let labels = labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let info = wire::Info { digest: digest.to_string(), labels, ..wire::Info::default() };
        let request = UpdateRequest { info: Some(info), update_mask: Some(FieldMask { paths }) };
        let done = self.lease.images.content_client().update(self.lease.leased_request(request)).await;
        let to_error = |source| ImageStoreError::LabelContent { digest: *digest, source };
        done.map(drop).map_err(|status| store_error(status, "labels", to_error))
    }

    async fn unpack_layers(&mut self, layers: &[ImageLayer]) -> Result<Labels, ImageStoreError> {
        super::unpack::unpack_layers(&self.lease, layers).await
    }

    async fn put_image(&mut self, image: &Image) -> Result<(), ImageStoreError> {
        let listed = wire::Image {
            name: image.name.clone(),
            labels: image.labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
            target: Some(descriptor_to_proto(&image.target)),
            ..wire::Image::default()
        };
        let to_error = |source| ImageStoreError::PutImage { name: image.name.clone(), source };
        self.create_or_update_image(listed).await.map_err(|status| store_error(status, &image.name, to_error))
    }

    async fn finish(mut self: Box<Self>) -> Result<(), ImageStoreError> {
        self.finished = true;
        self.lease.delete_lease().await.map_err(|status| ImageStoreError::FinishImport(status.into()))
    }

    async fn disk_space(&self) -> Result<Option<DiskSpace>, ImageStoreError> {
        self.lease.images.read_disk_space()
    }

    fn copies_layers_below(&self) -> bool {
        self.lease.images.copies_layers_below()
    }
}

impl Drop for ContainerdImport {
    /// Deletes the lease of an unfinished session. Without a runtime, the lease expires.
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // A drop can't wait. If the deletion is lost, the next start makes up for it, or the lease expires.
            let lease = Arc::clone(&self.lease);
            runtime.spawn(async move { lease.delete_lease().await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leases_of_imports_that_are_not_open_are_abandoned() {
        let (only, other) = (InstanceId::default(), "other".parse::<InstanceId>().expect("valid"));
        let is_of_only = |id: &str| is_abandoned(id, &HashMap::new(), &only);
        for id in ["nodekeel-1-2-3", "nodekeel-4294967295-1795372012957359869-0"] {
            assert!(is_of_only(id), "{id}");
            // Of another program, which may have it under way.
            let labels = HashMap::from([(INSTANCE_LABEL.to_owned(), "other".to_owned())]);
            assert!(!is_abandoned(id, &labels, &only) && is_abandoned(id, &labels, &other), "{id}");
            assert!(!is_abandoned(id, &HashMap::new(), &other), "{id}");
        }
        for id in
            ["nodekeel-1-2", "nodekeel-1-2-3-4", "nodekeel-1-2-3-x", "nodekeel-1-x-3", "nodekeel-", "1-2-3"]
        {
            assert!(!is_of_only(id), "{id}");
        }
        lock_open_leases().insert("nodekeel-7-7-7".to_owned());
        assert!(!is_of_only("nodekeel-7-7-7"));
    }
}
