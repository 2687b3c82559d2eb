//! Requirements of `run` on the API server, and the store of the node's volumes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{anyhow, bail};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::api::ListParams;
use kube::{Api, Client};
use nodekeel_provisioner::{
    NodeName, ProvisionerIdentity, SnapshotId, StoreAction, StoreIdentity, StoreName, VolumeId,
    VolumeRecovery, plan_new_store, plan_store, required_volume,
};

use crate::api_server;
use crate::check::{CheckFinding, StoreIds, permissions};
use crate::config::DaemonConfig;

/// `stores` are those whose disks have answered, with what is on them.
pub(super) async fn check_api_server(
    config: &DaemonConfig,
    stores: &[(DaemonConfig, StoreIds)],
) -> Vec<CheckFinding> {
    let client = match api_server::api_client(config.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![CheckFinding::Failure(error.into())],
    };
    let version = client.apiserver_version().await;
    match version {
        Ok(version) => {
            let mut findings = vec![CheckFinding::Pass(format!(
                "the API server answers: Kubernetes {}",
                version.git_version
            ))];
            findings.push(permissions::check_each_permission(&client).await);
            findings.extend(check_api_objects(config, &client).await);
            // An invalid name of the node is a finding of its own.
            if let Ok(node) = config.node_name() {
                let volumes = Api::<PersistentVolume>::all(client.clone()).list(&ListParams::default()).await;
                // That they can't be listed is a finding of each store.
                let volumes = volumes.map(|listed| listed.items).unwrap_or_default();
                findings.extend(check_unknown_stores(config, &node, &volumes));
                for store in stores {
                    findings.push(check_store(store, stores, node.clone(), &client).await);
                }
            }
            findings
        }
        // Without an answer, all further checks would fail for the same reason.
        Err(error) => {
            let what = "can't call the API server: check that it is up, and that the kubeconfig (or the service account) is valid";
            vec![CheckFinding::Failure(anyhow!(error).context(what))]
        }
    }
}

/// Checks the API objects that pods need for their volumes.
pub(crate) async fn check_api_objects(config: &DaemonConfig, client: &Client) -> Vec<CheckFinding> {
    let mut findings = Vec::new();
    if let Ok(name) = config.node_name() {
        let node = Api::<Node>::all(client.clone()).get_opt(name.as_str()).await;
        findings.push(check_node_label(config, &name, node));
    }
    let classes = Api::<StorageClass>::all(client.clone()).list(&ListParams::default()).await;
    findings.extend(check_classes(config, classes.map(|listed| listed.items)));
    if config.csi {
        let driver = Api::<CSIDriver>::all(client.clone()).get_opt(config.driver.as_str()).await;
        findings.push(check_csi_driver(config.driver.as_str(), driver));
    }
    findings
}

/// Finds the classes that name a store which this node does not have.
fn check_classes(config: &DaemonConfig, classes: kube::Result<Vec<StorageClass>>) -> Vec<CheckFinding> {
    // Without the permission, which is a finding of its own, nothing is known of them.
    let classes = classes.unwrap_or_default();
    let unknown = classes.iter().filter(|class| class.provisioner == config.driver.as_str()).filter_map(|class| {
        let store = class.parameters.as_ref()?.get("store").filter(|name| !name.is_empty())?;
        let is_known = config.stores.keys().any(|known| known.as_str() == store);
        let class = class.metadata.name.as_deref().unwrap_or_default();
        (!is_known).then(|| {
            CheckFinding::Warning(format!(
                "claims of storage class {class:?} go to other nodes: it names store {store:?}, which this node does not have"
            ))
        })
    });
    unknown.collect()
}

/// Finds the volumes of this node in stores that it does not have.
fn check_unknown_stores(
    config: &DaemonConfig,
    node: &NodeName,
    volumes: &[PersistentVolume],
) -> Vec<CheckFinding> {
    let mut counts: BTreeMap<StoreName, usize> = BTreeMap::new();
    for volume in volumes {
        let store = config.unknown_store(volume);
        let identity = ProvisionerIdentity { store, ..config.provisioner_identity(node.clone()) };
        if required_volume(&identity, volume).is_some()
            && let Some(store) = identity.store
        {
            *counts.entry(store).or_default() += 1;
        }
    }
    let warn = |(store, count)| {
        CheckFinding::Warning(format!(
            "{count} volumes of this node are in store {store}, which it does not have, so that no pod can use them: give it the \
             store again (`stores`, or --stores {store}=DIR); nothing deletes them"
        ))
    };
    counts.into_iter().map(warn).collect()
}

