//! Finding and ending all that descends from one start of a process.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use tokio::time::{Instant, sleep, timeout_at};

use super::cgroup::Cgroup;
use super::procfs;
use super::snapshot::{Snapshot, Snapshots};
use super::status::Signal;
use super::tag::{Giver, Tag};
use crate::sys::{self, Readable};

/// How many ends are awaited at once: each takes a descriptor.
const WATCHED: usize = 128;
/// How often those are looked for that were born while others were signalled: each time they should be fewer.
const CHASES: usize = 64;
/// How many looks in a row may find somebody new before others get the thread for a while.
const LOOKS: usize = 16;
/// When it is looked again while this program has no descriptor left to look or to wait with: nothing tells when it has.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(20);

/// One process that is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Member {
    pid: i32,
    limit: u64,
    /// When it was started, where it is known by its parents and not by its mark: with the pid, that is one process.
    start: Option<u64>,
}

impl Member {
    /// A descriptor that can only mean a member. Opened first and checked after, so it is either a process that is
    /// known by its mark or its start, or one that is gone and takes no signal.
    fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let same = procfs::locks_limit(self.pid)? == self.limit
            && self.start.is_none_or(|start| procfs::stat(self.pid).is_ok_and(|stat| stat.start == start));
        if same { Ok(fd) } else { Err(Errno::SRCH.into()) }
    }
}

/// What one pass over the members did.
#[derive(Default)]
struct Round {
    watched: Vec<(Member, Arc<OwnedFd>)>,
    /// Somebody got a signal that he had not got before, or was gone already: there may be new ones.
    changed: bool,
    /// Somebody is there whose end can't be awaited.
    unheld: bool,
}

/// The descendants of one start of a process. Its main process is killed with them, but it is its owner who asks it to
/// end, and who waits for it.
#[derive(Debug)]
pub(super) struct Family {
    tag: Tag,
    main: i32,
    main_fd: Arc<OwnedFd>,
    /// Where all of them are that have not left it.
    cgroup: Option<Arc<Cgroup>>,
    /// Supervisors below, which mark their children themselves.
    nested: HashSet<Giver>,
    /// Those that have no mark, or one that can't be told: known by the parents that they had when they were found.
    strays: Vec<Member>,
    /// When nobody is asked any more: what forks without end keeps who asks from killing it.
    asks_until: Option<Instant>,
    /// Before which signal the strays were looked for.
    searched: Option<Signal>,
    signalled: HashMap<Member, Signal>,
    /// Those that this program may not signal.
    untouchable: HashSet<Member>,
    /// Those that have ended, but whose parent has not waited for them.
    dead: HashSet<Member>,
}

impl Family {
    pub(super) fn new(tag: Tag, (main, main_fd): (i32, Arc<OwnedFd>), cgroup: Option<Arc<Cgroup>>) -> Self {
        Self {
            tag,
            main,
            main_fd,
            cgroup,
            nested: HashSet::new(),
            strays: Vec::new(),
            asks_until: None,
            searched: None,
            signalled: HashMap::new(),
            untouchable: HashSet::new(),
            dead: HashSet::new(),
        }
    }

    /// Asks nobody from then on, even in the midst of asking.
    pub(super) fn asking_until(mut self, deadline: Instant) -> Self {
        self.asks_until = Some(deadline);
        self
    }

