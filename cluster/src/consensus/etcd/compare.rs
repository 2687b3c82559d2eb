//! Compares the data of the voters: etcd replicates changes, and never compares what they have made.
//!
//! Each voter compares its data with that of the next voter that answers, by etcd's hash of all keys at one revision, before
//! it is `Running` and from time to time. That none answers is reported. Where the two differ it asks all voters. The one
//! that differs from a majority is the wrong one: it is stopped, and a record next to its data keeps it from starting again.
//! Two voters that differ don't know who is wrong, and say so.
//!
//! Only voters of the same release are compared: releases hash differently. A difference counts once it has lasted, since a
//! compaction in progress may cause one.

use std::time::{Duration, SystemTime};

use etcd_client as api;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::convert::STATUS_TIMEOUT;
use super::health::{HealthWatch, name_and_url};
use crate::consensus::{Member, MemberId, PeerUrl};

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

/// The number of comparisons in a row without an answer from which on that is reported: a compaction may cause one.
const REPORTED_MISSES: u32 = 2;

/// When this member's data was last compared with that of another.
#[derive(Debug)]
pub(super) struct LastComparison {
    at: SystemTime,
    /// The attempts since, in which no other voter could be compared.
    misses: u32,
}

impl LastComparison {
    pub(super) fn at_start() -> LastComparison {
        LastComparison { at: SystemTime::now(), misses: 0 }
    }

    fn record(&mut self, was_compared: bool) {
        *self = if was_compared {
            LastComparison::at_start()
        } else {
            LastComparison { misses: self.misses + 1, ..*self }
        };
    }

    /// Since when no other could be compared; `None` if the last one could.
    pub(super) fn uncompared_since(&self) -> Option<SystemTime> {
        (self.misses >= REPORTED_MISSES).then_some(self.at)
    }
}

