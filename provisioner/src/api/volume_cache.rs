//! The cache of PersistentVolumes, which has as many objects as the node has volumes.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::Event;

/// A PersistentVolume as JSON: decoded, it takes several times as much, since it has room for each kind of volume that
/// Kubernetes knows, and a tree for each map.
#[derive(Debug, Clone)]
pub(crate) struct PackedVolume {
    /// Only what the cache finds it by.
    key: ObjectMeta,
    json: Box<[u8]>,
}

impl PackedVolume {
    pub(crate) fn new(volume: &PersistentVolume) -> Self {
        let json = serde_json::to_vec(volume).expect("a PersistentVolume has string keys only");
        let key = ObjectMeta { name: volume.metadata.name.clone(), ..ObjectMeta::default() };
        Self { key, json: json.into() }
    }

    pub(crate) fn unpack(&self) -> PersistentVolume {
        serde_json::from_slice(&self.json).expect("it was a PersistentVolume")
    }
}

impl Resource for PackedVolume {
    type DynamicType = ();
    type Scope = <PersistentVolume as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        PersistentVolume::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        PersistentVolume::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        PersistentVolume::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        PersistentVolume::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.key
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.key
    }
}

/// Packs the object of an event.
pub(crate) fn pack_event(event: Event<PersistentVolume>) -> Event<PackedVolume> {
    match event {
        Event::Apply(volume) => Event::Apply(PackedVolume::new(&volume)),
        Event::Delete(volume) => Event::Delete(PackedVolume::new(&volume)),
        Event::Init => Event::Init,
        Event::InitApply(volume) => Event::InitApply(PackedVolume::new(&volume)),
        Event::InitDone => Event::InitDone,
    }
}

/// The PersistentVolumes of this node. Each is decoded when it is read, and not kept.
#[derive(Debug, Clone)]
pub(crate) struct VolumeCache(pub(crate) Store<PackedVolume>);

impl VolumeCache {
    pub(crate) fn get(&self, name: &str) -> Option<PersistentVolume> {
        Some(self.0.get(&ObjectRef::new(name))?.unpack())
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.get(&ObjectRef::new(name)).is_some()
    }

    /// All of them, one at a time: who collects them needs the memory that this cache saves.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PersistentVolume> + use<> {
        self.0.state().into_iter().map(|volume| volume.unpack())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use kube::runtime::reflector;
    use serde_json::json;

    use super::*;
    use crate::testing::objects::sample_volume;

    #[test]
    fn a_cached_volume_is_the_one_that_was_reported_and_much_smaller() {
        let mut volume = sample_volume(1, json!({ "status": { "phase": "Bound" } }));
        volume.metadata.creation_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        let name = volume.metadata.name.clone().expect("it has one");
        let (cache, mut writer) = reflector::store();
        writer.apply_watcher_event(&pack_event(Event::Apply(volume.clone())));
        let packed = cache.get(&ObjectRef::new(&name)).expect("it is in the cache");
        assert!(packed.json.len() + size_of::<PackedVolume>() < size_of::<PersistentVolume>() / 2);

        let cache = VolumeCache(cache);
        assert_eq!(cache.get(&name), Some(volume.clone()));
        assert_eq!(cache.iter().collect::<Vec<_>>(), [volume.clone()]);
        assert!(cache.contains(&name) && !cache.contains("another"));
        writer.apply_watcher_event(&pack_event(Event::Delete(volume)));
        assert!(cache.get(&name).is_none());
    }
}
