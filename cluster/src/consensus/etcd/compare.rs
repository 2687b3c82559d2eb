//! Compares the data of the voters: etcd replicates changes, and never compares what they have made.
//!
//! Each voter compares its data with that of the next voter, by etcd's hash of all keys at one revision, before it is
//! `Running` and from time to time. Where the two differ it asks all voters. The one that differs from a majority is the
//! wrong one: it is stopped, and a record next to its data keeps it from starting again. Two voters that differ don't know
//! who is wrong, and say so.
//!
//! Only voters of the same release are compared: releases hash differently. A difference counts once it has lasted, since a
//! compaction in progress may cause one.

use std::time::Duration;

use etcd_client as api;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::health::{HealthWatch, STATUS_TIMEOUT};
use crate::consensus::{Member, MemberId};

/// The shortest pause between two comparisons.
const COMPARE_PERIOD: Duration = Duration::from_secs(30);
/// The pause after a long comparison, in times of its length: a member commits nothing while it hashes.
const PAUSE_FACTOR: u32 = 50;
/// The number of times that a difference must be found, and the pause between these.
const CONFIRMATIONS: u32 = 4;
const CONFIRM_PAUSE: Duration = Duration::from_secs(4);
/// The time in which a member hashes its data: about a second for each gigabyte.
const HASH_TIMEOUT: Duration = Duration::from_secs(15);

/// The hash of a member's data at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataHash {
    pub(super) member: MemberId,
    /// The release of the member.
    pub(super) version: String,
    /// The revision up to which its history is deleted, which is not hashed.
    pub(super) compact_revision: i64,
    pub(super) hash: u32,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Comparison {
    /// No two of those that could be compared differ.
    #[default]
    Same,
    /// This member differs from a majority.
    ThisDiffers,
    /// These differ from a majority, which this member is of.
    OthersDiffer(Vec<MemberId>),
    /// No majority has the same data.
    Undecided,
}

/// Judges the hashes of all voters that answered, at one revision.
pub(super) fn judge(this: MemberId, hashes: &[DataHash], voters: usize) -> Comparison {
    let Some(own) = hashes.iter().find(|hash| hash.member == this) else { return Comparison::Same };
    let is_comparable =
        |hash: &&DataHash| hash.version == own.version && hash.compact_revision == own.compact_revision;
    let comparable: Vec<_> = hashes.iter().filter(is_comparable).collect();
    let with = |hash: u32| comparable.iter().filter(|other| other.hash == hash).count();
    let others: Vec<_> = comparable.iter().filter(|other| other.hash != own.hash).collect();
    let is_majority = |count: usize| count > voters / 2;
    match () {
        () if others.is_empty() => Comparison::Same,
        () if is_majority(with(own.hash)) => {
            Comparison::OthersDiffer(others.iter().map(|other| other.member).collect())
        }
        () if others.iter().any(|other| is_majority(with(other.hash))) => Comparison::ThisDiffers,
        () => Comparison::Undecided,
    }
}

/// The voter with which a member compares its data: the next in the order of ids.
fn next_voter<'a>(this: MemberId, voters: &[&'a Member]) -> Option<&'a Member> {
    let others = || voters.iter().filter(|voter| voter.id != this);
    let next = others().filter(|voter| voter.id > this).min_by_key(|voter| voter.id);
    next.or_else(|| others().min_by_key(|voter| voter.id)).copied()
}

impl HealthWatch {
    /// Compares the data of this member with that of the others from time to time. Returns only if this member is the
    /// wrong one.
    pub(super) async fn wait_difference(&self) {
        let mut pause = COMPARE_PERIOD;
        loop {
            sleep(pause).await;
            match self.compare_data().await {
                Some(length) => pause = COMPARE_PERIOD.max(length * PAUSE_FACTOR),
                None => return,
            }
        }
    }

    /// Compares the data of this member with that of the others, confirms a difference, and keeps the result. Returns the
    /// time that one comparison took; `None` if this member is the wrong one.
    pub(super) async fn compare_data(&self) -> Option<Duration> {
        let started_at = Instant::now();
        let mut found = self.compare_once().await;
        let length = started_at.elapsed();
        for _ in 1..CONFIRMATIONS {
            if found == Comparison::Same {
                break;
            }
            sleep(CONFIRM_PAUSE).await;
            let again = self.compare_once().await;
            found = if again == found { again } else { Comparison::Same };
        }
        let agrees = found != Comparison::ThisDiffers;
        self.comparison.send_replace(found);
        agrees.then_some(length)
    }

