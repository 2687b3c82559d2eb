//! Finding and ending all that descends from one start of a process.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Instant as Moment;

use futures_util::future::join_all;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use tokio::time::{Instant, timeout_at};

use super::procfs::{self, Stat};
use super::status::Signal;
use super::tag::{Program, Tag};
use crate::sys::{self, Readable};

/// How many ends are awaited at once: each takes a descriptor.
const WATCHED: usize = 128;
/// How often new processes are looked for when nothing can be awaited. Each time finds what the processes that were not
/// yet killed have forked meanwhile, so the second is mostly empty.
const BLIND_SWEEPS: usize = 16;

/// All processes at one moment, with their marks.
#[derive(Debug)]
pub(super) struct Snapshot {
    limits: Vec<(i32, u64)>,
    stats: OnceLock<HashMap<i32, Stat>>,
}

impl Snapshot {
    fn take() -> io::Result<Self> {
        let pids = procfs::pids()?;
        // Who is gone by now, or hidden, can't be a descendant that could be signalled.
        let limits = pids.into_iter().filter_map(|pid| Some((pid, procfs::locks_limit(pid).ok()?))).collect();
        Ok(Self { limits, stats: OnceLock::new() })
    }

    /// The soft limits of file locks, by pid.
    pub(super) fn limits(&self) -> &[(i32, u64)] {
        &self.limits
    }

    /// Read only when somebody is left to look for: it takes ten times as long as the rest.
    fn stats(&self) -> &HashMap<i32, Stat> {
        let read = || self.limits.iter().filter_map(|&(pid, _)| Some((pid, procfs::stat(pid).ok()?))).collect();
        self.stats.get_or_init(read)
    }
}

/// Hands out snapshots. Who asks while one is being taken shares the next with all others who do.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    latest: tokio::sync::Mutex<Option<(Moment, Arc<Snapshot>)>>,
}

impl Snapshots {
    /// One that was begun after this was called.
    pub(super) async fn fresh(&self) -> io::Result<Arc<Snapshot>> {
        let asked = Moment::now();
        let mut latest = self.latest.lock().await;
        if let Some((began, snapshot)) = &*latest
            && *began >= asked
        {
            return Ok(Arc::clone(snapshot));
        }
        let began = Moment::now();
        let snapshot = Arc::new(Snapshot::take()?);
        *latest = Some((began, Arc::clone(&snapshot)));
        Ok(snapshot)
    }
}

/// One process for good: a pid that is given out again has another start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Member {
    pid: i32,
    start: u64,
    limit: u64,
}

impl Member {
    /// A descriptor that can only mean this process. Opened first and checked after, so it is either the process that
    /// was found, or one that is gone and takes no signal.
    fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(Errno::SRCH)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let same = procfs::stat(self.pid)?.start == self.start && procfs::locks_limit(self.pid)? == self.limit;
        if same { Ok(fd) } else { Err(Errno::SRCH.into()) }
    }
}

/// What one pass over the members did.
struct Round {
    watched: Vec<(Member, Arc<OwnedFd>)>,
    /// Whether somebody got a signal that he had not got before.
    fresh: bool,
    /// Whether somebody was gone already.
    gone: bool,
}

/// The descendants of one start of a process, without its main process, whose owner waits for it.
#[derive(Debug)]
pub(super) struct Family {
    tag: Tag,
    main: i32,
    /// Supervisors below, which mark their children themselves.
    nested: HashSet<Program>,
    signalled: HashMap<Member, Signal>,
    /// Those that this program may not signal.
    untouchable: HashSet<Member>,
    /// Those that have ended, but whose parent has not waited for them.
    dead: HashSet<Member>,
}

impl Family {
    pub(super) fn new(tag: Tag, main: i32) -> Self {
        Self {
            tag,
            main,
            nested: HashSet::new(),
            signalled: HashMap::new(),
            untouchable: HashSet::new(),
            dead: HashSet::new(),
        }
    }

    /// Sends `polite` to everybody, and `KILL` from the deadline on, until nobody is left. What is to be killed is
    /// looked for again and again until a look finds nobody new, so that a process that forks without end loses the race.
    pub(super) async fn end(&mut self, snapshots: &Snapshots, polite: Signal, deadline: Instant) {
        loop {
            let members = match snapshots.fresh().await {
                Ok(snapshot) => self.find(&snapshot),
                Err(error) => return tracing::error!(%error, "can't look for descendants in /proc"),
            };
            if members.is_empty() {
                return;
            }
            let kill = Instant::now() >= deadline;
            let Round { watched, fresh, gone } = self.signal(&members, if kill { Signal::KILL } else { polite });
            if fresh && kill {
                continue;
            }
            let ended = ended(&watched);
            if kill {
                ended.await;
            } else if timeout_at(deadline, ended).await.is_err() {
                continue;
            }
            if !self.reap(watched) && !gone {
                return tracing::debug!(members = members.len(), "descendants are left to a parent elsewhere");
            }
        }
    }

