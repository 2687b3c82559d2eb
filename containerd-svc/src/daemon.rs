//! containerd as a runnable of the supervision tree.

mod bundle_watch;
mod effective_config;
mod preseed_task;
mod stop_mark;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_logtree::LogStore;
use nodekeel_supervisor::process::{KillMode, Liveness, Process, Readiness};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::task::spawn_blocking;

use crate::config::{ConfigVersion, ContainerdSettings};
use crate::containerd::daemon_version;
use crate::cri::cri_version;
use crate::layout::DirectoryLayout;
use crate::prepare::prepare_layout;
use crate::preseed::Preseed;
use crate::{DiskReserve, runsc};

use effective_config::{EffectiveConfig, detect_config_version, read_effective_config};
use preseed_task::{PreseedTask, preseed_runnable};
use stop_mark::StopMark;

/// Additional time for a stop beyond the grace period: its children stop first.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// A containerd with its log reader and its preseed import.
///
/// ```text
/// …containerd           the daemon; ready when it answers Version, and its CRI too, if it has one
/// ├─ runsc              gVisor's log, if gVisor is among the runtimes
/// └─ preseed            images; ready while the required ones are imported and the CRI lists them
/// ```
///
/// Other runnables can wait for `preseed`. It is ready as soon as the bundles of the
/// [required images](Preseed::with_required) have been processed, and stays ready whatever else has failed: others start
/// with what there is, and [`Preseed::problem`] names the rest, which it tries again after a pause of a second that grows
/// to five minutes. So it does where the directory is empty, and its disk may not be mounted. While the store itself fails, or
/// the directory is missing or can't be read at its start, it is not ready.
///
/// It watches the directory, also for being created, replaced or mounted, and imports what is put there once that is complete.
///
/// After a boot that no ordered stop has ended, it compares all images with their digests in the background, and has what is damaged
/// written again.
///
/// It is notified when one of its images is deleted, takes back that it is ready if that is required, and imports it again: at
/// once, but at most once in ten minutes, unless an operator imports it. The kubelet, which deletes images to free a
/// full disk, spares pinned ones; containerd 1.6 has no pins, and there it may delete the image each time.
///
/// The environment is `PATH`, where it looks up its shims and runc, `TMPDIR`, and the variables of `env`;
/// nothing else, because the shims inherit all of it. A stop affects the daemon only: its shims, and so the
/// containers, keep running, and the next containerd finds them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Containerd {
    /// The executable.
    pub binary: PathBuf,
    /// The directories.
    pub layout: DirectoryLayout,
    /// The `PATH` of the daemon.
    pub search_path: OsString,
    /// The configuration. Default: a containerd without the CRI.
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
    /// The space that they leave free on the disk of the data. Default: [`DiskReserve::default`].
    pub disk_reserve: DiskReserve,
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
        /// True if gVisor logs into the layout's file.
        runsc: bool,
    },
}

/// The liveness probe of a running containerd: it is not ready from the first failure on, and restarted when it goes on
/// failing, see [`Liveness`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessProbe {
    /// The pause before each version call to the daemon, and to its CRI if it has one. Default: two seconds.
    pub period: Duration,
    /// Timeout of a call. Default: two seconds.
    pub timeout: Duration,
    /// The failures in a row after which it is restarted. Default: eight, which are half a minute of a daemon that hangs.
    pub failure_threshold: u32,
}

impl Default for LivenessProbe {
    fn default() -> Self {
        let seconds = Duration::from_secs(2);
        Self { period: seconds, timeout: seconds, failure_threshold: 8 }
    }
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
            disk_reserve: DiskReserve::default(),
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
            ContainerdConfig::Settings(settings) => {
                let version = match settings.version {
                    Some(version) => version,
                    // Every release reads the few settings without a CRI in version 2.
                    None if settings.cri.is_none() && settings.fragments.is_empty() => {
                        ConfigVersion::default()
                    }
                    None => detect_config_version(self).await,
                };
                settings.fragments.iter().try_for_each(|fragment| fragment.check_version(version))?;
                let settings = ContainerdSettings { version: Some(version), ..settings.clone() };
                let runsc = settings.runsc_settings().map(|runsc| runsc.render_toml(&layout));
                (settings.render_toml(&layout), runsc)
            }
            ContainerdConfig::Verbatim { text, .. } => (text.clone(), None),
        };
        spawn_blocking(move || prepare_layout(&layout, &config, runsc.as_deref())).await??;
        Ok(())
    }

    fn build_process(&self, has_cri: bool) -> Process {
        let socket = self.layout.socket_path();
        let probe = move || {
            let socket = socket.clone();
            async move { probe_daemon(&socket, has_cri).await }
        };
        let process = Process::new(&self.binary)
            .arg("--config")
            .arg(self.layout.data().config.path())
            .arg("--root")
            .arg(self.layout.data().root.path())
            .arg("--state")
            .arg(self.layout.run().state.path())
            .arg("--address")
            .arg(self.layout.socket_path())
            .args(&self.extra_args)
            .env("PATH", &self.search_path)
            .env("TMPDIR", self.layout.run().tmp.path())
            .envs(self.env.clone())
            .ready_when(Readiness::on_probe(probe.clone()))
            .grace_period(self.grace_period)
            // The shims, and so the containers, outlive the daemon, and its next run finds them.
            .kill_mode(KillMode::Process);
        let Some(LivenessProbe { period, timeout, failure_threshold }) = self.liveness else {
            return process;
        };
        let liveness = Liveness::probe(probe).with_period(period).with_timeout(timeout);
        process.liveness(liveness.with_failure_threshold(failure_threshold))
    }

    async fn run_once(self, ctx: Context) -> Result<(), Failure> {
        // After the files are written, containerd itself is asked for what they result in.
        let EffectiveConfig { has_cri, snapshotter } = tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            effective = async { self.prepare_files().await?; read_effective_config(&self).await } => effective?,
        };
        if self.has_runsc() {
            let log = self.layout.runsc_log_path();
            ctx.run_child("runsc", runsc::runsc_log_reader(self.journal.clone(), log))?;
        }
        let Some(preseed) = self.preseed.clone() else { return self.build_process(has_cri).run(ctx).await };
        preseed.set_snapshotter(snapshotter);
        let mark = StopMark::new(&self.layout);
        let begin = mark.clone();
        spawn_blocking(move || begin.begin()).await??;
        // Started before the daemon, for whose readiness it waits.
        let task = PreseedTask::new(&self, preseed, has_cri, mark.clone());
        ctx.run_child("preseed", preseed_runnable(ctx.dn().to_owned(), task))?;
        let exit = self.build_process(has_cri).run(ctx.clone()).await;
        if ctx.is_canceled()
            && let Err(error) = spawn_blocking(move || mark.end()).await?
        {
            tracing::warn!("the next start compares all images with their digests: {error}");
        }
        exit
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

/// Asks the daemon for its version, and its CRI, if it should have one.
async fn probe_daemon(socket: &Path, has_cri: bool) -> Result<(), Failure> {
    daemon_version(socket).await?;
    if has_cri {
        cri_version(socket).await?;
    }
    Ok(())
}
