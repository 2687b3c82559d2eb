//! Finding and ending all that descends from one start of a process.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant as Moment};

use futures_util::future::join_all;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use tokio::time::{Instant, sleep, timeout_at};

use super::procfs::{self, Stat};
use super::status::Signal;
use super::tag::{Giver, Tag};
use crate::sys::{self, Readable};

/// How many ends are awaited at once: each takes a descriptor.
const WATCHED: usize = 128;
/// How many pids in a row that are nobody's of interest end a chase.
const CHASED: usize = 256;
/// How often it is looked again where a look can't be trusted.
const LOOKS: usize = 16;
/// When it is looked again while this program has no descriptor left to look or to wait with: nothing tells when it has.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(20);

/// All processes at one moment, with their marks.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// The soft limits of file locks by pid, ascending.
    limits: Vec<(i32, u64)>,
    /// Those that ended before their mark was read, and may have forked before that.
    missed: Vec<i32>,
    stats: OnceLock<HashMap<i32, Stat>>,
}

impl Snapshot {
    fn take() -> io::Result<Self> {
        let pids = procfs::pids()?;
        let mut snapshot =
            Self { limits: Vec::with_capacity(pids.len()), missed: Vec::new(), stats: OnceLock::new() };
        for pid in pids {
            match procfs::locks_limit_to_signal(pid) {
                Ok(limit) => snapshot.limits.push((pid, limit)),
                Err(error) if is_gone(&error) => snapshot.missed.push(pid),
                Err(_) => {}
            }
        }
        Ok(snapshot)
    }

