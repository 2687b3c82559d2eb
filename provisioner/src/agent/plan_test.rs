use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::runtime::watcher::Event;
use nodekeel_fsquota::Bytes;
use proptest::prelude::*;
use serde_json::json;
use tokio::time::Instant;

use super::AgentConfig;
use super::agenda::{ActionOutcome, Agenda};
use super::facts::{ClaimKey, ClusterObjects, NodeFacts, PendingClaim, PendingPod, PodKey, VolumeFacts};
use super::mirror::ObjectMirror;
use super::node_leases::NodeLeases;
use super::plan::{
    ClusterCondition, MostFree, NodeProblem, PodProblem, UnservedReason, VolumeKey, find_conditions,
    has_room, most_free, no_room_note,
};
use crate::api::event::MAX_NOTE_BYTES;
use crate::identity::SELECTED_NODE;
use crate::image::ImageFormat;
use crate::testing::objects::{CLASS, DRIVER, sample_claim, sample_class, sample_node, sample_volume};
use crate::{DriverName, NodeName};

const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];

fn driver() -> DriverName {
    DriverName::try_new(DRIVER).expect("a driver name")
}

fn topology_key() -> String {
    driver().topology_key()
}

/// What a test knows of a node.
#[derive(Debug, Clone, Copy)]
struct TestNode {
    exists: bool,
    /// `None`: without CSINode.
    has_driver: Option<bool>,
    is_cordoned: bool,
    is_ready: bool,
}

impl TestNode {
    fn facts(self) -> NodeFacts {
        let mut taints = Vec::new();
        if !self.is_ready {
            taints.push(json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule" }));
        }
        let spec = json!({ "unschedulable": self.is_cordoned, "taints": taints });
        NodeFacts::extract(&sample_node("node", json!({ "spec": spec })))
    }

    fn can_serve(self) -> bool {
        self.exists && self.has_driver == Some(true) && self.is_ready && !self.is_cordoned
    }
}

#[derive(Debug, Clone)]
struct TestClaim {
    /// `None`: not annotated yet.
    driver: Option<bool>,
    selected: Option<usize>,
    has_volume: bool,
}

#[derive(Debug, Clone)]
struct TestCluster {
    nodes: [TestNode; 3],
    claims: Vec<TestClaim>,
    /// By node; whether it is removable.
    volumes: Vec<(usize, bool)>,
    waits_for_consumer: bool,
    /// The nodes that the class allows.
    allowed: Option<BTreeSet<usize>>,
}

impl TestCluster {
    fn claim(&self, number: usize) -> PendingClaim {
        let claim = &self.claims[number];
        let driver = claim.driver.map(|is_ours| if is_ours { DRIVER } else { "foreign.example" });
        let annotations = json!({
            "volume.kubernetes.io/storage-provisioner": driver,
            "volume.kubernetes.io/selected-node": claim.selected.map(|node| NODES[node]),
        });
        let number = u32::try_from(number).expect("few");
        let claim = sample_claim(number, json!({ "metadata": { "annotations": annotations } }));
        PendingClaim::extract(&claim).expect("pending")
    }

