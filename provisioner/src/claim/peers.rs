//! The nodes that may take a claim that no scheduler places, and their order.
//!
//! Each node computes the order from the UID of the claim and the nodes whose kubelets have registered the driver
//! (rendezvous hashing). The first node takes the claim at once, and each other after a delay that grows with its place,
//! if the claim has no node by then. So a first node that is dead, cordoned or full costs a delay, and nodes that do not
//! know the same nodes cost a conflict at most. *Source:* Thaler and Ravishankar, "A Name-Based Mapping Scheme for
//! Rendezvous".
//!
//! CSINodes tell which nodes have the driver, and hardly ever change, unlike Leases and capacities. They are watched only
//! while a class needs it: most clusters have none with immediate binding.

use std::collections::BTreeSet;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::ResourceExt as _;
use kube::runtime::watcher::Event;
use tokio::sync::watch;

use crate::DriverName;
use crate::api::retry_tracker::random_fraction;
use crate::api::watch_errors::WatchErrors;
use crate::api::watches::watch_resource;
use crate::api::writer::ApiWriter;
use crate::identity::ProvisionerIdentity;
use crate::objects::{may_allow_node, waits_for_consumer};

/// Returns whether a node's kubelet has registered the driver.
pub(crate) fn has_driver(node: &CSINode, driver: &DriverName) -> bool {
    node.spec.drivers.iter().any(|registered| registered.name == driver.as_str())
}

/// The nodes with the driver. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerObserver(Arc<ObservedPeers>);

#[derive(Debug, Default)]
struct ObservedPeers {
    is_needed: watch::Sender<bool>,
    /// `None` before the first list is complete.
    nodes: Mutex<Option<BTreeSet<String>>>,
}

impl PeerObserver {
    /// Has the nodes watched from now on if one of the classes, which are all, needs it, or else no longer.
    pub(crate) fn observe_classes<'a>(
        &self,
        driver: &DriverName,
        classes: impl IntoIterator<Item = &'a StorageClass>,
    ) {
        let needs_peers =
            |class: &StorageClass| class.provisioner == driver.as_str() && !waits_for_consumer(class);
        let is_needed = classes.into_iter().any(needs_peers);
        self.0.is_needed.send_if_modified(|old| std::mem::replace(old, is_needed) != is_needed);
    }

    /// Watches the nodes while that is needed. Never returns.
    pub(crate) async fn run(&self, api: &ApiWriter, watch_errors: &WatchErrors) {
        // The waits never fail: `self` holds the sender.
        let mut needed = self.0.is_needed.subscribe();
        loop {
            let _ = needed.wait_for(|is_needed| *is_needed).await;
            let mut listed = BTreeSet::new();
            let events = watch_resource::<CSINode>(api.all(), watch_errors);
            let observing = events.for_each(|event| {
                // Errors were logged, and the watch retries.
                if let Ok(event) = event {
                    self.observe(&api.identity.driver, event, &mut listed);
                }
                ready(())
            });
            tokio::select! {
                () = observing => {}
                _ = needed.wait_for(|is_needed| !is_needed) => {}
            }
            *self.nodes() = None;
        }
    }

    fn observe(&self, driver: &DriverName, event: Event<CSINode>, listed: &mut BTreeSet<String>) {
        let mut nodes = self.nodes();
        let known = nodes.as_mut().unwrap_or(listed);
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(node) if has_driver(&node, driver) => drop(listed.insert(node.name_any())),
            Event::InitApply(_) => {}
            Event::InitDone => *nodes = Some(std::mem::take(listed)),
            Event::Apply(node) if has_driver(&node, driver) => drop(known.insert(node.name_any())),
            Event::Apply(node) | Event::Delete(node) => drop(known.remove(&node.name_any())),
        }
    }

    /// The time for which this node leaves a claim of this class to the nodes before it. `step` is that of the second one.
    pub(crate) fn delay(
        &self,
        identity: &ProvisionerIdentity,
        class: &StorageClass,
        claim_uid: &str,
        step: Duration,
    ) -> Duration {
        let own = identity.node.as_str();
        match &*self.nodes() {
            Some(nodes) if nodes.contains(own) => {
                let peers = nodes.iter().map(String::as_str);
                let peers = peers.filter(|peer| may_allow_node(&identity.driver, peer, class));
                delay_of(place(claim_uid, own, peers), step)
            }
            // The others are not known, or have no CSI plugin: not all at once.
            _ => step.mul_f64(random_fraction()),
        }
    }

    fn nodes(&self) -> MutexGuard<'_, Option<BTreeSet<String>>> {
        self.0.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a node among all nodes for this claim, from 0.
