//! One life of a machine in a process of its own, which may be killed, or have its etcd killed, at a moment of it. What
//! comes of it is told in lines on stderr.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nodekeel_cluster::machine::{Cluster, Membership};
use nodekeel_supervisor::Failure;
use rustix::process::{Pid, Signal, getpid, kill_process};
use testbed::leftovers;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::super::bed::{Life, said};
use super::{Machine, deps, settings};

/// What a process that is run for its life is told: directory, ports of members and clients, etcd, what is killed, when.
const LIFE: &str = "NODEKEEL_CLUSTER_LIFE";
/// Longer than a life takes, unless it hangs.
const HANG: Duration = Duration::from_secs(60);
/// So soon after a kill the node is Running or Failed, and its member serves.
pub(super) const WITHIN: Duration = Duration::from_secs(10);
/// How much later an etcd is killed that does not run yet at its moment, for each moment before that: all together are
/// longer than it takes until it is ready.
const LATER: Duration = Duration::from_millis(23);
/// The pause between two looks at the processes.
const LOOK: Duration = Duration::from_millis(5);

/// What is killed at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Victim {
    Nobody,
    Node,
    Etcd,
}

impl Machine {
    /// One life in a process of its own, with what is killed at its `nth` moment.
    pub(super) fn live(&self, test: &str, victim: Victim, nth: usize) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("it has a path"));
        command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
        let (dir, binary) = (self.scratch.path().display(), self.binary.display());
        let told = format!("{dir};{};{};{binary};{victim:?};{nth}", self.peer.number(), self.client.number());
        command.env(LIFE, told).stdin(Stdio::null());
        command.output().expect("it starts")
    }
}

/// The life that this process was started for, if it was started for one.
pub(super) async fn live_if_told() -> bool {
    let Ok(told) = std::env::var(LIFE) else { return false };
    let told: Vec<&str> = told.split(';').collect();
    let [dir, peer, client, binary, victim, nth] = told[..] else { panic!("{told:?}") };
    let port = |text: &str| text.parse::<u16>().expect("a port");
    let deps = deps(Path::new(dir), Path::new(binary), port(peer), port(client));
    let victim =
        [Victim::Nobody, Victim::Node, Victim::Etcd].into_iter().find(|one| format!("{one:?}") == victim);
    let killer = Arc::new(Killer {
        victim: victim.expect("one of them"),
        nth: nth.parse().expect("a number"),
        scratch: dir.into(),
        moments: AtomicUsize::new(0),
        killed: watch::Sender::new(None),
    });
    let hook = Arc::clone(&killer);
    let life = Life::of(Cluster::with_points(deps, settings(), move |point| hook.hear(point)));
    live(&life, &killer).await;
    life.end().await;
    true
}

async fn live(life: &Life, killer: &Killer) {
    let began = Instant::now();
    let Ok(finished) = timeout(HANG, life.cluster.wait_finished()).await else {
        return eprintln!("FAILED it hangs");
    };
    let now = Instant::now();
    let membership = match finished {
        Ok(membership) => membership,
        Err(reason) => {
            killer.tell_end(now);
            return eprintln!("FAILED {}", said(reason));
        }
    };
    let killed = killer.killed().await;
    killer.tell_end(now);
    let mut kept = None;
    let seen = timeout(HANG, async {
        loop {
            match (look(life, &membership, &mut kept).await, killed) {
                (Ok(seen), _) => return seen,
                // Where nothing was killed, it serves at once.
                (Err(failure), None) => panic!("{failure}"),
                (Err(_), Some(_)) => sleep(LOOK).await,
            }
        }
    });
    let Ok(seen) = seen.await else { return eprintln!("DEAD") };
    if let Some(killed) = killed {
        eprintln!("SERVES {}", killed.elapsed().as_millis());
    }
    eprintln!("RUNNING {seen} {}", now.duration_since(began).as_millis());
}

/// Everything that a node in its cluster can be asked, with a key written: node, cluster, members, ghosts, learners, and
/// whether there was a key of earlier.
async fn look(life: &Life, membership: &Membership, kept: &mut Option<bool>) -> Result<String, Failure> {
    let kv = life.cluster.kv("test", "kills")?;
    let kept = match *kept {
        Some(kept) => kept,
        None => *kept.insert(kv.get(b"/kept").await?.is_some()),
    };
    kv.put(b"/kept", b"yes").await?;
    let members = life.cluster.members()?.list().await?;
    let nodes = life.cluster.nodes()?.list().await?;
    let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
    let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
    let ghosts = members.len() != names.len() || names != ids;
    let learners = members.iter().filter(|member| member.is_learner).count();
    let (node, cluster) = (&membership.node, membership.cluster);
    Ok(format!("{node} {cluster} {} {ghosts} {learners} {kept}", members.len()))
}

/// Hears of the moments, and kills at one of them.
struct Killer {
    victim: Victim,
    nth: usize,
    scratch: PathBuf,
    moments: AtomicUsize,
    killed: watch::Sender<Option<Instant>>,
}

