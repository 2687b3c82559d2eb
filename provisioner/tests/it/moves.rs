//! Moves of volumes between nodes in memory, through the public API.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::testing::objects::{
    DRIVER, NODE, sample_claim, sample_identity, sample_node, sample_uid, sample_volume,
};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    ErrorSource, MoveDeps, MoveError, MoveOutcome, MoveRejection, MoveRequest, StepMoment, StoreId,
    VolumeCarrier, VolumeCopy, VolumeId, VolumeStep, list_moves, move_volume,
};
use serde_json::{Value, json};

const TARGET: &str = "node-b";

/// The nodes that have the volume, and the copies that were asked for.
#[derive(Debug, Default)]
struct Nodes {
    have: BTreeMap<String, StoreId>,
    copies: Vec<VolumeCopy>,
}

/// A cluster with a bound claim on [`NODE`], whose nodes are in memory.
#[derive(Debug, Clone)]
struct Site {
    api: FakeApi,
    nodes: Arc<Mutex<Nodes>>,
    /// Another call cancels the move during the next copy.
    is_cancelled: Arc<AtomicBool>,
    /// The claim is deleted during the next copy.
    loses_claim: Arc<AtomicBool>,
    /// The other node does not answer when the move ends.
    is_settled: Arc<AtomicBool>,
    /// The node that does not answer at all.
    silent: Arc<Mutex<Option<&'static str>>>,
}

fn id() -> VolumeId {
    VolumeId::from_uid(&sample_uid(1)).expect("a UUID")
}

fn store(number: u32) -> StoreId {
    sample_uid(number).parse().expect("a UUID")
}

impl Site {
    fn new() -> Self {
        let api = FakeApi::default();
        let bound = json!({ "spec": { "volumeName": id().as_str() }, "status": { "phase": "Bound" } });
        api.create_object(ObjectKind::Claim, sample_claim(1, bound));
        let attributes = json!({ "store": store(1).as_str() });
        let patch = json!({
            "metadata": { "resourceVersion": null },
            "spec": { "csi": { "volumeAttributes": attributes }, "volumeAttributesClassName": "many" },
            "status": { "phase": "Bound" },
        });
        api.create_object(ObjectKind::Volume, sample_volume(1, patch));
        let class =
            json!({ "metadata": { "name": "many" }, "driverName": DRIVER, "parameters": { "inodes": "7k" } });
        api.create_object(ObjectKind::AttributesClass, class);
        let nodes = Nodes { have: BTreeMap::from([(NODE.to_owned(), store(1))]), ..Nodes::default() };
        let no = || Arc::new(AtomicBool::new(false));
        Self {
            api,
            nodes: Arc::new(Mutex::new(nodes)),
            is_cancelled: no(),
            loses_claim: no(),
            is_settled: Arc::new(AtomicBool::new(true)),
            silent: Arc::default(),
        }
    }

    fn deps(&self) -> MoveDeps {
        MoveDeps {
            client: self.api.client(),
            driver: sample_identity(NODE).driver,
            namespace: "nodekeel".into(),
            carrier: Arc::new(self.clone()),
            hook: None,
        }
    }

    async fn request(&self, target: Option<&str>) -> Result<MoveOutcome, MoveError> {
        move_volume(&self.deps(), &request(target)).await
    }

    fn volume(&self) -> Value {
        self.api.get_object(ObjectKind::Volume, id().as_str()).expect("a PersistentVolume")
    }

    fn node_of_volume(&self) -> Value {
        let terms = &self.volume()["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
        terms[0]["matchExpressions"][0]["values"][0].clone()
    }

    fn ask(&self, node: &str) -> Result<(), ErrorSource> {
        let is_silent = *self.silent.lock().expect("no panic") == Some(node);
        if is_silent { Err("no pod runs on it".into()) } else { Ok(()) }
    }

    /// The data are on this node alone, and so is the PersistentVolume; no record is left.
    fn assert_on(&self, node: &str) {
        let have: Vec<_> = self.nodes.lock().expect("no panic").have.keys().cloned().collect();
        assert_eq!((have, self.node_of_volume()), (vec![node.to_owned()], json!(node)));
        assert_eq!(self.api.list_objects(ObjectKind::ConfigMap), Vec::<Value>::new());
        assert_eq!(self.volume()["spec"]["persistentVolumeReclaimPolicy"], "Delete");
    }
}

fn request(target: Option<&str>) -> MoveRequest {
    MoveRequest { namespace: "default".into(), claim: "claim-1".into(), target: target.map(str::to_owned) }
}

#[async_trait]
impl VolumeCarrier for Site {
    async fn check(&self, _: &VolumeCopy) -> Result<(), ErrorSource> {
        Ok(())
    }

