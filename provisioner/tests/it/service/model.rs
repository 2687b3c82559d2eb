//! Random lives of claims and volumes, with crashes, faults and stale caches between: nothing leaks, nothing is made twice.

use nodekeel_provisioner::VolumeStore as _;
use nodekeel_provisioner::testing::objects::claim;
use nodekeel_provisioner::testing::{FakeApi, Fault, Kind, MemStore, Verb};
use proptest::prelude::*;
use serde_json::json;

use super::harness::{Node, api, id, pass, until};

/// Claims in play.
const CLAIMS: u32 = 4;

#[derive(Debug, Clone)]
enum Op {
    Create(u32),
    DeleteClaim(u32),
    DeleteVolume(u32),
    Fail(Verb, Kind, Fault),
    StoreFails,
    Hold(Kind),
    Release(Kind),
    Restart,
    Crash,
    Stop,
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let number = 0..CLAIMS;
    let kind = prop_oneof![Just(Kind::Claim), Just(Kind::Volume)];
    let any_kind = prop_oneof![Just(Kind::Claim), Just(Kind::Volume), Just(Kind::Class), Just(Kind::Event)];
    let verb = prop_oneof![
        Just(Verb::Get),
        Just(Verb::List),
        Just(Verb::Watch),
        Just(Verb::Create),
        Just(Verb::Patch),
        Just(Verb::Delete),
    ];
    let fault = prop_oneof![
        Just(Fault::Lost),
        Just(Fault::Unreachable),
        Just(Fault::Status(500)),
        Just(Fault::Status(403)),
    ];
    prop_oneof![
        4 => number.clone().prop_map(Op::Create),
        3 => number.clone().prop_map(Op::DeleteClaim),
        2 => number.prop_map(Op::DeleteVolume),
        4 => (verb, any_kind, fault).prop_map(|(verb, kind, fault)| Op::Fail(verb, kind, fault)),
        1 => Just(Op::StoreFails),
        2 => kind.clone().prop_map(Op::Hold),
        2 => kind.prop_map(Op::Release),
        1 => Just(Op::Restart),
        2 => Just(Op::Crash),
        1 => Just(Op::Stop),
        4 => (0_u64..20).prop_map(Op::Pass),
    ]
}

/// Each claim of a name has a UID of its own, as the API server would give it.
#[derive(Default)]
struct World {
    made: u32,
    numbers: [u32; CLAIMS as usize],
}

impl World {
    async fn act(&mut self, op: Op, api: &FakeApi, store: &MemStore, node: Option<Node>) -> Option<Node> {
        match op {
            Op::Create(slot) if api.get(Kind::Claim, &format!("slot-{slot}")).is_none() => {
                self.made += 1;
                self.numbers[slot as usize] = self.made;
                api.create(
                    Kind::Claim,
                    claim(self.made, json!({ "metadata": { "name": format!("slot-{slot}") } })),
                );
            }
            Op::Create(_) => {}
            Op::DeleteClaim(slot) => api.delete(Kind::Claim, &format!("slot-{slot}")),
            Op::DeleteVolume(slot) => api.delete(Kind::Volume, id(self.numbers[slot as usize]).as_str()),
            Op::Fail(verb, kind, fault) => api.fail_next(verb, kind, fault),
            Op::StoreFails => store.fail_next("a fault"),
            Op::Hold(kind) => api.hold(kind),
            Op::Release(kind) => api.release(kind),
            Op::Restart => api.restart(),
            Op::Pass(seconds) => pass(seconds).await,
            Op::Crash => {
                node?.crash().await;
                return None;
            }
            Op::Stop => {
                node?.stop().await;
                return None;
            }
        }
        node
    }
}

async fn live(ops: Vec<Op>) {
    let (api, store) = (api(), MemStore::default());
    let (mut world, mut node) = (World::default(), None);
    for op in ops {
        // A node that can't list doesn't get ready, so its start is not waited for for ever.
        if node.is_none() {
            let start = Node::over(&api, &store);
            node = tokio::time::timeout(std::time::Duration::from_secs(900), start).await.ok();
        }
        node = world.act(op, &api, &store, node).await;
        // Most ops come while something is under way.
        tokio::task::yield_now().await;
    }
    if let Some(node) = node {
        node.crash().await;
    }
    for kind in [Kind::Claim, Kind::Volume] {
        api.release(kind);
    }
    let node = Node::over(&api, &store).await;
    until(&api, |api| api.list(Kind::Claim).iter().all(|claim| claim["status"]["phase"] == "Bound")).await;
    until(&api, |api| api.list(Kind::Volume).len() == api.list(Kind::Claim).len()).await;
    for slot in 0..CLAIMS {
        api.delete(Kind::Claim, &format!("slot-{slot}"));
    }
    until(&api, |api| api.list(Kind::Volume).is_empty()).await;
    pass(3600).await;
    assert_eq!(store.list().await.expect("list"), Vec::new(), "nothing leaks");
    for number in 1..=world.made {
        let (births, deaths) = (store.births(&id(number)), store.deaths(&id(number)));
        assert!(births <= 1 && births == deaths, "claim {number}: {births} births, {deaths} deaths");
    }
    node.stop().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::cases(200)))]
    #[test]
    fn nothing_leaks_and_nothing_is_made_twice(ops in prop::collection::vec(op(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(live(ops));
    }
}