/// Checks the label that the node affinity of volumes refers to. The kubelet sets it when it registers the
/// driver, so that it may be missing before.
fn check_node_label(
    config: &DaemonConfig,
    name: &NodeName,
    node: kube::Result<Option<Node>>,
) -> CheckFinding {
    let node = match node {
        Ok(Some(node)) => node,
        Ok(None) => {
            return CheckFinding::Failure(anyhow!(
                "node {name} does not exist: set --node to its name in the API"
            ));
        }
        Err(error) => {
            return CheckFinding::Failure(
                anyhow!(error).context(format!("can't read node {name} from the API server")),
            );
        }
    };
    let key = config.driver.topology_key();
    match node.metadata.labels.unwrap_or_default().get(&key) {
        Some(label) if label == name.as_str() => {
            CheckFinding::Pass(format!("node {name} has the label {key}={name}"))
        }
        Some(label) => CheckFinding::Failure(anyhow!(
            "node {name} has {key}={label:?}, so no pod can use its volumes: `kubectl label node {name} {key}-`, and \
             restart provisionerd"
        )),
        None if config.csi => CheckFinding::Pass(format!(
            "node {name} exists; the kubelet adds the label {key} when it registers the driver"
        )),
        None => CheckFinding::Warning(format!(
            "node {name} has no label {key}, so no pod is scheduled to its volumes: without --no-csi, the kubelet \
             adds it"
        )),
    }
}

/// Checks that the directory is the store of the node's volumes, one of `all`.
async fn check_store(
    (config, ids): &(DaemonConfig, StoreIds),
    all: &[(DaemonConfig, StoreIds)],
    node: NodeName,
    client: &Client,
) -> CheckFinding {
    let found = async {
        let (store, volumes, snapshots) = match ids {
            StoreIds::Found { store, volumes, snapshots } => (store, volumes, snapshots),
            StoreIds::Unreadable(why) => bail!("{why}"),
        };
        let store = store.as_ref().map(|store| store.parse()).transpose()?;
        let found = store.map_or(StoreIdentity::Absent, StoreIdentity::Present);
        let present: BTreeSet<VolumeId> = volumes.iter().filter_map(|name| name.parse().ok()).collect();
        let objects = Api::<PersistentVolume>::all(client.clone()).list(&ListParams::default()).await?;
        let identity = config.provisioner_identity(node);
        let required = objects.items.iter().filter_map(|object| required_volume(&identity, object));
        let missing = required.filter(|id| !present.contains(id)).count();
        // The decision is that of `run`, from the same facts.
        let action = match plan_store(&identity, &found, &present, &objects.items) {
            // Only a new store depends on snapshots, too.
            StoreAction::CreateIdentity => {
                let parse = |ids: &[String]| ids.iter().filter_map(|id| id.parse().ok()).collect();
                let present: BTreeSet<SnapshotId> = parse(snapshots);
                let recovery = VolumeRecovery::new(client.clone(), identity.clone(), None);
                let mut ready = recovery.list_ready_snapshots().await?;
                // A snapshot names no store: those in the others are not missing in this one.
                for (other, ids) in all {
                    if let StoreIds::Found { snapshots, .. } = ids
                        && other.store != config.store
                    {
                        let stored: BTreeSet<SnapshotId> = parse(snapshots);
                        ready.retain(|id| !stored.contains(id));
                    }
                }
                plan_new_store(&identity, &present, &ready, &objects.items)
            }
            action => action,
        };
        match (action, found.id()) {
            (StoreAction::Reject(rejection), _) => Err(anyhow!(rejection)),
            // A volume that is missing does not keep the others from being served.
            (_, Some(id)) if missing > 0 => Ok(CheckFinding::Warning(format!(
                "{missing} volumes of this node are missing in store {id}: `provisionerd volumes` names them"
            ))),
            (_, Some(id)) => Ok(CheckFinding::Pass(format!("the directory is store {id}"))),
            (_, None) => Ok(CheckFinding::Pass(
                "the directory becomes a new store: no PersistentVolume of this node names one".into(),
            )),
        }
    };
    let found = found.await;
    found.unwrap_or_else(|error: anyhow::Error| {
        CheckFinding::Failure(
            error.context(format!("can't use the volumes in {}", config.directory.display())),
        )
    })
}

