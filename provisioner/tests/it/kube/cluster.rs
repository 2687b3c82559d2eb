//! Several nodes, an API server that restarts, and one that forbids everything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{
    Deps, DirStore, FINALIZER, NodeName, Provisioner, ProvisionerConfig, ProvisionerIdentity, RunError,
};
use serde_json::{Value, json};
use testbed::{FakeNode, Kube};
use tokio_util::sync::CancellationToken;

use super::harness::{
    TestCluster, TestNode, id, names, shared_control_plane, start_control_plane, test_runtime, user_client,
};

/// The node of a volume.
fn volume_node(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
    let terms = &affinity.expect("an affinity").node_selector_terms;
    let expressions = terms[0].match_expressions.as_ref().expect("an expression");
    expressions[0].values.as_ref().expect("a value")[0].clone()
}

fn create_three_nodes(kube: &Kube, cluster: &TestCluster) {
    for node in ["a", "b", "c"] {
        kube.create_fake_node(&FakeNode::new(cluster.node_name(node))).expect("a node");
    }
}

/// A provisioner on each node, a class whose claims wait for no consumer, and the change that gives a claim the class.
async fn start_three_nodes(cluster: &TestCluster, class: &str) -> ([TestNode; 3], Value) {
    cluster.create_class(class, json!({ "volumeBindingMode": "Immediate" })).await;
    let nodes = [
        cluster.start_provisioner("a").await,
        cluster.start_provisioner("b").await,
        cluster.start_provisioner("c").await,
    ];
    (nodes, json!({ "metadata": { "annotations": null }, "spec": { "storageClassName": class } }))
}

#[test]
#[ignore = "needs kube"]
fn of_three_nodes_exactly_one_provisions_each_claim_that_waits_for_no_consumer() {
    const CLAIMS: usize = 24;
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    let cluster = runtime.block_on(TestCluster::new(&kube, "immediate"));
    create_three_nodes(&kube, &cluster);
    runtime.block_on(async {
        let (nodes, patch) = start_three_nodes(&cluster, "immediate-now").await;
        let mut claims = Vec::new();
        for number in 0..CLAIMS {
            claims.push(cluster.create_claim(&format!("claim-{number}"), patch.clone()).await);
        }
        let mut placed: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (number, claim) in claims.iter().enumerate() {
            let name = format!("claim-{number}");
            placed
                .entry(volume_node(&cluster.wait_bound(&name).await))
                .or_default()
                .push(id(claim).to_string());
            cluster.wait_for_event(&name, "ProvisioningSucceeded").await;
            assert_eq!(cluster.event_reasons(&name).await, ["ProvisioningSucceeded"], "{name}");
        }
        for node in &nodes {
            let mut volumes = placed.remove(&node.name).unwrap_or_default();
            volumes.sort();
            assert_eq!(
                node.volumes(),
                volumes,
                "{} has the directories of its volumes and no others",
                node.name
            );
            assert_eq!(node.quota.list_projects().len(), volumes.len());
            println!("{}: {} of {CLAIMS}", node.name, volumes.len());
        }
        assert!(placed.is_empty(), "{placed:?}");
        assert_eq!(cluster.driver_volumes().await.len(), CLAIMS);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn an_api_server_killed_during_provisioning_loses_nothing() {
    const CLAIMS: usize = 30;
    let (mut kube, runtime) = (start_control_plane(), test_runtime());
    let cluster = runtime.block_on(TestCluster::new(&kube, "restart"));
    let (node, claims) = runtime.block_on(async {
        let node = cluster.start_provisioner("a").await;
        let mut claims = Vec::new();
        for number in 0..CLAIMS {
            claims.push(cluster.create_claim(&format!("claim-{number}"), json!({})).await);
        }
        (node, claims)
    });
    kube.restart_apiserver().expect("restart");
    runtime.block_on(async {
        for number in 0..CLAIMS {
            cluster.wait_bound(&format!("claim-{number}")).await;
        }
        let claims: Vec<_> = claims.iter().collect();
        assert_eq!(node.volumes(), cluster.volume_ids(&claims), "one directory for each claim");
        assert_eq!(
            (cluster.driver_volumes().await.len(), node.quota.list_projects().len()),
            (CLAIMS, CLAIMS)
        );
        for number in 0..CLAIMS {
            // An event is emitted once; it is lost if the server restarts at that moment. A write that the restart has
            // interrupted is a failure.
            let reasons = cluster.event_reasons(&format!("claim-{number}")).await;
            let succeeded = reasons.iter().filter(|reason| *reason == "ProvisioningSucceeded").count();
            let is_known =
                |reason: &String| ["ProvisioningSucceeded", "ProvisioningFailed"].contains(&&**reason);
            assert!(succeeded <= 1 && reasons.iter().all(is_known), "claim-{number}: {reasons:?}");
            cluster.delete_object(&cluster.claims(), &format!("claim-{number}")).await;
        }
    });
    kube.restart_apiserver().expect("restart");
    runtime.block_on(async {
        for claim in &claims {
            cluster.wait_deleted(&cluster.volumes(), id(claim).as_str()).await;
            // A write that the restart has interrupted is a failure, and is repeated.
            let reasons = cluster.event_reasons(id(claim).as_str()).await;
            assert!(reasons.iter().all(|reason| reason == "VolumeFailedDelete"), "{reasons:?}");
        }
        node.assert_empty().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_provisioner_without_rights_never_becomes_ready_and_changes_nothing() {
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    runtime.block_on(async {
        let cluster = TestCluster::new(&kube, "forbidden").await;
        let claim = cluster.create_claim("data", json!({})).await;
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = Arc::new(DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"));
        let identity = ProvisionerIdentity {
            driver: cluster.driver.clone(),
            node: NodeName::try_new(cluster.node_name("a")).expect("a node name"),
            finalizer: Some(FINALIZER.to_owned()),
            store: None,
        };
        let deps = Deps {
            client: user_client(&kube, "nobody").await,
            store,
            metrics: Arc::new(()),
            guard: None,
            registered: None,
            snapshots: None,
            hook: None,
        };
        let provisioner = Provisioner::new(ProvisionerConfig::new(identity), deps);
        let token = CancellationToken::new();
        let run = provisioner.run_until(token.clone(), || panic!("ready without a complete list"));
        let mut run = std::pin::pin!(run);
        // Long enough for several attempts.
        assert!(tokio::time::timeout(Duration::from_secs(5), &mut run).await.is_err());
        token.cancel();
        assert!(matches!(run.await, Err(RunError::Canceled)));
        assert_eq!(names(&base.path().join("volumes")), Vec::<String>::new());
        assert_eq!(cluster.event_reasons("data").await, Vec::<String>::new());

        // The right account provisions the same claim.
        let node: TestNode = cluster.start_provisioner("a").await;
        cluster.wait_bound("data").await;
        assert_eq!(node.volumes(), cluster.volume_ids(&[&claim]));
        node.stop().await;
    });
}