    async fn copy(&self, copy: &VolumeCopy) -> Result<StoreId, ErrorSource> {
        self.ask(&copy.target)?;
        if self.is_cancelled.swap(false, Ordering::Relaxed) {
            let cancelled = Box::pin(self.request(None)).await.expect("cancelled");
            assert_eq!(cancelled, MoveOutcome::Stayed(None));
        }
        if self.api.get_object(ObjectKind::Volume, copy.id.as_str()).is_some() {
            return Err("it has a PersistentVolume".into());
        }
        if self.loses_claim.swap(false, Ordering::Relaxed) {
            self.api.delete_object(ObjectKind::Claim, "claim-1");
        }
        let mut nodes = self.nodes.lock().expect("no panic");
        nodes.copies.push(copy.clone());
        nodes.have.insert(copy.target.clone(), store(2));
        Ok(store(2))
    }

    async fn settle(&self, node: &str, _: &VolumeId) -> Result<(), ErrorSource> {
        self.ask(node)?;
        if !self.is_settled.load(Ordering::Relaxed) {
            return Err("it does not answer".into());
        }
        if self.node_of_volume() == node {
            let has = self.nodes.lock().expect("no panic").have.contains_key(node);
            return if has { Ok(()) } else { Err("missing".into()) };
        }
        self.nodes.lock().expect("no panic").have.remove(node);
        Ok(())
    }
}

#[tokio::test]
async fn a_move_that_another_call_has_cancelled_is_not_begun_again() {
    let site = Site::new();
    site.is_cancelled.store(true, Ordering::Relaxed);
    let outcome = site.request(Some(TARGET)).await.expect("the move has ended");
    assert_eq!(outcome, MoveOutcome::Stayed(Some(MoveRejection::Ended)));
    site.assert_on(NODE);
    assert_eq!(site.api.request_count(RequestVerb::Create, ObjectKind::ConfigMap), 1);
    let moved = site.request(Some(TARGET)).await.expect("moved");
    assert_eq!(moved, MoveOutcome::Moved { source: NODE.into() });
    site.assert_on(TARGET);
}

#[tokio::test]
async fn a_copy_that_is_gone_when_its_move_is_resumed_is_made_again() {
    let site = Site::new();
    site.api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::Unreachable);
    site.request(Some(TARGET)).await.expect_err("the API server is unreachable");
    site.nodes.lock().unwrap().have.remove(TARGET).expect("a complete copy");
    site.request(Some(TARGET)).await.expect("moved");
    site.assert_on(TARGET);
}

