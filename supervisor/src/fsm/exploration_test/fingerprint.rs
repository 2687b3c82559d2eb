//! A number that is equal for states that differ only in times, generations and the order of equal siblings.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};

use super::super::ROOT_SLOT;
use super::super::entry::ChildHistories;
use super::ExploredTree;
use crate::policy::GroupPolicy;

impl ExploredTree {
    /// A number that is equal for states that differ only in times, generations and the order of equal siblings.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.encode(ROOT_SLOT), self.fsm.is_shutting_down(), self.completed).hash(&mut hasher);
        hasher.finish()
    }

    fn encode(&self, slot: u32) -> Vec<u8> {
        let entry = self.fsm.entry(slot);
        let flags = [
            entry.canceled,
            entry.signaled_done,
            entry.forced_exit.is_some(),
            entry.held_by_operator,
            entry.canceled_alone,
            entry.restart_requested,
            entry.stop_requested,
            entry.timer.is_some(),
        ];
        let mut code = vec![entry.state as u8, u8::try_from(entry.restarts.len()).expect("few restarts")];
        code.extend(flags.map(u8::from));
        // The names of siblings matter where their parent will add them again as they were.
        if entry.held_by_operator {
            code.extend(entry.local_name().bytes());
        }
        encode_stopped(&entry.former_children, &mut code);
        for group in entry.groups() {
            let ending = group.ending.map(|ending| [ending.first_rank, ending.live]);
            code.extend(ending.into_iter().flatten().flat_map(u32::to_le_bytes));
            let mut members: Vec<Vec<u8>> = group.members().map(|member| self.encode(member)).collect();
            if group.policy != GroupPolicy::RestForOne && !self.shape.is_chain {
                members.sort_unstable();
            }
            code.push(b'(');
            code.extend(members.into_iter().flatten());
            code.push(b')');
        }
        code.push(b';');
        code
    }
}

/// The former children that an operator has stopped: they are stopped in the next run, too.
fn encode_stopped(former: &ChildHistories, code: &mut Vec<u8>) {
    for (name, history) in former {
        let mut stopped = vec![u8::from(history.held_by_operator)];
        encode_stopped(&history.children, &mut stopped);
        if stopped != [0] {
            code.push(b'<');
            code.extend(name.bytes().chain(stopped));
            code.push(b'>');
        }
    }
}
