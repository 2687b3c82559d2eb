//! containerd as a runnable of the supervision tree.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::process::{KillMode, Process, Readiness};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use crate::config::ContainerdSettings;
use crate::containerd::{ContainerdImages, daemon_version};
use crate::layout::DirectoryLayout;
use crate::prepare::prepare_layout;
use crate::preseed::{BundleOutcome, Preseed};
use crate::{ImageStoreError, ImportError, runsc};

/// Additional time for a stop beyond the grace period: its children stop first.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// Maximum time until the tree reports the exit of a containerd that does not answer; after that, it is still
/// running.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A containerd with its log reader and its preseed import.
///
/// ```text
/// …containerd           the daemon; ready when its version call answers
/// ├─ runsc              gVisor's log, if gVisor is among the runtimes
/// └─ preseed            images; ready and done when imported, so that other runnables can wait for it
/// ```
///
/// Its environment is `PATH`, where it looks up its shims and runc, `TMPDIR`, and the variables of `env`;
/// nothing else, because the shims inherit all of it. A stop affects the daemon only: its shims, and so the
/// containers, keep running, and the next containerd finds them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Containerd {
    /// The executable.
    pub binary: PathBuf,
    /// Its directories.
    pub layout: DirectoryLayout,
    /// Its `PATH`.
    pub search_path: OsString,
    /// Its configuration. Default: a containerd without the CRI.
    pub config: ContainerdConfig,
    /// Additional environment variables. Default: none.
    pub env: BTreeMap<OsString, OsString>,
    /// Additional arguments. Default: none.
    pub extra_args: Vec<OsString>,
    /// Time between SIGTERM and SIGKILL at a stop. Default: ten seconds.
    pub grace_period: Duration,
    /// Liveness probe; `None` disables it. Default: [`LivenessProbe::default`].
    pub liveness: Option<LivenessProbe>,
    /// Images to import. Default: none.
    pub preseed: Option<Preseed>,
    /// The journal that receives gVisor's log.
    pub journal: LogStore,
}

/// The configuration of containerd.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ContainerdConfig {
    /// Rendered from these settings.
    Settings(ContainerdSettings),
    /// This text, unchanged. Root, state and the API socket are those of the layout even if the text has
    /// others.
    Verbatim {
        /// The TOML.
        text: String,
        /// Whether gVisor logs into the layout's FIFO.
        runsc: bool,
    },
}

/// The liveness probe of a running containerd, which is killed and restarted when it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessProbe {
    /// Interval between version calls. Default: one minute.
    pub period: Duration,
    /// Timeout of a call. Default: ten seconds.
    pub timeout: Duration,
    /// Consecutive failures that are tolerated. Default: two; the third kills it.
    pub tolerated_failures: u32,
}

impl Default for LivenessProbe {
    fn default() -> Self {
        Self { period: Duration::from_secs(60), timeout: Duration::from_secs(10), tolerated_failures: 2 }
    }
}

/// containerd does not answer its liveness probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("containerd failed {failures} consecutive liveness probes")]
pub struct LivenessError {
    failures: u32,
}

impl Containerd {
    /// An executable with its directories, and defaults otherwise.
    pub fn new(
        binary: impl Into<PathBuf>,
        layout: DirectoryLayout,
        path: impl Into<OsString>,
        journal: LogStore,
    ) -> Self {
        Self {
            binary: binary.into(),
            layout,
            search_path: path.into(),
            config: ContainerdConfig::Settings(ContainerdSettings::default()),
            env: BTreeMap::new(),
            extra_args: Vec::new(),
            grace_period: Duration::from_secs(10),
            liveness: Some(LivenessProbe::default()),
            preseed: None,
            journal,
        }
    }

    fn has_runsc(&self) -> bool {
        match &self.config {
            ContainerdConfig::Settings(settings) => settings.runsc_settings().is_some(),
            ContainerdConfig::Verbatim { runsc, .. } => *runsc,
        }
    }

    async fn prepare_files(&self) -> Result<(), Failure> {
        let layout = self.layout.clone();
        let (config, runsc) = match &self.config {
            ContainerdConfig::Settings(settings) => (
                settings.render_toml(&layout),
                settings.runsc_settings().map(|runsc| runsc.render_toml(&layout)),
            ),
            ContainerdConfig::Verbatim { text, .. } => (text.clone(), None),
        };
        spawn_blocking(move || prepare_layout(&layout, &config, runsc.as_deref())).await??;
        Ok(())
    }

    fn build_process(&self, answered: Arc<Notify>) -> Process {
        let socket = self.layout.socket_path();
        let probe = move || {
            let (socket, answered) = (socket.clone(), Arc::clone(&answered));
            async move {
                daemon_version(&socket).await?;
                answered.notify_one();
                Ok::<(), Failure>(())
            }
        };
        Process::new(&self.binary)
            .arg("--config")
            .arg(self.layout.config_path())
            .arg("--root")
            .arg(self.layout.root_dir())
            .arg("--state")
            .arg(self.layout.state_dir())
            .arg("--address")
            .arg(self.layout.socket_path())
            .args(&self.extra_args)
            .env("PATH", &self.search_path)
            .env("TMPDIR", self.layout.temp_dir())
            .envs(self.env.clone())
            .ready_when(Readiness::on_probe(probe))
            .grace_period(self.grace_period)
            .kill_mode(KillMode::Process)
    }

