//! Members of the consensus.

use std::fmt::{self, Debug};

use super::{InvalidName, MemberName, PeerUrl};

/// A member's id, assigned by the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// In hexadecimal, as etcd's tools print it.
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
    /// The member's id.
    pub id: MemberId,
    /// The member's name; `None` until it has started for the first time.
    pub name: Option<String>,
    /// The URLs at which the others reach it, as listed.
    pub peer_urls: Vec<String>,
    /// True if it is a learner: it has no vote, and serves no reads and writes, until it is promoted.
    pub is_learner: bool,
}

impl Member {
    /// A member of these values.
    pub fn new(id: MemberId, name: Option<String>, peer_urls: Vec<String>, is_learner: bool) -> Member {
        Member { id, name, peer_urls, is_learner }
    }

    /// Returns whether it is listed at this URL.
    pub(crate) fn has_peer_url(&self, url: &PeerUrl) -> bool {
        self.peer_urls.iter().any(|listed| listed == url.as_str())
    }
}

/// A member to add.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewMember {
    /// The name with which it will start.
    pub name: MemberName,
    /// The URL at which the others will reach it.
    pub peer_url: PeerUrl,
}

impl NewMember {
    /// A member of this name, at this URL.
    pub fn new(name: MemberName, peer_url: PeerUrl) -> NewMember {
        NewMember { name, peer_url }
    }
}

/// A member's name and peer URL, an entry of etcd's `--initial-cluster`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peer {
    /// The member's name.
    pub name: MemberName,
    /// The member's peer URL.
    pub url: PeerUrl,
}

impl Peer {
    /// The member of this name, at this URL.
    pub fn new(name: MemberName, url: PeerUrl) -> Peer {
        Peer { name, url }
    }

    /// All members but the one at this URL, as a joining etcd has to know them. One that has not started has no
    /// name yet, and gets one here: etcd compares the URLs alone.
    pub(crate) fn others_of(members: &[Member], but: &PeerUrl) -> Result<Vec<Peer>, InvalidName> {
        let others = members.iter().filter(|member| !member.has_peer_url(but));
        let urls = others.flat_map(|member| member.peer_urls.iter().map(move |url| (member, url)));
        urls.map(|(member, url)| {
            let unnamed = || format!("member-{}", member.id);
            Ok(Peer::new(member.name.clone().unwrap_or_else(unnamed).parse()?, url.parse()?))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learner_that_has_not_started_is_a_peer_of_one_that_joins() {
        let url = |host| PeerUrl::new([192, 0, 2, host].into(), 7834);
        let member = |id, name: Option<&str>, host| {
            Member::new(MemberId(id), name.map(str::to_owned), vec![url(host).to_string()], name.is_none())
        };
        let members = [member(1, Some("one"), 1), member(0xab, None, 2), member(3, None, 3)];
        let others = Peer::others_of(&members, &url(3)).unwrap();
        assert_eq!(
            others,
            [Peer::new("one".parse().unwrap(), url(1)), Peer::new("member-ab".parse().unwrap(), url(2))]
        );
    }
}
