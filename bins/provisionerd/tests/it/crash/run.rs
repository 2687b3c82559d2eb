//! One lifecycle of a claim, with a kill of provisionerd in it.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::ensure;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::ListParams;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testbed::leftovers;
use tokio::process::Child;

use crate::client_cluster::{self as cluster, TIMEOUT, TestDaemon, claim_manifest, volumes_api};

/// Every claim for a directory fits, except for the one of `TooLarge`.
pub(super) const MAX_BYTES: &str = "2097152";

/// The limit of an image is larger than its file.
pub(super) const MAX_IMAGE_BYTES: &str = "1073741824";

/// A run: its name is that of the claim and of the node.
pub(super) struct CrashRun {
    pub(super) name: String,
    pub(super) client: Client,
    pub(super) program: TestDaemon,
    /// The largest limit of a volume, in bytes.
    max_bytes: &'static str,
    pub(super) child: Child,
    pub(super) kills: usize,
}

impl CrashRun {
    /// Starts provisionerd, which is killed at this moment; "" for none.
    pub(super) fn start(client: Client, program: TestDaemon, max_bytes: &'static str, moment: &str) -> Self {
        let child = start_daemon(&program, max_bytes, moment);
        Self { name: program.node.clone(), client, program, max_bytes, child, kills: 0 }
    }

    /// Starts provisionerd again, after it was stopped, to be killed at this moment.
    pub(super) fn restart(&mut self, moment: &str) {
        self.child = start_daemon(&self.program, self.max_bytes, moment);
    }

    /// Waits for a future, and restarts provisionerd if it is killed before.
    pub(super) async fn wait_through_kill<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                status = self.child.wait() => {
                    self.count_kill(status.expect("an exit status"));
                    self.restart("");
                }
                done = &mut what => return done,
            }
        }
    }

    /// Waits until provisionerd is killed, unless it was, and restarts it.
    pub(super) async fn wait_for_kill(&mut self) {
        if self.kills == 0 {
            self.wait_killed().await;
            self.restart("");
        }
    }

    /// Waits until provisionerd is killed.
    pub(super) async fn wait_killed(&mut self) {
        let status = tokio::time::timeout(TIMEOUT, self.child.wait()).await;
        let status =
            status.unwrap_or_else(|_| panic!("{} is never reached: {}", self.name, self.program.log_text()));
        self.count_kill(status.expect("an exit status"));
    }

    fn count_kill(&mut self, status: ExitStatus) {
        assert_eq!(status.signal(), Some(9), "{}: {status}: {}", self.name, self.program.log_text());
        assert_eq!(self.kills, 0, "killed once");
        self.kills += 1;
    }

    /// A claim for the node of this run, changed by a patch.
    pub(super) async fn create_claim(&self, name: &str, patch: Value) -> PersistentVolumeClaim {
        cluster::create_claim(&self.client, claim_manifest(name, Some(&self.program.node), patch)).await
    }

    pub(super) async fn count_volumes(&self) -> usize {
        let all = volumes_api(&self.client).list(&ListParams::default()).await.expect("a list").items;
        let is_own = |volume: &PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()?.name.as_deref());
            claim == Some(self.name.as_str())
        };
        all.iter().filter(|volume| is_own(volume)).count()
    }

    /// Waits until everything is erased, then stops provisionerd with SIGTERM.
    pub(super) async fn terminate(&mut self) {
        self.wait_missing(".trash", |_| true).await;
        let pid =
            self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("a running process");
        kill_process(pid, Signal::TERM).expect("SIGTERM is sent");
        let status = self.child.wait().await.expect("an exit status");
        // A process that has just been restarted may not handle the signal yet.
        let is_ended = status.code() == Some(0) || status.signal() == Some(Signal::TERM.as_raw());
        assert!(is_ended, "{}: {status}: {}", self.name, self.program.log_text());
    }

    /// Waits until no such name is in a subdirectory of the daemon's directory, also if it is killed. What
    /// stays counts as leaked.
    pub(super) async fn wait_missing(
        &mut self,
        subdirectory: &str,
        is_so: impl Fn(&str) -> bool + Send + 'static,
    ) {
        let path = self.program.base.path().join(subdirectory);
        let what = format!("{subdirectory} of {} to be empty", self.name);
        let missing = tokio::task::spawn_blocking(move || {
            testbed::wait_until(Duration::from_secs(60), &what, || {
                let mut left = cluster::list_names(&path);
                left.retain(|name| is_so(name));
                ensure!(left.is_empty(), "{left:?} still exists");
                Ok(())
            })
        });
        let _ = self.wait_through_kill(missing).await;
    }

    /// Stops provisionerd, and counts what its volumes left.
    pub(super) async fn end(&mut self, doubles: usize) -> LeakCounts {
        self.terminate().await;
        let directories = ["volumes", "snapshots", ".new", ".trash", ".unpublished", "kinds"];
        let counts = LeakCounts {
            kills: self.kills,
            directories: directories.iter().map(|name| self.program.list_names(name).len()).sum(),
            projects: self.program.project_names().len(),
            mounts: leftovers::find_mounts(self.program.base.path()).expect("the mounts").len(),
            volumes: self.count_volumes().await,
            doubles,
        };
        if counts != (LeakCounts { kills: 1, ..LeakCounts::default() }) {
            println!("{}: {counts}\n{}", self.name, self.program.log_text());
        }
        counts
    }
}

fn start_daemon(program: &TestDaemon, max_bytes: &str, moment: &str) -> Child {
    let kill = (!moment.is_empty()).then_some(("PROVISIONERD_KILL_AT", moment));
    let environment: Vec<_> = kill.into_iter().chain([("PROVISIONERD_ROOM", max_bytes)]).collect();
    program.start(&environment)
}

/// Counts of kills and leaks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeakCounts {
    pub(super) kills: usize,
    pub(super) directories: usize,
    pub(super) projects: usize,
    pub(super) mounts: usize,
    pub(super) volumes: usize,
    pub(super) doubles: usize,
}

impl fmt::Display for LeakCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, directories, projects, mounts, volumes, doubles } = self;
        write!(
            f,
            "{kills} kills: {directories} directories, {projects} projects, {mounts} mounts and {volumes} \
             PersistentVolumes leaked, {doubles} provisioned twice"
        )
    }
}

impl LeakCounts {
    pub(super) fn add(mut self, other: &Self) -> Self {
        self.kills += other.kills;
        self.directories += other.directories;
        self.projects += other.projects;
        self.mounts += other.mounts;
        self.volumes += other.volumes;
        self.doubles += other.doubles;
        self
    }
}
