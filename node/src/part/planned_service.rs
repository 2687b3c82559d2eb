//! The plan of a part for one DN.

use std::fmt;
use std::sync::Arc;

use nodekeel_localstorage::tree::LayoutEntry;
use nodekeel_logtree::parse::{LogFormat, LogZone};
use nodekeel_supervisor::Runnable;

use super::on_volume::{RunnableOnVolume, share_build};
use super::{NodePreparation, PlannedRunnable, PrepareError, PreparedRunnable};
use crate::dn::STORAGE as STORAGE_DN;
use crate::layout;
use crate::volume::VolumeHandle;

/// A runnable of the plan, and what it needs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PlannedService {
    /// The DN: `root.<name>`, or `root.<part>.<name>`.
    pub dn: String,
    /// The plan of what it runs.
    pub runnable: Arc<dyn PlannedRunnable>,
    /// The reason why it is skipped; `None` if it will run.
    pub skip_reason: Option<String>,
    /// DNs that must be ready before it starts; the planner adds the dependencies of its name.
    pub start_after: Vec<String>,
    /// The directories outside of the data volume, relative to the data directory, parents first.
    pub directories: Vec<String>,
    /// The directories on the data volume, parents first.
    pub volume_directories: Vec<String>,
    /// The bytes that must be free for it on the data volume.
    pub disk_bytes: u64,
    /// The log formats of runnables at and below its DN.
    pub log_formats: Vec<(String, LogFormat)>,
    /// The zone of the times in those logs that name none; `None` for that of the machine, in which a program without
    /// `TZ` writes.
    pub log_zone: Option<LogZone>,
    /// The next noded adopts a process of this DN that was [kept](nodekeel_supervisor::process::Process::keep).
    pub keep: bool,
}

impl PlannedService {
    /// A runnable of this DN that needs nothing.
    pub fn new(dn: impl Into<String>, runnable: impl PlannedRunnable + 'static) -> Self {
        Self {
            dn: dn.into(),
            runnable: Arc::new(runnable),
            skip_reason: None,
            start_after: Vec::new(),
            directories: Vec::new(),
            volume_directories: Vec::new(),
            disk_bytes: 0,
            log_formats: Vec::new(),
            log_zone: None,
            keep: false,
        }
    }

    /// A runnable of this DN that needs no preparation; `summary` describes it in the output of `noded check`.
    pub fn from_runnable(dn: impl Into<String>, summary: impl Into<String>, runnable: impl Runnable) -> Self {
        Self::from_prepared(dn, summary, PreparedRunnable::new(runnable))
    }

    /// A runnable of this DN that is prepared already.
    pub fn from_prepared(
        dn: impl Into<String>,
        summary: impl Into<String>,
        prepared: PreparedRunnable,
    ) -> Self {
        Self::new(dn, SimpleRunnable { summary: summary.into(), prepared })
    }

    /// A runnable of this DN that is built on the open data volume at each start, and needs nothing else; `summary`
    /// describes it in the output of `noded check`. See [`NodePreparation::on_volume`].
    pub fn on_volume<R: Runnable>(
        dn: impl Into<String>,
        summary: impl Into<String>,
        build: impl Fn(&VolumeHandle) -> Result<R, PrepareError> + Send + Sync + 'static,
    ) -> Self {
        let plan = RunnableOnVolume { summary: summary.into(), build: share_build(build) };
        Self::new(dn, plan).after_storage()
    }

    /// Sets why it is skipped.
    #[must_use]
    pub fn skip(self, reason: Option<String>) -> Self {
        Self { skip_reason: reason, ..self }
    }

    /// Needs the directories of this layout on the data volume, and so starts after `root.storage`.
    #[must_use]
    pub fn layout<L: LayoutEntry>(mut self) -> Self {
        self.volume_directories.extend(layout::directories_of::<L>(""));
        self.after_storage()
    }

    fn after_storage(mut self) -> Self {
        if !self.start_after.iter().any(|dn| dn == STORAGE_DN) {
            self.start_after.push(STORAGE_DN.to_owned());
        }
        self
    }

    /// Needs the directories of this layout in the data directory, outside of the volume. No other part may have them: a
    /// conflict is a problem of the plan.
    #[must_use]
    pub fn node_layout<L: LayoutEntry>(mut self) -> Self {
        self.directories.extend(layout::directories_of::<L>(""));
        self
    }

    /// Needs the directories of this layout in `run` below the data directory.
    #[must_use]
    pub fn run_layout<L: LayoutEntry>(mut self) -> Self {
        self.directories.extend(layout::directories_of::<L>("run/"));
        self
    }

    /// Needs this many free bytes on the data volume.
    #[must_use]
    pub fn disk_bytes(self, bytes: u64) -> Self {
        Self { disk_bytes: bytes, ..self }
    }

    /// Keeps its process, which must be set to be [kept](nodekeel_supervisor::process::Process::keep), when noded is
    /// killed: the next noded adopts it. Without this, the next noded ends it.
    #[must_use]
    pub fn keep(self, keep: bool) -> Self {
        Self { keep, ..self }
    }

    /// Parses the lines of the runnable with this DN.
    #[must_use]
    pub fn log_format(mut self, dn: impl Into<String>, format: LogFormat) -> Self {
        self.log_formats.push((dn.into(), format));
        self
    }

    /// Sets the zone of the times in its logs that name none.
    #[must_use]
    pub fn log_zone(self, zone: Option<LogZone>) -> Self {
        Self { log_zone: zone, ..self }
    }
}

/// A runnable without a plan.
struct SimpleRunnable {
    summary: String,
    prepared: PreparedRunnable,
}

impl fmt::Debug for SimpleRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimpleRunnable").field(&self.summary).finish()
    }
}

impl fmt::Display for SimpleRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)
    }
}

impl PlannedRunnable for SimpleRunnable {
    fn prepare(&self, _: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        Ok(self.prepared.clone())
    }
}
