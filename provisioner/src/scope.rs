//! What belongs to which store of a node, by the names that classes and PersistentVolumes have of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::StorageClass;

use crate::claim::size::store_of_class;
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::name::StoreName;
use crate::objects::{is_on_node, store_name};

/// A store among those of its node. What names none of them is the concern of the one without a name: its claims go to
/// other nodes, and its volumes are reported.
#[derive(Debug, Clone)]
pub(crate) struct StoreScope {
    pub(crate) identity: ProvisionerIdentity,
    /// The names of all stores that have one.
    pub(crate) names: Arc<BTreeSet<StoreName>>,
}

impl StoreScope {
    /// The store that a class names and the node does not have, if this store answers for it.
    pub(crate) fn unknown_store(&self, class: &StorageClass) -> Option<StoreName> {
        let named = store_of_class(class).ok().flatten()?;
        (self.identity.store.is_none() && !self.names.contains(&named)).then_some(named)
    }

    /// Returns whether what was published for a class is to be kept up to date, or deleted, by this store. `None`: the class
    /// does not exist.
    pub(crate) fn answers_for(&self, class: Option<&StorageClass>) -> bool {
        match class {
            Some(class) => is_class_of_store(&self.identity, class) || self.unknown_store(class).is_some(),
            None => self.identity.store.is_none(),
        }
    }

    /// The volume of a PersistentVolume of this node that names a store which the node does not have, and that name, if this
    /// store answers for it.
    pub(crate) fn volume_of_unknown_store<'a>(
        &self,
        volume: &'a PersistentVolume,
    ) -> Option<(VolumeId, &'a str)> {
        let name = store_name(volume).filter(|_| is_on_node(&self.identity, volume))?;
        let is_known = self.names.iter().any(|known| known.as_str() == name);
        let id = volume.metadata.name.as_deref()?.parse().ok()?;
        (self.identity.store.is_none() && !is_known).then_some((id, name))
    }
}

/// Returns whether the volumes of a class are in this store. A class with an invalid name counts for the store without one,
/// where its claims are rejected.
pub(crate) fn is_class_of_store(identity: &ProvisionerIdentity, class: &StorageClass) -> bool {
    store_of_class(class).unwrap_or_default() == identity.store
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::objects::{NODE, sample_class, sample_identity, sample_volume};

    #[test]
    fn each_class_and_volume_is_the_concern_of_exactly_one_store() {
        let name = |name: &str| StoreName::try_new(name).expect("a name");
        let names = Arc::new(BTreeSet::from([name("bulk"), name("fast")]));
        let scope = |store: Option<StoreName>| StoreScope {
            identity: sample_identity(NODE).with_store(store),
            names: Arc::clone(&names),
        };
        let scopes = [None, Some(name("bulk")), Some(name("fast"))].map(scope);
        // The place of the store that answers, and whether it has the class.
        for (named, place, is_known) in [
            (json!(null), 0, true),
            (json!(""), 0, true),
            (json!("bulk"), 1, true),
            (json!("fast"), 2, true),
            (json!("gone"), 0, false),
            (json!("Not a name"), 0, true),
        ] {
            let class = sample_class(json!({ "parameters": { "store": named } }));
            let answers = scopes.each_ref().map(|scope| scope.answers_for(Some(&class)));
            assert_eq!(answers, [0, 1, 2].map(|at| at == place), "{named}");
            let has = scopes.each_ref().map(|scope| is_class_of_store(&scope.identity, &class));
            assert_eq!(has, [0, 1, 2].map(|at| at == place && is_known), "{named}");
            assert_eq!(scopes[place].unknown_store(&class).is_some(), !is_known, "{named}");

            let attributes = json!({ "spec": { "csi": { "volumeAttributes": { "storeName": named } } } });
            let volume = sample_volume(1, attributes);
            let is_unknown = scopes.each_ref().map(|scope| scope.volume_of_unknown_store(&volume).is_some());
            let is_expected = [named == "gone" || named == "Not a name", false, false];
            assert_eq!(is_unknown, is_expected, "{named}");
        }
        assert_eq!(scopes.each_ref().map(|scope| scope.answers_for(None)), [true, false, false]);
    }
}
