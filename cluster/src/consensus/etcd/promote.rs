//! Giving learners their vote.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::consensus::kv::{Follow, KeyRange, KvStore};
use crate::consensus::{MemberId, Membership, MembershipError};

/// Below this, whoever adds a learner leaves word of it, by its id: nothing else would tell the members that vote.
pub(super) const LEARNERS: &str = "/etcd-learners/";

/// The pause after a try doubles from here.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// And ends here, as long as the learner is expected.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A learner that is not in sync by then is asked after more slowly: a machine may get its ticket days before it is switched
/// on.
const EXPECTED: Duration = Duration::from_secs(15 * 60);
/// How slowly: so long may such a machine have to wait for its vote.
const SLOW_PAUSE: Duration = Duration::from_secs(15);

/// A runnable that promotes learners as soon as they are in sync. Every voter runs it; whoever comes second finds a voter.
///
/// That a learner is there is told by its key. That it is in sync nothing tells but the leader's answer to the promotion,
/// so that is tried with growing pauses.
pub(super) async fn promote_learners(
    ctx: Context,
    root: Arc<dyn KvStore>,
    members: Arc<dyn Membership>,
) -> Result<(), Failure> {
    let mut follow = Follow::new(Arc::clone(&root), KeyRange::prefix(LEARNERS));
    ctx.ready()?;
    let promoting = async {
        loop {
            follow.next().await?;
            for member in members.list().await?.into_iter().filter(|member| member.is_learner) {
                promote(&*members, member.id).await;
            }
            // A key is nothing but a call: who is a learner, the list says. One that comes now is told all the same.
            root.delete(KeyRange::prefix(LEARNERS)).await?;
        }
    };
    tokio::select! {
        biased;
        cancelled = ctx.cancelled() => Err(cancelled.into()),
        failed = promoting => failed,
    }
}

async fn promote(members: &dyn Membership, id: MemberId) {
    let began = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match members.promote(id).await {
            Ok(()) => return info!(member = %id, "promoted a learner"),
            Err(MembershipError::Unknown { .. }) => return info!(member = %id, "a learner was removed"),
            Err(error) if error.is_retryable() => sleep(pause).await,
            Err(error) => {
                return warn!(member = %id, error = &error as &dyn std::error::Error, "gave up on a learner");
            }
        }
        pause = match began.elapsed() < EXPECTED {
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

    /// A learner that comes into sync at a time.
    #[derive(Debug)]
    struct Late {
        comes: Instant,
        asked: AtomicU32,
    }

    #[async_trait::async_trait]
    impl Membership for Late {
        async fn list(&self) -> Result<Vec<Member>, MembershipError> {
            Err(MembershipError::Stopped)
        }

        async fn add_learner(&self, _: &NewMember) -> Result<Member, MembershipError> {
            Err(MembershipError::Stopped)
        }

        async fn promote(&self, id: MemberId) -> Result<(), MembershipError> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            match Instant::now() >= self.comes {
                true => Ok(()),
                false => Err(MembershipError::NotInSync { id }),
            }
        }

        async fn remove(&self, _: MemberId) -> Result<(), MembershipError> {
            Err(MembershipError::Stopped)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_is_switched_on_days_after_its_ticket_was_made_gets_its_vote() {
        let began = Instant::now();
        let days = Duration::from_secs(3 * 24 * 3600);
        let late = Late { comes: began + days, asked: AtomicU32::new(0) };
        promote(&late, MemberId(1)).await;
        assert!(began.elapsed() < days + SLOW_PAUSE + LONGEST_PAUSE, "{:?}", began.elapsed());
        let asked = u64::from(late.asked.into_inner());
        assert!(asked < 500 + days.as_secs() / SLOW_PAUSE.as_secs(), "{asked}");
    }
}
