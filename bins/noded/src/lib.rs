//! Being written.

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "node")]
pub mod config;
#[cfg(feature = "node")]
mod control;
#[cfg(feature = "node")]
pub mod data;
#[cfg(feature = "node")]
pub mod history;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "node")]
pub mod notify;
#[cfg(feature = "node")]
pub mod output;
#[cfg(feature = "node")]
pub mod plan;
#[cfg(feature = "node")]
mod ports;
#[cfg(feature = "node")]
pub mod search;
#[cfg(feature = "node")]
mod service;
#[cfg(feature = "node")]
mod wire;

/// The control API's messages, its client, and with the feature `node` its server: generated from
/// `proto/nodekeel/control/v1/control.proto`, where they are described.
#[cfg(feature = "client")]
#[allow(
    missing_docs,
    missing_debug_implementations,
    clippy::all,
    clippy::pedantic,
    unreachable_pub,
    unnameable_types,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("nodekeel.control.v1");
}
