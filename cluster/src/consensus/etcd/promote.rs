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
/// And ends here.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A learner that is not in sync by then is left alone until somebody adds it again, or a voter starts.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

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
    let until = Instant::now() + PATIENCE;
    let mut pause = FIRST_PAUSE;
    loop {
        match members.promote(id).await {
            Ok(()) => return info!(member = %id, "promoted a learner"),
            Err(MembershipError::Unknown { .. }) => return info!(member = %id, "a learner was removed"),
            Err(error) if error.is_retryable() && Instant::now() < until => sleep(pause).await,
            Err(error) => {
                return warn!(member = %id, error = &error as &dyn std::error::Error, "gave up on a learner");
            }
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
