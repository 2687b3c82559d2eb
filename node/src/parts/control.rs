//! The control API.

mod api;
pub(crate) mod log_levels;
mod log_query;
mod streams;
mod suggestions;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use self::api::serve_control;
pub(crate) use self::api::{GRACE_PERIOD, control_routes, to_router};
use crate::config::NodedConfig;
use crate::control::socket::{self, NodeSocket, SocketPath};
use crate::dn::CONTROL as DN;
use crate::health::NodeSnapshot;
use crate::listen_address::{ListenAddress, check_socket_path};
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};

/// The part of the control API.
pub(super) struct ControlPart;

impl Part for ControlPart {
    fn name(&self) -> &str {
        "control"
    }

    /// No dependencies: the control API serves before anything else starts, so that nothing needs to wait for it.
    fn dependencies(&self, _: &NodedConfig) -> Vec<DependencyEntry> {
        Vec::new()
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let socket = planner.control_socket();
        let hint = "set control.socket to a shorter path, or use a shorter --data";
        if let Some(problem) = check_socket_path(socket, hint) {
            planner.report(problem);
        }
        planner.claim_address(ListenAddress::Unix(socket.to_owned()), "control.socket");
        // At a reload, the node itself serves this socket.
        if !planner.serves_socket(socket)
            && let Err(error) =
                socket::check_socket(&SocketPath::control(socket), &planner.config().node.data)
        {
            planner.report(error.to_string());
        }
        planner.add(PlannedService::new(DN, ControlPlan { socket: socket.to_owned() }));
    }
}

/// The control API on its socket.
#[derive(Debug)]
struct ControlPlan {
    socket: PathBuf,
}

impl fmt::Display for ControlPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the control API on {}", self.socket.display())
    }
}

impl PlannedRunnable for ControlPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        // Bound before the tree starts: a second noded, or a path that is too long, is an error of the start.
        let socket = SocketPath::control(&self.socket).of_node(&node.config().node.data);
        let socket = Arc::new(NodeSocket::new(socket)?);
        let watched = Arc::clone(&socket);
        node.health_sources()
            .add("control", move |_: &NodeSnapshot| watched.condition().into_iter().collect::<Vec<_>>());
        // The drop of the node's handle finds the socket here, and closes it.
        node.extensions().insert(Arc::clone(&socket));
        Ok(PreparedRunnable::new(serve_control(Arc::clone(node.running()), socket)))
    }
}