    /// Kills everybody, without waiting for it.
    pub(super) fn kill(&mut self) {
        for _ in 0..BLIND_SWEEPS {
            let Ok(snapshot) = Snapshot::take() else { return };
            let members = self.find(&snapshot);
            if !self.signal(&members, Signal::KILL).fresh {
                return;
            }
        }
    }

    fn find(&mut self, snapshot: &Snapshot) -> Vec<Member> {
        let own = procfs::own_pid();
        let marked = |limit| Tag::from_limit(limit).is_some_and(|tag| self.is_of(tag));
        let mut found: Vec<(i32, u64)> =
            snapshot.limits.iter().copied().filter(|&(pid, limit)| pid > 1 && pid != own && marked(limit)).collect();
        if found.is_empty() {
            return Vec::new();
        }
        let stats = snapshot.stats();
        self.add_those_below(&mut found, snapshot);
        found.retain(|&(pid, _)| pid != self.main);
        let members = found.into_iter().filter_map(|(pid, limit)| Some(Member { pid, start: stats.get(&pid)?.start, limit }));
        members.filter(|member| !self.untouchable.contains(member)).collect()
    }

    fn is_of(&self, tag: Tag) -> bool {
        tag == self.tag || self.nested.contains(&tag.program())
    }

    /// Those that have changed their mark, as a nested supervisor's children, are known by their parents.
    fn add_those_below(&mut self, found: &mut Vec<(i32, u64)>, snapshot: &Snapshot) {
        let mut children = HashMap::<i32, Vec<(i32, u64)>>::new();
        for &(pid, limit) in &snapshot.limits {
            if let Some(stat) = snapshot.stats().get(&pid) {
                children.entry(stat.parent).or_default().push((pid, limit));
            }
        }
        let mut known: HashSet<i32> = found.iter().map(|&(pid, _)| pid).collect();
        let mut next = 0;
        while next < found.len() {
            for &(pid, limit) in children.get(&found[next].0).into_iter().flatten() {
                let tag = Tag::from_limit(limit);
                if let Some(tag) = tag.filter(|tag| tag.program() != self.tag.program()) {
                    self.nested.insert(tag.program());
                }
                if known.insert(pid) {
                    found.push((pid, limit));
                }
            }
            next += 1;
        }
    }

    /// Sends the signal to those who have not got it yet.
    fn signal(&mut self, members: &[Member], signal: Signal) -> Round {
        let mut round = Round { watched: Vec::new(), fresh: false, gone: false };
        for &member in members {
            let fd = match member.open() {
                Ok(fd) => fd,
                Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => {
                    round.gone = true;
                    continue;
                }
                // This program is out of descriptors. There are some again when those that are watched have ended.
                Err(error) => {
                    tracing::warn!(pid = member.pid, %error, "can't get hold of a descendant");
                    continue;
                }
            };
            if self.signalled.get(&member) != Some(&signal) {
                if let Err(error) = deliver(&fd, signal)
                    && error.raw_os_error() == Some(libc::EPERM)
                {
                    tracing::warn!(pid = member.pid, "may not send {signal} to a descendant: it is another user's");
                    self.untouchable.insert(member);
                    continue;
                }
                self.signalled.insert(member, signal);
                round.fresh = true;
            }
            if round.watched.len() < WATCHED {
                round.watched.push((member, Arc::new(fd)));
            }
        }
        round
    }

    /// Takes the statuses of those that have ended. Whether anything has come of it.
    fn reap(&mut self, watched: Vec<(Member, Arc<OwnedFd>)>) -> bool {
        let mut progress = false;
        for (member, fd) in watched {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::PidFd(fd.as_fd()), options) {
                Ok(Some(_)) => progress = true,
                // Not a child of this program: its parent has waited for it, or lives on; or it is about to be one.
                _ => progress |= self.dead.insert(member),
            }
        }
        progress
    }
}

/// A stopped process acts on a signal only when it goes on.
fn deliver(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    sys::send_signal(fd.as_fd(), signal.number())?;
    if signal != Signal::KILL {
        sys::send_signal(fd.as_fd(), Signal::CONT.number())?;
    }
    Ok(())
}

/// Waits until all of them have ended.
async fn ended(watched: &[(Member, Arc<OwnedFd>)]) {
    let ends = watched.iter().map(|(_, fd)| async move {
        // A descriptor that can't be watched is taken for one that has ended; the next look shows.
        if let Ok(fd) = Readable::new(Arc::clone(fd)) {
            drop(fd.readable().await);
        }
    });
    join_all(ends).await;
}
