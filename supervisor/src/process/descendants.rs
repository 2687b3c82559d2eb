//! Finds and ends all descendants of one start of a process.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use tokio::time::{Instant, sleep, timeout_at};

use super::cgroup::RunCgroup;
use super::host_state::HostState;
use super::mark::{HostId, ProcessMark};
use super::procfs;
use super::snapshot::{ProcessSnapshot, SnapshotCache};
use crate::process_exit::Signal;
use crate::sys::{self, ReadableFd};

/// The number of exits that are awaited at once: each needs a descriptor.
const MAX_WATCHED: usize = 128;
/// The number of passes that look for processes born while others were signaled. Each pass should find fewer.
const MAX_CHASES: usize = 64;
/// The number of scans in a row that may find new processes before the task yields its thread.
const MAX_SCANS_IN_A_ROW: usize = 16;
/// The number of passes in a row that may find nothing but processes that have exited before they could be looked at:
/// one that forks and exits leaves another one, and a stranger with a copied mark can do so for ever.
const MAX_PASSES_WITHOUT_KIN: usize = 200;
/// The number of processes that are named because they may be descendants: every user can make more of them.
pub(super) const MAX_NAMED: usize = 16;
/// The pause before a retry while no descriptors are available: the kernel does not report when some are.
const DESCRIPTOR_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// One process that has to exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DescendantProcess {
    pid: i32,
    limit: u64,
    /// The start time, if it is identified by its parents and not by its mark: with the pid, it identifies
    /// one process.
    start: Option<u64>,
}

impl DescendantProcess {
    /// Opens a descriptor that can only refer to this process. It is opened first and checked afterwards, so
    /// it refers to the process with this mark or start time, or to one that has exited and ignores signals.
    fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let same = procfs::locks_limit(self.pid)? == self.limit
            && self
                .start
                .is_none_or(|start| procfs::read_stat(self.pid).is_ok_and(|stat| stat.start == start));
        if same { Ok(fd) } else { Err(Errno::SRCH.into()) }
    }
}

/// The evidence that a process with the mark of a start belongs to it. The mark alone is none: every process can set
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kinship {
    /// It descends from this program, which is the subreaper of all that its processes leave behind.
    Descends,
    /// It has no other user than this one, as the main process at its start. For what an earlier program started: its
    /// orphans have other parents.
    User(u32),
}

impl Kinship {
    /// # Errors
    /// The process has exited; or it can't be read, as when no descriptors are left.
    fn includes(self, pid: i32) -> io::Result<bool> {
        match self {
            Self::Descends => procfs::descends_from(pid, procfs::own_pid()),
            Self::User(uid) => procfs::only_user(pid).map(|user| user == Some(uid)),
        }
    }
}

/// The result of one pass over the processes.
#[derive(Default)]
struct SignalPass {
    watched: Vec<(DescendantProcess, Arc<OwnedFd>)>,
    /// A process got a signal for the first time, or had already exited: there may be new processes.
    changed: bool,
    /// The exit of at least one process can't be awaited.
    unwatchable: bool,
}

/// The descendants of one start of a process. The main process is killed with them, but its owner requests
/// its stop and waits for it.
#[derive(Debug)]
pub(super) struct DescendantSet {
    mark: ProcessMark,
    kinship: Kinship,
    main_pid: i32,
    main_pidfd: Arc<OwnedFd>,
    /// The cgroup of all that have not left it.
    cgroup: Option<Arc<RunCgroup>>,
    /// Nested supervisors, which mark their children themselves.
    nested_hosts: HashSet<HostId>,
    /// Processes without a mark, or with an unknown one, identified by their parents at the time they were
    /// found.
    unmarked: Vec<DescendantProcess>,
    /// No stop signal is sent after this time: an endless fork would otherwise delay the kill.
    term_deadline: Option<Instant>,
    /// The signal before which the last search for unmarked processes took place.
    searched_before: Option<Signal>,
    signaled: HashMap<DescendantProcess, Signal>,
    /// Processes that this program may not signal.
    not_permitted: HashSet<DescendantProcess>,
    /// Processes that have exited, but that their parent has not reaped.
    unreaped: HashSet<DescendantProcess>,
    /// Processes other than the main one had to be killed.
    needed_kill: bool,
    /// See [`MAX_PASSES_WITHOUT_KIN`].
    passes_without_kin: usize,
}

