//! One run of a node in a separate process, which may be killed, or have its etcd killed, at one of its kill
//! points. The process reports the result in lines on stderr.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nodekeel_cluster::enrolment::{ClusterNode, NodeMembership};
use nodekeel_supervisor::Failure;
use rustix::process::{Pid, Signal, getpid, kill_process};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::super::node_fixture::{NodeRun, error_chain};
use super::{NodeHost, etcd_deps, test_settings};
use crate::etcd::etcd_processes;

/// Input of the process: directory, ports for members and clients, etcd, what to kill, when.
const RUN_ENV: &str = "NODEKEEL_CLUSTER_LIFE";
/// Longer than any run, unless it hangs.
const HANG: Duration = Duration::from_secs(60);
/// Longest time after a kill until the node is Running or Failed, and its member serves.
pub(super) const RECOVERY_LIMIT: Duration = Duration::from_secs(10);
/// The delay per kill point when an etcd is to be killed that does not run yet: all delays together exceed
/// the time until it is ready.
const KILL_DELAY: Duration = Duration::from_millis(23);
/// The pause between two looks at the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What is killed at a kill point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum KillTarget {
    Nobody,
    Node,
    Etcd,
}

impl NodeHost {
    /// One run in a separate process, with the target killed at its `nth` kill point.
    pub(super) fn run_in_process(&self, test: &str, victim: KillTarget, nth: usize) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
        let (dir, binary) = (self.scratch.path().display(), self.binary.display());
        let parts =
            format!("{dir};{};{};{binary};{victim:?};{nth}", self.peer.number(), self.client.number());
        command.env(RUN_ENV, parts).stdin(Stdio::null());
        command.output().expect("started")
    }
}

/// Performs the run that this process was started for, if any.
pub(super) async fn run_if_requested() -> bool {
    let Ok(parts) = std::env::var(RUN_ENV) else { return false };
    let parts: Vec<&str> = parts.split(';').collect();
    let [dir, peer, client, binary, victim, nth] = parts[..] else { panic!("{parts:?}") };
    let port = |text: &str| text.parse::<u16>().expect("a port");
    let deps = etcd_deps(Path::new(dir), Path::new(binary), port(peer), port(client));
    let victim = [KillTarget::Nobody, KillTarget::Node, KillTarget::Etcd]
        .into_iter()
        .find(|one| format!("{one:?}") == victim);
    let killer = Arc::new(ProcessKiller {
        victim: victim.expect("a known target"),
        nth: nth.parse().expect("a number"),
        scratch: dir.into(),
        point_count: AtomicUsize::new(0),
        killed: watch::Sender::new(None),
    });
    let hook = Arc::clone(&killer);
    let run = NodeRun::start_once(ClusterNode::with_test_hook(deps, test_settings(), move |point| {
        hook.on_point(point)
    }));
    run_and_report(&run, &killer).await;
    run.stop().await;
    true
}

async fn run_and_report(run: &NodeRun, killer: &ProcessKiller) {
    let started_at = Instant::now();
    let Ok(finished) = timeout(HANG, run.node.wait_finished()).await else {
        return eprintln!("FAILED the run hangs");
    };
    let now = Instant::now();
    let membership = match finished {
        Ok(membership) => membership,
        Err(reason) => {
            killer.report_end(now);
            return eprintln!("FAILED {}", error_chain(reason));
        }
    };
    let killed = killer.killed().await;
    killer.report_end(now);
    let mut kept = None;
    let seen = timeout(HANG, async {
        loop {
            match (probe_node(run, &membership, &mut kept).await, killed) {
                (Ok(seen), _) => return seen,
                // If nothing was killed, the member serves at once.
                (Err(failure), None) => panic!("{failure}"),
                (Err(_), Some(_)) => sleep(POLL_INTERVAL).await,
            }
        }
    });
    let Ok(seen) = seen.await else { return eprintln!("DEAD") };
    if let Some(killed) = killed {
        eprintln!("SERVES {}", killed.elapsed().as_millis());
    }
    eprintln!("RUNNING {seen} {}", now.duration_since(started_at).as_millis());
}

/// What a node reports in its cluster, after writing a key: node, cluster, members, whether members are
/// stale, learners, and whether an earlier key exists.
async fn probe_node(
    run: &NodeRun,
    membership: &NodeMembership,
    kept: &mut Option<bool>,
) -> Result<String, Failure> {
    let kv = run.node.namespaced_kv("test", "kills")?;
    let kept = match *kept {
        Some(kept) => kept,
        None => *kept.insert(kv.get(b"/kept").await?.is_some()),
    };
    kv.put(b"/kept", b"yes").await?;
    let members = run.node.cluster_members()?.list_members().await?;
    let nodes = run.node.node_store()?.list_records().await?;
    let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
    let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
    let stale = members.len() != names.len() || names != ids;
    let learners = members.iter().filter(|member| member.is_learner).count();
    let (node, cluster) = (&membership.node_id, membership.cluster_id);
    Ok(format!("{node} {cluster} {} {stale} {learners} {kept}", members.len()))
}

