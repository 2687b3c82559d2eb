//! The facts that are kept of the objects of one kind.

use std::collections::BTreeMap;

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};

/// The objects of one kind, as far as their watch has reported, by `NAMESPACE/NAME`, or by `NAME` if they
/// have no namespace. A new list replaces them at once, when it is complete.
#[derive(Debug)]
pub(super) struct ObjectMirror<V> {
    known: BTreeMap<String, V>,
    /// The objects of a list in progress.
    listed: BTreeMap<String, V>,
    is_complete: bool,
}

impl<V> Default for ObjectMirror<V> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), listed: BTreeMap::new(), is_complete: false }
    }
}

impl<V: PartialEq> ObjectMirror<V> {
    /// Applies a watch event, and returns whether anything has changed. `extract` keeps what planning needs of
    /// an object; `None` if that is nothing.
    pub(super) fn observe<K>(&mut self, event: Event<K>, extract: impl Fn(&K) -> Option<V>) -> bool
    where
        K: Resource<DynamicType = ()>,
    {
        match event {
            Event::Init => {
                self.listed.clear();
                false
            }
            Event::InitApply(object) => {
                self.listed.extend(extract(&object).map(|value| (object_key(&object), value)));
                false
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                // The first list counts as a change even if it is empty: planning waits for it.
                let has_changed = !self.is_complete || listed != self.known;
                (self.known, self.is_complete) = (listed, true);
                has_changed
            }
            Event::Apply(object) => match extract(&object) {
                Some(value) => self.insert(object_key(&object), value),
                // The object does not matter any more: a claim is bound by now, for example.
                None => self.known.remove(&object_key(&object)).is_some(),
            },
            Event::Delete(object) => self.known.remove(&object_key(&object)).is_some(),
        }
    }

    fn insert(&mut self, key: String, value: V) -> bool {
        if self.known.get(&key) == Some(&value) {
            return false;
        }
        self.known.insert(key, value);
        true
    }
}

impl<V> ObjectMirror<V> {
    /// Returns whether the first list is complete.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    pub(super) fn get(&self, key: &str) -> Option<&V> {
        self.known.get(key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        self.known.iter().map(|(key, value)| (key.as_str(), value))
    }
}

/// A complete list.
impl<V> FromIterator<(String, V)> for ObjectMirror<V> {
    fn from_iter<I: IntoIterator<Item = (String, V)>>(objects: I) -> Self {
        Self { known: objects.into_iter().collect(), listed: BTreeMap::new(), is_complete: true }
    }
}

fn object_key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    use super::*;
    use crate::testing::objects::sample_node;

    fn is_cordoned(node: &Node) -> Option<bool> {
        (node.name_any() != "foreign")
            .then(|| node.spec.as_ref().is_some_and(|it| it.unschedulable == Some(true)))
    }

    #[test]
    fn a_mirror_reports_changes_of_what_is_kept_and_a_new_list_replaces_it_at_once() {
        let mut mirror = ObjectMirror::default();
        let node = |name| sample_node(name, json!({}));
        let cordoned = sample_node("a", json!({ "spec": { "unschedulable": true } }));
        let table = [
            (Event::Init, false, 0),
            (Event::InitApply(node("a")), false, 0),
            (Event::InitApply(node("foreign")), false, 0),
            (Event::InitDone, true, 1),
            (Event::Apply(node("a")), false, 1),
            (Event::Apply(cordoned.clone()), true, 1),
            (Event::Apply(node("foreign")), false, 1),
            (Event::Apply(node("b")), true, 2),
            (Event::Init, false, 2),
            (Event::InitApply(cordoned), false, 2),
            (Event::InitDone, true, 1),
            (Event::Delete(node("b")), false, 1),
            (Event::Delete(node("a")), true, 0),
        ];
        for (number, (event, has_changed, count)) in table.into_iter().enumerate() {
            let found = (mirror.observe(event, is_cordoned), mirror.iter().count());
            assert_eq!(found, (has_changed, count), "event {number}");
        }
        assert!(mirror.is_complete() && mirror.get("a").is_none());
    }
}