fn place<'a>(claim_uid: &str, own: &str, nodes: impl Iterator<Item = &'a str>) -> usize {
    let own = (score(claim_uid, own), own);
    nodes.filter(|node| (score(claim_uid, node), *node) > own).count()
}

/// By the logarithm, the last of thousands waits for a dozen steps only, and the first few are apart by half of one.
fn delay_of(place: usize, step: Duration) -> Duration {
    let steps = (place as f64 + 1.0).log2();
    // A configured step may be that long.
    Duration::try_from_secs_f64(step.as_secs_f64() * steps).unwrap_or(Duration::MAX)
}

/// The same in each process and release: nodes that disagree cost conflicts.
fn score(claim_uid: &str, node: &str) -> u64 {
    // FNV-1a of 64 bits. *Source:* Fowler, Noll, Vo: its offset basis and prime.
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    // No name contains a slash.
    let text = claim_uid.bytes().chain(*b"/").chain(node.bytes());
    let hash = text.fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    // The last bytes of a text, in which the names of nodes differ, reach few bits. *Source:* MurmurHash3, `fmix64`.
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::objects::sample_uid;

    const STEP: Duration = Duration::from_secs(2);

    /// How long a change takes from one node to all others, on a busy server.
    const LATENCY: Duration = Duration::from_millis(500);

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("node-{number}")).collect()
    }

    /// Has the nodes select themselves for 100 claims. Each knows those that `knows` says. Returns the requests, and the
    /// longest wait.
    fn select_nodes(
        nodes: &[String],
        is_alive: impl Fn(usize) -> bool,
        knows: impl Fn(usize, usize) -> bool,
    ) -> (usize, Duration) {
        let (mut requests, mut longest) = (0, Duration::ZERO);
        for uid in (0..100).map(sample_uid) {
            let delays: Vec<Duration> = (0..nodes.len())
                .filter(|at| is_alive(*at))
                .map(|at| {
                    let peers =
                        (0..nodes.len()).filter(|other| knows(at, *other)).map(|other| &*nodes[other]);
                    delay_of(place(&uid, &nodes[at], peers), STEP)
                })
                .collect();
            let first = *delays.iter().min().expect("a node");
            // Each node that has not seen the first one's selection writes, too, and gets a conflict.
            requests += delays.iter().filter(|delay| **delay < first + LATENCY).count();
            longest = longest.max(first);
        }
        (requests, longest)
    }

    #[test]
    fn one_of_thirty_nodes_takes_each_claim_with_one_request() {
        let nodes = names(30);
        let all = |_: usize, _: usize| true;
        assert_eq!(select_nodes(&nodes, |_| true, all), (100, Duration::ZERO));
        // A third of them is dead, cordoned or full.
        let (requests, longest) = select_nodes(&nodes, |at| at % 3 != 0, all);
        assert!(requests <= 120, "{requests}");
        assert!(longest > Duration::ZERO && longest <= 4 * STEP, "{longest:?}");
        // Each doesn't know another one yet: at most one conflict where that one is the first.
        let (requests, longest) = select_nodes(&nodes, |_| true, |at, other| other != (at + 1) % 30);
        assert!((100..=120).contains(&requests) && longest.is_zero(), "{requests}");
        // All but the last of a large cluster are full.
        let (requests, longest) = select_nodes(&names(5000), |at| at == 4999, all);
        assert!(requests == 100 && longest <= 13 * STEP, "{longest:?}");
    }

    #[test]
    fn each_place_is_that_of_one_node_and_the_first_places_are_spread() {
        let nodes = names(30);
        let mut firsts = BTreeSet::new();
        for uid in (0..300).map(sample_uid) {
            let peers = || nodes.iter().map(String::as_str);
            let places: BTreeSet<usize> = peers().map(|node| place(&uid, node, peers())).collect();
            assert!(places.into_iter().eq(0..30));
            firsts.extend(peers().filter(|node| place(&uid, node, peers()) == 0).map(str::to_owned));
        }
        assert_eq!(firsts.len(), 30);
        assert_eq!(score("uid", "node-a"), 0x948e_55ec_fc95_efa1, "the same in each release");
        assert_eq!(delay_of(1, Duration::MAX), Duration::MAX);
    }
}
