//! Consensus: what the members of a cluster agree on, and who is a member.
//!
//! [`Consensus`] runs this node's member. It gives a runnable for the tree and a watch of its [`Status`]; where that is
//! [`Status::Running`], and only there, the keys and the list of members can be had. The implementations are
//! [`memory`], for one process, and `etcd`, with the feature of that name.
//!
//! ```text
//!  Start ──▶ Consensus::start ──▶ Started { service: for the tree, status }
//!                                                          │
//!                        Running { this member, root keys, keys by module and space, Membership }
//! ```

mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod kv;
mod member;
pub mod memory;
mod names;
mod running;
mod start;
mod status;

use std::fmt::Debug;

pub use error::{ConsensusError, MembershipError};
pub use member::{Member, MemberId, Membership, NewMember, Peer};
pub use names::{InvalidName, MemberName, PeerUrl};
pub use running::Running;
pub use start::{Mode, Start};
pub(crate) use status::Turn;
pub use status::{Service, Started, Status, StatusWatch};

/// The port that members reach each other at, unless one is configured.
///
/// *Source:* Monogon's `consensus` of 2020.
pub const PEER_PORT: u16 = 7834;

/// The port that a member serves its clients at, unless one is configured.
///
/// *Source:* IANA's registry has it for etcd.
pub const CLIENT_PORT: u16 = 2379;

/// Runs this node's member of the consensus.
///
/// # Contract
/// - `start` does nothing but prepare: the member runs when the tree runs [`Started::service`]. There is one service at
///   a time for one place on the disk.
/// - The service is [`Status::Running`] once the member takes part (a learner: once it is promoted) and answers reads
///   that need the others. It signals ready to the tree then.
/// - A service that the tree starts again goes on with what is on the disk, whatever mode it was given first: [`Mode::New`]
///   and [`Mode::Existing`] are done once, and can be killed at any step of it.
/// - A member that has run and starts at another address than before is the same member, with the same key: before it is
///   `Running`, it is certified for the new address and listed there.
/// - No mode destroys what is there. What doesn't fit the mode is an error that names it.
/// - When the service ends, by whatever cause, the status is not `Running` any more before the service's future is done.
///   The [`Running`] that somebody still holds gets errors, and never reaches a later run.
pub trait Consensus: Debug + Send + Sync + 'static {
    /// Prepares a member that starts so.
    fn start(&self, start: Start) -> Started;
}