    async fn run_once(self, ctx: Context) -> Result<(), Failure> {
        self.prepare_files().await?;
        if self.has_runsc() {
            // The FIFO exists before the first container can write.
            let fifo = self.layout.runsc_log_path();
            runsc::open_fifo(&fifo)?;
            ctx.run_child("runsc", runsc::runsc_log_reader(self.journal.clone(), fifo))?;
        }
        if let Some(preseed) = &self.preseed {
            ctx.run_child(
                "preseed",
                preseed_runnable(ctx.dn().to_owned(), self.layout.clone(), preseed.clone()),
            )?;
        }
        let answered = Arc::new(Notify::new());
        let process = self.build_process(Arc::clone(&answered));
        tokio::select! {
            biased;
            ended = process.run(ctx.clone()) => ended,
            hung = self.watch_liveness(&answered) => Err(hung.into()),
        }
    }

    /// Resolves when the liveness probe fails; it starts after the first answer.
    async fn watch_liveness(&self, answered: &Notify) -> LivenessError {
        let Some(LivenessProbe { period, timeout: call_timeout, tolerated_failures }) = self.liveness else {
            return std::future::pending().await;
        };
        answered.notified().await;
        let socket = self.layout.socket_path();
        let mut failures = 0;
        // `interval_at` panics for a zero interval.
        let period = period.max(Duration::from_millis(1));
        let mut due = interval_at(Instant::now() + period, period);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while failures <= tolerated_failures {
            due.tick().await;
            match timeout(call_timeout, daemon_version(&socket)).await {
                Ok(Ok(_)) => failures = 0,
                missed => {
                    failures += 1;
                    let why = missed.map_or_else(|_| "timed out".to_owned(), |answer| format!("{answer:?}"));
                    tracing::warn!(
                        "containerd liveness probe failed, {failures} consecutive failures: {why}"
                    );
                }
            }
        }
        LivenessError { failures }
    }
}

impl Runnable for Containerd {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(self.clone().run_once(ctx))
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(self.grace_period + STOP_MARGIN)
    }
}

/// Creates a runnable that imports once its containerd is ready. Invalid bundles are logged once; bundles
/// that the store rejected are retried.
///
/// If the store failed because containerd exited, that is containerd's failure only: this runnable is
/// cancelled with it.
fn preseed_runnable(containerd: String, layout: DirectoryLayout, preseed: Preseed) -> impl Runnable {
    move |ctx: Context| {
        let (containerd, layout, preseed) = (containerd.clone(), layout.clone(), preseed.clone());
        async move {
            ctx.wait_ready(&containerd).await?;
            let imported = tokio::select! {
                biased;
                cancelled = ctx.canceled() => return Err(cancelled.into()),
                imported = import_bundles(&layout, &preseed) => imported,
            };
            if let Err(failure) = imported {
                if daemon_version(&layout.socket_path()).await.is_err()
                    && let Ok(cancelled) = timeout(EXIT_TIMEOUT, ctx.canceled()).await
                {
                    return Err(cancelled.into());
                }
                return Err(failure);
            }
            ctx.signal_ready()?;
            ctx.signal_done()?;
            Ok(())
        }
    }
}

/// Runs one pass; an error if bundles have to be retried.
async fn import_bundles(layout: &DirectoryLayout, preseed: &Preseed) -> Result<(), Failure> {
    let store = ContainerdImages::connect(&layout.socket_path()).await?;
    let report = preseed.run(&store).await?;
    let is_full = |outcome: &BundleOutcome| {
        matches!(
            outcome,
            BundleOutcome::Failed(ImportError::Store { source: ImageStoreError::NoSpace { .. }, .. })
        )
    };
    if report.outcomes.iter().any(is_full) {
        tracing::error!("{}", describe_free_space(&layout.root_dir()));
    }
    match report.retryable_count() {
        0 => Ok(()),
        failed => Err(Failure::new(format!("{failed} bundles will be retried"))),
    }
}

/// Describes the free space of a file system.
fn describe_free_space(root: &Path) -> String {
    let name = root.display();
    match rustix::fs::statvfs(root) {
        Ok(space) => {
            let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
            let (free, all) = (bytes(space.f_bavail), bytes(space.f_blocks));
            format!(
                "{name} has {free} of {all} bytes free, and {} of {} inodes",
                space.f_favail, space.f_files
            )
        }
        Err(error) => format!("free space of {name} is unknown: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_is_given_in_bytes_and_inodes() {
        let text = describe_free_space(Path::new("/"));
        let numbers: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(matches!(numbers[..], [free, all, inodes, of] if free <= all && inodes <= of), "{text}");
        assert!(describe_free_space(Path::new("/nowhere/at/all")).contains("is unknown"));
    }
}
