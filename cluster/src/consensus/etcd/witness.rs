//! Answers other voters before etcd starts.
//!
//! Voters that all start at once ask each other which of their starts they have seen, and none has started its etcd
//! yet. So the member itself answers at its peer port until then, as etcd does: `GET /members` returns the members in its
//! data. The question has what the asking voter has seen of this one, which is an answer, too.

use tokio::sync::mpsc;

use super::peer_client::{ListedMember, SEEN_HEADER};
use super::peer_server::PeerQuestion;
use super::start_number::StartNumber;
use super::starts::Answer;
use crate::consensus::ConsensusError;

/// What a voter answers before its etcd starts.
pub(super) struct Witness<'a> {
    members: &'a [ListedMember],
    list: Vec<u8>,
}

impl<'a> Witness<'a> {
    pub(super) fn new(members: &'a [ListedMember]) -> Result<Witness<'a>, ConsensusError> {
        let list = serde_json::to_vec(members).map_err(ConsensusError::backend("list the members"))?;
        Ok(Witness { members, list })
    }

    /// The answer to a question. Sends what the one who asks has seen of this member.
    pub(super) fn answer(
        &self,
        question: &PeerQuestion,
        seen: &mpsc::UnboundedSender<Answer>,
    ) -> Option<Vec<u8>> {
        if !question.is("GET /members") {
            return None;
        }
        let asking =
            self.members.iter().filter_map(ListedMember::name).find(|name| question.names.is_named(name));
        if let Some((name, start)) = asking.map(str::to_owned).zip(parse_seen(&question.head)) {
            let _ = seen.send((name, Ok(start)));
        }
        Some(self.list.clone())
    }
}

/// What the asking voter has seen. etcd sends none.
fn parse_seen(question: &str) -> Option<StartNumber> {
    let value = question.lines().find_map(|line| line.strip_prefix(SEEN_HEADER)?.strip_prefix(": "));
    Some(StartNumber(value?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_question_has_what_the_asking_voter_has_seen() {
        let question = |header: &str| format!("GET /members HTTP/1.0\r\nHost: one\r\n{header}\r\n");
        assert_eq!(parse_seen(&question(&format!("{SEEN_HEADER}: 7\r\n"))), Some(StartNumber(7)));
        for other in ["", "X-Server-From: 7\r\n", &format!("{SEEN_HEADER}: x\r\n")] {
            assert_eq!(parse_seen(&question(other)), None);
        }
    }
}
