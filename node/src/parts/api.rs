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
pub(super) mod shared;

#[cfg(feature = "testing")]
pub(crate) use self::enrol::check_arbitrary_request;
pub(crate) use self::enrol::{ApiEnroller, ticket_voters};
pub(crate) use self::shared::{Api, is_on, running_api};