    async fn compare_once(&self) -> Comparison {
        let listed = self.list_known_members().await;
        let voters: Vec<_> = listed.iter().filter(|(member, _)| !member.is_learner).collect();
        let members: Vec<_> = voters.iter().map(|(member, _)| member).collect();
        let own = members.iter().find(|member| self.is_this(member)).map(|member| member.id);
        let Some((this, next)) = own.and_then(|this| Some((this, next_voter(this, &members)?.id))) else {
            return Comparison::Same;
        };
        let Some(revision) = self.present_revision().await else { return Comparison::Same };
        let hash_of = |ids: Vec<MemberId>| {
            let asked = voters.iter().filter(move |(member, _)| ids.contains(&member.id));
            join_all(asked.map(|(member, url)| self.hash_data(member, url.as_deref(), revision)))
        };
        let pair: Vec<_> = hash_of(vec![this, next]).await.into_iter().flatten().collect();
        if judge(this, &pair, members.len()) == Comparison::Same {
            return Comparison::Same;
        }
        let all = hash_of(members.iter().map(|member| member.id).collect()).await;
        judge(this, &all.into_iter().flatten().collect::<Vec<_>>(), members.len())
    }

    /// The revision of the store, after all that was committed before.
    async fn present_revision(&self) -> Option<i64> {
        let mut keys = self.client.kv_client();
        let read = timeout(HASH_TIMEOUT, keys.get(crate::pki::CA_CERT_PATH, None)).await.ok()?.ok()?;
        read.header().map(api::ResponseHeader::revision)
    }

    /// None if the member does not answer, or has not applied the revision yet, or has deleted it.
    async fn hash_data(&self, member: &Member, url: Option<&str>, revision: i64) -> Option<DataHash> {
        let client = self.client_of(member, url).await?;
        let mut maintenance = client.maintenance_client();
        // A member that is down must not hold up the start of this one.
        let status = timeout(STATUS_TIMEOUT, maintenance.status()).await.ok()?.ok()?;
        let hash = timeout(HASH_TIMEOUT, maintenance.hash_kv(revision)).await.ok()?.ok()?;
        Some(DataHash {
            member: member.id,
            version: status.version().to_owned(),
            compact_revision: hash.compact_version(),
            hash: hash.hash(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges the hashes of members with the ids from 1 on, for the first one.
    fn judged(hashes: &[u32], voters: usize) -> Comparison {
        let hash = |(index, hash): (usize, &u32)| DataHash {
            member: MemberId(index as u64 + 1),
            version: "3.7.3".into(),
            compact_revision: 5,
            hash: *hash,
        };
        judge(MemberId(1), &hashes.iter().enumerate().map(hash).collect::<Vec<_>>(), voters)
    }

    #[test]
    fn the_one_that_differs_from_a_majority_of_all_voters_is_wrong() {
        let others = |ids: &[u64]| Comparison::OthersDiffer(ids.iter().copied().map(MemberId).collect());
        assert_eq!(judged(&[7, 7, 7], 3), Comparison::Same);
        assert_eq!(judged(&[9, 7, 7], 3), Comparison::ThisDiffers);
        assert_eq!(judged(&[7, 7, 9], 3), others(&[3]));
        assert_eq!(judged(&[7, 7, 7, 8, 9], 5), others(&[4, 5]));
        assert_eq!(judged(&[7, 9], 2), Comparison::Undecided);
        assert_eq!(judged(&[7, 9], 3), Comparison::Undecided, "the third is silent");
        assert_eq!(judged(&[7, 8, 9], 3), Comparison::Undecided);
        assert_eq!(judged(&[7, 8, 8, 8], 5), Comparison::ThisDiffers);
        assert_eq!(judged(&[7], 3), Comparison::Same);
        assert_eq!(judged(&[], 3), Comparison::Same);
    }

    #[test]
    fn another_release_or_another_history_is_not_compared() {
        let hash = |id, version: &str, compact_revision| DataHash {
            member: MemberId(id),
            version: version.into(),
            compact_revision,
            hash: u32::try_from(id).unwrap(),
        };
        let own = hash(1, "3.4.23", 5);
        for other in [hash(2, "3.5.1", 5), hash(2, "3.4.23", 6)] {
            assert_eq!(judge(MemberId(1), &[own.clone(), other], 2), Comparison::Same);
        }
    }

    #[test]
    fn each_voter_compares_itself_with_the_next() {
        let members = [3, 1, 9].map(|id| Member::new(MemberId(id), None, Vec::new(), false));
        let voters: Vec<_> = members.iter().collect();
        let next = |id| next_voter(MemberId(id), &voters).map(|voter| voter.id.0);
        assert_eq!([1, 3, 9].map(next), [Some(3), Some(9), Some(1)]);
        assert_eq!(next_voter(MemberId(1), &voters[1..2]), None);
    }
}
