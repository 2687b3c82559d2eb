//! The recovery of a cluster whose majority is lost for ever, from one of its members.

use std::fmt::Debug;

use async_trait::async_trait;
use thiserror::Error;

use super::ConsensusError;
use super::error::{REMOVED_NODE, UNNAMED_CERTIFICATE};

/// How far the recovery of a cluster from this member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the states of one operation")]
pub enum RecoveryState {
    /// None is in progress.
    None,
    /// It is requested: the member's next start begins it, or drops it if a majority answers by then.
    Requested,
    /// The member is the only one of its cluster. What its store has of the others is not removed yet.
    Alone,
}

/// Makes a cluster of one of this member, with its data, when the others are lost.
///
/// # Contract
/// - Nothing changes while so many voters answer that they are a majority with this one, or if one of them has seen a later
///   start of this member, or has removed it.
/// - All entries of the member's own log stay, also those of which it does not know that a majority has them. What only the
///   others have acknowledged is lost.
/// - A former member never exchanges data with the recovered cluster: it has another id than the former one.
/// - A recovery that was killed at any point is completed by the member's next start.
#[async_trait]
pub trait MemberRecovery: Debug + Send + Sync {
    /// The members that a recovery takes out, as they answer now.
    ///
    /// # Errors
    /// [`RecoveryError`].
    async fn plan(&self) -> Result<RecoveryPlan, RecoveryError>;

    /// Requests the recovery, durably, and restarts the member with it.
    ///
    /// # Errors
    /// [`RecoveryError`]. Nothing was changed.
    async fn request(&self) -> Result<RecoveryPlan, RecoveryError>;

    /// How far it is.
    ///
    /// # Errors
    /// [`RecoveryError::Failed`].
    async fn state(&self) -> Result<RecoveryState, RecoveryError>;

    /// Ends a recovery, once nothing of the others is left in the store.
    ///
    /// # Errors
    /// [`RecoveryError::Failed`].
    async fn complete(&self) -> Result<(), RecoveryError>;
}

/// The members that a recovery takes out of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryPlan {
    /// All but this member.
    pub lost: Vec<LostMember>,
}

impl RecoveryPlan {
    /// These members are taken out.
    pub fn new(lost: Vec<LostMember>) -> RecoveryPlan {
        RecoveryPlan { lost }
    }
}

/// A member that a recovery takes out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LostMember {
    /// Its name; `None` if it has never started.
    pub name: Option<String>,
    /// The URL at which the others reach it.
    pub peer_url: Option<String>,
    /// True if it answers. It may have writes that this member lacks.
    pub is_answering: bool,
}

impl LostMember {
    /// A member of these values.
    pub fn new(name: Option<String>, peer_url: Option<String>, is_answering: bool) -> LostMember {
        LostMember { name, peer_url, is_answering }
    }
}

/// The cause for which a cluster is not recovered from this member.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// It has no other voter: there is nothing to recover.
    #[error("this member is the only voter of its cluster: nothing is lost; see `nodectl cluster status`")]
    OnlyVoter,
    /// It is a learner: it may have a part of the data, and has acknowledged nothing.
    #[error("this member is a learner, which may lack data: recover the cluster on a voter")]
    Learner,
    /// It can't open the private key of the CA, without which nothing of the others could be removed, and no node added.
    #[error(
        "this member has lost the voter key that it joined with, and can't open the private key of the cluster's CA: recover \
         the cluster from another voter, or restore it from a snapshot by `nodectl cluster restore FILE`"
    )]
    Sealed,
    /// So many voters answer that they are a majority with this one.
    #[error(
        "a majority of the voters answers with this one ({answering}): nothing is lost; remove those that are \
         gone by `nodectl cluster remove`"
    )]
    MajorityAnswers {
        /// The names of those that answer.
        answering: String,
    },
    /// A member rejects this one, or has when it last answered.
    #[error("member {witness} of the cluster rejects this one's certificate: {}", REMOVED_NODE)]
    Removed {
        /// The other member.
        witness: String,
    },
    /// The same, and its certificate has no name of a member: it may not have been removed.
    #[error("member {witness} of the cluster rejects this one's certificate: {}", UNNAMED_CERTIFICATE)]
    Unnamed {
        /// The other member.
        witness: String,
    },
    /// It could not be decided or done. The source names the cause.
    #[error("can't recover the cluster from this member")]
    Failed(#[source] ConsensusError),
}
