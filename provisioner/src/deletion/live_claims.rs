//! The UIDs of all existing claims.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::watcher::Event;

/// The UIDs of all claims in the cluster, 16 bytes each. If a volume's claim reference was changed to another
/// claim, the name in it does not show that the original claim still exists; its UID does.
#[derive(Debug, Default)]
pub(crate) struct LiveClaims(Mutex<ClaimUids>);

#[derive(Debug, Default)]
struct ClaimUids {
    known: HashSet<u128>,
    /// The UIDs of a list in progress.
    listed: HashSet<u128>,
}

impl LiveClaims {
    /// Updates the set after a watch event.
    pub(crate) fn observe_event(&self, event: &Event<PersistentVolumeClaim>) {
        let mut state = self.lock_uids();
        match event {
            // The known claims stay until the list is complete: none may look deleted because it is not listed yet.
            Event::Init => state.listed.clear(),
            Event::InitApply(claim) => state.listed.extend(claim_uid(claim)),
            // The list replaces them: it lacks the claims that were deleted while the watch was disconnected.
            Event::InitDone => state.known = std::mem::take(&mut state.listed),
            Event::Apply(claim) => state.known.extend(claim_uid(claim)),
            Event::Delete(claim) => {
                if let Some(number) = claim_uid(claim) {
                    state.known.remove(&number);
                }
            }
        }
    }

    /// Returns whether a claim exists, as far as the watch has reported.
    pub(crate) fn contains_uid(&self, uid: &str) -> bool {
        parse_uid(uid).is_some_and(|number| self.lock_uids().known.contains(&number))
    }

    fn lock_uids(&self) -> MutexGuard<'_, ClaimUids> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn claim_uid(claim: &PersistentVolumeClaim) -> Option<u128> {
    parse_uid(claim.metadata.uid.as_deref()?)
}

/// A UUID as a number. Other UIDs belong to no volume.
fn parse_uid(uid: &str) -> Option<u128> {
    u128::from_str_radix(&uid.replace('-', ""), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::objects::{sample_claim, sample_uid};
    use serde_json::json;

    #[test]
    fn a_claim_is_live_until_it_is_deleted_or_missing_in_a_list() {
        let live_claims = LiveClaims::default();
        let [first, second] = [1, 2].map(|number| sample_claim(number, json!({})));
        for event in
            [Event::Init, Event::InitApply(first.clone()), Event::InitDone, Event::Apply(second.clone())]
        {
            live_claims.observe_event(&event);
        }
        assert_eq!(
            [1, 2, 3].map(|number| live_claims.contains_uid(&sample_uid(number))),
            [true, true, false]
        );
        live_claims.observe_event(&Event::Delete(first));
        assert_eq!([1, 2].map(|number| live_claims.contains_uid(&sample_uid(number))), [false, true]);
        live_claims.observe_event(&Event::Init);
        assert!(live_claims.contains_uid(&sample_uid(2)), "the old set stays until the list is complete");
        live_claims.observe_event(&Event::InitDone);
        assert!(!live_claims.contains_uid(&sample_uid(2)) && !live_claims.contains_uid("not a UUID"));
    }
}
