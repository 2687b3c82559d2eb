//! The words between a node that joins and the voter that decides, at the peer port of the node.

use serde::{Deserialize, Serialize};

use crate::consensus::{InvalidName, JoinRefusal, MemberId, Peer};

/// The question of a voter for the claim of a node that joins.
pub(super) const ASK_CLAIM: &str = "GET /nodekeel/join";
/// The verdict of the voter.
pub(super) const TELL_VERDICT: &str = "POST /nodekeel/join";

/// The decision of the cluster about a node that joins, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    /// It may start.
    Admitted {
        /// The names and URLs of the other members.
        peers: Vec<(String, String)>,
        /// The size of the cluster's data.
        store_bytes: u64,
        /// True if the peer ports require the name of members' certificates.
        #[serde(default)]
        is_name_required: bool,
    },
    /// Not yet: for this, as a clause.
    Waits(String),
    /// [`JoinRefusal::AlreadyStarted`].
    AlreadyStarted(u64),
    /// [`JoinRefusal::TicketUsed`].
    TicketUsed(u64),
    /// [`JoinRefusal::TicketRevoked`].
    TicketRevoked,
    /// [`JoinRefusal::NotListed`].
    NotListed,
    /// [`JoinRefusal::OtherMember`].
    OtherMember(u64, String),
}

/// The same, as the node takes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JoinAnswer {
    Admitted(Admitted),
    Waits(String),
    Refused(JoinRefusal),
}

/// What a node needs to start, besides its ticket.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    /// The other members, as they are listed now.
    pub(super) peers: Vec<Peer>,
    /// The size of the cluster's data.
    pub(super) store_bytes: u64,
    /// True if the peer ports require the name of members' certificates.
    pub(super) is_name_required: bool,
}

impl Verdict {
    pub(super) fn admitted(peers: &[Peer], store_bytes: u64, is_name_required: bool) -> Verdict {
        let peers = peers.iter().map(|peer| (peer.name.to_string(), peer.url.to_string()));
        Verdict::Admitted { peers: peers.collect(), store_bytes, is_name_required }
    }

    pub(super) fn refused(refusal: JoinRefusal) -> Verdict {
        match refusal {
            JoinRefusal::AlreadyStarted { id, .. } => Verdict::AlreadyStarted(id.0),
            JoinRefusal::TicketUsed { id, .. } => Verdict::TicketUsed(id.0),
            JoinRefusal::TicketRevoked { .. } => Verdict::TicketRevoked,
            JoinRefusal::NotListed { .. } => Verdict::NotListed,
            JoinRefusal::OtherMember { id, name, .. } => Verdict::OtherMember(id.0, name),
        }
    }

    /// The verdict about this node.
    ///
    /// # Errors
    /// It has a member with an invalid name or URL.
    pub(super) fn into_answer(self, this: &Peer) -> Result<JoinAnswer, InvalidName> {
        let name = || this.name.to_string();
        Ok(JoinAnswer::Refused(match self {
            Verdict::Admitted { peers, store_bytes, is_name_required } => {
                let peers = peers.into_iter().map(|(name, url)| Ok(Peer::new(name.parse()?, url.parse()?)));
                let peers = peers.collect::<Result<_, _>>()?;
                return Ok(JoinAnswer::Admitted(Admitted { peers, store_bytes, is_name_required }));
            }
            Verdict::Waits(reason) => return Ok(JoinAnswer::Waits(reason)),
            Verdict::AlreadyStarted(id) => JoinRefusal::AlreadyStarted { id: MemberId(id), name: name() },
            Verdict::TicketUsed(id) => JoinRefusal::TicketUsed { id: MemberId(id), name: name() },
            Verdict::TicketRevoked => JoinRefusal::TicketRevoked { name: name() },
            Verdict::NotListed => JoinRefusal::NotListed { url: this.url.clone() },
            Verdict::OtherMember(id, name) => {
                JoinRefusal::OtherMember { url: this.url.clone(), id: MemberId(id), name }
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_arrives_as_it_was_decided() {
        let this = Peer::new("three".parse().unwrap(), "https://192.0.2.3:7834".parse().unwrap());
        let (id, name) = (MemberId(u64::MAX), "three".to_owned());
        let refusals = [
            JoinRefusal::AlreadyStarted { id, name: name.clone() },
            JoinRefusal::TicketUsed { id, name: name.clone() },
            JoinRefusal::TicketRevoked { name },
            JoinRefusal::NotListed { url: this.url.clone() },
            JoinRefusal::OtherMember { url: this.url.clone(), id, name: "four".into() },
        ];
        let sent = |verdict: Verdict| {
            let json = serde_json::to_vec(&verdict).unwrap();
            serde_json::from_slice::<Verdict>(&json).unwrap().into_answer(&this)
        };
        for refusal in refusals {
            assert_eq!(sent(Verdict::refused(refusal.clone())), Ok(JoinAnswer::Refused(refusal)));
        }
        let admitted = Admitted { peers: vec![this.clone()], store_bytes: 7, is_name_required: true };
        let verdict = Verdict::admitted(&admitted.peers, 7, true);
        assert_eq!(sent(verdict), Ok(JoinAnswer::Admitted(admitted)));
        let peers = vec![("one".into(), "x".into())];
        assert!(sent(Verdict::Admitted { peers, store_bytes: 0, is_name_required: false }).is_err());
        // A voter of an earlier release knows no name.
        let former: Verdict = serde_json::from_str(r#"{"Admitted":{"peers":[],"store_bytes":7}}"#).unwrap();
        assert_eq!(former, Verdict::admitted(&[], 7, false));
    }
}
