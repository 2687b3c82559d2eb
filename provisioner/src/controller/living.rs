//! Which claims exist, by UID alone.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::watcher::Event;

/// The claims of the whole cluster, 16 bytes each. A volume may be pointed at another claim than its own; that its own
/// exists, its name then doesn't tell.
#[derive(Debug, Default)]
pub(super) struct Living(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    known: HashSet<u128>,
    /// What a list that is under way has shown so far.
    listed: HashSet<u128>,
}

impl Living {
    /// Hears of a change.
    pub(super) fn hear(&self, event: &Event<PersistentVolumeClaim>) {
        let mut state = self.state();
        match event {
            Event::Init => state.listed.clear(),
            Event::InitApply(claim) => state.listed.extend(number_of(claim)),
            Event::InitDone => state.known = std::mem::take(&mut state.listed),
            Event::Apply(claim) => state.known.extend(number_of(claim)),
            Event::Delete(claim) => {
                if let Some(number) = number_of(claim) {
                    state.known.remove(&number);
                }
            }
        }
    }

    /// Whether a claim exists, as far as was heard.
    pub(super) fn has(&self, uid: &str) -> bool {
        number(uid).is_some_and(|number| self.state().known.contains(&number))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn number_of(claim: &PersistentVolumeClaim) -> Option<u128> {
    number(claim.metadata.uid.as_deref()?)
}

/// A UUID as a number. What is none is no volume's.
fn number(uid: &str) -> Option<u128> {
    u128::from_str_radix(&uid.replace('-', ""), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::objects::{claim, uid};
    use serde_json::json;

    #[test]
    fn a_claim_lives_until_its_end_was_heard_of_or_a_list_lacks_it() {
        let living = Living::default();
        let [first, second] = [1, 2].map(|number| claim(number, json!({})));
        for event in
            [Event::Init, Event::InitApply(first.clone()), Event::InitDone, Event::Apply(second.clone())]
        {
            living.hear(&event);
        }
        assert_eq!([1, 2, 3].map(|number| living.has(&uid(number))), [true, true, false]);
        living.hear(&Event::Delete(first));
        assert_eq!([1, 2].map(|number| living.has(&uid(number))), [false, true]);
        living.hear(&Event::Init);
        assert!(living.has(&uid(2)), "what was known holds until the list is complete");
        living.hear(&Event::InitDone);
        assert!(!living.has(&uid(2)) && !living.has("no UUID"));
    }
}
