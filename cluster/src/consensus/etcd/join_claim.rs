//! This host's claim to the member as which it joins.
//!
//! Everything that makes a joining member is in its ticket, so two hosts with one ticket are the same member to
//! etcd, which would count the vote of the one for the log of the other. So a host writes a random claim to its
//! disk, and records it in the cluster, where the first claim to a member stays. Only then does its etcd start.
//!
//! A claim on the disk next to etcd's log is therefore a recorded one: such a member restarts without asking,
//! and restarts also while its cluster waits for its vote.
//!
//! An earlier release makes no claim. A member that it has started asks whether another host has claimed it, once;
//! any member knows that in which it has a vote already, since only a learner is claimed. And a host that claims a
//! member asks afterwards whether it is still a learner that has not started.

use std::path::PathBuf;

use etcd_client as api;
use nodekeel_localstorage::tree::LayoutFile;
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::timeout;

use super::convert::CALL_TIMEOUT;
use crate::BoxError;
use crate::consensus::kv::{Compare, KvError, KvStore, Txn, TxnOp};
use crate::consensus::{ConsensusError, JoinRefusal, MemberId, MemberName};

/// Key prefix of recorded claims, by the member's id. They stay: no other member ever has that id.
const CLAIMS: &str = "/etcd-joins/";

/// A member's question to its cluster before it starts.
#[derive(Debug)]
pub(super) enum JoinQuestion {
    /// May it start for the first time, with this claim?
    MayStart(JoinClaim),
    /// Has no other host claimed it? An earlier release, which made no claims, has started it here. If an operator
    /// creates this file, the claim, the member starts without asking.
    MayResume(PathBuf),
}

impl JoinQuestion {
    /// This host's claim, if it has made one.
    pub(super) fn claim(&self) -> Option<&JoinClaim> {
        match self {
            Self::MayStart(claim) => Some(claim),
            Self::MayResume(_) => None,
        }
    }

    /// The operator's remedy while no majority answers, as the end of a sentence.
    pub(super) fn advice(&self) -> String {
        match self {
            Self::MayStart(_) => String::new(),
            Self::MayResume(claim) => format!(
                "; if the majority needs this member, and no other host has used its ticket, start it: touch {}",
                claim.display()
            ),
        }
    }
}

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
        file.write(format!("{}\n", claim.0).as_bytes())
            .map_err(ConsensusError::backend("write the join claim"))?;
        Ok(claim)
    }

    pub(super) fn parse(content: &[u8]) -> Option<JoinClaim> {
        let digits = std::str::from_utf8(content).ok()?.strip_suffix('\n')?;
        let is_whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_whole.then(|| JoinClaim(digits.to_owned()))
    }

    fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The claim to a member that the cluster has recorded. Records this host's claim, if it has one, unless there is
/// another.
pub(super) async fn record_claim(
    kv: &dyn KvStore,
    id: MemberId,
    claim: Option<&JoinClaim>,
) -> Result<Option<Vec<u8>>, KvError> {
    let key = claim_key(id);
    let Some(claim) = claim else { return Ok(kv.get(&key).await?.map(|kv| kv.value)) };
    let keep_first = Txn::new()
        .when(Compare::key_absent(key.clone()))
        .then(TxnOp::put(key.clone(), claim.as_bytes()))
        .or_else(TxnOp::get(key));
    // A repeated call, after a lost answer, finds this host's own claim.
    let first = kv.txn(keep_first).await?.into_first();
    Ok(Some(first.map_or_else(|| claim.as_bytes().to_vec(), |kv| kv.value)))
}

/// The claim to a member that the member of this client knows of, which needs no majority to answer.
pub(super) async fn read_claim_at(client: &api::Client, id: MemberId) -> Result<Option<Vec<u8>>, BoxError> {
    let mut keys = client.kv_client();
    let options = api::GetOptions::new().with_serializable();
    let read = timeout(CALL_TIMEOUT, keys.get(claim_key(id), Some(options))).await??;
    Ok(read.kvs().first().map(|kv| kv.value().to_vec()))
}

/// Refuses a host whose claim is not the recorded one.
pub(super) fn check_claim(
    recorded: Option<&[u8]>,
    claim: Option<&JoinClaim>,
    id: MemberId,
    name: &MemberName,
) -> Result<(), JoinRefusal> {
    match recorded {
        None => Ok(()),
        Some(recorded) if claim.is_some_and(|claim| claim.as_bytes() == recorded) => Ok(()),
        Some(_) => Err(JoinRefusal::TicketUsed { id, name: name.to_string() }),
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
        let check = |recorded: Option<&JoinClaim>, claim| {
            check_claim(recorded.map(JoinClaim::as_bytes), claim, ID, &name)
        };
        assert_eq!(check(Some(&first), Some(&first)), Ok(()));
        assert_eq!(check(None, None), Ok(()), "an earlier release started it, and nobody else claims it");
        let refusal = JoinRefusal::TicketUsed { id: ID, name: "three".into() };
        assert_eq!(check(Some(&first), Some(&second)), Err(refusal.clone()));
        assert_eq!(check(Some(&first), None), Err(refusal));
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
