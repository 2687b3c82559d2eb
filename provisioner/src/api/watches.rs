//! Watches of the cluster's objects, and the caches of those that concern this node.

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event};

use crate::api::volume_cache::{PackedVolume, VolumeCache};
use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;

/// The number of objects of the cluster that are listed at once: most of them are dropped.
const PAGE_SIZE: u32 = 100;

/// The cached objects: the claims that this node must act on, its PersistentVolumes, and all classes.
#[derive(Clone)]
pub(crate) struct ObjectCaches {
    pub(crate) claims: Store<PersistentVolumeClaim>,
    pub(crate) volumes: VolumeCache,
    pub(crate) classes: Store<StorageClass>,
}

/// Fills the caches from the events of the watches.
pub(crate) struct CacheWriters {
    pub(crate) claims: Writer<PersistentVolumeClaim>,
    pub(crate) volumes: Writer<PackedVolume>,
    pub(crate) classes: Writer<StorageClass>,
}

pub(crate) fn new_caches() -> (ObjectCaches, CacheWriters) {
    let (claims, claims_writer) = reflector::store();
    let (volumes, volumes_writer) = reflector::store();
    let (classes, classes_writer) = reflector::store();
    let writers = CacheWriters { claims: claims_writer, volumes: volumes_writer, classes: classes_writer };
    (ObjectCaches { claims, volumes: VolumeCache(volumes), classes }, writers)
}

impl ObjectCaches {
    /// Waits for the first lists. Waits forever if a watch has ended before, because then the run ends.
    pub(crate) async fn wait_until_complete(&self) {
        let lists = (
            self.claims.wait_until_ready(),
            self.volumes.0.wait_until_ready(),
            self.classes.wait_until_ready(),
        );
        if let (Ok(()), Ok(()), Ok(())) = futures_util::join!(lists.0, lists.1, lists.2) {
            return;
        }
        std::future::pending().await
    }
}

/// Watches all objects of a kind: lists them, then follows changes, with bookmarks, and retries after errors.
///
/// No selector can restrict it to our objects: the driver of a claim is an annotation, and that of a volume a
/// field that the API server does not index. A label could, but removing the label would leak the volume. So
/// each object is decoded once, and foreign ones are dropped before they are cached; lists are paged.
pub(crate) fn watch_resource<K>(
    api: Api<K>,
    watch_errors: &WatchErrors,
) -> impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send + use<K>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let config = watcher::Config::default().page_size(PAGE_SIZE);
    with_backoff(watcher::watcher(api, config), watch_errors.clone())
}

/// The changed objects, once they are in the cache: those of a list when it is complete. Watch errors are dropped here: they
/// were logged, and the watch retries.
pub(crate) fn changed_objects<K>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
) -> impl Stream<Item = ObjectRef<K>> + Send
where
    K: kube::Resource<DynamicType = ()> + Send,
{
    let mut listed = Vec::new();
    events.flat_map(move |event| {
        stream::iter(match event {
            Ok(Event::Init) => {
                // A list that failed halfway starts anew.
                listed.clear();
                Vec::new()
            }
            Ok(Event::InitApply(object)) => {
                listed.push(ObjectRef::from_obj(&object));
                Vec::new()
            }
            Ok(Event::InitDone) => std::mem::take(&mut listed),
            Ok(Event::Apply(object)) => vec![ObjectRef::from_obj(&object)],
            // A deleted object needs no work: the observer of its event has sent the signals that follow from it.
            Ok(Event::Delete(_)) | Err(_) => Vec::new(),
        })
    })
}

#[cfg(test)]
mod tests {
    use kube::runtime::WatchStreamExt as _;
    use serde_json::json;

    use super::*;
    use crate::testing::objects::sample_class;

    #[tokio::test]
    async fn a_listed_object_has_changed_once_its_list_is_in_the_cache() {
        let (cache, writer) = reflector::store();
        let class = |kind: &str| sample_class(json!({ "metadata": { "labels": { "kind": kind } } }));
        let events = [
            Event::Init,
            Event::InitApply(class("first")),
            Event::InitDone,
            Event::Apply(class("changed")),
            Event::Init,
            Event::InitApply(class("interrupted")),
            Event::Init,
            Event::InitApply(class("listed")),
            Event::InitDone,
        ];
        let changes = changed_objects(stream::iter(events.map(Ok)).reflect(writer));
        let found = changes.map(|name| {
            let class = cache.get(&name).expect("it is in the cache");
            class.metadata.labels.clone().unwrap_or_default()["kind"].clone()
        });
        assert_eq!(found.collect::<Vec<_>>().await, ["first", "changed", "listed"]);
    }
}
