//! Expansion, and VolumeAttributesClasses, as the API server admits them.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::Api;
use kube::api::{Patch, PatchParams};
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::{VolumeStep, VolumeStore as _};
use serde_json::{Value, json};

use super::harness::{TestCluster, TestNode, id, merge, run_test, wait_for_object};

const MIB: u64 = 1 << 20;

fn request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

fn attributes(name: &str) -> Value {
    json!({ "spec": { "volumeAttributesClassName": name } })
}

async fn try_patch(
    cluster: &TestCluster,
    claim: &str,
    patch: Value,
) -> Result<PersistentVolumeClaim, kube::Error> {
    cluster.claims().patch(claim, &PatchParams::default(), &Patch::Merge(patch)).await
}

async fn patch_claim(cluster: &TestCluster, claim: &str, patch: Value) {
    try_patch(cluster, claim, patch).await.expect("the API server admits the change");
}

/// Waits until the status of a claim meets a condition.
async fn wait_status(
    cluster: &TestCluster,
    claim: &str,
    is_so: impl Fn(&PersistentVolumeClaimStatus) -> bool,
) -> PersistentVolumeClaimStatus {
    let is_so = |claim: Option<&PersistentVolumeClaim>| {
        claim.and_then(|claim| claim.status.as_ref()).is_some_and(&is_so)
    };
    let claim = wait_for_object(&cluster.claims(), claim, is_so).await;
    claim.and_then(|claim| claim.status).expect("a status")
}

/// Waits until a claim has this size, and checks that nothing is in progress.
async fn wait_capacity(cluster: &TestCluster, claim: &str, size: &str) -> PersistentVolume {
    let status = wait_status(cluster, claim, |status| {
        status.capacity.as_ref().is_some_and(|capacity| capacity["storage"].0 == size)
    })
    .await;
    assert_eq!((status.allocated_resource_statuses, status.conditions), (None, None));
    let volume = cluster.wait_bound(claim).await;
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()).expect("a capacity");
    assert_eq!(capacity["storage"].0, size);
    volume
}

fn resize_state(status: &PersistentVolumeClaimStatus) -> Option<&str> {
    status.allocated_resource_statuses.as_ref()?.get("storage").map(String::as_str)
}

async fn limits(node: &TestNode, claim: &PersistentVolumeClaim) -> QuotaLimits {
    node.store.usage(&id(claim)).await.expect("usage").limits
}

fn limits_of(mib: u64, inodes: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(inodes)) }
}

#[test]
#[ignore = "needs kube"]
fn a_claim_is_expanded_and_an_infeasible_expansion_is_lowered() {
    run_test("expansion", async |cluster| {
        cluster.create_class("expansion-grows", json!({ "allowVolumeExpansion": true })).await;
        let node = cluster.start_provisioner("a").await;
        let of_class = json!({ "spec": { "storageClassName": "expansion-grows" } });
        let mut patch = of_class.clone();
        merge(&mut patch, request("8Mi"));
        let claim = cluster.create_claim("data", patch).await;
        cluster.wait_bound("data").await;
        patch_claim(&cluster, "data", request("16Mi")).await;
        wait_capacity(&cluster, "data", "16Mi").await;
        assert_eq!(limits(&node, &claim).await, limits_of(16, 8192));
        cluster.wait_for_event("data", "VolumeResizeSuccessful").await;
        let writes = [VolumeStep::MarkResize, VolumeStep::UpdateVolume, VolumeStep::FinishResize];
        assert_eq!(writes.map(|step| node.step_count(step)), [1; 3]);

        patch_claim(&cluster, "data", request("100Ti")).await;
        let infeasible =
            |status: &PersistentVolumeClaimStatus| resize_state(status) == Some("ControllerResizeInfeasible");
        let status = wait_status(&cluster, "data", infeasible).await;
        let conditions = status.conditions.expect("conditions");
        assert_eq!((conditions.len(), conditions[0].type_.as_str()), (1, "ControllerResizeError"));
        let (kind, note) = cluster.wait_for_event("data", "VolumeResizeFailed").await;
        assert_eq!(kind, "Warning");
        assert!(note.contains("never fits on this node"), "{note}");
        assert_eq!(limits(&node, &claim).await, limits_of(16, 8192));

        try_patch(&cluster, "data", request("8Mi")).await.expect_err("less than the capacity");
        patch_claim(&cluster, "data", request("24Mi")).await;
        wait_capacity(&cluster, "data", "24Mi").await;
        assert_eq!(limits(&node, &claim).await, limits_of(24, 12288));

        cluster.create_claim("fixed", json!({})).await;
        cluster.wait_bound("fixed").await;
        try_patch(&cluster, "fixed", request("2Mi")).await.expect_err("its class does not allow expansion");
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_gets_the_inode_limit_of_its_attributes_class_and_of_another() {
    run_test("attributes", async |cluster| {
        let classes: Api<VolumeAttributesClass> = Api::all(cluster.admin.clone());
        for (name, parameters) in [
            ("few", json!({ "inodes": "100" })),
            ("many", json!({ "inodes": "5k" })),
            ("bad", json!({ "iops": "1" })),
        ] {
            let class = json!({
                "metadata": { "name": format!("attributes-{name}") },
                "driverName": cluster.driver.as_str(),
                "parameters": parameters,
            });
            cluster.create_object(classes.clone(), class).await;
        }
        let node = cluster.start_provisioner("a").await;
        let claim = cluster.create_claim("data", attributes("attributes-few")).await;
        let volume = cluster.wait_bound("data").await;
        let name = volume.spec.and_then(|spec| spec.volume_attributes_class_name);
        assert_eq!(name.as_deref(), Some("attributes-few"));
        assert_eq!(limits(&node, &claim).await, limits_of(1, 100));

        patch_claim(&cluster, "data", attributes("attributes-bad")).await;
        let infeasible = |status: &PersistentVolumeClaimStatus| {
            status.modify_volume_status.as_ref().is_some_and(|modify| modify.status == "Infeasible")
        };
        let status = wait_status(&cluster, "data", infeasible).await;
        assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some("attributes-few"));
        cluster.wait_for_event("data", "VolumeModifyFailed").await;

        patch_claim(&cluster, "data", attributes("attributes-many")).await;
        let status = wait_status(&cluster, "data", |status| {
            status.current_volume_attributes_class_name.as_deref() == Some("attributes-many")
        })
        .await;
        assert_eq!((status.modify_volume_status, status.conditions), (None, None));
        assert_eq!(limits(&node, &claim).await, limits_of(1, 5000));
        let volume = cluster.wait_bound("data").await;
        let name = volume.spec.and_then(|spec| spec.volume_attributes_class_name);
        assert_eq!(name.as_deref(), Some("attributes-many"));
        cluster.wait_for_event("data", "VolumeModifySuccessful").await;
        node.stop().await;
    });
}
