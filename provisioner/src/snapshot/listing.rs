//! The snapshots that the API server knows of a node, and whom each belongs to.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::ListParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::api::call::status_code;
use crate::api::timeout::with_timeout;
use crate::identity::ProvisionerIdentity;
use crate::image::VolumeKind;
use crate::name::StoreName;
use crate::snapshot::decide::ready_snapshot;
use crate::snapshot::{ContentStore, content_store, recorded_store, store_annotation};
use crate::snapshot::{MANAGED_BY_LABEL, SNAPSHOT_GROUP, SnapshotId, VolumeSnapshotContent};

const PAGE_SIZE: u32 = 500;

/// The snapshots of a node that were taken and are not being removed, and that name no other store: those of its ready
/// VolumeSnapshotContents. None without the snapshot API, or without the permission to list them: then the node has never served any.
pub(crate) async fn list_ready_snapshots(
    client: &Client,
    identity: &ProvisionerIdentity,
) -> Result<BTreeSet<SnapshotId>, kube::Error> {
    let label = format!("{MANAGED_BY_LABEL}={}", identity.node);
    let mut ready = BTreeSet::new();
    let listed = for_each(client, ListParams::default().labels(&label), |content| {
        let store = recorded_store(identity, &content);
        let is_here =
            store.is_none_or(|store| identity.store.as_ref().is_some_and(|own| own.as_str() == store));
        ready.extend(ready_snapshot(identity, &content).filter(|_| is_here));
    });
    match listed.await {
        Err(error) if matches!(status_code(&error), Some(403 | 404)) => Ok(BTreeSet::new()),
        listed => listed.map(|()| ready),
    }
}

/// The VolumeSnapshotContent that a snapshot belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotOwner {
    /// Its name.
    pub content: String,
    /// The VolumeSnapshot that it names, as `namespace/name`.
    pub snapshot: String,
    /// The node that must act on it; none if it has no label.
    pub node: Option<String>,
    /// The name of the store that has the snapshot, `Some(None)` that without a name; `None` if it is not known.
    store: Option<Option<String>>,
}

impl SnapshotOwner {
    /// Returns whether its snapshot is the one in the store of this name, of its node. That of another store is a copy of
    /// its files, which nothing owns. One that is not reported yet may be in any store.
    pub fn is_in_store(&self, store: Option<&StoreName>) -> bool {
        self.store.as_ref().is_none_or(|named| named.as_deref() == store.map(StoreName::as_str))
    }
}

/// The owners of the driver's snapshots, on any node. Without the snapshot API, an error: it may only be away for a moment, and
/// a snapshot whose owner is not seen counts as an orphan, which an operator may remove.
pub(crate) async fn list_snapshot_owners(
    client: &Client,
    identity: &ProvisionerIdentity,
) -> Result<BTreeMap<SnapshotId, SnapshotOwner>, kube::Error> {
    let mut owners = BTreeMap::new();
    let listed = for_each(client, ListParams::default(), |content| {
        owners.extend(snapshot_ids(identity, &content).into_iter().map(|id| (id, owner(identity, &content))));
    });
    listed.await.map(|()| owners)
}

fn owner(identity: &ProvisionerIdentity, content: &VolumeSnapshotContent) -> SnapshotOwner {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let of = &content.spec.volume_snapshot_ref;
    SnapshotOwner {
        content: text(&content.metadata.name),
        snapshot: format!("{}/{}", text(&of.namespace), text(&of.name)),
        node: content.node().map(str::to_owned),
        store: match content_store(identity, content) {
            ContentStore::Named(name) => Some(Some(name.to_owned())),
            ContentStore::Unnamed => Some(None),
            ContentStore::Unknown => None,
        },
    }
}

/// The snapshots that a content of the driver may name: the one that it reports, the one that it was created for, and the one
/// that is taken for it and not reported yet.
fn snapshot_ids(identity: &ProvisionerIdentity, content: &VolumeSnapshotContent) -> BTreeSet<SnapshotId> {
    if content.spec.driver != identity.driver.as_str() {
        return BTreeSet::new();
    }
    let handles = [content.snapshot_handle(), content.spec.source.snapshot_handle.as_deref()];
    let taken = content.spec.volume_snapshot_ref.uid.as_deref().map(SnapshotId::from_uid);
    handles.into_iter().flatten().map(str::parse).chain(taken).filter_map(Result::ok).collect()
}

