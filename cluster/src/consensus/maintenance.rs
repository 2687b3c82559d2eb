//! Maintenance of the store: room in its database, its alarms, and its snapshot.

use std::fmt::{self, Debug};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};

use super::{ClusterReport, MemberId, MembershipError, StoreAlarm};

/// The size of the largest request. A store with less room than that is full again at once.
///
/// *Source:* etcd's `DefaultMaxRequestBytes`.
const REQUEST_BYTES: u64 = 3 << 19;

/// Maintenance of the store, by an operator.
///
/// # Contract
/// - All calls can be repeated. Whether a call that fails as [`MembershipError::Unavailable`] took effect is unknown.
/// - Dropping a call's future discards its answer, but does not cancel the call.
#[async_trait]
pub trait StoreMaintenance: Debug + Send + Sync {
    /// Deletes the history of all keys: a watch of earlier changes ends, and its reader reads the present keys. The room
    /// is free for other data of the store, and for other files after a defragmentation.
    ///
    /// # Errors
    /// [`MembershipError::Unavailable`], [`MembershipError::Stopped`], [`MembershipError::Rejected`].
    async fn compact(&self) -> Result<(), MembershipError>;

    /// Writes the database of this node's member anew, without its free room. The member serves nothing until then: some seconds
    /// for each gigabyte.
    ///
    /// # Errors
    /// Those of [`compact`](Self::compact).
    async fn defragment(&self) -> Result<(), MembershipError>;

    /// All alarms of the store, with the ids of their members.
    ///
    /// # Errors
    /// Those of [`compact`](Self::compact).
    async fn list_alarms(&self) -> Result<Vec<(MemberId, StoreAlarm)>, MembershipError>;

    /// Ends an alarm.
    ///
    /// # Errors
    /// Those of [`compact`](Self::compact).
    async fn disarm(&self, member: MemberId, alarm: &StoreAlarm) -> Result<(), MembershipError>;

    /// A copy of the store, by this node's member: each write that was acknowledged before the call is in it.
    ///
    /// # Errors
    /// Those of [`compact`](Self::compact).
    async fn snapshot(&self) -> Result<SnapshotStream, MembershipError>;
}

/// A copy of the store in pieces: the file that etcd's own tools write and read, a database with its SHA-256 at the end.
///
/// # Contract
/// - It ends after the last piece of a whole file, or with an error. [`encrypt_snapshot`](crate::backup::encrypt_snapshot) checks
///   that.
/// - It ends with [`MembershipError::Stopped`] when the store is stopped. Nothing follows an error.
pub struct SnapshotStream(BoxStream<'static, Result<Vec<u8>, MembershipError>>);

impl SnapshotStream {
    /// A snapshot of these pieces: for implementations.
    pub fn new(
        pieces: impl Stream<Item = Result<Vec<u8>, MembershipError>> + Send + 'static,
    ) -> SnapshotStream {
        SnapshotStream(pieces.boxed())
    }

    /// The next piece; `None` after the end.
    ///
    /// # Errors
    /// See the type.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no piece is lost.
    pub async fn next_piece(&mut self) -> Result<Option<Vec<u8>>, MembershipError> {
        self.0.try_next().await
    }
}

impl fmt::Debug for SnapshotStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotStream").finish_non_exhaustive()
    }
}

/// Decides whether a member may be defragmented now: it must answer, and the others that answer must be a majority, or be
/// all. The reason, if it may not.
///
/// # Errors
/// The reason, as a clause.
pub fn check_defragment(report: &ClusterReport, member: MemberId) -> Result<(), String> {
    let found = report.members.iter().find(|report| report.member.id == member);
    let Some(found) = found else { return Err(format!("the cluster has no member {member}")) };
    match &found.facts {
        None => return Err(format!("member {member} does not answer: start it first")),
        // Its socket admits its own node alone.
        Some(facts) if facts.store.is_none() => {
            return Err(format!("member {member} is another node's: `nodectl cluster defragment` there"));
        }
        Some(_) => {}
    }
    let (voters, silent) = (report.voter_count(), report.silent_voters().count());
    let others = voters - silent - usize::from(!found.member.is_learner);
    if silent > 0 && others <= voters / 2 {
        return Err(format!(
            "{silent} of {voters} voters do not answer, and without another one there is no majority: start them first"
        ));
    }
    Ok(())
}

/// Decides whether an alarm may be ended: its cause must be gone.
///
/// # Errors
/// The reason why not, as a clause with the remedy.
pub fn check_disarm(report: &ClusterReport, member: MemberId, alarm: &StoreAlarm) -> Result<(), String> {
    let found = report.members.iter().find(|report| report.member.id == member);
    match (&*alarm.kind, found) {
        ("CORRUPT", Some(_)) => Err(format!(
            "the data of {} is corrupt, and it would be served: remove this member first",
            alarm.member
        )),
        ("NOSPACE", Some(found)) => match found.facts.as_ref().and_then(|facts| facts.store.as_ref()) {
            Some(store)
                if store.quota_bytes.is_some_and(|quota| store.store_bytes + REQUEST_BYTES > quota) =>
            {
                Err(format!(
                    "the store of {} is still full: delete keys, then `nodectl cluster defragment`",
                    alarm.member
                ))
            }
            // If the store of another node's member is still full, that raises the alarm again.
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::consensus::{Member, MemberFacts, MemberReport, StoreFacts};

    /// Voters with the ids from 1 on, each of which answers or not.
    fn report(answers: &[bool]) -> ClusterReport {
        let voter = |(index, answers): (usize, &bool)| {
            let member = Member::new(MemberId(index as u64 + 1), Some("n".into()), Vec::new(), false);
            match answers {
                true => {
                    let store = (index == 0).then(StoreFacts::default);
                    MemberReport::new(member, Some(MemberFacts { store, ..MemberFacts::default() }))
                }
                false => MemberReport::silent(member, SystemTime::UNIX_EPOCH),
            }
        };
        ClusterReport::new(answers.iter().enumerate().map(voter).collect())
    }

    #[test]
    fn a_member_is_defragmented_only_while_the_others_are_a_majority_or_all_answer() {
        let may = |answers: &[bool]| check_defragment(&report(answers), MemberId(1)).is_ok();
        assert!(may(&[true]) && may(&[true; 2]) && may(&[true; 3]));
        assert!(may(&[true, true, true, true, false]));
        assert!(!may(&[true, true, false]) && !may(&[true, true, true, false, false]));
        assert!(!may(&[false, true, true, true, true]), "it does not answer itself");
        assert!(check_defragment(&report(&[true]), MemberId(9)).unwrap_err().contains("no member 9"));
        assert!(check_defragment(&report(&[true; 3]), MemberId(2)).unwrap_err().contains("another node's"));
    }

    #[test]
    fn an_alarm_whose_cause_remains_is_not_ended() {
        let mut full = report(&[true]);
        let store =
            StoreFacts { store_bytes: 15 << 20, quota_bytes: Some(16 << 20), ..StoreFacts::default() };
        full.members[0].facts = Some(MemberFacts { store: Some(store), ..MemberFacts::default() });
        let check = |report: &ClusterReport, kind: &str| {
            check_disarm(report, MemberId(1), &StoreAlarm::new("10.0.0.1", kind))
        };
        assert!(check(&full, "NOSPACE").unwrap_err().contains("still full"));
        assert_eq!(check(&report(&[true]), "NOSPACE"), Ok(()));
        assert!(check(&report(&[true]), "CORRUPT").unwrap_err().contains("remove"));
        assert_eq!(check(&report(&[]), "CORRUPT"), Ok(()), "it was replaced");
    }
}
