//! The settings of a control plane.

use anyhow::Result;

use super::{GUEST_NODE, Kube, KubeDaemon, KubePrograms};
use crate::port::retry_taken_ports;

/// A user of the API, with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeUser {
    /// The name for [`Kube::kubeconfig_file`] and RBAC.
    pub name: String,
    /// Its groups, beside `system:authenticated`.
    pub groups: Vec<String>,
}

impl KubeUser {
    /// A user without permissions until a role is bound to its name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), groups: Vec::new() }
    }

    /// The kubelet of this node, by its name for the Node authorizer: `system:node:NAME`.
    pub fn for_node(name: &str) -> Self {
        Self { name: format!("system:node:{name}"), groups: vec!["system:nodes".into()] }
    }

    /// A service account, by its name in role bindings: `system:serviceaccount:NAMESPACE:NAME`.
    pub fn service_account(namespace: &str, name: &str) -> Self {
        Self {
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")],
        }
    }

    fn with_group(name: &str, group: &str) -> Self {
        Self { name: name.into(), groups: vec![group.into()] }
    }
}

/// The user with all permissions.
pub(super) const ADMIN: &str = "admin";
/// The controller manager's user. It runs all controllers as this user, which is more than the user's role
/// allows.
pub(super) const CONTROLLER_MANAGER: &str = "system:kube-controller-manager";
pub(super) const SCHEDULER: &str = "system:kube-scheduler";

/// The settings of a control plane.
#[derive(Clone, Debug)]
#[must_use = "a control plane runs once it is started"]
pub struct KubeBuilder {
    pub(super) users: Vec<KubeUser>,
    pub(super) left_out: Vec<KubeDaemon>,
    pub(super) arguments: Vec<(KubeDaemon, String)>,
    pub(super) has_service_accounts: bool,
}

impl Default for KubeBuilder {
    fn default() -> Self {
        let masters = "system:masters";
        let users = vec![
            KubeUser::with_group(ADMIN, masters),
            KubeUser::with_group(CONTROLLER_MANAGER, masters),
            KubeUser::new(SCHEDULER),
            KubeUser::for_node(GUEST_NODE),
        ];
        Self { users, left_out: Vec::new(), arguments: Vec::new(), has_service_accounts: false }
    }
}

impl KubeBuilder {
    /// Adds a user beside `admin` and the node [`GUEST_NODE`].
    pub fn with_user(mut self, user: KubeUser) -> Self {
        self.users.push(user);
        self
    }

    /// Leaves a daemon out. [`Kube::launch_daemon`] can start it later.
    pub fn without_daemon(mut self, part: KubeDaemon) -> Self {
        self.left_out.push(part);
        self
    }

    /// Adds a flag at the end of a daemon's command line: of a repeated flag the last one counts.
    pub fn with_argument(mut self, part: KubeDaemon, argument: impl Into<String>) -> Self {
        self.arguments.push((part, argument.into()));
        self
    }

    /// Sets the controller manager's limit of requests per second, instead of 20: a burst of claims waits for
    /// it.
    pub fn with_controller_requests_per_second(self, count: u32) -> Self {
        let manager = KubeDaemon::ControllerManager;
        self.with_argument(manager, format!("--kube-api-qps={count}"))
            .with_argument(manager, format!("--kube-api-burst={count}"))
    }

    /// Gives pods a service account and its token, as a real cluster does. Pods can be created in a namespace
    /// once its account `default` exists; in the namespace `default` it does when [`start`](Self::start)
    /// returns.
    pub fn with_service_accounts(mut self) -> Self {
        self.has_service_accounts = true;
        self
    }

    /// Starts it and waits until every daemon answers. The first start on a machine builds the programs,
    /// which takes minutes and reports its progress on standard error.
    ///
    /// # Errors
    /// A program is missing and can't be built, or a daemon did not start; with its last output.
    pub fn start(self) -> Result<Kube> {
        let programs = KubePrograms::locate()?;
        retry_taken_ports(|| Kube::try_start(self.clone(), programs.clone()))
    }
}