/// The objects that give a snapshot without a VolumeSnapshotContent back to its users: a content, which is retained since
/// its data were kept when it had none, and a VolumeSnapshot in this namespace. To be applied by an administrator: a node
/// may create neither.
pub fn adopted_snapshot(
    identity: &ProvisionerIdentity,
    id: &SnapshotId,
    kind: VolumeKind,
    namespace: &str,
) -> [Value; 2] {
    let api_version = format!("{SNAPSHOT_GROUP}/v1");
    let name = id.as_str();
    let annotations =
        identity.store.as_ref().map(|store| json!({ store_annotation(identity): store.as_str() }));
    [
        json!({
            "apiVersion": api_version,
            "kind": "VolumeSnapshotContent",
            "metadata": {
                "name": name,
                "labels": { MANAGED_BY_LABEL: identity.node.as_str() },
                "annotations": annotations,
            },
            "spec": {
                "driver": identity.driver.as_str(),
                "deletionPolicy": "Retain",
                "source": { "snapshotHandle": name },
                "sourceVolumeMode": kind.volume_mode(),
                "volumeSnapshotRef": { "namespace": namespace, "name": name },
            },
        }),
        json!({
            "apiVersion": api_version,
            "kind": "VolumeSnapshot",
            "metadata": { "namespace": namespace, "name": name },
            "spec": { "source": { "volumeSnapshotContentName": name } },
        }),
    ]
}

/// Visits the contents of the cluster, page by page.
async fn for_each(
    client: &Client,
    mut params: ListParams,
    mut visit: impl FnMut(VolumeSnapshotContent) + Send,
) -> Result<(), kube::Error> {
    let contents: Api<VolumeSnapshotContent> = Api::all(client.clone());
    params = params.limit(PAGE_SIZE);
    loop {
        let page = with_timeout(contents.list(&params)).await?;
        page.items.into_iter().for_each(&mut visit);
        // The API server marks the last page by a missing or an empty token.
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::SnapshotContentSource;
    use crate::snapshot::decide::{SnapshotAction, plan_snapshot};
    use crate::testing::objects::{NODE, sample_identity, sample_snapshot_content, sample_uid};

    fn id(number: u32) -> SnapshotId {
        SnapshotId::from_uid(&sample_uid(number)).expect("a UID")
    }

    #[test]
    fn a_content_owns_what_it_reports_what_it_names_and_what_is_taken_for_it() {
        let identity = sample_identity(NODE);
        let reported = json!({ "status": { "snapshotHandle": id(2).as_str() } });
        let mut content = sample_snapshot_content(1, reported);
        assert_eq!(snapshot_ids(&identity, &content), BTreeSet::from([id(1), id(2)]));
        content.spec.source =
            SnapshotContentSource { volume_handle: None, snapshot_handle: Some(id(3).to_string()) };
        assert_eq!(snapshot_ids(&identity, &content), BTreeSet::from([id(1), id(2), id(3)]));
        content.spec.driver = "other.example".to_owned();
        assert_eq!(snapshot_ids(&identity, &content), BTreeSet::new());
    }

    #[test]
    fn a_snapshot_is_owned_in_one_store_once_it_was_reported() {
        let identity = sample_identity(NODE);
        let fast: StoreName = "fast".parse().expect("a name");
        let recorded = json!({ "annotations": { store_annotation(&identity): "fast" } });
        let reported = json!({ "snapshotHandle": id(1).as_str(), "readyToUse": false });
        // Whether it is that of the store without a name, and that of the named one.
        for (metadata, status, expected) in [
            (json!({}), json!(null), [true, true]),
            (json!({}), reported.clone(), [true, false]),
            (recorded.clone(), json!(null), [false, true]),
            (recorded, reported, [false, true]),
        ] {
            let content = sample_snapshot_content(1, json!({ "metadata": metadata, "status": status }));
            let owner = owner(&identity, &content);
            assert_eq!([None, Some(&fast)].map(|store| owner.is_in_store(store)), expected, "{owner:?}");
        }
    }

    #[test]
    fn the_node_reports_an_adopted_snapshot_and_retains_it() {
        let identity = sample_identity(NODE);
        let [content, snapshot] = adopted_snapshot(&identity, &id(1), VolumeKind::Directory, "apps");
        assert_eq!(snapshot["spec"]["source"]["volumeSnapshotContentName"], content["metadata"]["name"]);
        let content: VolumeSnapshotContent = serde_json::from_value(content).expect("a content");
        assert_eq!(snapshot_ids(&identity, &content), BTreeSet::from([id(1)]), "it is no orphan any more");
        assert_eq!(plan_snapshot(&identity, &content), SnapshotAction::Report(id(1)));
        assert_eq!(content.spec.deletion_policy, "Retain");
    }
}