/// Counts the kill points, and kills at one of them.
struct ProcessKiller {
    victim: KillTarget,
    nth: usize,
    scratch: PathBuf,
    point_count: AtomicUsize,
    killed: watch::Sender<Option<Instant>>,
}

impl ProcessKiller {
    fn on_point(self: &Arc<Self>, point: &str) {
        let now = self.point_count.fetch_add(1, Ordering::SeqCst);
        eprintln!("POINT {now} {point}");
        match self.victim {
            KillTarget::Node if now == self.nth => {
                kill_process(getpid(), Signal::KILL).expect("this process");
            }
            KillTarget::Etcd if now == self.nth && !self.kill_etcd() => {
                let killer = Arc::clone(self);
                std::thread::spawn(move || killer.kill_soon());
            }
            _ => {}
        }
    }

    /// Kills an etcd that does not run yet: between its start and its readiness, or later.
    fn kill_soon(&self) {
        while etcd_processes(&self.scratch).is_empty() {
            pause(POLL_INTERVAL);
        }
        pause(KILL_DELAY * u32::try_from(self.nth).expect("a small number"));
        while !self.kill_etcd() {
            pause(POLL_INTERVAL);
        }
    }

    /// Kills the running etcd processes; returns whether there were any. They have exited afterwards.
    fn kill_etcd(&self) -> bool {
        let killed =
            etcd_processes(&self.scratch).into_iter().filter(|pid| kill_process(*pid, Signal::KILL).is_ok());
        let killed: Vec<Pid> = killed.collect();
        if killed.is_empty() {
            return false;
        }
        let at = Instant::now();
        while etcd_processes(&self.scratch).iter().any(|pid| killed.contains(pid)) {
            pause(POLL_INTERVAL);
        }
        eprintln!("KILLED {}", killed.len());
        self.killed.send_replace(Some(at));
        true
    }

    /// When etcd was killed, once that has happened; `None` if it is not the target.
    async fn killed(&self) -> Option<Instant> {
        if self.victim != KillTarget::Etcd {
            return None;
        }
        let mut killed = self.killed.subscribe();
        let at = timeout(HANG, killed.wait_for(Option::is_some))
            .await
            .expect("killed in time")
            .expect("the sender exists");
        *at
    }

    /// Reports how long after the kill the run has ended, if it has ended after it.
    fn report_end(&self, end: Instant) {
        if let Some(killed) = *self.killed.borrow() {
            eprintln!("ENDED {}", end.saturating_duration_since(killed).as_millis());
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "no notification exists for a process started or ended elsewhere"
)]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// The report of a run without panics.
pub(super) struct RunReport(String);

/// The report of a node that was Running.
pub(super) struct RunningReport {
    pub(super) node: String,
    pub(super) cluster: String,
    pub(super) members: usize,
    pub(super) has_stale_members: bool,
    pub(super) learners: usize,
    /// Whether the key written before existed.
    pub(super) has_kept: bool,
    pub(super) took: u64,
}

impl RunReport {
    /// The report of a run that ended by itself.
    ///
    /// # Panics
    /// If it has panicked, on any of its threads, or was killed.
    pub(super) fn from_output(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !text.contains("panicked at"), "{}: {text}", output.status);
        Self(text)
    }

    fn lines_of<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.lines().filter_map(move |line| line.strip_prefix(word)?.strip_prefix(' '))
    }

    fn single_number(&self, word: &str) -> u64 {
        let mut all = self.lines_of(word).map(|number| number.parse().expect("a number"));
        match (all.next(), all.next()) {
            (Some(number), None) => number,
            _ => panic!("expected exactly one line {word}: {}", self.0),
        }
    }

    pub(super) fn kill_points(&self) -> Vec<String> {
        self.lines_of("POINT")
            .map(|line| line.split_once(' ').map_or("", |(_, point)| point).to_owned())
            .collect()
    }

    /// How many of its etcd processes were killed.
    pub(super) fn killed_count(&self) -> u64 {
        self.single_number("KILLED")
    }

    /// Milliseconds from the kill until the node was Running or Failed.
    pub(super) fn ended_after(&self) -> u64 {
        self.single_number("ENDED")
    }

    /// Milliseconds from the kill until its member served.
    pub(super) fn serving_after(&self) -> u64 {
        self.single_number("SERVES")
    }

    /// Why the run failed, if it did.
    pub(super) fn failure(&self) -> Option<&str> {
        self.lines_of("FAILED").next()
    }

    /// What the node reported in its cluster.
    pub(super) fn running_report(&self) -> RunningReport {
        let line =
            self.lines_of("RUNNING").next().unwrap_or_else(|| panic!("the node is not running: {}", self.0));
        let words: Vec<&str> = line.split(' ').collect();
        let [node, cluster, members, stale, learners, kept, took] = words[..] else { panic!("{line}") };
        let number = |text: &str| text.parse().expect("a number");
        RunningReport {
            node: node.into(),
            cluster: cluster.into(),
            members: number(members),
            has_stale_members: stale == "true",
            learners: number(learners),
            has_kept: kept == "true",
            took: took.parse().expect("milliseconds"),
        }
    }
}
