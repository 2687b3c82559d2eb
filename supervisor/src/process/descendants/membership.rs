//! Which processes of a snapshot are descendants.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd as _;

use super::signal_pass::{DescendantProcess, has_exited};
use super::{DescendantSet, ProcessMark, ProcessSnapshot, procfs};

impl DescendantSet {
    /// The processes that carry this mark, or that of a nested supervisor.
    pub(super) fn find_marked(&self, snapshot: &ProcessSnapshot) -> Vec<DescendantProcess> {
        let own = procfs::own_pid();
        let candidates =
            snapshot.limits().iter().filter(|(pid, _)| *pid > 1 && *pid != own && *pid != self.main_pid);
        candidates
            .filter(|(_, limit)| self.is_marked(*limit))
            .map(|&(pid, limit)| DescendantProcess { pid, limit, start: None })
            .filter(|member| !self.not_permitted.contains(member))
            .collect()
    }

    pub(super) fn is_marked(&self, limit: u64) -> bool {
        ProcessMark::from_limit(limit)
            .is_some_and(|mark| mark == self.mark || self.nested_hosts.contains(&mark.host_id()))
    }

    /// Adds the descendants that have changed their mark, as a nested supervisor's children have: the first
    /// of these reveals the mark of all the others.
    pub(super) fn find_unmarked(&mut self, snapshot: &ProcessSnapshot) {
        let marked = self.find_marked(snapshot);
        // Once the main process has exited, its children have another parent, and its pid may be another process'.
        let main = (!has_exited(self.main_pidfd.as_fd())).then_some(self.main_pid);
        let parents = marked.iter().chain(&self.unmarked).map(|member| member.pid).chain(main);
        let mut known: HashSet<i32> = parents.collect();
        let mut parents: Vec<i32> = known.iter().copied().collect();
        if parents.is_empty() {
            return;
        }
        let mut children = HashMap::<i32, Vec<i32>>::new();
        for (&pid, &parent) in snapshot.parents() {
            children.entry(parent).or_default().push(pid);
        }
        while let Some(parent) = parents.pop() {
            for &pid in children.get(&parent).into_iter().flatten().filter(|pid| known.insert(**pid)) {
                parents.push(pid);
                let Some(limit) = snapshot.limit_of(pid) else { continue };
                match (ProcessMark::from_limit(limit).map(ProcessMark::host_id), procfs::read_stat(pid)) {
                    // An adopted process has the mark of an earlier host, as others that were adopted.
                    (Some(host_id), _) if host_id == self.mark.host_id() => {}
                    (Some(host_id), _) => _ = self.nested_hosts.insert(host_id),
                    (None, Ok(stat)) if stat.parent == parent => {
                        self.unmarked.push(DescendantProcess { pid, limit, start: Some(stat.start) });
                    }
                    // It, or its parent, has exited.
                    _ => {}
                }
            }
        }
    }

    pub(super) fn forget_exited_unmarked(&mut self, snapshot: &ProcessSnapshot) {
        self.unmarked.retain(|member| {
            snapshot.limit_of(member.pid) == Some(member.limit)
                && !self.not_permitted.contains(member)
                && procfs::read_stat(member.pid).is_ok_and(|stat| Some(stat.start) == member.start)
        });
    }
}
