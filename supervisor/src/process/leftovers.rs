//! Ends the processes that a killed supervisor has left behind, as its records identify them.
//!
//! The decision is a pure function of the records and the processes that a scan shows. A signal goes through a
//! descriptor that was opened before a second check of the process' start time and mark. Where there is a cgroup, it
//! identifies what is in it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::cgroup::RunCgroup;
use super::descendants::{MAX_NAMED, has_exited};
use super::mark::ProcessMark;
use super::output::sanitize_line;
use super::procfs;
use super::record::{BootId, HostRecord, KeptRecord, ProcessId, Record};
use super::records::{HostRecords, ProcessRecords, RecordProblem};
use crate::process_exit::Signal;
use crate::sys;

/// The time that all leftovers together may take to exit. They have been killed: a process that takes longer waits
/// for a device, and the next start checks again.
const LEFTOVER_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of exits that are awaited at once: each needs a descriptor.
const MAX_WATCHED: usize = 128;

/// A process that a killed supervisor had left behind, and that was killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftoverProcess {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// The fate of the processes that the records of an earlier supervisor identify.
#[derive(Debug, Default)]
pub(super) struct LeftoverReport {
    /// Those that were killed.
    pub(super) ended: Vec<LeftoverProcess>,
    /// The records that can't be read.
    pub(super) rejected: Vec<RecordProblem>,
}

/// A process as a scan shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ObservedProcess {
    id: ProcessId,
    parent: i32,
    /// The leader of its session.
    session: i32,
    /// The soft limit of file locks, which may be a mark.
    limit: u64,
    /// Its user, if it has a mark and no other user: see [`procfs::only_user`].
    user: Option<u32>,
}

/// The records and processes that identify leftovers.
///
/// Every process can take a mark, but only one of its own user. So a mark ends nothing but processes of the users as
/// which the recorded ones were started. Descent ends those of every user: nothing else gives a process its parent, or
/// the leader of its session.
#[derive(Debug, Default)]
struct LeftoverSet {
    hosts: Vec<HostRecord>,
    /// The kept processes that are to end.
    kept: Vec<KeptRecord>,
    /// Those that were identified so far: a parent that has exited no longer identifies its children.
    known: HashSet<ProcessId>,
}

impl LeftoverSet {
    /// The leftovers among these processes: those with a mark of the set, and all that descend from one that is there.
    fn find(&mut self, observed: &[ObservedProcess]) -> Vec<ObservedProcess> {
        // Neither init nor this program is a leftover, although both may carry a mark.
        let own = procfs::own_pid();
        let others = observed.iter().copied().filter(|process| process.id.pid > 1 && process.id.pid != own);
        let mut children = HashMap::<i32, Vec<ObservedProcess>>::new();
        let mut found = Vec::new();
        for process in others {
            if self.known.contains(&process.id) || self.identifies(&process) {
                self.known.insert(process.id);
                found.push(process);
            }
            for above in [process.parent, process.session] {
                children.entry(above).or_default().push(process);
            }
        }
        let mut next = 0;
        // `found` grows while it is read: the children of each process in it are added.
        while let Some(parent) = found.get(next) {
            let born_below = children.get(&parent.id.pid).into_iter().flatten();
            let ends = |limit| !survives(limit) || self.kept.iter().any(|kept| kept.mark.as_limit() == limit);
            let is_new = |child: &&ObservedProcess| ends(child.limit) && self.known.insert(child.id);
            found.extend(born_below.filter(is_new).copied());
            next += 1;
        }
        found
    }

    fn identifies(&self, process: &ObservedProcess) -> bool {
        process.user.is_some_and(|user| self.users_of_mark(process).any(|of_mark| of_mark == user))
    }

