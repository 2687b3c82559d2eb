//! The daemons of a control plane.

use std::fmt;

/// A daemon of a control plane, in the order of shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum KubeDaemon {
    /// Places pods on nodes.
    Scheduler,
    /// Runs the controllers: binds claims, collects garbage, monitors nodes.
    ControllerManager,
    /// Serves the API.
    Apiserver,
    /// Stores the state.
    Etcd,
}

impl KubeDaemon {
    /// All of them, in the order of start.
    pub const ALL: [Self; 4] = [Self::Etcd, Self::Apiserver, Self::ControllerManager, Self::Scheduler];

    /// The name of its program's file.
    pub fn program_name(self) -> &'static str {
        match self {
            Self::Scheduler => "kube-scheduler",
            Self::ControllerManager => "kube-controller-manager",
            Self::Apiserver => "kube-apiserver",
            Self::Etcd => "etcd",
        }
    }
}

impl fmt::Display for KubeDaemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program_name())
    }
}
