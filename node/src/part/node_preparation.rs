//! The node, as a part finds it while its runnables are prepared.

use std::sync::Arc;

use nodekeel_localstorage::tree::LayoutEntry;
use nodekeel_logtree::LogStore;
use nodekeel_supervisor::Runnable;
use nodekeel_supervisor::process::ProcessHandle;
use tonic::Extensions;

use super::on_volume::{BuildOnVolume, VolumeRunnable, share_build};
use super::{ControlServices, PartAdditions, PrepareError, PreparedRunnable};
use crate::config::NodedConfig;
use crate::data::{self, DataError};
use crate::dn;
use crate::health::HealthSources;
use crate::layout::DataLayout;
use crate::metrics::MetricsRegistries;
use crate::running::RunningNode;
use crate::search_path::SearchPath;
use crate::volume::VolumeHandle;

/// The node, as a runnable finds it while it is prepared, and with what it adds.
#[derive(Debug)]
pub struct NodePreparation<'a> {
    pub(crate) running: &'a Arc<RunningNode>,
    pub(crate) config: &'a NodedConfig,
    pub(crate) search: &'a SearchPath,
    pub(crate) additions: &'a mut PartAdditions,
}

impl NodePreparation<'_> {
    /// The node, for the parts that show it: the control API and the metrics.
    pub(crate) fn running(&self) -> &Arc<RunningNode> {
        self.running
    }

    pub(crate) fn data(&self) -> &DataLayout {
        self.running.data()
    }

    /// The configuration.
    pub fn config(&self) -> &NodedConfig {
        self.config
    }

    /// The directories of programs.
    pub fn search_path(&self) -> &SearchPath {
        self.search
    }

    /// The log of the node.
    pub fn log_store(&self) -> &LogStore {
        &self.running.log_store
    }

    /// A runnable on the data volume: `build` creates its layout and builds it at each start, when the volume is open. It
    /// may block, and its error is one of the runnable, which the supervisor restarts. When `root.storage` closes the
    /// volume, the runnable stops, and starts again with the open one. It may take `node.grace` and 30 seconds to stop.
    pub fn on_volume<R: Runnable>(
        &self,
        build: impl Fn(&VolumeHandle) -> Result<R, PrepareError> + Send + Sync + 'static,
    ) -> PreparedRunnable {
        self.prepare_on_volume(share_build(build))
    }

    pub(super) fn prepare_on_volume(&self, build: BuildOnVolume) -> PreparedRunnable {
        let (volume, grace) = (self.running.volume.clone(), self.config.node.grace);
        PreparedRunnable::new(VolumeRunnable { build, volume, grace }).start_after(&[dn::STORAGE.to_owned()])
    }

    /// Creates a layout in the data directory, outside of the volume, durably: one that the plan declares with
    /// [`PlannedService::node_layout`](crate::part::PlannedService::node_layout).
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn create_node_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.data().add_layout().map_err(|error| data::placement_error(self.data().path(), error))
    }

    /// Creates a layout in `run` below the data directory.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn create_run_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.data().run.add_layout().map_err(|error| data::placement_error(self.data().path(), error))
    }

    /// Values of the parts, by their type: what a part puts here is found by the parts after it, and by
    /// [`NodeHandle::extension`](crate::node::NodeHandle::extension).
    pub fn extensions(&mut self) -> &mut Extensions {
        &mut self.additions.extensions
    }

    /// The sources that answer `nodectl health`.
    pub fn health_sources(&mut self) -> &mut HealthSources {
        &mut self.additions.health
    }

    /// The registries that `[metrics]` serves.
    pub fn metrics(&mut self) -> &mut MetricsRegistries {
        &mut self.additions.metrics
    }

    /// The gRPC services on the control socket.
    pub fn control_services(&mut self) -> &mut ControlServices {
        &mut self.additions.services
    }

    /// Lets clients signal the process of this DN, and ask it to reload.
    pub(crate) fn add_process(&mut self, dn: String, process: ProcessHandle) {
        self.additions.processes.insert(dn, process);
    }
}