    fn objects(&self) -> ClusterObjects {
        let named = |number: usize| NODES[number].to_owned();
        let binding = if self.waits_for_consumer { "WaitForFirstConsumer" } else { "Immediate" };
        let topologies = self.allowed.as_ref().map(|allowed| {
            let values: Vec<&str> = allowed.iter().map(|node| NODES[*node]).collect();
            json!([{ "matchLabelExpressions": [{ "key": topology_key(), "values": values }] }])
        });
        let class = sample_class(json!({ "volumeBindingMode": binding, "allowedTopologies": topologies }));
        let numbers = 0..self.claims.len();
        let own = self.volumes.iter().enumerate().map(|(number, (node, is_removable))| {
            (format!("volume-{number}"), volume_facts(NODES[*node], *is_removable))
        });
        let of_claims = numbers.clone().filter(|number| self.claims[*number].has_volume);
        let of_claims =
            of_claims.map(|number| (self.claim(number).volume_name(), volume_facts("node-z", false)));
        let nodes = self.nodes.iter().enumerate();
        ClusterObjects {
            claims: numbers.map(|number| (format!("default/claim-{number}"), self.claim(number))).collect(),
            classes: [(CLASS.to_owned(), class)].into_iter().collect(),
            nodes: nodes
                .clone()
                .filter(|(_, it)| it.exists)
                .map(|(at, it)| (named(at), it.facts()))
                .collect(),
            csi_nodes: nodes.filter_map(|(at, it)| Some((named(at), it.has_driver?))).collect(),
            volumes: own.chain(of_claims).collect(),
            leases: NodeLeases::default(),
            pods: ObjectMirror::default(),
        }
    }
}

#[test]
fn a_claim_whose_source_only_its_node_has_keeps_the_node_while_that_exists() {
    let healthy = TestNode { exists: true, has_driver: Some(true), is_cordoned: false, is_ready: true };
    let driverless = TestNode { has_driver: Some(false), ..healthy };
    let claim = |at| TestClaim { driver: Some(true), selected: Some(at), has_volume: false };
    let cluster = |node| TestCluster {
        nodes: [node, healthy, healthy],
        claims: vec![claim(0)],
        volumes: vec![(0, false)],
        waits_for_consumer: true,
        allowed: None,
    };
    let source = |kind: &str, name: &str| {
        let group = (kind == "VolumeSnapshot").then_some("snapshot.storage.k8s.io");
        let source = json!({ "apiGroup": group, "kind": kind, "name": name });
        let claim = sample_claim(0, json!({ "spec": { "dataSourceRef": source } }));
        PendingClaim::extract(&claim).expect("pending")
    };
    for (node, claim, is_kept) in [
        (driverless, source("PersistentVolumeClaim", "bound-here"), true),
        // Its source may be on the node: a volume of a claim that is not bound yet, a snapshot.
        (driverless, source("PersistentVolumeClaim", "unknown"), true),
        (driverless, source("VolumeSnapshot", "any"), true),
        // The node that the scheduler selects next hands it over.
        (driverless, source("PersistentVolumeClaim", "bound-elsewhere"), false),
        (driverless, cluster(healthy).claim(0), false),
        (TestNode { exists: false, ..healthy }, source("PersistentVolumeClaim", "bound-here"), false),
        (TestNode { exists: false, ..healthy }, source("VolumeSnapshot", "any"), false),
    ] {
        let (text, mut objects) = (format!("{node:?}, {:?}", claim.source), cluster(node).objects());
        let bound = |name: &str, node: &str| {
            let key = ClaimKey { namespace: "default".into(), name: name.into(), uid: name.into() };
            (name.to_owned(), VolumeFacts { bound_claim: Some(key), ..volume_facts(node, false) })
        };
        objects.volumes =
            [bound("bound-here", "node-a"), bound("bound-elsewhere", "node-b")].into_iter().collect();
        objects.claims = [("default/claim-0".to_owned(), claim)].into_iter().collect();
        let found = find_conditions(&driver(), &objects);
        let of_claim = found.iter().find(|condition| !matches!(condition, ClusterCondition::NodeGone { .. }));
        match of_claim.expect("a condition") {
            ClusterCondition::UnservedClaim { reason, .. } => {
                assert!(is_kept, "{text}");
                let note = reason.to_string();
                assert!(note.contains("node node-a") && note.contains("does not have the driver"), "{note}");
            }
            other => assert!(
                !is_kept && matches!(other, ClusterCondition::UnusableNode { .. }),
                "{text}: {other:?}"
            ),
        }
    }
}

/// A pod with these volumes, and a class whose claims wait for it, in a cluster of three nodes.
fn objects_of_pod(volumes: serde_json::Value, node: Option<&str>) -> ClusterObjects {
    let pod = json!({
        "metadata": { "namespace": "default", "name": "web", "uid": "pod" },
        "spec": { "nodeName": node, "containers": [], "volumes": volumes },
        "status": { "phase": "Pending" },
    });
    let pod = serde_json::from_value(pod).expect("a pod");
    let node = TestNode { exists: true, has_driver: Some(true), is_cordoned: false, is_ready: true };
    let cluster = TestCluster {
        nodes: [node; 3],
        claims: Vec::new(),
        volumes: Vec::new(),
        waits_for_consumer: true,
        allowed: None,
    };
    let pods = PendingPod::extract(&pod).map(|pod| ("default/web".to_owned(), pod)).into_iter().collect();
    ClusterObjects { pods, ..cluster.objects() }
}

/// The volumes of a pod that uses the sample claims with these numbers.
fn using(claims: &[u32]) -> serde_json::Value {
    let volume = |number: &u32| json!({ "name": "data", "persistentVolumeClaim": { "claimName": format!("claim-{number}") } });
    claims.iter().map(volume).collect()
}

/// The claim of so many GiB, on no node.
fn waiting_claim(number: u32, size: u64) -> (String, PendingClaim) {
    let patch = json!({
        "metadata": { "annotations": { "volume.kubernetes.io/selected-node": null } },
        "spec": { "resources": { "requests": { "storage": format!("{size}Gi") } } },
    });
    (format!("default/claim-{number}"), PendingClaim::extract(&sample_claim(number, patch)).expect("pending"))
}

/// The volume of a claim, on a node.
fn bound_volume(number: u32, node: &str) -> (String, VolumeFacts) {
    let claim = waiting_claim(number, 1).1;
    (claim.volume_name(), VolumeFacts { bound_claim: Some(claim.key), ..volume_facts(node, false) })
}

fn pod_problems(objects: &ClusterObjects) -> Vec<PodProblem> {
    let problem = |condition| match condition {
        ClusterCondition::StuckPod { problem, .. } => Some(problem),
        _ => None,
    };
    find_conditions(&driver(), objects).into_iter().filter_map(problem).collect()
}

fn capacity(size: u64) -> CSIStorageCapacity {
    let size = format!("{size}Gi");
    let object = json!({ "storageClassName": CLASS, "capacity": "9Ti", "maximumVolumeSize": size });
    serde_json::from_value(object).expect("a capacity")
}

#[test]
fn no_pod_with_two_claims_is_stuck_without_an_event_however_the_space_is_split_over_three_nodes() {
    let (mut stuck, mut placed, mut unplaced) = (0, 0, 0);
    for case in 0..5 * 5 * 5 * 3 * 3 {
        let free = [case % 5, case / 5 % 5, case / 25 % 5];
        let sizes = [1 + case / 125 % 3, 1 + case / 375];
        // The scheduler takes any node that has room for each claim alone, and the node either of them first.
        let fits = |at: &usize| sizes.iter().all(|size| *size <= free[*at]);
        let candidates: Vec<usize> = (0..3).filter(fits).collect();
        // It reports that itself.
        unplaced += usize::from(candidates.is_empty());
        for (at, first) in candidates.into_iter().flat_map(|at| [(at, 0), (at, 1)]) {
            let second = 1 - first;
            let left = free[at] - sizes[first];
            let mut objects = objects_of_pod(using(&[0, 1]), None);
            let number = |claim: usize| u32::try_from(claim).expect("small");
            let mut volumes = vec![bound_volume(number(first), NODES[at])];
            if sizes[second] <= left {
                volumes.push(bound_volume(number(second), NODES[at]));
            } else {
                let claim = waiting_claim(number(second), sizes[second]);
                objects.claims = [claim].into_iter().collect();
            }
            objects.volumes = volumes.into_iter().collect();
            let text = format!("{sizes:?} on {} of {free:?}, {first} first", NODES[at]);
            if sizes[second] <= left {
                placed += 1;
                assert_eq!(pod_problems(&objects), [], "{text}");
                continue;
            }
            stuck += 1;
            let problems = pod_problems(&objects);
            let [problem @ PodProblem::NoRoom { node, claim, others, .. }] = &problems[..] else {
                panic!("{text}: {problems:?}")
            };
            let named = [claim, &others[0]].map(|name| name.trim_start_matches("claim-").to_owned());
            assert_eq!((&**node, named), (NODES[at], [first, second].map(|it| it.to_string())), "{text}");
            let (_, claim) = objects.claims.iter().next().expect("a claim");
            assert!(
                !has_room(&[capacity(left)], claim) && has_room(&[capacity(sizes[second])], claim),
                "{text}"
            );
            let typed = format!("kubectl -n default delete pvc/claim-{first} pod/web`");
            assert!(problem.to_string().contains(&typed), "{problem}");
        }
    }
    assert!(stuck > 100 && placed > 100 && unplaced > 100, "{stuck} {placed} {unplaced}");
}

#[test]
fn a_pod_that_bypasses_the_scheduler_or_whose_claims_are_apart_is_reported() {
    let volumes =
        |volumes: &[(u32, &str)]| volumes.iter().map(|(it, node)| bound_volume(*it, node)).collect();
    // Any of several may be the one without room.
    let mut objects = objects_of_pod(using(&[1, 2, 3]), None);
    (objects.volumes, objects.claims) =
        (volumes(&[(1, "node-a")]), [waiting_claim(2, 1), waiting_claim(3, 9)].into_iter().collect());
    let problems = pod_problems(&objects);
    assert!(
        matches!(&problems[..], [PodProblem::NoRoom { others, .. }] if others.len() == 2),
        "{problems:?}"
    );
    // On one node, and not the driver's.
    let mut objects = objects_of_pod(using(&[1, 2, 9]), None);
    objects.volumes = volumes(&[(1, "node-a"), (2, "node-a")]);
    assert_eq!(pod_problems(&objects), []);
    objects.volumes = volumes(&[(1, "node-a"), (2, "node-b")]);
    let problems = pod_problems(&objects);
    assert!(matches!(&problems[..], [PodProblem::Apart { .. }]), "{problems:?}");
    assert!(
        problems[0]
            .to_string()
            .starts_with("claim claim-1 is on node node-a, and claim claim-2 on node node-b")
    );

    for (pod_volumes, node, is_reported) in [
        (using(&[1]), Some("node-b"), true),
        // The scheduler is at work.
        (using(&[1]), None, false),
        (json!([{ "name": "scratch", "emptyDir": {} }]), Some("node-b"), false),
    ] {
        let mut objects = objects_of_pod(pod_volumes, node);
        objects.claims = [waiting_claim(1, 1)].into_iter().collect();
        let problems = pod_problems(&objects);
        assert_eq!(problems.len(), usize::from(is_reported), "{problems:?}");
        let typed = "`kubectl -n default annotate pvc claim-1 volume.kubernetes.io/selected-node=node-b`";
        assert!(problems.iter().all(|problem| problem.to_string().contains(typed)), "{problems:?}");
    }
    // The claim of an ephemeral volume; its node is at work.
    let ephemeral = json!([{ "name": "data", "ephemeral": {} }]);
    let mut objects = objects_of_pod(ephemeral, Some("node-b"));
    let (_, mut claim) = waiting_claim(1, 1);
    claim.key.name = "web-data".to_owned();
    objects.claims = [("default/web-data".to_owned(), claim.clone())].into_iter().collect();
    assert_eq!(pod_problems(&objects).len(), 1);
    claim.selected_node = Some("node-b".to_owned());
    objects.claims = [("default/web-data".to_owned(), claim)].into_iter().collect();
    assert_eq!(pod_problems(&objects), []);
}

#[test]
fn the_longest_names_cut_no_command_of_a_note() {
    let [long, short] = [253, 63].map(|length| "n".repeat(length));
    let pod = PodKey { namespace: short.clone(), name: long.clone(), uid: String::new() };
    let (claim, node, others) = (long.clone(), short.clone(), vec![long.clone(), long.clone()]);
    let no_room = PodProblem::NoRoom { pod: pod.clone(), claim, node, others };
    let delete = format!("`kubectl cordon {short} && kubectl -n {short} delete pvc/{long} pod/{long}`");
    let unscheduled = PodProblem::Unscheduled { pod, claim: long.clone(), node: short.clone() };
    let select = format!("`kubectl -n {short} annotate pvc {long} {SELECTED_NODE}={short}`");
    for (problem, commands) in [
        (no_room, vec![delete, format!("`kubectl uncordon {short}` once the pod runs")]),
        (unscheduled, vec![select]),
    ] {
        let note = problem.to_string();
        assert!(note.len() <= MAX_NOTE_BYTES, "{}", note.len());
        assert!(commands.iter().all(|command| note.contains(command)), "{note}");
    }
}

/// The Lease of a node that says so of its stores, in its labels.
fn lease(node: &str, labels: serde_json::Value) -> Lease {
    let lease = json!({
        "metadata": { "name": format!("{DRIVER}-{node}"), "labels": labels },
        "spec": { "holderIdentity": node, "renewTime": "2001-01-01T00:00:00.000000Z" },
    });
    serde_json::from_value(lease).expect("a Lease")
}

#[test]
fn a_claim_that_no_scheduler_places_is_unserved_exactly_if_no_node_that_may_take_it_has_room() {
    let gib = |count: u64| (count << 30).to_string();
    let free = |size: String| json!({ format!("{DRIVER}/free"): size });
    let fast =
        |size: &str| json!({ format!("{DRIVER}/free"): gib(9), format!("stores.{DRIVER}/fast"): size });
    // The labels of the three nodes, of which the last one is tainted; the store of the class; whether the claim of 4 GiB is
    // unserved, and who has the most.
    for (labels, store, expected) in [
        ([free(gib(1)), free(gib(3)), free(gib(9))], "", Some(("node-b", 3))),
        ([free(gib(1)), free(gib(4)), free(gib(9))], "", None),
        ([free("0".into()), free("0".into()), free(gib(9))], "", Some(("node-a", 0))),
        // A node of another release, or with a store without a limit, doesn't say.
        ([free(gib(1)), json!({}), free(gib(9))], "", None),
        ([free(gib(1)), free("much".into()), free(gib(9))], "", None),
        ([fast(&gib(1)), free(gib(9)), fast(&gib(9))], "fast", Some(("node-a", 1))),
        ([fast(&gib(5)), free(gib(9)), fast(&gib(9))], "fast", None),
        ([fast(""), free(gib(9)), fast(&gib(9))], "fast", None),
    ] {
        let text = format!("{labels:?} {store}");
        let node = TestNode { exists: true, has_driver: Some(true), is_cordoned: false, is_ready: true };
        let cluster = TestCluster {
            nodes: [node; 3],
            claims: Vec::new(),
            volumes: Vec::new(),
            waits_for_consumer: false,
            allowed: None,
        };
        let mut objects = cluster.objects();
        let class = json!({ "volumeBindingMode": "Immediate", "parameters": { "store": store } });
        let class = sample_class(class);
        objects.classes = [(CLASS.to_owned(), class.clone())].into_iter().collect();
        objects.claims = [waiting_claim(1, 4)].into_iter().collect();
        let tainted = json!({ "spec": { "taints": [{ "key": "k", "effect": "NoSchedule" }] } });
        let tainted = NodeFacts::extract(&sample_node("node-c", tainted));
        objects.nodes =
            NODES.map(str::to_owned).into_iter().zip([node.facts(), node.facts(), tainted]).collect();
        for (node, labels) in NODES.into_iter().zip(labels) {
            let seen = objects.leases.observe(&driver(), Event::Apply(lease(node, labels)), Instant::now());
            assert!(seen, "{text}");
        }
        let reasons: Vec<_> = find_conditions(&driver(), &objects)
            .into_iter()
            .map(|condition| match condition {
                ClusterCondition::UnservedClaim { reason, .. } => reason,
                other => panic!("{text}: {other:?}"),
            })
            .collect();
        let size = Bytes(4 << 30);
        let no_room = |_| UnservedReason::NoRoom { class: CLASS.to_owned(), size };
        assert_eq!(reasons, expected.map(no_room).into_iter().collect::<Vec<_>>(), "{text}");
        if let Some((node, free)) = expected {
            let most = MostFree { node: node.to_owned(), free: Bytes(free << 30) };
            let (note, said) = (no_room_note(&reasons[0], &most), if free == 0 { "/readyz" } else { node });
            assert!(note.contains("for the 4Gi that") && note.contains(said), "{note}");
            assert_eq!(most_free(&driver(), &objects, &class), Some(most), "{text}");
        }
    }
}

#[test]
fn a_claim_of_a_strict_class_is_unserved_exactly_if_no_node_can_make_its_file_system() {
    let lacking = |formats: &str| json!({ format!("{DRIVER}/lacking"): formats, format!("{DRIVER}/free"): "99999999999" });
    let able = || json!({ format!("{DRIVER}/free"): "99999999999" });
    let fast = |formats: Option<&str>| {
        let mut labels = json!({ format!("stores.{DRIVER}/fast"): "99999999999" });
        if let Some(formats) = formats {
            labels[format!("lacking.{DRIVER}/fast")] = formats.into();
        }
        labels
    };
    let (ext4, xfs) = (Some((ImageFormat::Ext4, "mkfs.ext4")), Some((ImageFormat::Xfs, "mkfs.xfs")));
    let strict = json!({ "strict": "true" });
    let strict_fast = json!({ "strict": "true", "store": "fast" });
    let strict_xfs = json!({ "strict": "true", "csi.storage.k8s.io/fstype": "xfs" });
    // The labels of the three nodes, the parameters of the class, the specification of the claim, and what is missing.
    for (labels, parameters, spec, expected) in [
        ([lacking("ext4"), lacking("ext4.xfs"), lacking("future.ext4")], &strict, json!({}), ext4),
        ([lacking("ext4"), lacking("ext4.xfs"), lacking("xfs")], &strict, json!({}), None),
        // A node of another release doesn't say.
        ([lacking("ext4"), lacking("ext4"), json!({})], &strict, json!({}), None),
        ([lacking("ext4"), lacking("ext4"), able()], &strict, json!({}), None),
        ([lacking("ext4"), lacking("ext4"), lacking("ext4")], &json!({}), json!({}), None),
        (
            [lacking("ext4"), lacking("ext4"), lacking("ext4")],
            &strict,
            json!({ "volumeMode": "Block" }),
            None,
        ),
        ([lacking("xfs"), lacking("ext4.xfs"), lacking("xfs")], &strict_xfs, json!({}), xfs),
        ([lacking("ext4"), lacking("ext4.xfs"), lacking("ext4")], &strict_xfs, json!({}), None),
        // Only one node has the store, and can't; then another one can.
        ([fast(Some("ext4")), able(), able()], &strict_fast, json!({}), ext4),
        ([fast(Some("ext4")), fast(None), able()], &strict_fast, json!({}), None),
    ] {
        for mode in ["Immediate", "WaitForFirstConsumer"] {
            let text = format!("{labels:?} {parameters} {spec} {mode}");
            let node = TestNode { exists: true, has_driver: Some(true), is_cordoned: false, is_ready: true };
            let cluster = TestCluster {
                nodes: [node; 3],
                claims: Vec::new(),
                volumes: Vec::new(),
                waits_for_consumer: false,
                allowed: None,
            };
            let mut objects = cluster.objects();
            let class = sample_class(json!({ "volumeBindingMode": mode, "parameters": parameters }));
            objects.classes = [(CLASS.to_owned(), class)].into_iter().collect();
            let unselected = json!({ "metadata": { "annotations": { SELECTED_NODE: null } }, "spec": spec });
            let claim = PendingClaim::extract(&sample_claim(1, unselected)).expect("pending");
            objects.claims = [("default/claim-1".to_owned(), claim)].into_iter().collect();
            for (node, labels) in NODES.into_iter().zip(labels.clone()) {
                objects.leases.observe(&driver(), Event::Apply(lease(node, labels)), Instant::now());
            }
            let found = find_conditions(&driver(), &objects).into_iter().map(|condition| match condition {
                ClusterCondition::UnservedClaim { reason, .. } => reason,
                other => panic!("{text}: {other:?}"),
            });
            let missing = |(format, program)| {
                let class = CLASS.to_owned();
                UnservedReason::FormatMissing { class, format, program }
            };
            assert_eq!(
                found.collect::<Vec<_>>(),
                expected.map(missing).into_iter().collect::<Vec<_>>(),
                "{text}"
            );
        }
    }
}

fn volume_facts(node: &str, is_removable: bool) -> VolumeFacts {
    let node = NodeName::try_new(node).expect("a node name");
    VolumeFacts { uid: "uid".to_owned(), node, bound_claim: None, is_removable }
}

fn any_node() -> impl Strategy<Value = TestNode> {
    (any::<[bool; 3]>(), any::<Option<bool>>()).prop_map(|([exists, is_cordoned, is_ready], has_driver)| {
        TestNode { exists, has_driver, is_cordoned, is_ready }
    })
}

fn any_cluster() -> impl Strategy<Value = TestCluster> {
    let claim = (any::<Option<bool>>(), proptest::option::of(0..3_usize), any::<bool>());
    let claim = claim.prop_map(|(driver, selected, has_volume)| TestClaim { driver, selected, has_volume });
    let allowed = proptest::option::of(proptest::collection::btree_set(0..3_usize, 1..3));
    let volumes = proptest::collection::vec((0..3_usize, any::<bool>()), 0..4);
    (
        [any_node(), any_node(), any_node()],
        proptest::collection::vec(claim, 0..4),
        volumes,
        any::<bool>(),
        allowed,
    )
        .prop_map(|(nodes, claims, volumes, waits_for_consumer, allowed)| TestCluster {
            nodes,
            claims,
            volumes,
            waits_for_consumer,
            allowed,
        })
}

proptest! {
    #[test]
    fn a_claim_needs_the_agent_exactly_if_its_node_or_every_node_cannot_serve_it(cluster in any_cluster()) {
        let found = find_conditions(&driver(), &cluster.objects());
        for (number, claim) in cluster.claims.iter().enumerate() {
            let key = cluster.claim(number).key;
            let of_claim: Vec<_> = found.iter().filter(|condition| match condition {
                ClusterCondition::UnusableNode { claim, .. } | ClusterCondition::UnservedClaim { claim, .. } => {
                    *claim == key
                }
                _ => false,
            }).collect();
            let is_ours = claim.driver.unwrap_or(true) && !claim.has_volume;
            let allows = |node: &usize| cluster.allowed.as_ref().is_none_or(|allowed| allowed.contains(node));
            let hosts = |node: &usize| cluster.nodes[*node].exists && cluster.nodes[*node].has_driver == Some(true);
            let is_served = match claim.selected {
                Some(node) => cluster.nodes[node].can_serve(),
                None if cluster.waits_for_consumer => (0..3).any(|node| hosts(&node) && allows(&node)),
                None => (0..3).any(|node| cluster.nodes[node].can_serve() && allows(&node)),
            };
            prop_assert_eq!(of_claim.len(), usize::from(is_ours && !is_served), "{:?}", of_claim);
            let is_deselection = matches!(of_claim.first(), Some(ClusterCondition::UnusableNode { .. }));
            prop_assert_eq!(is_deselection, is_ours && !is_served && claim.selected.is_some());
        }
    }

    #[test]
    fn a_volume_is_gone_only_if_neither_its_node_nor_the_csinode_exists(cluster in any_cluster()) {
        let found = find_conditions(&driver(), &cluster.objects());
        for (number, (at, is_removable)) in cluster.volumes.iter().enumerate() {
            let volume = VolumeKey { name: format!("volume-{number}"), uid: "uid".to_owned() };
            let node = NodeName::try_new(NODES[*at]).expect("a node name");
            let is_gone = !cluster.nodes[*at].exists && cluster.nodes[*at].has_driver.is_none();
            let gone = ClusterCondition::NodeGone { volume: volume.clone(), node: node.clone() };
            prop_assert_eq!(found.contains(&gone), is_gone);
            let removable = ClusterCondition::Removable { volume, node };
            prop_assert_eq!(found.contains(&removable), is_gone && *is_removable);
        }
    }

    #[test]
    fn nothing_is_due_before_it_has_lasted_for_its_delay(
        changes in proptest::collection::vec((0..4_u64, any::<[bool; 4]>()), 1..40),
        remove_after in proptest::option::of(0..900_u64),
    ) {
        let mut config = AgentConfig::new(driver(), "agent");
        config.remove_after = remove_after.map(Duration::from_secs);
        let delays = [Some(5), Some(5), Some(300), remove_after.map(|delay| delay.max(300))];
        let (mut agenda, start) = (Agenda::new(&config), Instant::now());
        let (mut now, mut since) = (start, BTreeMap::new());
        for (pause, present) in changes {
            now += Duration::from_secs([1, 4, 120, 400][usize::try_from(pause).expect("small")]);
            let due = agenda.due_conditions(now);
            for (condition, delay) in all_conditions().into_iter().zip(delays) {
                let age = since.get(&condition).map(|since: &Instant| now - *since);
                let is_due = age.zip(delay).is_some_and(|(age, delay)| age.as_secs() >= delay);
                prop_assert_eq!(due.contains(&condition), is_due, "{:?} after {:?}", condition, age);
            }
            let conditions: BTreeSet<_> =
                all_conditions().into_iter().zip(present).filter(|(_, it)| *it).map(|(it, _)| it).collect();
            since.retain(|condition, _| conditions.contains(condition));
            for condition in &conditions {
                since.entry(condition.clone()).or_insert(now);
            }
            agenda.update(conditions, |_| true, now);
            prop_assert!(agenda.next_due().is_none_or(|due| due > start));
        }
    }
}

/// One condition of each kind.
fn all_conditions() -> [ClusterCondition; 4] {
    let claim = ClaimKey { namespace: "default".into(), name: "claim".into(), uid: "uid".into() };
    let volume = VolumeKey { name: "volume".into(), uid: "uid".into() };
    let node = NodeName::try_new("node-a").expect("a node name");
    [
        ClusterCondition::UnusableNode {
            claim: claim.clone(),
            node: "node-a".into(),
            problem: NodeProblem::Deleted,
        },
        ClusterCondition::UnservedClaim { claim, reason: UnservedReason::DriverMissing },
        ClusterCondition::NodeGone { volume: volume.clone(), node: node.clone() },
        ClusterCondition::Removable { volume, node },
    ]
}

#[test]
fn a_node_that_is_selected_again_and_again_is_deselected_after_growing_delays() {
    let mut agenda = Agenda::new(&AgentConfig::new(driver(), "agent"));
    let [condition, ..] = all_conditions();
    let mut now = Instant::now();
    let delays: Vec<u64> = (0..8)
        .map(|_| {
            agenda.update(BTreeSet::from([condition.clone()]), |_| true, now);
            let due = agenda.next_due().expect("due");
            let delay = due - now;
            now = due;
            agenda.record_outcome(&condition, ActionOutcome::Deselected, now);
            agenda.update(BTreeSet::new(), |_| true, now);
            delay.as_secs()
        })
        .collect();
    assert_eq!(delays, [5, 10, 20, 40, 80, 160, 300, 300]);
    agenda.update(BTreeSet::new(), |_| false, now);
    agenda.update(BTreeSet::from([condition]), |_| true, now);
    assert_eq!(agenda.next_due(), Some(now + Duration::from_secs(5)), "it had a volume in between");
}

#[test]
fn without_a_grace_period_a_repeated_deselection_waits_all_the_same() {
    let mut config = AgentConfig::new(driver(), "agent");
    config.grace_period = Duration::ZERO;
    let mut agenda = Agenda::new(&config);
    let [condition, ..] = all_conditions();
    let now = Instant::now();
    let delays = [(); 4].map(|()| {
        agenda.update(BTreeSet::from([condition.clone()]), |_| true, now);
        let delay = agenda.next_due().expect("due") - now;
        agenda.record_outcome(&condition, ActionOutcome::Deselected, now);
        agenda.update(BTreeSet::new(), |_| true, now);
        delay.as_secs()
    });
    assert_eq!(delays, [0, 2, 4, 8]);
}

#[test]
fn after_a_watch_has_failed_each_delay_starts_again() {
    let mut agenda = Agenda::new(&AgentConfig::new(driver(), "agent"));
    let [done, _, gone, _] = all_conditions();
    let now = Instant::now();
    agenda.update(BTreeSet::from([done.clone(), gone.clone()]), |_| true, now);
    agenda.record_outcome(&done, ActionOutcome::Done, now);
    let later = now + Duration::from_secs(299);
    agenda.restart_delays(later);
    assert_eq!(agenda.next_due(), Some(later + Duration::from_secs(300)));
    assert_eq!(agenda.due_conditions(later + Duration::from_secs(300)), [gone]);
}

#[test]
fn a_report_is_not_repeated_and_a_failed_one_is_retried() {
    let mut agenda = Agenda::new(&AgentConfig::new(driver(), "agent"));
    let [_, condition, ..] = all_conditions();
    let now = Instant::now();
    agenda.update(BTreeSet::from([condition.clone()]), |_| true, now);
    let later = now + Duration::from_secs(5);
    assert_eq!(agenda.due_conditions(later), std::slice::from_ref(&condition));
    assert_eq!(agenda.reached_conditions(now).count(), 0);
    agenda.record_outcome(&condition, ActionOutcome::Retry, later);
    assert_eq!(agenda.next_due(), Some(later + Duration::from_secs(1)));
    agenda.record_outcome(&condition, ActionOutcome::Done, later);
    agenda.update(BTreeSet::from([condition]), |_| true, later);
    assert_eq!(agenda.next_due(), None);
    assert_eq!(agenda.reached_conditions(later).count(), 1);
}

#[test]
fn only_what_the_nodes_own_provisioner_would_delete_is_removable() {
    let affinity = |values: &[&str]| {
        let label = json!({ "key": topology_key(), "operator": "In", "values": values });
        json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [label] }] } })
    };
    let extract = |patch: serde_json::Value| VolumeFacts::extract(&driver(), &sample_volume(1, patch));
    let spec = |field: &str, value: serde_json::Value| {
        let mut spec = json!({ "nodeAffinity": affinity(&["node-a"]) });
        spec[field] = value;
        json!({ "spec": spec })
    };
    let released = extract(spec("nodeAffinity", affinity(&["node-a"]))).expect("of the driver");
    assert!(released.is_removable && released.bound_claim.is_none());
    let bound = json!({ "spec": { "nodeAffinity": affinity(&["node-a"]) }, "status": { "phase": "Bound" } });
    let bound = extract(bound).expect("of the driver");
    assert!(!bound.is_removable && bound.bound_claim.is_some_and(|claim| claim.name == "claim-1"));
    let retained = extract(spec("persistentVolumeReclaimPolicy", json!("Retain"))).expect("of the driver");
    assert!(!retained.is_removable);
    let hostname = extract(json!({})).expect("of the driver");
    assert!(!hostname.is_removable, "a hostname may differ from the node's name");
    assert_eq!(extract(spec("csi", json!({ "driver": "foreign.example" }))), None);
    assert_eq!(extract(spec("nodeAffinity", affinity(&["node-a", "node-b"]))), None);
    assert_eq!(extract(json!({ "spec": { "nodeAffinity": null } })), None);
}
