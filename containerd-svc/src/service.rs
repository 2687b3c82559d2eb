//! containerd as a runnable of the tree.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_logtree::Journal;
use nodekeel_supervisor::process::{KillMode, Process, Readiness};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use crate::config::Settings;
use crate::containerd::{ContainerdImages, version};
use crate::place::Place;
use crate::prepare::prepare;
use crate::preseed::{Outcome, Preseed};
use crate::{ImportError, StoreError, runsc};

/// How much longer than its grace a stop may take: its children stop first.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// How long it takes at most until the tree knows that a containerd that doesn't answer has ended; else it still runs.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// A containerd, and what belongs to it.
///
/// ```text
/// …containerd           the daemon; ready when it tells its version
/// ├─ runsc              gVisor's log, where gVisor is among the runtimes
/// └─ preseed            images; ready and done when they are there, so that others can wait for it
/// ```
///
/// Its environment is `PATH`, in which it searches its shims and runc, `TMPDIR`, and what is added; nothing else, since all of
/// it reaches the shims, too. Whoever stops it stops the daemon alone: its shims, and so the containers, outlive it, and the
/// next one finds them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Containerd {
    /// The program.
    pub binary: PathBuf,
    /// Where it keeps what it has.
    pub place: Place,
    /// Its `PATH`.
    pub path: OsString,
    /// What it is told. Default: a containerd without Kubernetes.
    pub config: Config,
    /// Its environment beside `PATH` and `TMPDIR`. Default: nothing.
    pub env: BTreeMap<OsString, OsString>,
    /// Arguments after its own. Default: none.
    pub extra_args: Vec<OsString>,
    /// How long it may take to stop. Default: ten seconds.
    pub grace: Duration,
    /// When it counts as hung; `None` never. Default: [`Liveness::default`].
    pub liveness: Option<Liveness>,
    /// Images that are to be there. Default: none.
    pub preseed: Option<Preseed>,
    /// Where gVisor's log goes.
    pub journal: Journal,
}

/// What containerd is told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Config {
    /// What these settings say.
    Settings(Settings),
    /// This text, as it is. Root, state and the socket of the API are those of the place, whatever it says of them.
    Given {
        /// The TOML.
        text: String,
        /// Whether gVisor writes into the place's FIFO.
        runsc: bool,
    },
}

/// When a containerd that runs counts as hung: it is killed then, and started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Liveness {
    /// How often it is asked for its version. Default: once a minute.
    pub every: Duration,
    /// How long an answer may take. Default: ten seconds.
    pub within: Duration,
    /// How many answers in a row it may owe. Default: two; the third kills it.
    pub owed: u32,
}

impl Default for Liveness {
    fn default() -> Self {
        Self { every: Duration::from_secs(60), within: Duration::from_secs(10), owed: 2 }
    }
}

/// A containerd has stopped answering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("containerd has not told its version {asked} times in a row")]
pub struct Hung {
    asked: u32,
}

impl Containerd {
    /// A program in a place, with defaults otherwise.
    pub fn new(
        binary: impl Into<PathBuf>,
        place: Place,
        path: impl Into<OsString>,
        journal: Journal,
    ) -> Self {
        Self {
            binary: binary.into(),
            place,
            path: path.into(),
            config: Config::Settings(Settings::default()),
            env: BTreeMap::new(),
            extra_args: Vec::new(),
            grace: Duration::from_secs(10),
            liveness: Some(Liveness::default()),
            preseed: None,
            journal,
        }
    }

    fn has_runsc(&self) -> bool {
        match &self.config {
            Config::Settings(settings) => settings.runsc().is_some(),
            Config::Given { runsc, .. } => *runsc,
        }
    }

    async fn prepare(&self) -> Result<(), Failure> {
        let place = self.place.clone();
        let (config, runsc) = match &self.config {
            Config::Settings(settings) => {
                (settings.render(&place), settings.runsc().map(|runsc| runsc.render(&place)))
            }
            Config::Given { text, .. } => (text.clone(), None),
        };
        spawn_blocking(move || prepare(&place, &config, runsc.as_deref())).await??;
        Ok(())
    }

    fn process(&self, answered: Arc<Notify>) -> Process {
        let socket = self.place.socket();
        let probe = move || {
            let (socket, answered) = (socket.clone(), Arc::clone(&answered));
            async move {
                version(&socket).await?;
                answered.notify_one();
                Ok::<(), Failure>(())
            }
        };
        Process::new(&self.binary)
            .arg("--config")
            .arg(self.place.config())
            .arg("--root")
            .arg(self.place.root())
            .arg("--state")
            .arg(self.place.state())
            .arg("--address")
            .arg(self.place.socket())
            .args(&self.extra_args)
            .env("PATH", &self.path)
            .env("TMPDIR", self.place.tmp())
            .envs(self.env.clone())
            .ready(Readiness::probe(probe))
            .grace(self.grace)
            .kill(KillMode::Process)
    }