/// A voter that answers.
struct AnsweringVoter {
    id: MemberId,
    name: String,
    url: PeerUrl,
    /// Its release.
    version: String,
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

/// Judges the hashes of all voters that answered, at one revision; `None` if none can be compared with this member's.
pub(super) fn judge(this: MemberId, hashes: &[DataHash], voters: usize) -> Option<Comparison> {
    let own = hashes.iter().find(|hash| hash.member == this)?;
    let is_comparable =
        |hash: &&DataHash| hash.version == own.version && hash.compact_revision == own.compact_revision;
    let comparable: Vec<_> = hashes.iter().filter(is_comparable).collect();
    if comparable.len() < 2 {
        return None;
    }
    let with = |hash: u32| comparable.iter().filter(|other| other.hash == hash).count();
    let others: Vec<_> = comparable.iter().filter(|other| other.hash != own.hash).collect();
    let is_majority = |count: usize| count > voters / 2;
    Some(match () {
        () if others.is_empty() => Comparison::Same,
        () if is_majority(with(own.hash)) => {
            Comparison::OthersDiffer(others.iter().map(|other| other.member).collect())
        }
        () if others.iter().any(|other| is_majority(with(other.hash))) => Comparison::ThisDiffers,
        () => Comparison::Undecided,
    })
}

/// The voter with which a member compares its data: the next in the order of ids.
fn next_voter(this: MemberId, others: impl Iterator<Item = MemberId> + Clone) -> Option<MemberId> {
    others.clone().filter(|other| *other > this).min().or_else(|| others.min())
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
            if matches!(found, None | Some(Comparison::Same)) {
                break;
            }
            sleep(CONFIRM_PAUSE).await;
            let again = self.compare_once().await;
            found = if again == found { again } else { Some(Comparison::Same) };
        }
        self.last_comparison.send_modify(|last| last.record(found.is_some()));
        let agrees = found != Some(Comparison::ThisDiffers);
        // What was found stays until it is found otherwise.
        if let Some(found) = found {
            self.comparison.send_replace(found);
        }
        agrees.then_some(length)
    }

    /// `None` if no other voter can be compared.
    async fn compare_once(&self) -> Option<Comparison> {
        let mut listed = self.list_known_members().await;
        listed.retain(|(member, _)| !member.is_learner);
        let this = listed.iter().map(|(member, _)| member).find(|member| self.is_this(member))?.id;
        if listed.len() == 1 {
            return Some(Comparison::Same);
        }
        let asked = listed.iter().map(|(member, _)| self.ask_voter(member));
        let answering: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
        let own = answering.iter().find(|voter| voter.id == this)?;
        let others = answering.iter().filter(|voter| voter.id != this && voter.version == own.version);
        let next = next_voter(this, others.map(|voter| voter.id))?;
        let revision = self.present_revision().await?;
        let hash_of = async |voters: Vec<&AnsweringVoter>| {
            let hashes = join_all(voters.into_iter().map(|voter| self.hash_data(voter, revision))).await;
            hashes.into_iter().flatten().collect::<Vec<_>>()
        };
        let pair = answering.iter().filter(|voter| [this, next].contains(&voter.id));
        match judge(this, &hash_of(pair.collect()).await, listed.len())? {
            Comparison::Same => Some(Comparison::Same),
            _ => judge(this, &hash_of(answering.iter().collect()).await, listed.len()),
        }
    }

    /// The revision of the store, after all that was committed before.
    async fn present_revision(&self) -> Option<i64> {
        let mut keys = self.client.kv_client();
        let read = timeout(HASH_TIMEOUT, keys.get(crate::pki::CA_CERT_PATH, None)).await.ok()?.ok()?;
        read.header().map(api::ResponseHeader::revision)
    }

    /// `None` if the voter does not answer.
    async fn ask_voter(&self, member: &Member) -> Option<AnsweringVoter> {
        let (name, url) = name_and_url(member)?;
        // A member that is down must not hold up the start of this one.
        let version = timeout(STATUS_TIMEOUT, self.peers.read_version(&name, &url)).await.ok()?.ok()?;
        Some(AnsweringVoter { id: member.id, name, url, version })
    }

    /// `None` if the voter does not answer, or has not applied the revision yet, or has deleted it.
    async fn hash_data(&self, voter: &AnsweringVoter, revision: i64) -> Option<DataHash> {
        let hash = self.peers.hash_data(&voter.name, &voter.url, revision, HASH_TIMEOUT).await.ok()?;
        Some(DataHash {
            member: voter.id,
            version: voter.version.clone(),
            compact_revision: hash.compact_revision,
            hash: hash.hash,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges the hashes of members with the ids from 1 on, for the first one.
    fn judged(hashes: &[u32], voters: usize) -> Option<Comparison> {
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
        let others =
            |ids: &[u64]| Some(Comparison::OthersDiffer(ids.iter().copied().map(MemberId).collect()));
        assert_eq!(judged(&[7, 7, 7], 3), Some(Comparison::Same));
        assert_eq!(judged(&[9, 7, 7], 3), Some(Comparison::ThisDiffers));
        assert_eq!(judged(&[7, 7, 9], 3), others(&[3]));
        assert_eq!(judged(&[7, 7, 7, 8, 9], 5), others(&[4, 5]));
        assert_eq!(judged(&[7, 9], 2), Some(Comparison::Undecided));
        assert_eq!(judged(&[7, 9], 3), Some(Comparison::Undecided), "the third is silent");
        assert_eq!(judged(&[7, 8, 9], 3), Some(Comparison::Undecided));
        assert_eq!(judged(&[7, 8, 8, 8], 5), Some(Comparison::ThisDiffers));
        assert_eq!(judged(&[7], 3), None);
        assert_eq!(judged(&[], 3), None);
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
            assert_eq!(judge(MemberId(1), &[own.clone(), other], 2), None);
        }
    }

    #[test]
    fn each_voter_compares_itself_with_the_next() {
        let next = |this, others: &[u64]| {
            next_voter(MemberId(this), others.iter().copied().map(MemberId)).map(|other| other.0)
        };
        assert_eq!([next(1, &[3, 9]), next(3, &[1, 9]), next(9, &[3, 1])], [Some(3), Some(9), Some(1)]);
        assert_eq!(next(3, &[1]), Some(1), "the next one does not answer");
        assert_eq!(next(1, &[]), None);
    }

    #[test]
    fn a_member_that_can_be_compared_with_no_other_says_since_when() {
        let mut last = LastComparison::at_start();
        last.record(false);
        assert_eq!(last.uncompared_since(), None, "a compaction may cause one");
        last.record(false);
        assert_eq!(last.uncompared_since(), Some(last.at));
        last.record(true);
        assert_eq!(last.uncompared_since(), None);
    }
}
