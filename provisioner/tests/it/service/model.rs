//! Random sequences of changes of claims and volumes, with crashes, faults and stale caches: nothing leaks,
//! and no claim is provisioned twice.

use nodekeel_provisioner::VolumeStore as _;
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use proptest::prelude::*;
use serde_json::json;

use super::harness::{ApiFixture as _, TestNode, advance_time, id, test_api, wait_until};

/// The number of claim names.
const CLAIMS: u32 = 4;

#[derive(Debug, Clone)]
enum ModelOp {
    Create(u32),
    DeleteClaim(u32),
    DeleteVolume(u32),
    Fail(RequestVerb, ObjectKind, RequestFault),
    StoreFails,
    PauseWatches(ObjectKind),
    ResumeWatches(ObjectKind),
    ResetWatches,
    Crash,
    Stop,
    AdvanceTime(u64),
}

fn op_strategy() -> impl Strategy<Value = ModelOp> {
    let number = 0..CLAIMS;
    let kind = prop_oneof![Just(ObjectKind::Claim), Just(ObjectKind::Volume)];
    let any_kind = prop_oneof![
        Just(ObjectKind::Claim),
        Just(ObjectKind::Volume),
        Just(ObjectKind::Class),
        Just(ObjectKind::Event)
    ];
    let verb = prop_oneof![
        Just(RequestVerb::Get),
        Just(RequestVerb::List),
        Just(RequestVerb::Watch),
        Just(RequestVerb::Create),
        Just(RequestVerb::Patch),
        Just(RequestVerb::Delete),
    ];
    let fault = prop_oneof![
        Just(RequestFault::ResponseLost),
        Just(RequestFault::Unreachable),
        Just(RequestFault::Status(500)),
        Just(RequestFault::Status(403)),
    ];
    prop_oneof![
        4 => number.clone().prop_map(ModelOp::Create),
        3 => number.clone().prop_map(ModelOp::DeleteClaim),
        2 => number.prop_map(ModelOp::DeleteVolume),
        4 => (verb, any_kind, fault).prop_map(|(verb, kind, fault)| ModelOp::Fail(verb, kind, fault)),
        1 => Just(ModelOp::StoreFails),
        2 => kind.clone().prop_map(ModelOp::PauseWatches),
        2 => kind.prop_map(ModelOp::ResumeWatches),
        1 => Just(ModelOp::ResetWatches),
        2 => Just(ModelOp::Crash),
        1 => Just(ModelOp::Stop),
        4 => (0_u64..20).prop_map(ModelOp::AdvanceTime),
    ]
}

/// Each new claim gets a new UID, as from the API server.
#[derive(Default)]
struct ModelWorld {
    created_claims: u32,
    numbers: [u32; CLAIMS as usize],
}

impl ModelWorld {
    async fn apply_op(
        &mut self,
        op: ModelOp,
        api: &FakeApi,
        store: &MemStore,
        node: Option<TestNode>,
    ) -> Option<TestNode> {
        match op {
            ModelOp::Create(slot) if api.get_object(ObjectKind::Claim, &format!("slot-{slot}")).is_none() => {
                self.created_claims += 1;
                self.numbers[slot as usize] = self.created_claims;
                api.create_claim(
                    self.created_claims,
                    json!({ "metadata": { "name": format!("slot-{slot}") } }),
                );
            }
            ModelOp::Create(_) => {}
            ModelOp::DeleteClaim(slot) => api.delete_object(ObjectKind::Claim, &format!("slot-{slot}")),
            ModelOp::DeleteVolume(slot) => {
                api.delete_object(ObjectKind::Volume, id(self.numbers[slot as usize]).as_str())
            }
            ModelOp::Fail(verb, kind, fault) => api.fail_next(verb, kind, fault),
            ModelOp::StoreFails => store.fail_next("a fault"),
            ModelOp::PauseWatches(kind) => api.pause_watches(kind),
            ModelOp::ResumeWatches(kind) => api.resume_watches(kind),
            ModelOp::ResetWatches => api.reset_watches(),
            ModelOp::AdvanceTime(seconds) => advance_time(seconds).await,
            ModelOp::Crash => {
                node?.crash().await;
                return None;
            }
            ModelOp::Stop => {
                node?.stop().await;
                return None;
            }
        }
        node
    }
}

async fn run_ops(ops: Vec<ModelOp>) {
    let (api, store) = (test_api(), MemStore::default());
    let (mut world, mut node) = (ModelWorld::default(), None);
    for op in ops {
        // A node that cannot list does not become ready, so waiting for its start has a timeout.
        if node.is_none() {
            let start = TestNode::start_with_store(&api, &store);
            node = tokio::time::timeout(std::time::Duration::from_secs(900), start).await.ok();
        }
        node = world.apply_op(op, &api, &store, node).await;
        // Most operations happen while others are in progress.
        tokio::task::yield_now().await;
    }
    if let Some(node) = node {
        node.crash().await;
    }
    for kind in [ObjectKind::Claim, ObjectKind::Volume] {
        api.resume_watches(kind);
    }
    let node = TestNode::start_with_store(&api, &store).await;
    wait_until(&api, |api| {
        api.list_objects(ObjectKind::Claim).iter().all(|claim| claim["status"]["phase"] == "Bound")
    })
    .await;
    wait_until(&api, |api| {
        api.list_objects(ObjectKind::Volume).len() == api.list_objects(ObjectKind::Claim).len()
    })
    .await;
    for slot in 0..CLAIMS {
        api.delete_object(ObjectKind::Claim, &format!("slot-{slot}"));
    }
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
    advance_time(3600).await;
    assert_eq!(store.list().await.expect("list"), Vec::new(), "nothing leaks");
    for number in 1..=world.created_claims {
        let (created, removed) = (store.create_count(&id(number)), store.remove_count(&id(number)));
        assert!(
            created <= 1 && created == removed,
            "claim {number}: created {created} times, removed {removed} times"
        );
    }
    node.stop().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::cases(200)))]
    #[test]
    fn nothing_leaks_and_no_claim_is_provisioned_twice(ops in prop::collection::vec(op_strategy(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(run_ops(ops));
    }
}