    async fn run_once(self, ctx: Context) -> Result<(), Failure> {
        self.prepare().await?;
        if self.has_runsc() {
            // It is there before the first container can write.
            let fifo = self.place.runsc_log();
            runsc::open(&fifo)?;
            ctx.run("runsc", runsc::runsc_log(self.journal.clone(), fifo))?;
        }
        if let Some(preseed) = &self.preseed {
            ctx.run("preseed", preseeding(ctx.dn().to_owned(), self.place.clone(), preseed.clone()))?;
        }
        let answered = Arc::new(Notify::new());
        let process = self.process(Arc::clone(&answered));
        tokio::select! {
            biased;
            ended = process.run(ctx.clone()) => ended,
            hung = self.hangs(&answered) => Err(hung.into()),
        }
    }

    /// Resolves when it owes too many answers, counted from its first.
    async fn hangs(&self, answered: &Notify) -> Hung {
        let Some(Liveness { every, within, owed }) = self.liveness else {
            return std::future::pending().await;
        };
        answered.notified().await;
        let socket = self.place.socket();
        let mut asked = 0;
        // No interval is shorter.
        let every = every.max(Duration::from_millis(1));
        let mut due = interval_at(Instant::now() + every, every);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while asked <= owed {
            due.tick().await;
            match timeout(within, version(&socket)).await {
                Ok(Ok(_)) => asked = 0,
                missed => {
                    asked += 1;
                    let why = missed.map_or_else(|_| "too late".to_owned(), |told| format!("{told:?}"));
                    tracing::warn!("containerd has not told its version, {asked} times in a row: {why}");
                }
            }
        }
        Hung { asked }
    }
}

impl Runnable for Containerd {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(self.clone().run_once(ctx))
    }

    fn stop_within(&self) -> Option<Duration> {
        Some(self.grace + STOP_MARGIN)
    }
}

/// Imports once its containerd is ready. Bundles that are bad are told once; what the store has refused is tried again.
///
/// Where the store has failed since containerd has ended, that is containerd's failure alone: this one is cancelled with
/// it.
fn preseeding(containerd: String, place: Place, preseed: Preseed) -> impl Runnable {
    move |ctx: Context| {
        let (containerd, place, preseed) = (containerd.clone(), place.clone(), preseed.clone());
        async move {
            ctx.wait_ready(&containerd).await?;
            let imported = tokio::select! {
                biased;
                cancelled = ctx.cancelled() => return Err(cancelled.into()),
                imported = imported(&place, &preseed) => imported,
            };
            if let Err(failure) = imported {
                if version(&place.socket()).await.is_err()
                    && let Ok(cancelled) = timeout(ENDS_WITHIN, ctx.cancelled()).await
                {
                    return Err(cancelled.into());
                }
                return Err(failure);
            }
            ctx.ready()?;
            ctx.done()?;
            Ok(())
        }
    }
}

/// One round, after which nothing remains to be tried again.
async fn imported(place: &Place, preseed: &Preseed) -> Result<(), Failure> {
    let store = ContainerdImages::connect(&place.socket()).await?;
    let report = preseed.run(&store).await?;
    let is_full = |outcome: &Outcome| {
        matches!(outcome, Outcome::Failed(ImportError::Store { source: StoreError::Full { .. }, .. }))
    };
    if report.outcomes.iter().any(is_full) {
        tracing::error!("{}", room(&place.root()));
    }
    match report.retryable() {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} bundles are to be tried again"))),
    }
}

/// How much room there is, in words.
fn room(root: &Path) -> String {
    let name = root.display();
    match rustix::fs::statvfs(root) {
        Ok(room) => {
            let bytes = |blocks: u64| blocks.saturating_mul(room.f_frsize);
            let (free, all) = (bytes(room.f_bavail), bytes(room.f_blocks));
            format!("{name} has {free} of {all} bytes free, and {} of {} inodes", room.f_favail, room.f_files)
        }
        Err(error) => format!("how much is free at {name} isn't told: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_told_in_bytes_and_inodes() {
        let told = room(Path::new("/"));
        let numbers: Vec<u64> = told.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(matches!(numbers[..], [free, all, inodes, of] if free <= all && inodes <= of), "{told}");
        assert!(room(Path::new("/nowhere/at/all")).contains("isn't told"));
    }
}
