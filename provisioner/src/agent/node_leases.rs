//! The Leases of the nodes, by which their provisioners show that they run.
//!
//! As in leader election, no clocks are compared: a Lease is expired once this agent has seen no change of it for its
//! duration, by its own monotonic clock, which starts when it first sees the Lease. The time in the Lease is only compared
//! with the last one. Only time in which the API server has answered counts: where no node at all renews its Lease, the
//! server stands still.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::runtime::watcher::Event;
use nodekeel_fsquota::Bytes;
use tokio::time::Instant;

use crate::image::ImageFormat;
use crate::node_lease::{LEASE_DURATION, OfferedStores, RENEW_INTERVAL, lease_name, stores_of_lease};
use crate::{DriverName, NodeName, StoreName};

/// Without a renewal by any of several nodes for this time, the API server is silent, and not they: of the renewals of one
/// node, one in this time may fail.
const SILENCE: Duration = RENEW_INTERVAL.saturating_mul(2);

/// The Leases of the driver's nodes, by node. A node without one is judged by its CSINode alone: its provisioner is of an
/// older release, or has not started yet.
#[derive(Debug, Default)]
pub(super) struct NodeLeases {
    seen: BTreeMap<String, SeenLease>,
    /// Those of a list in progress.
    listed: BTreeMap<String, (LeaseSpec, OfferedStores)>,
    expired: BTreeSet<String>,
    /// When any of them was seen to change.
    changed_at: Option<Instant>,
    /// No node has renewed its Lease for a while, and the time of all was started again for that.
    is_silent: bool,
    is_complete: bool,
}

/// A Lease as it was seen last.
#[derive(Debug)]
struct SeenLease {
    spec: LeaseSpec,
    /// What the node says of its stores.
    stores: OfferedStores,
    /// When this agent has seen it change.
    changed_at: Instant,
}

impl SeenLease {
    fn expires_at(&self) -> Instant {
        let seconds = self.spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        // One year at most: a moment that is much later can't be represented.
        let duration = seconds.filter(|seconds| (1..=31_536_000).contains(seconds));
        self.changed_at + duration.map_or(LEASE_DURATION, Duration::from_secs)
    }
}

/// The node of a Lease, which is its holder; `None` if it is not the one of that node and this driver.
fn node_of(driver: &DriverName, lease: &Lease) -> Option<String> {
    let holder = lease.spec.as_ref()?.holder_identity.as_deref()?;
    let node = NodeName::try_new(holder).ok()?;
    (lease.metadata.name.as_deref() == Some(lease_name(driver, &node).as_str())).then(|| node.to_string())
}

impl NodeLeases {
    /// Records a watch event, and returns whether a node says something else of its stores than before. A renewal alone
    /// changes nothing; an expiry does, and the time that it has not come.
    pub(super) fn observe(&mut self, driver: &DriverName, event: Event<Lease>, now: Instant) -> bool {
        let parse = |lease: Lease| {
            let stores = stores_of_lease(driver, &lease);
            Some((node_of(driver, &lease)?, (lease.spec?, stores)))
        };
        match event {
            Event::Init => {
                self.listed.clear();
                false
            }
            Event::InitApply(lease) => {
                self.listed.extend(parse(lease));
                false
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let count = self.seen.len();
                self.seen.retain(|node, _| listed.contains_key(node));
                let mut has_changed = self.seen.len() < count;
                for (node, lease) in listed {
                    has_changed |= self.record(node, lease, now);
                }
                self.is_complete = true;
                has_changed
            }
            Event::Apply(lease) => parse(lease).is_some_and(|(node, lease)| self.record(node, lease, now)),
            Event::Delete(lease) => parse(lease).is_some_and(|(node, _)| self.seen.remove(&node).is_some()),
        }
    }

    /// A change of anything but the specification is no renewal, and neither is a list that repeats it.
    fn record(&mut self, node: String, (spec, stores): (LeaseSpec, OfferedStores), now: Instant) -> bool {
        let old = self.seen.get_mut(&node);
        let has_changed = old.as_ref().is_none_or(|seen| seen.stores != stores);
        match old {
            Some(seen) if seen.spec == spec => seen.stores = stores,
            _ => {
                self.seen.insert(node, SeenLease { spec, stores, changed_at: now });
                (self.changed_at, self.is_silent) = (Some(now), false);
            }
        }
        has_changed
    }

    /// Starts the time of all Leases that are not expired again, after a time in which no renewal could be seen.
    pub(super) fn restart(&mut self, now: Instant) {
        let current = self.seen.iter_mut().filter(|(node, _)| !self.expired.contains(*node));
        current.for_each(|(_, seen)| seen.changed_at = now);
    }

    /// Leaves out a time in which no renewal could be seen. A server that always takes that long only delays an expiry.
    pub(super) fn postpone(&mut self, unseen: Duration, now: Instant) {
        let current = self.seen.iter_mut().filter(|(node, _)| !self.expired.contains(*node));
        current.for_each(|(_, seen)| seen.changed_at = now.min(seen.changed_at + unseen));
    }