    /// The pids of those that carry a mark of the set, and that neither their user nor their descent proves to be
    /// leftovers.
    fn unproven(&self, observed: &[ObservedProcess]) -> Vec<i32> {
        let is_unproven = |process: &&ObservedProcess| {
            !self.known.contains(&process.id) && self.users_of_mark(process).next().is_some()
        };
        observed.iter().filter(is_unproven).map(|process| process.id.pid).collect()
    }

    /// The users as which processes with the mark of this one were started; none if it has no mark of the set.
    fn users_of_mark(&self, process: &ObservedProcess) -> impl Iterator<Item = u32> {
        let (mark, start) = (ProcessMark::from_limit(process.limit), process.id.start);
        let kept = self.kept.iter().filter(move |kept| Some(kept.mark) == mark).map(|kept| kept.user);
        let of_host = mark.filter(|mark| !mark.survives()).map(ProcessMark::host_id);
        let hosts =
            self.hosts.iter().filter(move |host| Some(host.host_id) == of_host && start >= host.start);
        kept.chain(hosts.flat_map(|host| host.users.iter().copied()))
    }
}

fn survives(limit: u64) -> bool {
    ProcessMark::from_limit(limit).is_some_and(ProcessMark::survives)
}

/// The decisions about the records of an earlier supervisor, by their file names.
#[derive(Debug, Default)]
struct LeftoverPlan {
    leftovers: LeftoverSet,
    /// Kept processes that await their adoption.
    kept: Vec<KeptRecord>,
    /// Kept processes that are to end.
    end_kept: Vec<KeptRecord>,
    /// Records that are removed once everything has ended.
    obsolete: Vec<String>,
    /// Records that are left as they are, and why.
    rejected: Vec<(String, String)>,
}

impl LeftoverPlan {
    /// Decides by the records and the processes that exist.
    fn decide(
        records: Vec<(String, Result<Record, String>)>,
        boot: &BootId,
        expects: impl Fn(&str) -> bool,
        is_in_cgroup: impl Fn(&KeptRecord, ProcessId) -> bool,
        observed: &[ObservedProcess],
    ) -> Self {
        let mut plan = Self::default();
        let is_there = |recorded: ProcessId| observed.iter().any(|process| process.id == recorded);
        for (file, record) in records {
            match record {
                Err(reason) => plan.rejected.push((file, reason)),
                Ok(Record::Host(host)) => {
                    // After another boot, its marks and times mean nothing.
                    if host.boot == *boot {
                        plan.leftovers.hosts.push(host);
                    }
                    plan.obsolete.push(file);
                }
                Ok(Record::Kept(kept)) if kept.boot != *boot => plan.end_kept.push(kept),
                Ok(Record::Kept(kept)) => {
                    // One DN has one process: of several records, the first counts.
                    let is_first = plan.kept.iter().all(|other| other.dn != kept.dn);
                    let is_running = is_running(&kept, observed, &is_in_cgroup);
                    if is_first && expects(&kept.dn) && is_running {
                        plan.kept.push(kept);
                    } else {
                        plan.leftovers.add_kept(&kept, is_running);
                        match kept.process.filter(|recorded| !is_running && is_there(*recorded)) {
                            Some(ProcessId { pid, .. }) => plan.rejected.push((
                                file,
                                format!(
                                    "process {pid} of {} has neither its mark nor its cgroup, and is left alone",
                                    kept.dn
                                ),
                            )),
                            None => plan.end_kept.push(kept),
                        }
                    }
                }
            }
        }
        plan
    }
}

impl LeftoverSet {
    /// `is_running`: the recorded process is there, as it was recorded.
    fn add_kept(&mut self, kept: &KeptRecord, is_running: bool) {
        self.kept.push(kept.clone());
        self.known.extend(kept.process.filter(|_| is_running));
    }
}

/// Returns whether the process of a record is there, with its mark or in its cgroup.
fn is_running(
    kept: &KeptRecord,
    observed: &[ObservedProcess],
    is_in_cgroup: impl Fn(&KeptRecord, ProcessId) -> bool,
) -> bool {
    let is_it = |process: &ObservedProcess| {
        Some(process.id) == kept.process
            && (process.limit == kept.mark.as_limit() || is_in_cgroup(kept, process.id))
    };
    observed.iter().any(is_it)
}