fn check_csi_driver(name: &str, driver: kube::Result<Option<CSIDriver>>) -> CheckFinding {
    match driver {
        // The default is true, and without an external attacher no VolumeAttachment would ever be answered.
        Ok(Some(driver)) if driver.spec.attach_required == Some(false) => {
            match driver.spec.storage_capacity {
                Some(true) => CheckFinding::Pass(format!("CSIDriver {name} exists")),
                _ => CheckFinding::Warning(format!(
                    "CSIDriver {name} has storageCapacity: false, so pods are scheduled to nodes without free space: \
                 apply deploy/csidriver.yaml again"
                )),
            }
        }
        Ok(Some(_)) => CheckFinding::Failure(anyhow!(
            "CSIDriver {name} has attachRequired: true, so pods wait forever: apply deploy/csidriver.yaml again"
        )),
        Ok(None) => CheckFinding::Failure(anyhow!(
            "CSIDriver {name} does not exist, so pods wait forever: apply deploy/csidriver.yaml, with this name"
        )),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't read CSIDriver {name} from the API server")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_provisioner::DriverName;
    use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_volume};

    use super::*;

    #[test]
    fn a_topology_label_other_than_the_nodes_name_fails_the_check() {
        let name = NodeName::try_new("node-a").expect("a node name");
        let find = |labels: serde_json::Value, csi: bool| {
            let node = serde_json::from_value(serde_json::json!({ "metadata": { "labels": labels } }));
            let config = DaemonConfig { csi, ..DaemonConfig::default() };
            check_node_label(&config, &name, Ok(Some(node.expect("a node"))))
        };
        let labels = |value: &str| serde_json::json!({ "topology.volumes.nodekeel/node": value });
        assert!(matches!(find(labels("node-a"), true), CheckFinding::Pass(_)));
        let other = find(labels("ip-10-0-0-1"), true);
        assert!(other.is_failure() && other.to_string().contains("kubectl label node node-a"), "{other}");
        let hostname = serde_json::json!({ "kubernetes.io/hostname": "ip-10-0-0-1" });
        assert!(matches!(find(hostname.clone(), true), CheckFinding::Pass(_)), "the kubelet adds the label");
        assert!(matches!(find(hostname, false), CheckFinding::Warning(_)), "and without CSI nothing does");
        let missing = check_node_label(&DaemonConfig::default(), &name, Ok(None));
        assert!(missing.to_string().contains("--node"), "{missing}");
    }

    #[test]
    fn volumes_in_a_store_that_the_node_does_not_have_are_a_warning_that_names_it() {
        let config = DaemonConfig {
            driver: DriverName::try_new(DRIVER).expect("a name"),
            stores: [("fast".parse().expect("a name"), "/srv/fast".into())].into(),
            ..DaemonConfig::default()
        };
        let volume = |number, store: &str| {
            let csi = serde_json::json!({ "volumeAttributes": { "storeName": store } });
            let status = serde_json::json!({ "phase": "Bound" });
            sample_volume(number, serde_json::json!({ "spec": { "csi": csi }, "status": status }))
        };
        let volumes = [volume(1, ""), volume(2, "fast"), volume(3, "bulk"), volume(4, "bulk")];
        let found =
            |node: &str| check_unknown_stores(&config, &NodeName::try_new(node).expect("a name"), &volumes);
        let texts: Vec<_> = found(NODE).iter().map(ToString::to_string).collect();
        assert!(texts.len() == 1 && texts[0].starts_with("warn  2 volumes"), "{texts:?}");
        assert!(texts[0].contains("--stores bulk=DIR"), "{texts:?}");
        assert!(found("node-b").is_empty());
    }

    #[test]
    fn a_class_of_a_store_that_the_node_does_not_have_is_a_warning() {
        let class = |name: &str, provisioner: &str, store: serde_json::Value| -> StorageClass {
            let meta = serde_json::json!({ "name": name });
            let parameters = serde_json::json!({ "store": store });
            let class =
                serde_json::json!({ "metadata": meta, "provisioner": provisioner, "parameters": parameters });
            serde_json::from_value(class).expect("a class")
        };
        let config = DaemonConfig {
            stores: [("fast".parse().expect("a name"), "/srv/fast".into())].into(),
            ..DaemonConfig::default()
        };
        let ours = config.driver.as_str();
        let classes = vec![
            class("plain", ours, "".into()),
            class("fast", ours, "fast".into()),
            class("foreign", "other.example", "bulk".into()),
            class("bulk", ours, "bulk".into()),
        ];
        let found: Vec<_> = check_classes(&config, Ok(classes)).iter().map(ToString::to_string).collect();
        assert!(
            matches!(&found[..], [text] if text.starts_with("warn") && text.contains("\"bulk\"")),
            "{found:?}"
        );
    }

    #[test]
    fn a_driver_object_that_blocks_pods_fails_the_check() {
        let driver = |attach: bool, capacity: bool| -> CSIDriver {
            let spec = serde_json::json!({ "attachRequired": attach, "storageCapacity": capacity });
            serde_json::from_value(serde_json::json!({ "spec": spec })).expect("a driver")
        };
        let pass = check_csi_driver("d", Ok(Some(driver(false, true))));
        assert!(matches!(pass, CheckFinding::Pass(_)), "{pass}");
        let unaware = check_csi_driver("d", Ok(Some(driver(false, false))));
        assert!(
            matches!(&unaware, CheckFinding::Warning(text) if text.contains("storageCapacity")),
            "{unaware}"
        );
        assert!(check_csi_driver("d", Ok(Some(driver(true, true)))).is_failure());
        assert!(check_csi_driver("d", Ok(None)).to_string().contains("csidriver.yaml"));
    }
}