    /// Whether it is too late for a signal.
    fn is_late(&self, signal: Signal) -> bool {
        signal != Signal::KILL && self.asks_until.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Sends `polite` to everybody, and kills from the deadline on, until nobody is left.
    ///
    /// First those in the cgroup, whom the kernel can kill all at once; then those who have left it.
    pub(super) async fn end(&mut self, snapshots: &Snapshots, polite: Signal, deadline: Instant) {
        if let Some(cgroup) = self.cgroup.clone()
            && let Err(error) = self.end_cgroup(&cgroup, snapshots, (polite, deadline)).await
        {
            tracing::warn!(%error, "can't end a cgroup as one: its processes are ended one by one");
        }
        self.end_marked(snapshots, polite, deadline).await;
    }

    /// Ends those in the cgroup. Who forks after it was asked is asked no more.
    async fn end_cgroup(
        &mut self,
        cgroup: &Cgroup,
        snapshots: &Snapshots,
        (polite, deadline): (Signal, Instant),
    ) -> io::Result<()> {
        if Instant::now() < deadline {
            // What it can't do the chase by marks tells.
            let _ = self.pass(snapshots, polite);
            if let Ok(empty) = timeout_at(deadline, cgroup.empty()).await {
                return empty;
            }
        }
        cgroup.kill()?;
        cgroup.empty().await
    }

    /// Ends those that are known by their marks and parents.
    async fn end_marked(&mut self, snapshots: &Snapshots, polite: Signal, deadline: Instant) {
        loop {
            let kill = Instant::now() >= deadline;
            let round = match self.pass(snapshots, if kill { Signal::KILL } else { polite }) {
                Ok(Some(round)) => round,
                Ok(None) => return,
                Err(error) if is_short(&error) => {
                    sleep(WITHOUT_DESCRIPTORS).await;
                    continue;
                }
                Err(error) => return tracing::error!(%error, "can't look for descendants in /proc"),
            };
            if kill && round.changed {
                tokio::task::yield_now().await;
                continue;
            }
            let (watched, all) = watch(&round);
            let ended = async {
                join_all(watched.iter().map(|(_, end)| end.readable())).await;
                if !all {
                    sleep(WITHOUT_DESCRIPTORS).await;
                }
            };
            if kill {
                ended.await;
            } else if timeout_at(deadline, ended).await.is_err() {
                continue;
            }
            if !self.reap(watched, snapshots) && !round.changed && all {
                return tracing::debug!("descendants that have ended are left to a parent elsewhere");
            }
        }
    }

    /// Kills everybody, without waiting for it.
    pub(super) fn kill(&mut self, snapshots: &Snapshots) {
        if let Some(cgroup) = &self.cgroup {
            let _ = cgroup.kill();
        }
        // `end` tells why it is not possible.
        let _ = self.pass(snapshots, Signal::KILL);
    }

    /// Asks everybody to end, once: whoever is found later is asked by [`end`](Self::end). The main process is asked
    /// first, so that no death of a child seems an accident to it, but after those are found that are known by their
    /// parents only, while these live.
    pub(super) fn ask(&mut self, snapshots: &Snapshots, polite: Signal, ask_main: impl FnOnce()) {
        // Without a snapshot nobody else can be signalled: `end` tells.
        if let Ok(snapshot) = snapshots.fresh() {
            self.find_strays(&snapshot);
            self.searched = Some(polite);
        }
        ask_main();
        // A process that forks without end is asked no more: it is killed when its time is over.
        let _ = self.pass(snapshots, polite);
    }

    /// Signals everybody, until a look finds nobody new, so that a process that forks without end loses the race. `None`
    /// when nobody is there.
    ///
    /// Those that are known by their parents are looked for before the first signal of a kind, because a parent that is
    /// dead tells nothing. So the main process is killed only after that, but then at once.
    fn pass(&mut self, snapshots: &Snapshots, signal: Signal) -> io::Result<Option<Round>> {
        let mut snapshot = snapshots.fresh();
        if self.searched != Some(signal) {
            if let Ok(snapshot) = &snapshot {
                self.find_strays(snapshot);
                self.searched = Some(signal);
            }
            if signal == Signal::KILL {
                // It may have ended.
                let _ = sys::send_signal(self.main_fd.as_fd(), signal.number());
            }
        }
        let mut looks = 1;
        loop {
            let round = self.round(&*snapshot?, signal);
            if looks == LOOKS || self.is_late(signal) || !round.as_ref().is_some_and(|round| round.changed) {
                return Ok(round);
            }
            looks += 1;
            snapshot = snapshots.fresh();
        }
    }

    /// Signals everybody, once each. `None` when nobody is there.
    fn round(&mut self, snapshot: &Snapshot, signal: Signal) -> Option<Round> {
        let mut round = Round::default();
        self.forget_gone_strays(snapshot);
        let mut members = self.marked(snapshot);
        members.extend(&self.strays);
        if members.is_empty() {
            return None;
        }
        self.signal(&members, signal, &mut round);
        if round.changed {
            self.chase(snapshot.newest(), signal, &mut round);
        }
        Some(round)
    }

    /// Signals those that were born since a snapshot, and since that was done, until nobody is born any more: what has
    /// forked and is gone may be one of them. The kernel gives out pids in order and tells the last, so these are few,
    /// and here is no time to look at all the others.
    fn chase(&mut self, mut from: i32, signal: Signal, round: &mut Round) {
        for _ in 0..CHASES {
            let Ok(to) = procfs::newest_pid() else { return };
            if to == from || self.is_late(signal) {
                return;
            }
            for pid in procfs::pids_after(from, to) {
                let limit = procfs::locks_limit_to_signal(pid).ok().filter(|limit| self.is_marked(*limit));
                if let Some(limit) = limit.filter(|_| pid != self.main) {
                    self.signal(&[Member { pid, limit, start: None }], signal, round);
                }
            }
            from = to;
        }
    }

    /// Those that carry the mark, or one of a nested supervisor.
    fn marked(&self, snapshot: &Snapshot) -> Vec<Member> {
        let own = procfs::own_pid();
        let candidates =
            snapshot.limits().iter().filter(|(pid, _)| *pid > 1 && *pid != own && *pid != self.main);
        candidates
            .filter(|(_, limit)| self.is_marked(*limit))
            .map(|&(pid, limit)| Member { pid, limit, start: None })
            .filter(|member| !self.untouchable.contains(member))
            .collect()
    }

    fn is_marked(&self, limit: u64) -> bool {
        Tag::from_limit(limit).is_some_and(|tag| tag == self.tag || self.nested.contains(&tag.giver()))
    }

    /// Adds those that have changed their mark, as a nested supervisor's children have: the first of these gives away
    /// the mark of all.
    fn find_strays(&mut self, snapshot: &Snapshot) {
        let mut children = HashMap::<i32, Vec<i32>>::new();
        for (&pid, &parent) in snapshot.parents() {
            children.entry(parent).or_default().push(pid);
        }
        let marked = self.marked(snapshot);
        let parents = marked.iter().chain(&self.strays).map(|member| member.pid).chain([self.main]);
        let mut known: HashSet<i32> = parents.collect();
        let mut parents: Vec<i32> = known.iter().copied().collect();
        while let Some(parent) = parents.pop() {
            for &pid in children.get(&parent).into_iter().flatten().filter(|pid| known.insert(**pid)) {
                parents.push(pid);
                let Some(limit) = snapshot.limit(pid) else { continue };
                match (Tag::from_limit(limit).map(Tag::giver), procfs::stat(pid)) {
                    (Some(giver), _) => _ = self.nested.insert(giver),
                    (None, Ok(stat)) if stat.parent == parent => {
                        self.strays.push(Member { pid, limit, start: Some(stat.start) });
                    }
                    // It has ended, or its parent has.
                    _ => {}
                }
            }
        }
    }

    fn forget_gone_strays(&mut self, snapshot: &Snapshot) {
        self.strays.retain(|member| {
            snapshot.limit(member.pid) == Some(member.limit)
                && !self.untouchable.contains(member)
                && procfs::stat(member.pid).is_ok_and(|stat| Some(stat.start) == member.start)
        });
    }

    /// Sends the signal to those who have not got it yet.
    fn signal(&mut self, members: &[Member], signal: Signal, round: &mut Round) {
        for &member in members {
            if self.is_late(signal) {
                round.changed = true;
                return;
            }
            let fd = match member.open() {
                Ok(fd) => fd,
                Err(error) if is_gone(&error) => {
                    round.changed = true;
                    continue;
                }
                Err(error) => {
                    self.signal_unheld(member, signal);
                    round.unheld |= is_short(&error);
                    if !is_short(&error) {
                        tracing::warn!(pid = member.pid, %error, "can't get hold of a descendant");
                        self.untouchable.insert(member);
                    }
                    continue;
                }
            };
            let known = self.signalled.get(&member) == Some(&signal);
            // A pid may have come to mean another member: to kill twice does no harm.
            if !known || signal == Signal::KILL {
                if let Err(error) = deliver(&fd, signal)
                    && error.raw_os_error() == Some(libc::EPERM)
                {
                    tracing::warn!(
                        pid = member.pid,
                        "may not send {signal} to a descendant: it is another user's"
                    );
                    self.untouchable.insert(member);
                    continue;
                }
                self.signalled.insert(member, signal);
                round.changed |= !known;
            }
            if round.watched.len() < WATCHED {
                round.watched.push((member, Arc::new(fd)));
            }
        }
    }

    /// Signals one of which no descriptor can be had. Its pid can have come to mean another process only since its mark
    /// was looked at; one that is not known by its mark has to wait until there are descriptors again.
    fn signal_unheld(&mut self, member: Member, signal: Signal) {
        let is_known = self.signalled.get(&member) == Some(&signal) && signal != Signal::KILL;
        let is_marked = member.start.is_none()
            && procfs::locks_limit(member.pid).is_ok_and(|limit| limit == member.limit);
        if is_marked && !is_known && sys::send_signal_to_pid(member.pid, signal.number()).is_ok() {
            self.signalled.insert(member, signal);
            if signal != Signal::KILL {
                // It is there, or it is gone and needs no waking.
                let _ = sys::send_signal_to_pid(member.pid, Signal::CONT.number());
            }
        }
    }

    /// Takes the statuses of those that have ended. Whether anything has come of it.
    fn reap(&mut self, watched: Vec<(Member, Readable)>, snapshots: &Snapshots) -> bool {
        let mut progress = false;
        for (member, end) in watched {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match snapshots.reap(|| rustix::process::waitid(WaitId::PidFd(end.fd()), options)) {
                Ok(Some(_)) => progress = true,
                // Not a child of this program: its parent has waited for it, or lives on; or it is about to be one.
                Err(Errno::CHILD) => progress |= self.dead.insert(member),
                _ => {}
            }
        }
        progress
    }
}

/// What tells the end of those that are watched, and whether that is everybody.
fn watch(round: &Round) -> (Vec<(Member, Readable)>, bool) {
    let ends = round.watched.iter().map(|(member, fd)| Ok((*member, Readable::new(Arc::clone(fd))?)));
    let watched: Vec<_> = ends.filter_map(|end: io::Result<_>| end.ok()).collect();
    let all = watched.len() == round.watched.len() && !round.unheld;
    (watched, all)
}

/// Whether there may be enough of what it took in a moment.
fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whether there is no such process, but at most a thread of that id.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT | libc::EINVAL))
}

/// A stopped process acts on a signal only when it goes on.
fn deliver(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    sys::send_signal(fd.as_fd(), signal.number())?;
    if signal != Signal::KILL {
        sys::send_signal(fd.as_fd(), Signal::CONT.number())?;
    }
    Ok(())
}
