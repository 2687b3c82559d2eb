//! Decides whether a member without data may start in a cluster.
//!
//! A member's vote stands for everything that it has ever acknowledged. One that has started and lost its data
//! must not start again under its id: its empty log would let the cluster forget what it has acknowledged.

use thiserror::Error;

#[cfg(any(feature = "etcd", feature = "memory"))]
use super::{Member, Peer};
use super::{MemberId, PeerUrl};

/// The cause for which a cluster does not admit a member without data. Retrying does not help.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JoinRefusal {
    /// The member has started before: its ticket was used, on this host or on a clone of it, and its data is
    /// not on this disk. Its vote may stand for data that the others rely on.
    #[error(
        "member {name} ({id}) has started before, and its data is not on this disk: the ticket is used, the disk \
         was lost, or this host is a clone; if the data is gone, type `nodectl cluster replace {name}` on a \
         member and `nodectl reset` here, and join it by another ticket"
    )]
    AlreadyStarted {
        /// The member's id.
        id: MemberId,
        /// The member's name.
        name: String,
    },
    /// Another host has started to join as this member, or this one did before its disk was lost: a ticket is for
    /// one host.
    #[error(
        "the ticket of member {name} ({id}) is used by another host, or was used with a disk of this one that is lost: \
         leave it to that host; or revoke the ticket (if the member takes part, remove it), type `nodectl reset` here, \
         and join it by another ticket"
    )]
    TicketUsed {
        /// The member's id.
        id: MemberId,
        /// The member's name.
        name: String,
    },
    /// The ticket was revoked, and its host still reaches the cluster: its members have not heard of that yet.
    #[error(
        "the ticket of member {name} was revoked: type `nodectl reset` here, and join it by another ticket"
    )]
    TicketRevoked {
        /// The member's name.
        name: String,
    },
    /// The cluster lists no member at the URL: the ticket was revoked, or the member removed.
    #[error(
        "the cluster has no member at {url}: the ticket was revoked, or its member removed; type `nodectl reset` here, \
         and join it by another ticket"
    )]
    NotListed {
        /// The URL at which the member was to be added.
        url: PeerUrl,
    },
    /// The cluster lists another node's member at the URL.
    #[error("another member, {name} ({id}), is at {url}: use another address, or remove that member first")]
    OtherMember {
        /// The URL at which the member was to be added.
        url: PeerUrl,
        /// The other member's id.
        id: MemberId,
        /// The other member's name.
        name: String,
    },
}

/// Key prefix of invitations, by the member's name, each with its peer URL.
pub(crate) const INVITATIONS: &str = "/etcd-invitations/";

/// The key of a member's invitation. It exists as long as the member's ticket is unused: with it, the leader adds the member to
/// the cluster once it is there. So a ticket takes no place in the list before its node is there, and any number of tickets may be unused.
pub(crate) fn invitation_key(name: &str) -> Vec<u8> {
    format!("{INVITATIONS}{name}").into_bytes()
}

/// Decides whether this member may start without data. The list must be one that a majority has confirmed: an
/// older one may lack a start or a promotion.
#[cfg(any(feature = "etcd", feature = "memory"))]
pub(super) fn check_join(members: &[Member], this: &Peer) -> Result<MemberId, JoinRefusal> {
    if let Some(refusal) = find_started(members, this) {
        return Err(refusal);
    }
    let member = find_listed(members, this)?;
    if member.is_learner {
        Ok(member.id)
    } else {
        // Promoted before it published its name.
        Err(JoinRefusal::AlreadyStarted { id: member.id, name: this.name.to_string() })
    }
}

/// The member that the cluster lists at this one's URL: this one, started or not.
#[cfg(any(feature = "etcd", feature = "memory"))]
fn find_listed<'a>(members: &'a [Member], this: &Peer) -> Result<&'a Member, JoinRefusal> {
    // By its URL: a member that has not started has no name yet.
    let listed = members.iter().find(|member| member.has_peer_url(&this.url));
    let Some(member) = listed else { return Err(JoinRefusal::NotListed { url: this.url.clone() }) };
    match &member.name {
        Some(name) if name != this.name.as_str() => {
            Err(JoinRefusal::OtherMember { url: this.url.clone(), id: member.id, name: name.clone() })
        }
        _ => Ok(member),
    }
}

/// The refusal if this member is known to have started. Any list of the cluster proves it, however old: a name
/// is of one node's key alone, and a member that has started will always have.
#[cfg(any(feature = "etcd", feature = "memory"))]
pub(super) fn find_started(members: &[Member], this: &Peer) -> Option<JoinRefusal> {
    let started = members.iter().find(|member| member.name.as_deref() == Some(this.name.as_str()))?;
    Some(JoinRefusal::AlreadyStarted { id: started.id, name: this.name.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "https://192.0.2.3:7834";

    fn joiner() -> Peer {
        Peer::new("three".parse().unwrap(), URL.parse().unwrap())
    }

    fn listed(name: Option<&str>, url: &str, is_learner: bool) -> Vec<Member> {
        let first =
            Member::new(MemberId(1), Some("one".into()), vec!["https://192.0.2.1:7834".into()], false);
        vec![first, Member::new(MemberId(3), name.map(str::to_owned), vec![url.into()], is_learner)]
    }

    #[test]
    fn a_learner_that_never_started_may_start() {
        assert_eq!(check_join(&listed(None, URL, true), &joiner()), Ok(MemberId(3)));
    }

    #[test]
    fn a_member_that_has_started_is_refused_wherever_it_is_listed() {
        for is_learner in [true, false] {
            for url in [URL, "https://192.0.2.9:7834"] {
                let members = listed(Some("three"), url, is_learner);
                let refusal = JoinRefusal::AlreadyStarted { id: MemberId(3), name: "three".into() };
                assert_eq!(find_started(&members, &joiner()), Some(refusal.clone()));
                assert_eq!(check_join(&members, &joiner()), Err(refusal));
            }
        }
    }

    #[test]
    fn a_voter_without_a_name_is_refused() {
        let refused = check_join(&listed(None, URL, false), &joiner());
        assert!(matches!(refused, Err(JoinRefusal::AlreadyStarted { id: MemberId(3), .. })), "{refused:?}");
    }

    #[test]
    fn a_ticket_of_a_removed_or_replaced_member_is_refused() {
        let refused = check_join(&listed(None, "https://192.0.2.4:7834", true), &joiner());
        assert_eq!(refused, Err(JoinRefusal::NotListed { url: URL.parse().unwrap() }));
        let members = listed(Some("other"), URL, false);
        assert!(matches!(check_join(&members, &joiner()), Err(JoinRefusal::OtherMember { .. })));
        assert_eq!(find_started(&members, &joiner()), None, "the list may be older than the ticket");
    }
}