    /// Finds the Leases that are expired now, and returns whether they are others than before.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let current = self.seen.keys().filter(|node| !self.expired.contains(*node)).count();
        let has_silence = self.changed_at.is_some_and(|changed_at| now >= changed_at + SILENCE);
        // Once: the agent itself leads only while the server takes its renewals, so a silence that lasts is the nodes'.
        if current > 1 && has_silence && !self.is_silent {
            self.is_silent = true;
            self.restart(now);
        }
        let expired = self.seen.iter().filter(|(_, seen)| seen.expires_at() <= now);
        let expired: BTreeSet<String> = expired.map(|(node, _)| node.clone()).collect();
        let has_changed = expired != self.expired;
        self.expired = expired;
        has_changed
    }

    /// When the next Lease expires, unless it is renewed.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let current = self.seen.iter().filter(|(node, _)| !self.expired.contains(*node));
        current.map(|(_, seen)| seen.expires_at()).min()
    }

    /// Returns whether the first list is complete.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    pub(super) fn is_expired(&self, node: &str) -> bool {
        self.expired.contains(node)
    }

    /// The nodes whose Lease is expired.
    pub(super) fn expired(&self) -> impl Iterator<Item = &str> {
        self.expired.iter().map(String::as_str)
    }

    /// Returns whether a node is known to lack a store of this name: it has a Lease, which doesn't say that it has it.
    pub(super) fn lacks_store(&self, node: &str, store: &StoreName) -> bool {
        self.seen.get(node).is_some_and(|seen| !seen.stores.contains_key(&Some(store.clone())))
    }

    /// The size of the largest new volume that a store of a node offers; `None` if that is not limited or not known.
    pub(super) fn offered(&self, node: &str, store: &Option<StoreName>) -> Option<Bytes> {
        self.seen.get(node)?.stores.get(store)?.size
    }

    /// Returns whether a node says that its store can't have strict volumes of a format.
    pub(super) fn lacks_format(&self, node: &str, store: &Option<StoreName>, format: ImageFormat) -> bool {
        let offer = self.seen.get(node).and_then(|seen| seen.stores.get(store));
        offer.is_some_and(|offer| offer.lacking.contains(&format))
    }

    /// What was seen last of the Lease of a node.
    pub(super) fn last_seen(&self, node: &str) -> Option<&LeaseSpec> {
        self.seen.get(node).map(|seen| &seen.spec)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::objects::DRIVER;

    fn lease(node: &str, holder: &str, second: u32) -> Lease {
        let manifest = json!({
            "metadata": { "name": format!("{DRIVER}-{node}"), "resourceVersion": second.to_string() },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": 10,
                // Years away from the clock of the agent.
                "renewTime": format!("2001-01-01T00:00:{second:02}.000000Z"),
            },
        });
        serde_json::from_value(manifest).expect("a Lease")
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_expires_when_it_was_not_seen_to_change_for_its_duration_whatever_its_time_says() {
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let (mut leases, start) = (NodeLeases::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let renewed = |second| Event::Apply(lease("node-a", "node-a", second));
        let foreign = Event::Apply(lease("node-b", "node-c", 1));
        for (event, seconds, expected) in [
            (Event::Init, 0, false),
            (Event::InitApply(lease("node-a", "node-a", 1)), 0, false),
            (Event::InitDone, 0, false),
            (foreign, 1, false),
            (renewed(2), 9, false),
            // The same record again is no renewal, in a list, neither.
            (renewed(2), 18, false),
            (Event::Init, 18, false),
            (Event::InitApply(lease("node-a", "node-a", 2)), 18, false),
            (Event::InitDone, 18, false),
            (renewed(2), 19, true),
            (renewed(3), 20, false),
            (renewed(3), 30, true),
            // Its node is deleted, or its record: judged as one that never had a Lease.
            (Event::Delete(lease("node-a", "node-a", 3)), 31, false),
        ] {
            let text = format!("{event:?} after {seconds} s");
            leases.observe(&driver, event, at(seconds));
            leases.expire(at(seconds));
            assert_eq!(leases.is_expired("node-a"), expected, "{text}");
            assert_eq!(leases.expired().count(), usize::from(expected), "{text}");
        }
        assert_eq!(leases.next_expiry(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn where_no_node_renews_its_lease_the_server_is_silent_once() {
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let (mut leases, start) = (NodeLeases::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let renew = |leases: &mut NodeLeases, node: &str, second: u32| {
            leases.observe(&driver, Event::Apply(lease(node, node, second)), at(second.into()));
        };
        for node in ["node-a", "node-b", "node-c"] {
            renew(&mut leases, node, 1);
        }
        // All are late at once, and then only one of them.
        assert!(!leases.expire(at(11)) && leases.next_expiry() == Some(at(21)));
        for second in [12, 15, 18, 21] {
            renew(&mut leases, "node-a", second);
            renew(&mut leases, "node-b", second);
        }
        assert!(leases.expire(at(21)) && leases.is_expired("node-c"));
        // The others end for good: later, but they do. The one that has expired stays so until it renews.
        assert!(!leases.expire(at(31)) && leases.is_expired("node-c"));
        assert!(leases.expire(at(41)) && leases.expired().count() == 3);
        renew(&mut leases, "node-c", 42);
        assert!(leases.expire(at(42)) && !leases.is_expired("node-c"));
        // A single one may be silent by itself.
        assert!(leases.expire(at(52)) && leases.is_expired("node-c"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_in_which_no_renewal_could_be_seen_does_not_count() {
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let (mut leases, start) = (NodeLeases::default(), Instant::now());
        leases.observe(&driver, Event::Apply(lease("node-a", "node-a", 1)), start);
        let later = start + Duration::from_secs(60);
        leases.restart(later);
        assert!(!leases.expire(later) && leases.next_expiry() == Some(later + LEASE_DURATION));
        assert!(leases.expire(later + LEASE_DURATION) && leases.next_expiry().is_none());
    }
}
