//! The start of a member.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::pki::{Credentials, RevocationList};

use super::{MemberName, Peer};

/// The start of a member.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StartOptions {
    /// The member's name, which is the node's name. Its certificate contains it.
    pub name: MemberName,
    /// The address at which the other members reach it. Its certificate contains it; the address of a member
    /// that has run may differ from the previous one.
    pub address: IpAddr,
    /// The cluster that it finds, with what it needs to join it.
    pub mode: StartMode,
}

/// The cluster that a member finds when it starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StartMode {
    /// No cluster: it creates a cluster of one, with a new CA.
    ///
    /// It resumes an earlier start in this mode, and rejects what any other mode has left.
    NewCluster,
    /// A cluster that has invited it or added it as a learner, and has issued its credentials.
    ///
    /// It resumes an earlier start with the same credentials.
    ExistingCluster {
        /// All members but this one.
        peers: Vec<Peer>,
        /// The member's key and certificate, and the certificate of the cluster's CA.
        credentials: Arc<Credentials>,
        /// The certificates that were revoked when the credentials were issued; the cluster supplies later
        /// ones.
        revoked: RevocationList,
    },
    /// A cluster that is lost, with its keys in a snapshot: this member becomes its only one, with a new id. Its former
    /// members can't take part any more.
    ///
    /// It resumes an earlier start in this mode, also without the snapshot once it is no longer needed.
    RestoredCluster {
        /// The database of the snapshot, as [`stage_snapshot`](crate::backup::stage_snapshot) stores it.
        snapshot: PathBuf,
        /// A text unique to this restore.
        token: String,
    },
    /// The data that it left on the disk when it last ran.
    Restart,
}

impl StartOptions {
    /// Creates a cluster of one.
    pub fn new_cluster(name: MemberName, address: IpAddr) -> StartOptions {
        StartOptions { name, address, mode: StartMode::NewCluster }
    }

    /// Joins a cluster that has invited this member, or lists it as a learner.
    pub fn join_cluster(
        name: MemberName,
        address: IpAddr,
        peers: Vec<Peer>,
        credentials: Arc<Credentials>,
        revoked: RevocationList,
    ) -> StartOptions {
        StartOptions { name, address, mode: StartMode::ExistingCluster { peers, credentials, revoked } }
    }

    /// Restores a cluster from a snapshot.
    pub fn restore_cluster(
        name: MemberName,
        address: IpAddr,
        snapshot: PathBuf,
        token: String,
    ) -> StartOptions {
        StartOptions { name, address, mode: StartMode::RestoredCluster { snapshot, token } }
    }

    /// Restarts the member from its data.
    pub fn restart_member(name: MemberName, address: IpAddr) -> StartOptions {
        StartOptions { name, address, mode: StartMode::Restart }
    }
}