    /// Read only when somebody is left to look for: it takes ten times as long as the rest.
    fn stats(&self) -> &HashMap<i32, Stat> {
        let read =
            || self.limits.iter().filter_map(|&(pid, _)| Some((pid, procfs::stat(pid).ok()?))).collect();
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
    /// The first who was gone already.
    gone: Option<i32>,
}

/// The descendants of one start of a process, without its main process, whose owner waits for it.
#[derive(Debug)]
pub(super) struct Family {
    tag: Tag,
    main: i32,
    /// Supervisors below, which mark their children themselves.
    nested: HashSet<Giver>,
    /// Those that have no mark, or one that can't be told: known by the parents that they had when they were found.
    strays: Vec<Member>,
    /// Before which signal the strays were looked for.
    searched: Option<Signal>,
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
            strays: Vec::new(),
            searched: None,
            signalled: HashMap::new(),
            untouchable: HashSet::new(),
            dead: HashSet::new(),
        }
    }

    /// Sends `polite` to everybody, and `KILL` from the deadline on, until nobody is left. What is to be killed is
    /// looked for again and again until a look finds nobody new, so that a process that forks without end loses the race.
    pub(super) async fn end(&mut self, snapshots: &Snapshots, polite: Signal, deadline: Instant) {
        let mut looks = 0;
        loop {
            let snapshot = match snapshots.fresh().await {
                Ok(snapshot) => snapshot,
                Err(error) if is_short(&error) => {
                    sleep(WITHOUT_DESCRIPTORS).await;
                    continue;
                }
                Err(error) => return tracing::error!(%error, "can't look for descendants in /proc"),
            };
            let kill = Instant::now() >= deadline;
            let Some(round) = self.round(&snapshot, if kill { Signal::KILL } else { polite }) else {
                looks += 1;
                if !snapshot.missed.is_empty() && looks < LOOKS {
                    continue;
                }
                return;
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
            if !self.reap(watched) && !round.changed && all {
                return tracing::debug!("descendants that have ended are left to a parent elsewhere");
            }
        }
    }

    /// Kills everybody, without waiting for it.
    pub(super) fn kill(&mut self) {
        for _ in 0..LOOKS {
            let Ok(snapshot) = Snapshot::take() else { return };
            match self.round(&snapshot, Signal::KILL) {
                Some(round) if !round.changed => return,
                None if snapshot.missed.is_empty() => return,
                _ => {}
            }
        }
    }

    /// Asks everybody to end, once: whoever is found later is asked by [`end`](Self::end). The main process is asked
    /// first, so that no death of a child seems an accident to it, but after those are found that are known by their
    /// parents only, while these live.
    pub(super) async fn ask(&mut self, snapshots: &Snapshots, polite: Signal, ask_main: impl FnOnce()) {
        // Without a snapshot nobody else can be signalled: `end` tells.
        let Ok(mut snapshot) = snapshots.fresh().await else { return ask_main() };
        self.find_strays(&self.marked(&snapshot), &snapshot);
        self.searched = Some(polite);
        ask_main();
        // A process that forks without end is asked no more: it is killed when its time is over.
        for _ in 0..LOOKS {
            if !self.round(&snapshot, polite).is_some_and(|round| round.changed) {
                return;
            }
            match snapshots.fresh().await {
                Ok(fresh) => snapshot = fresh,
                Err(_) => return,
            }
        }
    }

    /// Signals everybody. `None` when nobody is there.
    ///
    /// Those that are known by their parents are looked for before the first signal of a kind. After that time is
    /// short, because a process that is found may fork and be gone, and a parent that is dead tells nothing.
    fn round(&mut self, snapshot: &Snapshot, signal: Signal) -> Option<Round> {
        let mut round = Round::default();
        let mut marked = self.marked(snapshot);
        self.forget_gone_strays(snapshot);
        if marked.is_empty() && self.strays.is_empty() {
            for pid in &snapshot.missed {
                self.chase(*pid, signal, &mut round);
            }
            return round.changed.then_some(round);
        }
        if self.searched != Some(signal) {
            self.find_strays(&marked, snapshot);
            self.searched = Some(signal);
            marked = self.marked(snapshot);
        }
        self.signal(&marked, signal, &mut round);
        self.signal(&self.strays.clone(), signal, &mut round);
        if let Some(pid) = round.gone {
            self.chase(pid, signal, &mut round);
        }
        Some(round)
    }

    /// Signals those that a process may have become which had forked and was gone when it was looked at. The kernel
    /// gives out pids in order, so they are not far, and here is no time to look at all the others before.
    fn chase(&mut self, gone: i32, signal: Signal, round: &mut Round) {
        let (mut pid, mut misses) = (gone, 0);
        while misses < CHASED {
            pid += 1;
            misses += 1;
            let found = procfs::locks_limit_to_signal(pid).ok().filter(|limit| self.is_marked(*limit));
            if let Some(limit) = found.filter(|_| pid != self.main) {
                self.signal(&[Member { pid, limit, start: None }], signal, round);
                misses = 0;
            }
        }
    }

    /// Those that carry the mark, or one of a nested supervisor.
    fn marked(&self, snapshot: &Snapshot) -> Vec<Member> {
        let own = procfs::own_pid();
        let candidates =
            snapshot.limits.iter().filter(|(pid, _)| *pid > 1 && *pid != own && *pid != self.main);
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
    fn find_strays(&mut self, marked: &[Member], snapshot: &Snapshot) {
        let stats = snapshot.stats();
        let mut children = HashMap::<i32, Vec<Member>>::new();
        for &(pid, limit) in &snapshot.limits {
            if let Some(stat) = stats.get(&pid) {
                children.entry(stat.parent).or_default().push(Member { pid, limit, start: Some(stat.start) });
            }
        }
        let parents = marked.iter().chain(&self.strays).map(|member| member.pid).chain([self.main]);
        let mut known: HashSet<i32> = parents.collect();
        let mut parents: Vec<i32> = known.iter().copied().collect();
        while let Some(parent) = parents.pop() {
            for member in
                children.get(&parent).into_iter().flatten().filter(|member| known.insert(member.pid))
            {
                parents.push(member.pid);
                match Tag::from_limit(member.limit).map(Tag::giver) {
                    None => self.strays.push(*member),
                    Some(giver) if giver != self.tag.giver() => _ = self.nested.insert(giver),
                    Some(_own) => {}
                }
            }
        }
    }

    fn forget_gone_strays(&mut self, snapshot: &Snapshot) {
        let is_there = |member: &Member| {
            let at = snapshot.limits.binary_search_by_key(&member.pid, |(pid, _)| *pid);
            at.is_ok_and(|at| snapshot.limits[at].1 == member.limit)
        };
        self.strays.retain(|member| {
            is_there(member)
                && !self.untouchable.contains(member)
                && snapshot.stats().get(&member.pid).is_some_and(|stat| Some(stat.start) == member.start)
        });
    }

    /// Sends the signal to those who have not got it yet.
    fn signal(&mut self, members: &[Member], signal: Signal, round: &mut Round) {
        for &member in members {
            let fd = match member.open() {
                Ok(fd) => fd,
                Err(error) if is_gone(&error) => {
                    round.changed = true;
                    round.gone = round.gone.or(Some(member.pid));
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
    fn reap(&mut self, watched: Vec<(Member, Readable)>) -> bool {
        let mut progress = false;
        for (member, end) in watched {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::PidFd(end.fd()), options) {
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

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

/// A stopped process acts on a signal only when it goes on.
fn deliver(fd: &OwnedFd, signal: Signal) -> io::Result<()> {
    sys::send_signal(fd.as_fd(), signal.number())?;
    if signal != Signal::KILL {
        sys::send_signal(fd.as_fd(), Signal::CONT.number())?;
    }
    Ok(())
}