impl DescendantSet {
    pub(super) fn new(
        mark: ProcessMark,
        kinship: Kinship,
        main_pid: i32,
        main_pidfd: Arc<OwnedFd>,
        cgroup: Option<Arc<RunCgroup>>,
    ) -> Self {
        Self {
            mark,
            kinship,
            main_pid,
            main_pidfd,
            cgroup,
            nested_hosts: HashSet::new(),
            unmarked: Vec::new(),
            term_deadline: None,
            searched_before: None,
            signaled: HashMap::new(),
            not_permitted: HashSet::new(),
            unreaped: HashSet::new(),
            needed_kill: false,
            passes_without_kin: 0,
        }
    }

    /// Sends no stop signals from this time on, even in the middle of a pass.
    pub(super) fn with_term_deadline(mut self, deadline: Instant) -> Self {
        self.term_deadline = Some(deadline);
        self
    }

    /// Returns whether the deadline for a signal has passed.
    fn is_past_deadline(&self, signal: Signal) -> bool {
        signal != Signal::KILL && self.term_deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns whether processes other than the main one were still running when they were killed.
    pub(super) fn needed_kill(&self) -> bool {
        self.needed_kill
    }

    /// Sends `stop_signal` to every process, and kills from the deadline on, until none is left.
    ///
    /// First it ends those in the cgroup, which the kernel can kill all at once; then those that have left
    /// it.
    pub(super) async fn terminate_all(&mut self, host: &HostState, stop_signal: Signal, deadline: Instant) {
        let snapshots = &host.snapshots;
        if let Some(cgroup) = self.cgroup.clone()
            && let Err(error) = self.terminate_cgroup(&cgroup, snapshots, stop_signal, deadline).await
        {
            tracing::warn!(%error, "can't kill a cgroup as a unit: ending its processes one by one");
        }
        // Once the main process has exited, what is left of it is an orphan, or descends from one. What an earlier program
        // has started has other parents.
        if self.kinship == Kinship::Descends
            && has_exited(self.main_pidfd.as_fd())
            && host.has_nothing_left().await
        {
            return;
        }
        self.terminate_marked(snapshots, stop_signal, deadline).await;
    }

    /// Ends the processes in the cgroup. A process that is forked after the stop signal gets none.
    async fn terminate_cgroup(
        &mut self,
        cgroup: &RunCgroup,
        snapshots: &SnapshotCache,
        stop_signal: Signal,
        deadline: Instant,
    ) -> io::Result<()> {
        // Most main processes leave no other process behind.
        if !cgroup.is_populated()? {
            return Ok(());
        }
        if Instant::now() < deadline {
            // `terminate_marked` logs what this pass can't do.
            let _ = self.signal_until_stable(snapshots, stop_signal).await;
            if let Ok(empty) = timeout_at(deadline, cgroup.wait_empty()).await {
                return empty;
            }
        }
        self.needed_kill |= cgroup.is_populated()?;
        cgroup.kill_all()?;
        cgroup.wait_empty().await
    }

    /// Ends the processes that are identified by their marks and parents.
    async fn terminate_marked(&mut self, snapshots: &SnapshotCache, stop_signal: Signal, deadline: Instant) {
        loop {
            let kill = Instant::now() >= deadline;
            let signal = if kill { Signal::KILL } else { stop_signal };
            let pass = match self.signal_until_stable(snapshots, signal).await {
                Ok(Some(pass)) => pass,
                Ok(None) => return,
                Err(error) if is_resource_shortage(&error) => {
                    sleep(DESCRIPTOR_RETRY_PAUSE).await;
                    continue;
                }
                Err(error) => return tracing::error!(%error, "can't scan /proc for descendants"),
            };
            // There may be new processes. They are killed before this waits for an exit: a process that keeps
            // forking would win.
            if kill && pass.changed {
                tokio::task::yield_now().await;
                continue;
            }
            let (watched, all) = watch_exits(&pass);
            let ended = async {
                join_all(watched.iter().map(|(_, end)| end.wait_readable())).await;
                if !all {
                    sleep(DESCRIPTOR_RETRY_PAUSE).await;
                }
            };
            if kill {
                ended.await;
            } else if timeout_at(deadline, ended).await.is_err() {
                continue;
            }
            if !self.reap_exited(watched, snapshots) && !pass.changed && all {
                return tracing::debug!("exited descendants are left to their parents to reap");
            }
        }
    }

    /// Kills every process, without waiting for the exits.
    pub(super) fn kill_all(&mut self, snapshots: &SnapshotCache) {
        if let Some(cgroup) = &self.cgroup {
            let _ = cgroup.kill_all();
        }
        let mut snapshot = snapshots.take_fresh();
        self.search_before(Signal::KILL, &snapshot);
        for _ in 0..MAX_SCANS_IN_A_ROW {
            // `terminate_all` logs why it is not possible.
            let Ok(known) = snapshot else { return };
            let Ok(Some(pass)) = self.signal_once(&known, Signal::KILL) else { return };
            if !pass.changed {
                return;
            }
            snapshot = snapshots.take_fresh();
        }
    }

    /// Sends the stop signal to every process once; [`terminate_all`](Self::terminate_all) signals those that
    /// are found later. The main process comes first, so that it does not take a child's exit for a crash.
    /// But before it, this finds the unmarked descendants, which are identified only by their parents, while
    /// those are running.
    pub(super) async fn request_stop(
        &mut self,
        snapshots: &SnapshotCache,
        stop_signal: Signal,
        signal_main: impl FnOnce(),
    ) {
        // Without a snapshot no other process can be signaled: `terminate_all` logs it.
        if let Ok(snapshot) = snapshots.take_shared().await {
            let _ = self.find_unmarked(&snapshot).map(|()| self.searched_before = Some(stop_signal));
        }
        signal_main();
        // A process that keeps forking gets no further stop signals: it is killed at the deadline.
        let _ = self.signal_until_stable(snapshots, stop_signal).await;
    }

    /// Signals every process until a scan finds no new one, so that a process that keeps forking loses the
    /// race. `None` if no process is left.
    ///
    /// Two scans are enough for processes that do not keep forking; further ones wait for no other task.
    async fn signal_until_stable(
        &mut self,
        snapshots: &SnapshotCache,
        signal: Signal,
    ) -> io::Result<Option<SignalPass>> {
        let mut snapshot = snapshots.take_shared().await;
        self.search_before(signal, &snapshot);
        let mut scans = 1;
        loop {
            let pass = self.signal_once(&*snapshot?, signal)?;
            if scans == MAX_SCANS_IN_A_ROW
                || self.is_past_deadline(signal)
                || !pass.as_ref().is_some_and(|pass| pass.changed)
            {
                return Ok(pass);
            }
            scans += 1;
            snapshot = if scans == 2 { snapshots.take_shared().await } else { snapshots.take_fresh() };
        }
    }

    /// The search for unmarked processes precedes the first signal of a kind, because an exited parent no
    /// longer identifies its children. The main process is therefore killed only after the search, but then
    /// at once.
    fn search_before(&mut self, signal: Signal, snapshot: &io::Result<Arc<ProcessSnapshot>>) {
        if self.searched_before == Some(signal) {
            return;
        }
        if let Ok(snapshot) = snapshot
            && self.find_unmarked(snapshot).is_ok()
        {
            self.searched_before = Some(signal);
        }
        if signal == Signal::KILL {
            // It may have exited.
            let _ = sys::send_signal(self.main_pidfd.as_fd(), signal.as_number());
        }
    }

    /// The processes that carry this mark, or that of a nested supervisor, and are kin. The second value is true if
    /// others have exited before that could be seen.
    fn find_marked(&self, snapshot: &ProcessSnapshot) -> io::Result<(Vec<DescendantProcess>, bool)> {
        let own = procfs::own_pid();
        let (mut kin, mut have_exited) = (Vec::new(), false);
        for &(pid, limit) in snapshot.limits() {
            let member = DescendantProcess { pid, limit, start: None };
            if pid <= 1
                || [own, self.main_pid].contains(&pid)
                || !self.is_marked(limit)
                || self.not_permitted.contains(&member)
            {
                continue;
            }
            match self.kinship.includes(pid) {
                Ok(true) => kin.push(member),
                Ok(false) => {}
                Err(error) if is_gone(&error) => have_exited = true,
                Err(error) => return Err(error),
            }
        }
        Ok((kin, have_exited))
    }

    fn is_marked(&self, limit: u64) -> bool {
        ProcessMark::from_limit(limit)
            .is_some_and(|mark| mark == self.mark || self.nested_hosts.contains(&mark.host_id()))
    }

    /// Adds the descendants that have changed their mark, as a nested supervisor's children have: the first
    /// of these reveals the mark of all the others.
    fn find_unmarked(&mut self, snapshot: &ProcessSnapshot) -> io::Result<()> {
        let (marked, _) = self.find_marked(snapshot)?;
        // Once the main process has exited, its children have another parent, and its pid may be another process'.
        let main = (!has_exited(self.main_pidfd.as_fd())).then_some(self.main_pid);
        let parents = marked.iter().chain(&self.unmarked).map(|member| member.pid).chain(main);
        let mut known: HashSet<i32> = parents.collect();
        let mut parents: Vec<i32> = known.iter().copied().collect();
        let of_others = self.marked_of_others(snapshot);
        if parents.is_empty() && of_others.is_empty() {
            return Ok(());
        }
        let mut children = HashMap::<i32, Vec<i32>>::new();
        for (&pid, &parent) in snapshot.parents() {
            children.entry(parent).or_default().push(pid);
        }
        if let Some(main) = main {
            // Only a descendant of the main process can be in its session while that is running.
            let in_session = |pid: &i32| sys::session_id(*pid).is_ok_and(|session| session == main);
            let in_session: Vec<i32> = of_others.iter().copied().filter(in_session).collect();
            if !has_exited(self.main_pidfd.as_fd()) {
                children.entry(main).or_default().extend(in_session);
            }
        }
        while let Some(parent) = parents.pop() {
            for &pid in children.get(&parent).into_iter().flatten().filter(|pid| known.insert(**pid)) {
                parents.push(pid);
                let Some(limit) = snapshot.limit_of(pid) else { continue };
                match (ProcessMark::from_limit(limit).map(ProcessMark::host_id), procfs::read_stat(pid)) {
                    // It is found by its mark only while its descent, or its user, shows whose it is.
                    (_, Ok(stat))
                        if of_others.contains(&pid) && [stat.parent, stat.session].contains(&parent) =>
                    {
                        self.unmarked.push(DescendantProcess { pid, limit, start: Some(stat.start) });
                    }
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
        let left: Vec<_> = of_others.iter().filter(|pid| !known.contains(*pid)).collect();
        if self.searched_before.is_none() && !left.is_empty() && self.cgroup.is_none() {
            let (main, named) = (self.main_pid, &left[..left.len().min(MAX_NAMED)]);
            let more = if left.len() > named.len() { " and more" } else { "" };
            tracing::warn!(
                "processes {named:?}{more} may be descendants of the kept process {main}, and are left alone: they have its mark, but another user, and neither a parent nor their session shows it"
            );
        }
        Ok(())
    }

    /// The processes with the mark of an adopted start, but another user than its main process.
    fn marked_of_others(&self, snapshot: &ProcessSnapshot) -> Vec<i32> {
        let Kinship::User(_) = self.kinship else { return Vec::new() };
        let marked = snapshot.limits().iter().filter(|(_, limit)| *limit == self.mark.as_limit());
        let of_other = |pid: &i32| self.kinship.includes(*pid).is_ok_and(|is_kin| !is_kin);
        marked.map(|(pid, _)| *pid).filter(of_other).collect()
    }

    fn forget_exited_unmarked(&mut self, snapshot: &ProcessSnapshot) {
        self.unmarked.retain(|member| {
            snapshot.limit_of(member.pid) == Some(member.limit)
                && !self.not_permitted.contains(member)
                && procfs::read_stat(member.pid).is_ok_and(|stat| Some(stat.start) == member.start)
        });
    }

    /// Signals every process once. `None` if no process is left.
    fn signal_once(&mut self, snapshot: &ProcessSnapshot, signal: Signal) -> io::Result<Option<SignalPass>> {
        let mut pass = SignalPass::default();
        self.forget_exited_unmarked(snapshot);
        let (mut members, have_exited) = self.find_marked(snapshot)?;
        members.extend(&self.unmarked);
        if members.is_empty() {
            self.passes_without_kin += 1;
            if !have_exited || self.passes_without_kin > MAX_PASSES_WITHOUT_KIN {
                return Ok(None);
            }
        } else {
            self.passes_without_kin = 0;
        }
        pass.changed = have_exited;
        self.signal_members(&members, signal, &mut pass);
        if pass.changed {
            self.signal_newborn(snapshot.newest_pid(), signal, &mut pass);
        }
        Ok(Some(pass))
    }

    /// Signals the processes born since a snapshot, and since this started, until no more are born: a process
    /// that forked and exited may have left one of them. The kernel assigns pids in order and reports the
    /// last one, so these are few; scanning all processes would take too long.
    fn signal_newborn(&mut self, mut from: i32, signal: Signal, pass: &mut SignalPass) {
        for _ in 0..MAX_CHASES {
            let Ok(to) = procfs::newest_pid() else { return };
            if to == from || self.is_past_deadline(signal) {
                return;
            }
            for pid in procfs::pids_after(from, to) {
                let limit =
                    procfs::locks_limit_if_signalable(pid).ok().filter(|limit| self.is_marked(*limit));
                let is_kin = || pid != self.main_pid && self.kinship.includes(pid).unwrap_or(false);
                if let Some(limit) = limit.filter(|_| is_kin()) {
                    self.signal_members(&[DescendantProcess { pid, limit, start: None }], signal, pass);
                }
            }
            from = to;
        }
    }

    /// Sends the signal to those that have not received it yet.
    fn signal_members(&mut self, members: &[DescendantProcess], signal: Signal, pass: &mut SignalPass) {
        for &member in members {
            if self.is_past_deadline(signal) {
                pass.changed = true;
                return;
            }
            let fd = match member.open() {
                Ok(fd) => fd,
                Err(error) if is_gone(&error) => {
                    pass.changed = true;
                    continue;
                }
                Err(error) => {
                    self.signal_by_pid(member, signal);
                    pass.unwatchable |= is_resource_shortage(&error);
                    if !is_resource_shortage(&error) {
                        tracing::warn!(pid = member.pid, %error, "can't open a descriptor of a descendant");
                        self.not_permitted.insert(member);
                    }
                    continue;
                }
            };
            let known = self.signaled.get(&member) == Some(&signal);
            // The pid may now refer to another process of this set: to kill it twice does no harm.
            if !known || signal == Signal::KILL {
                let is_late = self.term_deadline.is_some_and(|deadline| Instant::now() >= deadline);
                self.needed_kill |= signal == Signal::KILL && is_late && !has_exited(fd.as_fd());
                if let Err(error) = signal_and_continue(&fd, signal)
                    && error.raw_os_error() == Some(libc::EPERM)
                {
                    tracing::warn!(
                        pid = member.pid,
                        "not permitted to send {signal} to a descendant: it runs as another user"
                    );
                    self.not_permitted.insert(member);
                    continue;
                }
                self.signaled.insert(member, signal);
                pass.changed |= !known;
            }
            if pass.watched.len() < MAX_WATCHED {
                pass.watched.push((member, Arc::new(fd)));
            }
        }
    }

    /// Signals by pid a process for which no descriptor is available. The pid can refer to another process
    /// only if that happened since the check of its mark. A process without a mark has to wait until
    /// descriptors are available.
    fn signal_by_pid(&mut self, member: DescendantProcess, signal: Signal) {
        let is_known = self.signaled.get(&member) == Some(&signal) && signal != Signal::KILL;
        let is_marked = member.start.is_none()
            && procfs::locks_limit(member.pid).is_ok_and(|limit| limit == member.limit);
        if is_marked && !is_known && sys::send_signal_to_pid(member.pid, signal.as_number()).is_ok() {
            self.signaled.insert(member, signal);
            if signal != Signal::KILL {
                // If it fails, the process has exited and needs no SIGCONT.
                let _ = sys::send_signal_to_pid(member.pid, Signal::CONT.as_number());
            }
        }
    }

    /// Reaps the processes that have exited. Returns whether there was any progress.
    fn reap_exited(
        &mut self,
        watched: Vec<(DescendantProcess, ReadableFd)>,
        snapshots: &SnapshotCache,
    ) -> bool {
        let mut progress = false;
        for (member, end) in watched {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match snapshots
                .reap_between_snapshots(|| rustix::process::waitid(WaitId::PidFd(end.fd()), options))
            {
                Ok(Some(_)) => progress = true,
                // Not a child of this program: its parent has reaped it, or is running, or has just exited.
                Err(Errno::CHILD) => progress |= self.unreaped.insert(member),
                _ => {}
            }
        }
        progress
    }
}

/// Opens the exit notifications of the watched processes. Returns them, and whether they cover every process.
fn watch_exits(pass: &SignalPass) -> (Vec<(DescendantProcess, ReadableFd)>, bool) {
    let ends = pass.watched.iter().map(|(member, fd)| Ok((*member, ReadableFd::new(Arc::clone(fd))?)));
    let watched: Vec<_> = ends.filter_map(|end: io::Result<_>| end.ok()).collect();
    let all = watched.len() == pass.watched.len() && !pass.unwatchable;
    (watched, all)
}

/// Returns whether an error is a shortage that may be over soon.
fn is_resource_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Returns whether the process has exited; at most a thread has its id.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT | libc::EINVAL))
}

/// Returns whether the process of a pidfd has exited, even if its parent has not reaped it.
///
/// *Source:* pidfd_open(2): the descriptor becomes readable when the process terminates.
pub(super) fn has_exited(pidfd: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::new(&pidfd, PollFlags::IN)];
    matches!(poll(&mut watched, Some(&Timespec::default())), Ok(1..))
}

/// Sends a signal, then SIGCONT: a stopped process handles a signal only after it is continued.
fn signal_and_continue(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    sys::send_signal(fd.as_fd(), signal.as_number())?;
    if signal != Signal::KILL {
        sys::send_signal(fd.as_fd(), Signal::CONT.as_number())?;
    }
    Ok(())
}