fn is_in_cgroup(kept: &KeptRecord, process: ProcessId) -> bool {
    kept.cgroup.as_deref().is_some_and(|dir| RunCgroup::is_kept_in(dir, kept.mark, process.pid))
}

/// Ends what the records identify, except what is kept, and removes the records of what has ended.
pub(super) fn end_recorded(records: &HostRecords, wanted: &ProcessRecords) -> io::Result<LeftoverReport> {
    let found = records.read_all()?;
    if found.is_empty() {
        return Ok(LeftoverReport::default());
    }
    let mut plan =
        LeftoverPlan::decide(found, records.boot(), |dn| wanted.expects(dn), is_in_cgroup, &observe()?);
    for (file, why) in &plan.rejected {
        tracing::warn!(
            dn = "supervisor",
            "can't use the record {file} of an earlier start, so its processes keep running: {why}; end them, then remove the file"
        );
    }
    let of_this_boot = plan.end_kept.iter().filter(|kept| kept.boot == *records.boot());
    let cgroups: Vec<_> = of_this_boot.filter_map(open_cgroup).collect();
    let (ended, complete) = plan.leftovers.end_all(&cgroups, Instant::now() + LEFTOVER_TIMEOUT)?;
    drop(cgroups);
    name_unproven(&plan.leftovers.unproven(&observe()?));
    // Else the records stay, and the next start tries again.
    if complete {
        plan.end_kept.iter().for_each(|kept| records.remove_kept(kept.mark));
        plan.obsolete.iter().for_each(|file| records.remove(file));
    }
    plan.kept.into_iter().for_each(|kept| records.add_unclaimed(kept));
    let unread =
        |(file, reason): (String, String)| RecordProblem::Record { path: records.path_of(&file), reason };
    Ok(LeftoverReport { ended, rejected: plan.rejected.into_iter().map(unread).collect() })
}

/// Logs which processes may be leftovers, and run on.
fn name_unproven(pids: &[i32]) {
    let (named, others) = pids.split_at(pids.len().min(MAX_NAMED));
    for &pid in named {
        let name = read_name(pid);
        tracing::warn!(
            dn = "supervisor",
            "{name}, process {pid}, may be a leftover of a killed supervisor, and is left alone: it has the mark, but a user as which none was started"
        );
    }
    if !others.is_empty() {
        tracing::warn!(dn = "supervisor", "{} more processes with such a mark are left alone", others.len());
    }
}

/// Ends one kept process with its descendants, and removes its record. Blocks until they have exited, at most a second.
/// Returns whether they have; else the record stays.
pub(super) fn end_kept(records: &HostRecords, kept: &KeptRecord) -> bool {
    let cgroup = open_cgroup(kept);
    let mut leftovers = LeftoverSet::default();
    let is_running = observe().is_ok_and(|observed| is_running(kept, &observed, is_in_cgroup));
    leftovers.add_kept(kept, is_running);
    let ended = leftovers.end_all(cgroup.as_slice(), Instant::now() + LEFTOVER_TIMEOUT);
    let complete = ended.map(|(_, complete)| complete).unwrap_or_else(|error| {
        tracing::error!(dn = "supervisor", %error, "can't scan /proc for leftover processes");
        false
    });
    // It is removed with its directory, if that is empty.
    drop(cgroup);
    if complete {
        records.remove_kept(kept.mark);
    }
    complete
}

/// The cgroup of a kept process. It is removed when the result is dropped.
fn open_cgroup(kept: &KeptRecord) -> Option<RunCgroup> {
    RunCgroup::open_kept(kept.cgroup.as_deref()?, kept.mark)
}

