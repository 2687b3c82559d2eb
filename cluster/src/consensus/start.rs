//! How a member starts.

use std::net::IpAddr;
use std::sync::Arc;

use nodekeel_localstorage::pki::{Credentials, RevocationList};

use super::{MemberName, Peer};

/// How a member starts: who it is, and what it finds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Start {
    /// The member's name, which is the node's. It is in its certificate.
    pub name: MemberName,
    /// The address at which the other members reach it. It is in its certificate; a member that has run may have another one
    /// than before.
    pub address: IpAddr,
    /// Whether there is a cluster, and who knows of it.
    pub mode: Mode,
}

/// What a member finds when it starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Mode {
    /// Nothing: it makes a cluster of one, with an authority of its own.
    ///
    /// It goes on with what an earlier start in this mode has left, and refuses what any other has.
    New,
    /// A cluster that has added it as a learner, and has issued its credentials.
    ///
    /// It goes on with what an earlier start with the same credentials has left.
    Existing {
        /// All members but this one.
        peers: Vec<Peer>,
        /// The member's key and certificate, and the certificate of the cluster's authority.
        credentials: Arc<Credentials>,
        /// The certificates that were revoked when the credentials were issued; later ones come from the cluster.
        revoked: RevocationList,
    },
    /// What it has left on the disk when it last ran.
    Restart,
}

impl Start {
    /// Makes a cluster of one.
    pub fn new_cluster(name: MemberName, address: IpAddr) -> Start {
        Start { name, address, mode: Mode::New }
    }

    /// Joins a cluster that expects it.
    pub fn join(
        name: MemberName,
        address: IpAddr,
        peers: Vec<Peer>,
        credentials: Arc<Credentials>,
        revoked: RevocationList,
    ) -> Start {
        Start { name, address, mode: Mode::Existing { peers, credentials, revoked } }
    }

    /// Goes on as the member that it was.
    pub fn restart(name: MemberName, address: IpAddr) -> Start {
        Start { name, address, mode: Mode::Restart }
    }
}
