//! Promotes learners.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_supervisor::{Context, Failure};
use tokio::time::{Instant, sleep_until};
use tracing::info;

use super::members::{EtcdMembers, LEARNERS, announcement_key};
use crate::consensus::kv::{KeyRange, KvStore, ListWatchUpdate, ListWatcher};
use crate::consensus::{ClusterMembers as _, Member, MemberId, MembershipError};

/// The first pause after an attempt; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause in the first minutes after an announcement.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A learner that is not in sync after this time is tried more slowly: it was stopped, or has much to copy.
const SLOW_AFTER: Duration = Duration::from_secs(5 * 60);
const SLOW_PAUSE: Duration = Duration::from_secs(15);

/// A runnable that promotes learners as soon as they are in sync. Every voter runs it, and the leader's alone
/// promotes: a follower's etcd would pass the request on again and again, each time as another entry of the
/// raft log.
///
/// It sleeps until a learner announces its start. From then on the leader knows how far the learner is, and
/// rejects an early promotion without writing anything, so that attempts cost nothing but their call.
pub(super) async fn promote_learners(
    ctx: Context,
    root: Arc<dyn KvStore>,
    members: EtcdMembers,
) -> Result<(), Failure> {
    let follow = ListWatcher::new(Arc::clone(&root), KeyRange::prefix(LEARNERS));
    ctx.signal_ready()?;
    tokio::select! {
        biased;
        canceled = ctx.canceled() => Err(canceled.into()),
        failed = Promoter { group: members, root, announced: Announced::default() }.run(follow) => failed,
    }
}

/// The cluster, as a promoter sees it.
#[async_trait]
trait PromotionGroup: Send + Sync {
    async fn is_leader(&self) -> Result<bool, MembershipError>;
    async fn list_learners(&self) -> Result<Vec<Member>, MembershipError>;
    async fn promote(&self, id: MemberId) -> Result<(), MembershipError>;
}

#[async_trait]
impl PromotionGroup for EtcdMembers {
    async fn is_leader(&self) -> Result<bool, MembershipError> {
        EtcdMembers::is_leader(self).await
    }

    async fn list_learners(&self) -> Result<Vec<Member>, MembershipError> {
        Ok(self.list_members().await?.into_iter().filter(|member| member.is_learner).collect())
    }

    async fn promote(&self, id: MemberId) -> Result<(), MembershipError> {
        self.promote_member(id).await
    }
}

/// The announcements of learners that wait for their vote, and when the last one announced itself.
#[derive(Debug, Default)]
struct Announced {
    keys: BTreeMap<Vec<u8>, Vec<u8>>,
    last: Option<Instant>,
}

impl Announced {
    fn apply(&mut self, update: ListWatchUpdate) {
        update.apply_to(&mut self.keys);
        self.last = Some(Instant::now());
    }

    /// The time of the next attempt, after one at this time; `None` if no learner waits.
    fn next_attempt(&self, now: Instant, pause: Duration) -> Option<Instant> {
        let last = self.last.filter(|_| !self.keys.is_empty())?;
        Some(now + if now < last + SLOW_AFTER { pause } else { SLOW_PAUSE })
    }
}

struct Promoter<Group> {
    group: Group,
    root: Arc<dyn KvStore>,
    announced: Announced,
}

