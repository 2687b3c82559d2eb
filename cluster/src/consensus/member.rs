//! Who is a member.

use std::fmt::{self, Debug};

use async_trait::async_trait;

use super::{MemberName, MembershipError, PeerUrl};

/// A member's number, which the cluster has given it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// In hexadecimal, as etcd's own tools print it.
impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemberId({self})")
    }
}

/// A member as the cluster lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// Its number.
    pub id: MemberId,
    /// Its name; none until it has started for the first time.
    pub name: Option<String>,
    /// Where the others reach it, as it is listed.
    pub peer_urls: Vec<String>,
    /// Whether it only listens: it has no vote, and serves no reads and writes, until it is promoted.
    pub is_learner: bool,
}

impl Member {
    /// A member of these values.
    pub fn new(id: MemberId, name: Option<String>, peer_urls: Vec<String>, is_learner: bool) -> Member {
        Member { id, name, peer_urls, is_learner }
    }
}

/// A member to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewMember {
    /// The name that it will start with.
    pub name: MemberName,
    /// Where the others will reach it.
    pub peer_url: PeerUrl,
}

impl NewMember {
    /// A member of this name, at this URL.
    pub fn new(name: MemberName, peer_url: PeerUrl) -> NewMember {
        NewMember { name, peer_url }
    }
}

/// A member by its name, as those who start need to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// Its name.
    pub name: MemberName,
    /// Where it is reached.
    pub url: PeerUrl,
}

impl Peer {
    /// The member of this name, at this URL.
    pub fn new(name: MemberName, url: PeerUrl) -> Peer {
        Peer { name, url }
    }
}

/// The list of members, and how it changes.
///
/// # Contract
/// - Each call is answered by the cluster, not from a copy that this member has.
/// - Whether a call that fails as [`MembershipError::Unavailable`] took effect is not known. All can be made again:
///   `add_learner` of a member that was added gives that member; `promote` of a voter and `remove` of a member that is
///   gone are success.
/// - A learner that was added is promoted by the members that vote, as soon as it is in sync. `promote` is for whoever
///   doesn't want to rely on that.
/// - Dropping a call's future gives up its answer, not the call.
#[async_trait]
pub trait Membership: Debug + Send + Sync {
    /// All members, in the order of their ids.
    async fn list(&self) -> Result<Vec<Member>, MembershipError>;

    /// Adds a member that listens, or finds the one that has this URL. Only one may be a learner at a time.
    async fn add_learner(&self, member: &NewMember) -> Result<Member, MembershipError>;

    /// Gives a learner its vote. One that is not in sync yet is [`MembershipError::NotInSync`].
    async fn promote(&self, id: MemberId) -> Result<(), MembershipError>;

    /// Removes a member. The last one, and one without which the others would have no majority, is refused.
    async fn remove(&self, id: MemberId) -> Result<(), MembershipError>;
}
