//! What the parts of the node know of the API for other machines: its configuration, who may call it, and the other nodes. It is
//! served by [`api_server`](super::api_server).

pub(super) mod cluster_records;
pub(super) mod config;
pub(crate) mod control;
pub(super) mod enrol;
pub(super) mod identities;
pub(super) mod peer_client;
pub(super) mod peer_keys;
pub(super) mod peers;
pub(super) mod records;

use std::sync::Arc;

use self::config::{ApiConfig, NAME};
#[cfg(feature = "testing")]
pub(crate) use self::enrol::check_arbitrary_request;
pub(crate) use self::enrol::{ApiEnroller, ticket_voters};
pub(crate) use self::identities::Api;
use crate::config::NodedConfig;
use crate::running::RunningNode;

/// The API of a running node. A reload that switches it off leaves the extension.
pub(super) fn running_api(running: &RunningNode) -> Option<Arc<Api>> {
    running.extension::<Arc<Api>>().filter(|_| is_on(&running.plan().config))
}

/// Returns whether the node has an API for other machines.
pub(super) fn is_on(config: &NodedConfig) -> bool {
    config.section::<ApiConfig>(NAME).is_some()
}