impl LeftoverSet {
    /// Kills all of them, and what is in their cgroups, until a scan finds none that runs. Returns those that were
    /// running, and whether all have exited in time.
    fn end_all(
        &mut self,
        cgroups: &[RunCgroup],
        deadline: Instant,
    ) -> io::Result<(Vec<LeftoverProcess>, bool)> {
        let (mut ended, mut seen) = (Vec::new(), HashSet::new());
        loop {
            let (mut running, mut changed, mut complete) = (Vec::new(), false, true);
            for process in self.find(&observe()?) {
                let is_new = seen.insert(process.id);
                changed |= is_new;
                // Before the kill: what has exited may be reaped at once, and has no name then.
                let name = is_new.then(|| read_name(process.id.pid));
                match kill_process(process) {
                    Ok(Some(pidfd)) => {
                        if let Some(name) = name {
                            let pid = process.id.pid.unsigned_abs();
                            tracing::info!(
                                dn = "supervisor",
                                pid,
                                "killed {name}, a leftover process of a killed supervisor"
                            );
                            ended.push(LeftoverProcess { pid, name });
                        }
                        running.push(pidfd);
                    }
                    Ok(None) => {}
                    Err(error) => {
                        // It runs as another user, and always will.
                        complete &= error.raw_os_error() == Some(libc::EPERM);
                        if is_new {
                            tracing::warn!(
                                dn = "supervisor",
                                pid = process.id.pid,
                                "can't end a leftover process of a killed supervisor, so it keeps running: {error}"
                            );
                        }
                    }
                }
            }
            // The cgroups come last: a process that they kill exits at once, and could no longer be named. The others
            // are found by their mark.
            cgroups.iter().for_each(|cgroup| _ = cgroup.kill_all());
            if running.is_empty() && !changed {
                return Ok((ended, complete));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(dn = "supervisor", "leftover processes do not exit after SIGKILL");
                return Ok((ended, false));
            }
            if !changed {
                wait_any_exit(&running, left);
            }
        }
    }
}

fn read_name(pid: i32) -> String {
    let name = fs::read(Path::new("/proc").join(pid.to_string()).join("comm")).unwrap_or_default();
    sanitize_line(name.trim_ascii_end())
}

/// Kills the process, if it is still the observed one. `None` if it has exited.
fn kill_process(process: ObservedProcess) -> io::Result<Option<OwnedFd>> {
    let pid = Pid::from_raw(process.id.pid).ok_or(Errno::SRCH)?;
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        opened => opened?,
    };
    // If it has exited by now, it is the observed process, or ignores signals.
    let is_same =
        observe_process(process.id.pid).is_ok_and(|now| now.id == process.id && now.limit == process.limit);
    if !is_same || has_exited(pidfd.as_fd()) {
        return Ok(None);
    }
    match sys::send_signal(pidfd.as_fd(), Signal::KILL.as_number()) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        sent => sent.map(|()| Some(pidfd)),
    }
}

fn observe() -> io::Result<Vec<ObservedProcess>> {
    Ok(procfs::list_pids()?.into_iter().filter_map(|pid| observe_process(pid).ok()).collect())
}

fn observe_process(pid: i32) -> io::Result<ObservedProcess> {
    let stat = procfs::read_stat(pid)?;
    let (id, limit) = (ProcessId { pid, start: stat.start }, procfs::locks_limit(pid)?);
    // Few have a mark.
    let user = ProcessMark::from_limit(limit).map(|_| procfs::only_user(pid)).transpose()?.flatten();
    Ok(ObservedProcess { id, parent: stat.parent, session: stat.session, limit, user })
}

/// Waits until one of them has exited.
fn wait_any_exit(running: &[OwnedFd], within: Duration) {
    let mut watched: Vec<_> =
        running.iter().take(MAX_WATCHED).map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
    let within = Timespec::try_from(within).unwrap_or_default();
    // If it fails, the next scan finds what is left.
    let _ = poll(&mut watched, Some(&within));
}

#[cfg(test)]
#[path = "leftovers_test.rs"]
mod tests;