impl Killer {
    fn hear(self: &Arc<Self>, point: &str) {
        let now = self.moments.fetch_add(1, Ordering::SeqCst);
        eprintln!("POINT {now} {point}");
        match self.victim {
            Victim::Node if now == self.nth => {
                kill_process(getpid(), Signal::KILL).expect("it is this one");
            }
            Victim::Etcd if now == self.nth && !self.kill_etcd() => {
                let killer = Arc::clone(self);
                std::thread::spawn(move || killer.kill_soon());
            }
            _ => {}
        }
    }

    /// Kills an etcd that does not run yet: between its start and when it is ready, or after.
    fn kill_soon(&self) {
        while etcds(&self.scratch).is_empty() {
            pause(LOOK);
        }
        pause(LATER * u32::try_from(self.nth).expect("there are few"));
        while !self.kill_etcd() {
            pause(LOOK);
        }
    }

    /// Whether there was one. It is dead afterwards.
    fn kill_etcd(&self) -> bool {
        let killed = etcds(&self.scratch).into_iter().filter(|pid| kill_process(*pid, Signal::KILL).is_ok());
        let killed: Vec<Pid> = killed.collect();
        if killed.is_empty() {
            return false;
        }
        let at = Instant::now();
        while etcds(&self.scratch).iter().any(|pid| killed.contains(pid)) {
            pause(LOOK);
        }
        eprintln!("KILLED {}", killed.len());
        self.killed.send_replace(Some(at));
        true
    }

    /// When etcd was killed, once that has happened; none where it is not to be.
    async fn killed(&self) -> Option<Instant> {
        if self.victim != Victim::Etcd {
            return None;
        }
        let mut killed = self.killed.subscribe();
        let at =
            timeout(HANG, killed.wait_for(Option::is_some)).await.expect("it is killed").expect("it is here");
        *at
    }

    /// Tells how long after the kill the life has ended, if it was after that.
    fn tell_end(&self, end: Instant) {
        if let Some(killed) = *self.killed.borrow() {
            eprintln!("ENDED {}", end.saturating_duration_since(killed).as_millis());
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "nothing tells of a process that starts or ends elsewhere")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn etcds(scratch: &Path) -> Vec<Pid> {
    let all = leftovers::processes(scratch).expect("they are listed");
    let etcds = all.iter().filter(|process| process.command.contains("--data-dir"));
    etcds.filter_map(|process| Pid::from_raw(process.pid)).collect()
}

/// What a life has told of itself, which did nothing that it should not.
pub(super) struct Told(String);

/// What a node that was Running has told.
pub(super) struct Ran {
    pub(super) node: String,
    pub(super) cluster: String,
    pub(super) members: usize,
    pub(super) has_ghosts: bool,
    pub(super) learners: usize,
    /// Whether it has found the key that was put before.
    pub(super) has_kept: bool,
    pub(super) took: u64,
}

impl Told {
    /// By a life that came to its end by itself.
    ///
    /// # Panics
    /// Where it has panicked, on any of its threads, or died.
    pub(super) fn by(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !text.contains("panicked at"), "{}: {text}", output.status);
        Self(text)
    }

    fn all<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.lines().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(' '))
    }

    fn number(&self, word: &str) -> u64 {
        let mut all = self.all(word).map(|number| number.parse().expect("a number"));
        match (all.next(), all.next()) {
            (Some(number), None) => number,
            _ => panic!("there is not one {word}: {}", self.0),
        }
    }

    pub(super) fn moments(&self) -> Vec<String> {
        self.all("POINT").map(|line| line.split_once(' ').map_or("", |(_, point)| point).to_owned()).collect()
    }

    /// How many of its etcds were killed.
    pub(super) fn killed(&self) -> u64 {
        self.number("KILLED")
    }

    /// How many milliseconds after the kill it was Running or Failed.
    pub(super) fn ended(&self) -> u64 {
        self.number("ENDED")
    }

    /// How many milliseconds after the kill its member served.
    pub(super) fn serves(&self) -> u64 {
        self.number("SERVES")
    }

    /// Why it was in no cluster, if it was not.
    pub(super) fn failed(&self) -> Option<&str> {
        self.all("FAILED").next()
    }

    /// What it was in its cluster.
    pub(super) fn ran(&self) -> Ran {
        let line = self.all("RUNNING").next().unwrap_or_else(|| panic!("it does not run: {}", self.0));
        let words: Vec<&str> = line.split(' ').collect();
        let [node, cluster, members, ghosts, learners, kept, took] = words[..] else { panic!("{line}") };
        let number = |text: &str| text.parse().expect("a number");
        Ran {
            node: node.into(),
            cluster: cluster.into(),
            members: number(members),
            has_ghosts: ghosts == "true",
            learners: number(learners),
            has_kept: kept == "true",
            took: took.parse().expect("milliseconds"),
        }
    }
}
