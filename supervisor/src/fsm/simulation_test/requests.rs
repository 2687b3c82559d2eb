//! The operations that change which runnables there are: new children, and the operator's requests.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::super::{NewChild, Removal, RunnableSettings};
use super::expected::ExpectedGroup;
use super::{STOP_TIMEOUT, SimulatedDriver};
use crate::policy::{ChildPolicy, GroupPolicy, RestartLimit, RestartLimitAction, RestartPolicy};

pub(super) fn settings_with(restart: RestartPolicy) -> RunnableSettings {
    let policy = ChildPolicy { restart, ..ChildPolicy::default() };
    RunnableSettings { policy, stop_timeout: STOP_TIMEOUT, stop_before: Vec::new() }
}

impl SimulatedDriver {
    pub(super) fn add_children(&mut self) {
        let Some(at) = self.random_task() else { return };
        let task = self.tasks[at].clone();
        if task.dn.split('.').count() > 5 || self.entries.len() > 60 {
            return;
        }
        let mut names = Vec::new();
        for _ in 0..=self.random_below(3) {
            names.push(["a", "b", "c", "d", "e", "NOT A NAME"][self.random_below(6) % 6]);
        }
        let policy =
            [GroupPolicy::OneForOne, GroupPolicy::OneForAll, GroupPolicy::RestForOne][self.random_below(3)];
        let group = self.next_group;
        self.next_group += 1;
        let mut children = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            let settings = self.random_settings(&task.dn, &names[..rank]);
            let group = ExpectedGroup { number: group, policy, rank };
            self.pending_children.insert(format!("{}.{name}", task.dn), (settings.clone(), group));
            children.push(NewChild { name, settings });
        }
        let existing: Vec<bool> = names
            .iter()
            .map(|name| self.entries.contains_key(format!("{}.{name}", task.dn).as_str()))
            .collect();
        let result = self.fsm.add_group(self.now, task.key, policy, &children);
        let distinct = names.iter().collect::<HashSet<_>>().len() == names.len();
        if result.is_ok() {
            assert!(
                distinct && !existing.contains(&true) && !names.contains(&"NOT A NAME"),
                "invalid names were accepted"
            );
            assert!(!task.canceled, "children were added below a canceled context");
            self.count_operation("groups added");
        } else {
            self.count_operation("groups rejected");
        }
    }

    /// Settings of a child. Where the order has no cycles, it stops only before older siblings; elsewhere also
    /// before siblings that are added later, if ever.
    fn random_settings(&mut self, parent: &str, older: &[&str]) -> Arc<RunnableSettings> {
        let restart =
            [RestartPolicy::Always, RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never]
                [self.random_below(4)];
        let mut settings = settings_with(restart);
        if self.random_below(4) == 0 {
            let (restarts, period) = (self.random_below(3) as u32, Duration::from_secs(60));
            let action = [RestartLimitAction::FailParent, RestartLimitAction::StayDead][self.random_below(2)];
            settings.policy.restart_limit = Some(RestartLimit { restarts, period, action });
        }
        let mut candidates: Vec<Arc<str>> = self.entries.keys().cloned().collect();
        if self.is_ordered {
            candidates.retain(|dn| Self::parent_dn(dn) == Some(parent));
            candidates.extend(older.iter().map(|name| Arc::from(format!("{parent}.{name}"))));
        } else {
            // Among siblings alone, cycles are frequent.
            if self.random_below(2) == 0 {
                candidates.clear();
            }
            candidates.extend(["a", "b", "c", "d", "e"].map(|name| Arc::from(format!("{parent}.{name}"))));
        }
        for _ in 0..self.random_below(3) {
            if !candidates.is_empty() {
                let at = self.random_below(candidates.len());
                settings.stop_before.push(Arc::clone(&candidates[at]));
            }
        }
        settings.into()
    }

    pub(super) fn send_control_request(&mut self) {
        let dns: Vec<Arc<str>> = self.entries.keys().cloned().collect();
        let dn = Arc::clone(&dns[self.random_below(dns.len())]);
        let request = self.random_below(5);
        let result = match request {
            3 => return self.remove_runnable(&dn),
            4 => return self.add_child(&dn),
            0 => self.fsm.stop_runnable(self.now, &dn),
            1 => self.fsm.start_runnable(self.now, &dn),
            _ => self.fsm.restart_runnable(self.now, &dn),
        };
        if result.is_err() {
            assert!(self.fsm.drain_actions().next().is_none(), "a rejected request had an effect");
            return;
        }
        match request {
            0 => self.held_by_operator.insert(Arc::clone(&dn)),
            _ => self.held_by_operator.remove(&dn),
        };
        if result.is_ok() {
            self.entries.get_mut(&dn).expect("known").restart_requested = true;
            self.count_operation("control requests");
        }
    }

    fn remove_runnable(&mut self, dn: &Arc<str>) {
        let removal = [Removal::ForReplacement, Removal::ForGood][self.random_below(2)];
        match self.fsm.remove_runnable(self.now, dn, removal) {
            Ok(_) => {
                if removal == Removal::ForGood {
                    self.held_by_operator.remove(dn);
                }
                self.removals.insert(Arc::clone(dn));
                self.count_operation("removals");
            }
            Err(_) => assert!(self.fsm.drain_actions().next().is_none(), "a rejected removal had an effect"),
        }
    }

    /// Adds a child below a runnable that may be ready.
    fn add_child(&mut self, parent: &Arc<str>) {
        if parent.split('.').count() > 5 || self.entries.len() > 60 {
            return;
        }
        let name = ["a", "b", "c", "d", "e"][self.random_below(5)];
        let (dn, settings) = (format!("{parent}.{name}"), self.random_settings(parent, &[]));
        let is_known = self.entries.contains_key(dn.as_str());
        let result = self.fsm.add_child(self.now, parent, NewChild { name, settings: settings.clone() });
        if result.is_err() {
            assert!(self.fsm.drain_actions().next().is_none(), "a rejected child had an effect");
            return;
        }
        assert!(!is_known && !self.entries[parent].canceled, "{dn} was added twice, or can't run");
        let group = ExpectedGroup { number: self.next_group, policy: GroupPolicy::OneForAll, rank: 0 };
        self.next_group += 1;
        self.pending_children.insert(dn, (settings, group));
        self.count_operation("children added");
    }
}
