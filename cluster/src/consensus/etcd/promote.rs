//! Promotes learners.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::consensus::kv::{KeyRange, KvStore, ListWatcher};
use crate::consensus::{ClusterMembers, MemberId, MembershipError};

/// Key prefix of announced learners, by id: nothing else would notify the voting members.
pub(super) const LEARNERS: &str = "/etcd-learners/";

/// The first pause after an attempt; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause while the learner is expected to start soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A learner that is not in sync after this time is polled more slowly: a host may get its ticket days before
/// it is switched on.
const SLOW_AFTER: Duration = Duration::from_secs(15 * 60);
/// The slow pause, and so the longest time that such a host may wait for its vote.
const SLOW_PAUSE: Duration = Duration::from_secs(15);

/// A runnable that promotes learners as soon as they are in sync. Every voter runs it; promoting a voter
/// again is harmless.
///
/// A learner is announced by its key. Only the leader's answer to the promotion tells whether the learner is
/// in sync, so the promotion is attempted with growing pauses.
pub(super) async fn promote_learners(
    ctx: Context,
    root: Arc<dyn KvStore>,
    members: Arc<dyn ClusterMembers>,
) -> Result<(), Failure> {
    let mut follow = ListWatcher::new(Arc::clone(&root), KeyRange::prefix(LEARNERS));
    ctx.signal_ready()?;
    let promoting = async {
        loop {
            follow.next_update().await?;
            for member in members.list_members().await?.into_iter().filter(|member| member.is_learner) {
                promote_when_ready(&*members, member.id).await;
            }
            // A key is only a notification: the list says who is a learner. One that is added now is
            // announced all the same.
            root.delete(KeyRange::prefix(LEARNERS)).await?;
        }
    };
    tokio::select! {
        biased;
        cancelled = ctx.canceled() => Err(cancelled.into()),
        failed = promoting => failed,
    }
}

async fn promote_when_ready(members: &dyn ClusterMembers, id: MemberId) {
    let started_at = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match members.promote_member(id).await {
            Ok(()) => return info!(member = %id, "promoted a learner"),
            Err(MembershipError::MemberNotFound { .. }) => {
                return info!(member = %id, "a learner was removed");
            }
            Err(error) if error.is_retryable() => sleep(pause).await,
            Err(error) => {
                return warn!(member = %id, error = &error as &dyn std::error::Error, "giving up on a learner");
            }
        }
        pause = match started_at.elapsed() < SLOW_AFTER {
            true => (pause * 2).min(LONGEST_PAUSE),
            false => SLOW_PAUSE,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::consensus::{Member, NewMember};

    /// A learner that is in sync from some time on.
    #[derive(Debug)]
    struct LateLearner {
        ready_at: Instant,
        attempts: AtomicU32,
    }

    #[async_trait::async_trait]
    impl ClusterMembers for LateLearner {
        async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
            Err(MembershipError::Stopped)
        }

        async fn add_learner(&self, _: &NewMember) -> Result<Member, MembershipError> {
            Err(MembershipError::Stopped)
        }

        async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError> {
            self.attempts.fetch_add(1, Ordering::Relaxed);
            match Instant::now() >= self.ready_at {
                true => Ok(()),
                false => Err(MembershipError::LearnerNotReady { id }),
            }
        }

        async fn remove_member(&self, _: MemberId) -> Result<(), MembershipError> {
            Err(MembershipError::Stopped)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_learner_that_starts_days_after_its_ticket_was_issued_is_promoted() {
        let started_at = Instant::now();
        let days = Duration::from_secs(3 * 24 * 3600);
        let late = LateLearner { ready_at: started_at + days, attempts: AtomicU32::new(0) };
        promote_when_ready(&late, MemberId(1)).await;
        assert!(started_at.elapsed() < days + SLOW_PAUSE + LONGEST_PAUSE, "{:?}", started_at.elapsed());
        let attempts = u64::from(late.attempts.into_inner());
        assert!(attempts < 500 + days.as_secs() / SLOW_PAUSE.as_secs(), "{attempts}");
    }
}