#[tokio::test]
async fn what_changes_until_the_volume_is_deleted_is_kept_and_limits_its_copy() {
    let site = Site::new();
    let api = site.api.clone();
    let hook = move |step: VolumeStep, moment: StepMoment| {
        let patch = match (step, moment) {
            (VolumeStep::UpdateVolume, StepMoment::After) => json!({ "capacity": { "storage": "80Mi" } }),
            // It is being deleted.
            (VolumeStep::DeletePersistentVolume, StepMoment::After) => json!({ "mountOptions": ["noexec"] }),
            _ => return,
        };
        api.patch_object(ObjectKind::Volume, id().as_str(), json!({ "spec": patch }));
    };
    let deps = MoveDeps { hook: Some(Arc::new(hook)), ..site.deps() };
    move_volume(&deps, &request(Some(TARGET))).await.expect("moved");
    site.assert_on(TARGET);
    let spec = &site.volume()["spec"];
    assert_eq!((&spec["capacity"]["storage"], &spec["mountOptions"][0]), (&json!("80Mi"), &json!("noexec")));
    assert_eq!(spec["csi"]["volumeAttributes"]["store"], store(2).as_str());
    let limits = QuotaLimits { bytes: Some(Bytes(80 << 20)), inodes: Some(Inodes(7000)) };
    assert_eq!(site.nodes.lock().unwrap().copies[0].limits, limits);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_stops_its_own_move_alone() {
    let site = Site::new();
    let create = |number: u32, text: &str| {
        let name = format!("move-pvc-{}", sample_uid(number));
        let metadata = json!({ "name": name, "namespace": "nodekeel" });
        site.api.create_object(
            ObjectKind::ConfigMap,
            json!({ "metadata": metadata, "data": { "move.json": text } }),
        );
        name
    };
    let others = [create(2, "{"), create(3, r#"{ "format": 2, "more": true }"#)];
    site.request(Some(TARGET)).await.expect("moved");
    assert_eq!(site.node_of_volume(), TARGET);
    let listed = list_moves(&site.deps(), NODE).await.expect("a list");
    let named: Vec<_> = listed.into_iter().map(|it| it.expect_err("unreadable").to_string()).collect();
    assert!(others.iter().zip(&named).all(|(name, error)| error.contains(name)), "{named:?}");
    let ours = create(1, "{}");
    let error = site.request(Some(NODE)).await.expect_err("its record can't be read").to_string();
    assert!(error.contains(&ours), "{error}");
}

#[tokio::test]
async fn a_claim_that_is_deleted_during_the_copy_leaves_no_copy_or_its_node_is_named() {
    for answers in [true, false] {
        let site = Site::new();
        site.loses_claim.store(true, Ordering::Relaxed);
        site.is_settled.store(answers, Ordering::Relaxed);
        let outcome = site.request(Some(TARGET)).await.expect("the move has ended");
        let copy = (!answers).then(|| TARGET.to_owned());
        assert_eq!(outcome, MoveOutcome::ClaimDeleted { id: id(), copy });
        assert_eq!(site.nodes.lock().unwrap().have.contains_key(TARGET), !answers);
        // Deleted or retained on its node, by its policy.
        assert_eq!(site.node_of_volume(), NODE);
        assert_eq!(site.volume()["status"]["phase"], "Released");
        assert_eq!(site.api.list_objects(ObjectKind::ConfigMap), Vec::<Value>::new());
    }
}

#[tokio::test]
async fn a_volume_whose_move_for_another_claim_has_not_ended_is_not_moved() {
    let site = Site::new();
    site.api.fail_next(RequestVerb::Patch, ObjectKind::Volume, RequestFault::Unreachable);
    site.request(Some(TARGET)).await.expect_err("the API server is unreachable");
    let bound = json!({ "metadata": { "name": "other", "uid": sample_uid(9) }, "spec": { "volumeName": id().as_str() } });
    site.api.create_object(ObjectKind::Claim, sample_claim(2, bound));
    let other = MoveRequest { claim: "other".into(), ..request(Some(TARGET)) };
    let error = move_volume(&site.deps(), &other).await.expect_err("rejected");
    let is_so = matches!(error, MoveError::Rejected { source: MoveRejection::OtherClaim { .. }, .. });
    assert!(is_so, "{error:?}");
}

#[tokio::test]
async fn a_move_whose_other_node_is_gone_for_good_is_ended_by_its_cancellation() {
    // Before the copy, and when only the data on the first node are left to be removed.
    for (gone, expected, place) in [
        (TARGET, MoveOutcome::Stayed(None), NODE),
        (NODE, MoveOutcome::Moved { source: NODE.into() }, TARGET),
    ] {
        let site = Site::new();
        for node in [NODE, TARGET] {
            site.api.create_object(ObjectKind::Node, sample_node(node, json!({})));
        }
        *site.silent.lock().unwrap() = Some(gone);
        site.request(Some(TARGET)).await.expect_err("a node does not answer");
        let error = site.request(None).await.expect_err("it may come back").to_string();
        assert!(error.contains("delete its Node first"), "{error}");
        assert_eq!(site.api.list_objects(ObjectKind::ConfigMap).len(), 1);
        site.api.delete_object(ObjectKind::Node, gone);
        // Only where it is asked for.
        let repeated = site.request(Some(TARGET)).await.expect_err("it does not answer");
        assert!(!matches!(repeated, MoveError::Api { .. }), "{repeated}");
        assert_eq!(site.request(None).await.expect("ended"), expected);
        assert_eq!(
            (site.node_of_volume(), &site.volume()["spec"]["persistentVolumeReclaimPolicy"]),
            (json!(place), &json!("Delete"))
        );
        assert_eq!(site.api.list_objects(ObjectKind::ConfigMap), Vec::<Value>::new());
        assert!(site.nodes.lock().unwrap().have.contains_key(place));
    }
}