impl<Group: PromotionGroup> Promoter<Group> {
    async fn run(mut self, mut follow: ListWatcher) -> Result<(), Failure> {
        // No attempt before the first announcements are read: without any, there is nothing to promote.
        let (mut next, mut pause) = (None, FIRST_PAUSE);
        loop {
            tokio::select! {
                biased;
                update = follow.next_update() => {
                    // A new learner is usually in sync soon, so the pauses start over.
                    self.announced.apply(update?);
                    pause = FIRST_PAUSE;
                }
                () = wait_until(next) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
            self.attempt().await?;
            next = self.announced.next_attempt(Instant::now(), pause);
        }
    }

    /// Promotes what is in sync, if this member leads. What can't be done now is done with a later attempt.
    async fn attempt(&self) -> Result<(), Failure> {
        match self.promote_started().await {
            Err(error) if !error.is_retryable() => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn promote_started(&self) -> Result<(), MembershipError> {
        // Without an announcement etcd is not asked at all: the runnable causes no load while it sleeps.
        if self.announced.keys.is_empty() || !self.group.is_leader().await? {
            return Ok(());
        }
        let mut waiting = BTreeSet::new();
        for learner in self.group.list_learners().await? {
            if !self.promote(&learner).await? {
                waiting.insert(announcement_key(learner.id));
            }
        }
        // After the promotion: a kill in between leaves a key, which the next attempt of any leader deletes.
        for key in self.announced.keys.keys().filter(|key| !waiting.contains(*key)) {
            let deleted = self.root.delete(KeyRange::single_key(key.clone())).await;
            deleted.map_err(|error| MembershipError::Unavailable {
                operation: "delete a learner's announcement",
                source: error.into(),
            })?;
        }
        Ok(())
    }

    /// Promotes a learner, if it is in sync, and returns whether it is one no longer.
    async fn promote(&self, learner: &Member) -> Result<bool, MembershipError> {
        // It publishes its name once it has started. Every voter that knows of its vote then knows of its
        // start, too, and refuses it if it comes without its data.
        if learner.name.is_none() {
            return Ok(false);
        }
        match self.group.promote(learner.id).await {
            Ok(()) => info!(member = %learner.id, "promoted a learner"),
            Err(MembershipError::MemberNotFound { .. }) => {
                info!(member = %learner.id, "a learner was removed")
            }
            Err(MembershipError::LearnerNotReady { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

async fn wait_until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::consensus::memory::MemoryKv;

    /// Members of both releases in one cluster promote each other's learners.
    #[test]
    fn a_learner_is_announced_under_the_key_of_the_first_release() {
        let key = announcement_key(MemberId(0xdec6_d3f4_a495_63bf));
        assert_eq!(key, b"/etcd-learners/dec6d3f4a49563bf");
    }

    /// A cluster with one learner, which is in sync from some time on.
    #[derive(Clone)]
    struct FakeGroup(Arc<FakeState>);

    struct FakeState {
        is_leader: AtomicBool,
        has_name: AtomicBool,
        is_promoted: AtomicBool,
        ready_at: Instant,
        attempts: AtomicU32,
        status_reads: AtomicU32,
    }

    const LEARNER: MemberId = MemberId(7);

    #[async_trait]
    impl PromotionGroup for FakeGroup {
        async fn is_leader(&self) -> Result<bool, MembershipError> {
            self.0.status_reads.fetch_add(1, Ordering::Relaxed);
            Ok(self.0.is_leader.load(Ordering::Relaxed))
        }

        async fn list_learners(&self) -> Result<Vec<Member>, MembershipError> {
            let name = self.0.has_name.load(Ordering::Relaxed).then(|| "seven".to_owned());
            let learner = Member::new(LEARNER, name, Vec::new(), true);
            Ok((!self.0.is_promoted.load(Ordering::Relaxed)).then_some(learner).into_iter().collect())
        }

        async fn promote(&self, id: MemberId) -> Result<(), MembershipError> {
            self.0.attempts.fetch_add(1, Ordering::Relaxed);
            if Instant::now() < self.0.ready_at {
                return Err(MembershipError::LearnerNotReady { id });
            }
            self.0.is_promoted.store(true, Ordering::Relaxed);
            Ok(())
        }
    }

    impl FakeGroup {
        fn new(ready_in: Duration) -> FakeGroup {
            FakeGroup(Arc::new(FakeState {
                is_leader: AtomicBool::new(true),
                has_name: AtomicBool::new(true),
                is_promoted: AtomicBool::new(false),
                ready_at: Instant::now() + ready_in,
                attempts: AtomicU32::new(0),
                status_reads: AtomicU32::new(0),
            }))
        }

        /// Runs a promoter for this time, in virtual time.
        async fn run_for(&self, root: &MemoryKv, time: Duration) {
            let root: Arc<dyn KvStore> = Arc::new(root.clone());
            let follow = ListWatcher::new(Arc::clone(&root), KeyRange::prefix(LEARNERS));
            let promoter = Promoter { group: self.clone(), root, announced: Announced::default() };
            let ended = tokio::time::timeout(time, promoter.run(follow)).await;
            assert!(ended.is_err(), "a promoter ends only with its member");
        }

        fn counts(&self) -> (u32, u32) {
            (self.0.attempts.load(Ordering::Relaxed), self.0.status_reads.load(Ordering::Relaxed))
        }
    }

    async fn announced_learner() -> MemoryKv {
        let root = MemoryKv::new();
        root.put(&announcement_key(LEARNER), b"").await.unwrap();
        root
    }

    #[tokio::test(start_paused = true)]
    async fn a_learner_in_sync_is_promoted_at_once_and_its_announcement_deleted() {
        let (group, root) = (FakeGroup::new(Duration::ZERO), announced_learner().await);
        let before = root.range(KeyRange::all_keys()).await.unwrap();
        group.run_for(&root, Duration::from_secs(3600)).await;
        assert!(group.0.is_promoted.load(Ordering::Relaxed));
        let after = root.range(KeyRange::all_keys()).await.unwrap();
        assert_eq!((after.kvs.len(), after.revision.0 - before.revision.0), (0, 1), "one change");
        assert_eq!(group.counts().0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_follower_promotes_nobody() {
        let (group, root) = (FakeGroup::new(Duration::ZERO), announced_learner().await);
        group.0.is_leader.store(false, Ordering::Relaxed);
        group.run_for(&root, Duration::from_secs(3600)).await;
        assert_eq!(group.counts().0, 0);
        assert!(root.get(&announcement_key(LEARNER)).await.unwrap().is_some(), "the leader is yet to see it");
        // Once it leads, it does so.
        group.0.is_leader.store(true, Ordering::Relaxed);
        group.run_for(&root, SLOW_PAUSE).await;
        assert!(group.0.is_promoted.load(Ordering::Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_learner_that_has_not_published_its_name_is_not_promoted() {
        let (group, root) = (FakeGroup::new(Duration::ZERO), announced_learner().await);
        group.0.has_name.store(false, Ordering::Relaxed);
        group.run_for(&root, Duration::from_secs(10)).await;
        assert_eq!(group.counts().0, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_promoter_without_learners_sleeps() {
        let (group, root) = (FakeGroup::new(Duration::ZERO), MemoryKv::new());
        group.run_for(&root, Duration::from_secs(24 * 3600)).await;
        assert_eq!(group.counts(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_learner_that_needs_days_to_copy_is_promoted() {
        let days = Duration::from_secs(3 * 24 * 3600);
        let (group, root) = (FakeGroup::new(days), announced_learner().await);
        group.run_for(&root, days + SLOW_PAUSE + LONGEST_PAUSE).await;
        assert!(group.0.is_promoted.load(Ordering::Relaxed));
        let attempts = u64::from(group.counts().0);
        assert!(attempts < 400 + days.as_secs() / SLOW_PAUSE.as_secs(), "{attempts}");
    }
}
