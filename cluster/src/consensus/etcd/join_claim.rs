//! This host's claim to the member as which it joins.
//!
//! Everything that makes a joining member is in its ticket, so two hosts with one ticket are the same member to
//! etcd, which would count the vote of the one for the log of the other. So a host writes a random claim to its
//! disk, and the cluster records it, where the first claim to a member stays. Only then does its etcd start.
//!
//! A claim on the disk next to etcd's log is therefore a recorded one: such a member restarts without asking,
//! and restarts also while its cluster waits for its vote.

use nodekeel_localstorage::tree::LayoutFile;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::consensus::kv::{Compare, KvError, KvStore, Txn, TxnOp};
use crate::consensus::{ConsensusError, JoinRefusal, MemberId, MemberName};

/// Key prefix of recorded claims, by the member's id. They stay: no other member ever has that id.
const CLAIMS: &str = "/etcd-joins/";

/// 32 hexadecimal digits, generated at random by the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JoinClaim(String);

impl JoinClaim {
    /// The claim in this file. A missing or damaged one is generated anew: if the lost one was recorded, the
    /// cluster refuses the new one by name.
    pub(super) fn load_or_create(file: &LayoutFile) -> Result<JoinClaim, ConsensusError> {
        let stored = file.read_if_present().map_err(ConsensusError::backend("read the join claim"))?;
        if let Some(claim) = stored.as_deref().and_then(JoinClaim::parse) {
            return Ok(claim);
        }
        let mut bytes = [0; 16];
        // Up to 256 bytes are returned at once or not at all. *Source:* getrandom(2).
        getrandom(&mut bytes, GetRandomFlags::empty())
            .map_err(ConsensusError::backend("generate the join claim"))?;
        let claim = JoinClaim(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
        // On the disk before it is recorded: a host that forgets a recorded claim is refused.
        file.write(&claim.to_line()).map_err(ConsensusError::backend("write the join claim"))?;
        Ok(claim)
    }

    pub(super) fn parse(content: &[u8]) -> Option<JoinClaim> {
        let digits = std::str::from_utf8(content).ok()?.strip_suffix('\n')?;
        let is_whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_whole.then(|| JoinClaim(digits.to_owned()))
    }

    /// The line that is its file, and the answer to a voter.
    pub(super) fn to_line(&self) -> Vec<u8> {
        format!("{}\n", self.0).into_bytes()
    }

    fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The claim to a member that the cluster has recorded.
pub(super) async fn read_claim(kv: &dyn KvStore, id: MemberId) -> Result<Option<Vec<u8>>, KvError> {
    Ok(kv.get(&claim_key(id)).await?.map(|kv| kv.value))
}

/// Records a host's claim to a member, unless there is one. Returns the recorded one.
pub(super) async fn record_claim(
    kv: &dyn KvStore,
    id: MemberId,
    claim: &JoinClaim,
) -> Result<Vec<u8>, KvError> {
    let key = claim_key(id);
    let keep_first = Txn::new()
        .when(Compare::key_absent(key.clone()))
        .then(TxnOp::put(key.clone(), claim.as_bytes()))
        .or_else(TxnOp::get(key));
    // A repeated call, after a lost answer, finds this host's own claim.
    let first = kv.txn(keep_first).await?.into_first();
    Ok(first.map_or_else(|| claim.as_bytes().to_vec(), |kv| kv.value))
}

/// Refuses a host whose claim is not the recorded one.
pub(super) fn check_claim(
    recorded: &[u8],
    claim: &JoinClaim,
    id: MemberId,
    name: &MemberName,
) -> Result<(), JoinRefusal> {
    if claim.as_bytes() == recorded {
        Ok(())
    } else {
        Err(JoinRefusal::TicketUsed { id, name: name.to_string() })
    }
}

fn claim_key(id: MemberId) -> Vec<u8> {
    format!("{CLAIMS}{id}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: MemberId = MemberId(0xdec6_d3f4_a495_63bf);

    fn claim(digit: char) -> JoinClaim {
        JoinClaim::parse(format!("{}\n", digit.to_string().repeat(32)).as_bytes()).unwrap()
    }

    #[test]
    fn the_first_claim_to_a_member_stays_and_another_hosts_is_refused_by_name() {
        let (first, second, name) = (claim('1'), claim('2'), "three".parse().unwrap());
        let check = |recorded: &JoinClaim, claim| check_claim(recorded.as_bytes(), claim, ID, &name);
        assert_eq!(check(&first, &first), Ok(()));
        let refusal = JoinRefusal::TicketUsed { id: ID, name: "three".into() };
        assert_eq!(check(&first, &second), Err(refusal));
    }

    #[test]
    fn a_claim_is_a_whole_line_of_32_digits() {
        let line = format!("{}\n", "0f".repeat(16));
        assert!(JoinClaim::parse(line.as_bytes()).is_some());
        for cut in 0..line.len() {
            assert_eq!(JoinClaim::parse(&line.as_bytes()[..cut]), None, "cut to {cut}");
        }
        assert_eq!(JoinClaim::parse(line.replace('f', "g").as_bytes()), None);
    }

    /// Members of later releases read it.
    #[test]
    fn a_claim_is_recorded_under_the_members_id() {
        assert_eq!(claim_key(ID), b"/etcd-joins/dec6d3f4a49563bf");
    }
}
