//! Several nodes, an API server that goes away, and one that allows nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{Config, Deps, DirStore, FINALIZER, Identity, NodeName, Provisioner, RunError};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::harness::{Node, Scene, client, id, names, play, runtime, shared, start};

/// The one node that a volume is on.
fn place(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
    let terms = &affinity.expect("an affinity").node_selector_terms;
    let expressions = terms[0].match_expressions.as_ref().expect("an expression");
    expressions[0].values.as_ref().expect("a value")[0].clone()
}

#[test]
#[ignore = "needs kube"]
fn of_three_nodes_exactly_one_provisions_each_claim_that_waits_for_no_consumer() {
    const CLAIMS: usize = 24;
    play("immediate", async |scene| {
        scene.class("immediate-now", json!({ "volumeBindingMode": "Immediate" })).await;
        let nodes =
            [scene.provisioner("a").await, scene.provisioner("b").await, scene.provisioner("c").await];
        let patch =
            json!({ "metadata": { "annotations": null }, "spec": { "storageClassName": "immediate-now" } });
        let mut claims = Vec::new();
        for number in 0..CLAIMS {
            claims.push(scene.claim(&format!("claim-{number}"), patch.clone()).await);
        }
        let mut placed: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (number, claim) in claims.iter().enumerate() {
            let name = format!("claim-{number}");
            placed.entry(place(&scene.bound(&name).await)).or_default().push(id(claim).to_string());
            scene.told(&name, "ProvisioningSucceeded").await;
            assert_eq!(scene.events(&name).await, ["ProvisioningSucceeded"], "{name}");
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
            assert_eq!(node.quota.list().len(), volumes.len());
            println!("{}: {} of {CLAIMS}", node.name, volumes.len());
        }
        assert!(placed.is_empty(), "{placed:?}");
        assert_eq!(scene.own_volumes().await.len(), CLAIMS);
        for node in nodes {
            node.stop().await;
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn an_api_server_killed_while_volumes_are_made_changes_nothing_in_the_end() {
    const CLAIMS: usize = 30;
    let (mut kube, runtime) = (start(), runtime());
    let scene = runtime.block_on(Scene::new(&kube, "restart"));
    let (node, claims) = runtime.block_on(async {
        let node = scene.provisioner("a").await;
        let mut claims = Vec::new();
        for number in 0..CLAIMS {
            claims.push(scene.claim(&format!("claim-{number}"), json!({})).await);
        }
        (node, claims)
    });
    kube.restart_apiserver().expect("it comes back");
    runtime.block_on(async {
        for number in 0..CLAIMS {
            scene.bound(&format!("claim-{number}")).await;
        }
        let claims: Vec<_> = claims.iter().collect();
        assert_eq!(node.volumes(), scene.ids(&claims), "one directory for each claim");
        assert_eq!((scene.own_volumes().await.len(), node.quota.list().len()), (CLAIMS, CLAIMS));
        for number in 0..CLAIMS {
            // An event is told once; where the server went meanwhile, nobody hears it.
            let told = scene.events(&format!("claim-{number}")).await;
            assert!(told.is_empty() || told == ["ProvisioningSucceeded"], "claim-{number}: {told:?}");
            scene.delete(&scene.claims(), &format!("claim-{number}")).await;
        }
    });
    kube.restart_apiserver().expect("it comes back");
    runtime.block_on(async {
        for claim in &claims {
            scene.gone(&scene.volumes(), id(claim).as_str()).await;
            assert_eq!(scene.events(id(claim).as_str()).await, Vec::<String>::new(), "nothing has failed");
        }
        node.is_bare().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn who_may_do_nothing_gets_not_ready_and_touches_nothing() {
    let (kube, runtime) = (shared(), runtime());
    runtime.block_on(async {
        let scene = Scene::new(&kube, "forbidden").await;
        let claim = scene.claim("data", json!({})).await;
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = Arc::new(DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"));
        let identity = Identity {
            driver: scene.driver.clone(),
            node: NodeName::try_new(scene.node("a")).expect("a node's name"),
            finalizer: Some(FINALIZER.to_owned()),
        };
        let deps = Deps {
            client: client(&kube, "nobody").await,
            store,
            meter: Arc::new(()),
            guard: None,
            registered: None,
            hook: None,
        };
        let provisioner = Provisioner::new(Config::new(identity), deps);
        let token = CancellationToken::new();
        let run = provisioner.run_until(token.clone(), || panic!("it is ready without having seen anything"));
        let mut run = std::pin::pin!(run);
        // Long enough for several tries.
        assert!(tokio::time::timeout(Duration::from_secs(5), &mut run).await.is_err());
        token.cancel();
        assert!(matches!(run.await, Err(RunError::Cancelled)));
        assert_eq!(names(&base.path().join("volumes")), Vec::<String>::new());
        assert_eq!(scene.events("data").await, Vec::<String>::new());

        // The right account takes the same claim up.
        let node: Node = scene.provisioner("a").await;
        scene.bound("data").await;
        assert_eq!(node.volumes(), scene.ids(&[&claim]));
        node.stop().await;
    });
}
