//! The re-encryption of the open volume with a new volume key: begun by an operator, continued by root.storage at each opening
//! until it is complete.
//!
//! ```text
//!  nodectl storage reencrypt ──▶ new unlock keys ──▶ begun: recorded in the header
//!                                                       │
//!  root.storage opens the volume ───────────────────────┴──▶ running ──▶ complete
//!                                                              │  ▲
//!                    the volume closes, or noded is killed     ▼  │ opens again
//!                                                            paused
//! ```
//!
//! A call may ask for one while the last one ends. Each call is counted, so that the end of the one before is not told as its end.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_localstorage::volume::{
    LuksError, LuksVolume, ReencryptionEnd, ReencryptionProgress, UnlockSecret, VolumeError,
};
use nodekeel_supervisor::Backoff;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::error::StorageError;
use super::opener::VolumeOpener;
use super::unlock::{VolumeUnlock, random_fraction};
use crate::blocking::run_blocking;
use crate::dn::STORAGE;
use crate::error_chain::error_chain;
use crate::health::HealthChanges;
use crate::volume::{NodeVolume, VolumeHandle};

/// Between two attempts to continue: the key may come later.
const RETRY: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(60), jitter: 0.25 };

/// The time without progress after which a condition names it. A piece takes seconds on a disk that works.
const STALL_TIME: Duration = Duration::from_secs(120);

/// What this process knows of the re-encryption.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum ReencryptionState {
    /// Nothing: none was begun.
    #[default]
    None,
    Running,
    /// The volume closes.
    Paused,
    /// It can't go on, for this reason, and is tried again.
    Failed(String),
    Complete,
}

/// A re-encryption, as far as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ReencryptionReport {
    pub(super) state: ReencryptionState,
    /// When this process has begun or continued it, and how far it was.
    first: Option<(SystemTime, ReencryptionProgress)>,
    pub(super) progress: Option<ReencryptionProgress>,
    /// When it had made its last progress, if that is long ago.
    pub(super) stalled: Option<SystemTime>,
    /// True while root.storage continues what was begun.
    is_followed: bool,
    /// The number of calls that have asked for one.
    calls: u64,
}

impl ReencryptionReport {
    /// Its name in answers.
    pub(super) fn name(&self) -> &'static str {
        match self.state {
            ReencryptionState::None => "none",
            ReencryptionState::Running => "running",
            ReencryptionState::Paused => "paused",
            ReencryptionState::Failed(_) => "failed",
            ReencryptionState::Complete => "complete",
        }
    }

    /// Returns whether nothing more is done by itself at present.
    pub(super) fn has_ended(&self) -> bool {
        !matches!(self.state, ReencryptionState::None | ReencryptionState::Running)
    }

    /// When this process has begun or continued it.
    pub(super) fn began(&self) -> Option<SystemTime> {
        self.first.map(|(at, _)| at)
    }

    /// How long the rest takes at the speed of this process.
    pub(super) fn time_left(&self, now: SystemTime) -> Option<Duration> {
        let ((began, first), last) = (self.first?, self.progress?);
        let done = last.done_bytes.checked_sub(first.done_bytes).filter(|done| *done > 0)?;
        let rest = last.total_bytes.saturating_sub(last.done_bytes);
        let elapsed = now.duration_since(began).ok()?;
        let left = u128::from(rest) * elapsed.as_millis() / u128::from(done);
        Some(Duration::from_millis(u64::try_from(left).unwrap_or(u64::MAX)))
    }

    /// It goes on. cryptsetup reports its last piece also after root.storage has ended.
    fn advance(&mut self, progress: ReencryptionProgress, now: SystemTime) {
        if self.is_followed && matches!(self.state, ReencryptionState::Failed(_)) {
            self.set_state(ReencryptionState::Running);
        }
        self.first.get_or_insert((now, progress));
        if self.progress.replace(progress) != Some(progress) {
            self.stalled = None;
        }
    }

    /// A call has begun one, or follows the one that was begun.
    fn request(&mut self) {
        self.calls += 1;
        if self.state != ReencryptionState::Running {
            self.progress = None;
        }
        // Without root.storage, nothing happens before it opens the volume again.
        self.set_state(if self.is_followed { ReencryptionState::Running } else { ReencryptionState::Paused });
    }

    /// root.storage continues it. One that has failed goes on with its first progress.
    fn run(&mut self) {
        if !matches!(self.state, ReencryptionState::Failed(_)) {
            self.set_state(ReencryptionState::Running);
        }
    }

    /// It is complete, as of the time of so many calls. A later call may have begun another one.
    fn complete(&mut self, calls: u64) {
        if self.calls == calls {
            self.set_state(ReencryptionState::Complete);
        }
    }

    /// None is in the header, as of the time of so many calls: one that this process knows has ended, as by an operator.
    fn find_none(&mut self, calls: u64) {
        if self.state != ReencryptionState::None {
            self.complete(calls);
        }
    }

    /// root.storage ends.
    fn leave(&mut self) {
        self.is_followed = false;
        if self.state == ReencryptionState::Running {
            self.set_state(ReencryptionState::Paused);
        }
    }

    fn set_state(&mut self, state: ReencryptionState) {
        if self.state != state {
            (self.first, self.stalled) = (None, None);
            self.state = state;
        }
    }
}

/// The re-encryption of the data volume. Cheap to clone; all clones share it.
#[derive(Debug, Clone)]
pub(super) struct VolumeReencryption {
    report: watch::Sender<ReencryptionReport>,
    /// One was begun, or has a key by now.
    begun: Arc<Notify>,
    unlock: Arc<VolumeUnlock>,
    opener: VolumeOpener,
    health: HealthChanges,
}

impl VolumeReencryption {
    pub(super) fn new(unlock: Arc<VolumeUnlock>, opener: VolumeOpener, health: HealthChanges) -> Self {
        let (report, begun) = (watch::Sender::default(), Arc::default());
        Self { report, begun, unlock, opener, health }
    }

    pub(super) fn report(&self) -> ReencryptionReport {
        self.report.borrow().clone()
    }

    pub(super) fn watch(&self) -> watch::Receiver<ReencryptionReport> {
        self.report.subscribe()
    }

    /// One is in the header: root.storage continues it now.
    pub(super) fn resume(&self) {
        self.report.send_modify(ReencryptionReport::request);
        self.begun.notify_one();
    }

    /// Continues whatever was begun, for as long as the volume is open. Returns only if the volume is to be closed.
    ///
    /// # Cancel safety
    /// When it is dropped, cryptsetup completes its piece, which the close of the volume waits for.
    pub(super) async fn follow(&self, volume: &NodeVolume) -> StorageError {
        self.report.send_modify(|report| report.is_followed = true);
        let _paused = PausedOnDrop(self);
        tokio::select! {
            error = self.follow_open(volume) => error,
            never = watch_progress(&self.report, &self.health) => match never {},
        }
    }

    async fn follow_open(&self, volume: &NodeVolume) -> StorageError {
        let mut failures = 0;
        loop {
            let calls = self.report.borrow().calls;
            let ended = match self.unlock.encrypted_volume() {
                Some(encrypted) => self.continue_once(encrypted, volume).await,
                None => std::future::pending().await,
            };
            match ended {
                // None is in the header.
                Ok(None) => {
                    self.change(|report| report.find_none(calls));
                    self.begun.notified().await;
                }
                Ok(Some(ReencryptionEnd::Complete)) => {
                    failures = 0;
                    tracing::info!(
                        dn = STORAGE,
                        "the data volume is re-encrypted: no header of before opens it"
                    );
                    self.change(|report| report.complete(calls));
                }
                // The volume closes, or an operator has stopped cryptsetup: then it goes on.
                Ok(Some(_)) => {
                    self.change(|report| report.set_state(ReencryptionState::Paused));
                    failures += 1;
                    self.wait_to_retry(failures).await;
                }
                Err(error) if is_killed(&error) => return StorageError::Reencryption(error),
                Err(error) => {
                    let reason = error_chain(&error);
                    tracing::warn!(
                        dn = STORAGE,
                        "the re-encryption of the data volume can't go on: {reason}"
                    );
                    self.change(|report| report.set_state(ReencryptionState::Failed(reason)));
                    failures += 1;
                    self.wait_to_retry(failures).await;
                }
            }
        }
    }

    async fn wait_to_retry(&self, failures: u32) {
        let delay = RETRY.jittered_delay(failures, random_fraction());
        // A timeout is no error.
        let _ = timeout(delay, self.begun.notified()).await;
    }

    /// Continues it by the first secret that opens the volume; `None` if none was begun.
    async fn continue_once(
        &self,
        encrypted: Arc<LuksVolume>,
        volume: &NodeVolume,
    ) -> Result<Option<ReencryptionEnd>, VolumeError> {
        let read = Arc::clone(&encrypted);
        if run_blocking(move || read.encryption_status()).await?.reencryption.is_none() {
            return Ok(None);
        }
        let mut last = None;
        for secret in self.opener.own_secrets(self.unlock.secret()) {
            // A close waits for the handle, and so for cryptsetup.
            let Some(handle) = volume.handle_of_call() else { return Ok(Some(ReencryptionEnd::Stopped)) };
            self.change(ReencryptionReport::run);
            let (run, encrypted) = (self.clone(), Arc::clone(&encrypted));
            match run_blocking(move || run.run(&encrypted, &handle, &secret)).await {
                Err(error) if StorageError::needs_key_of(&error) => last = last.or(Some(error)),
                ended => return ended.map(Some),
            }
        }
        // `own_secrets` is never empty.
        last.map_or(Ok(None), Err)
    }

    /// It blocks.
    fn run(
        &self,
        encrypted: &LuksVolume,
        volume: &VolumeHandle,
        secret: &UnlockSecret,
    ) -> Result<ReencryptionEnd, VolumeError> {
        encrypted.run_reencryption(secret, |progress| {
            self.report.send_modify(|report| report.advance(progress, SystemTime::now()));
            if volume.is_closing() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    }

    fn change(&self, change: impl FnOnce(&mut ReencryptionReport)) {
        self.report.send_modify(change);
        self.health.announce();
    }
}

/// Names a re-encryption that makes no progress, until it does.
async fn watch_progress(report: &watch::Sender<ReencryptionReport>, health: &HealthChanges) -> Infallible {
    let mut reports = report.subscribe();
    loop {
        let (last, since) = (progress_of(&reports.borrow_and_update()), SystemTime::now());
        let has_moved = |report: &ReencryptionReport| progress_of(report) != last;
        // An error is a sender that is gone, and this is its own.
        if timeout(STALL_TIME, reports.wait_for(has_moved)).await.is_ok() {
            continue;
        }
        if last.is_some() {
            tracing::warn!(dn = STORAGE, "the re-encryption of the data volume makes no progress");
            report.send_modify(|report| report.stalled = Some(since));
            health.announce();
        }
        let _ = reports.wait_for(has_moved).await;
        health.announce();
    }
}

/// The bytes with the new key, while it runs.
fn progress_of(report: &ReencryptionReport) -> Option<Option<u64>> {
    let is_running = report.state == ReencryptionState::Running;
    is_running.then(|| report.progress.map(|progress| progress.done_bytes))
}

/// Whichever way root.storage ends, nothing runs afterwards.
struct PausedOnDrop<'a>(&'a VolumeReencryption);

impl Drop for PausedOnDrop<'_> {
    fn drop(&mut self) {
        self.0.change(ReencryptionReport::leave);
    }
}

fn is_killed(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Encryption { source, .. } if matches!(**source, LuksError::ReencryptionKilled))
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[test]
    fn the_time_left_is_that_of_this_run() {
        let progress = |done_bytes, total_bytes| ReencryptionProgress::new(done_bytes, total_bytes);
        let start = SystemTime::UNIX_EPOCH;
        let mut report = ReencryptionReport::default();
        assert_eq!((report.name(), report.time_left(start)), ("none", None));
        // Another noded has done half of it.
        report.run();
        report.advance(progress(500, 1000), start);
        assert_eq!((report.name(), report.time_left(start)), ("running", None));
        let later = start + Duration::from_secs(10);
        report.advance(progress(600, 1000), later);
        assert_eq!(report.time_left(later), Some(Duration::from_secs(40)));
        assert!(!report.has_ended() && report.began() == Some(start));
    }

    #[test]
    fn a_call_never_waits_for_what_nobody_does_and_is_not_told_the_end_of_the_one_before() {
        use ReencryptionState::{Complete, Paused, Running};
        let followed = || ReencryptionReport { is_followed: true, ..Default::default() };
        // Where root.storage has ended meanwhile.
        let mut report = ReencryptionReport::default();
        report.request();
        assert_eq!(report.state, Paused);
        // The one that the call was to follow has ended before it was counted.
        let mut report = followed();
        report.run();
        let calls = report.calls;
        report.complete(calls);
        report.request();
        assert_eq!(report.state, Running);
        report.find_none(report.calls);
        assert_eq!(report.state, Complete);
        // The call has begun another one before the end of the last one was told.
        let mut report = followed();
        report.run();
        let calls = report.calls;
        report.request();
        report.complete(calls);
        report.find_none(calls);
        assert_eq!(report.state, Running);
        // A stop of root.storage, after which cryptsetup reports its last piece.
        report.leave();
        report.advance(ReencryptionProgress::new(1, 2), SystemTime::UNIX_EPOCH);
        assert!(report.state == Paused && report.has_ended());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reencryption_without_progress_is_named_until_it_goes_on() {
        let (sender, health) = (watch::Sender::<ReencryptionReport>::default(), HealthChanges::default());
        let is_stalled = || sender.borrow().stalled.is_some();
        let work = async {
            // Nothing runs.
            sleep(3 * STALL_TIME).await;
            assert!(!is_stalled());
            sender.send_modify(ReencryptionReport::run);
            sleep(STALL_TIME / 2).await;
            let advance = |done| {
                let progress = ReencryptionProgress::new(done, 9);
                sender.send_modify(|report| report.advance(progress, SystemTime::UNIX_EPOCH));
            };
            advance(1);
            sleep(3 * STALL_TIME / 4).await;
            assert!(!is_stalled());
            sleep(STALL_TIME / 2).await;
            assert!(is_stalled());
            advance(2);
            assert!(!is_stalled());
            sleep(2 * STALL_TIME).await;
            assert!(is_stalled());
            sender.send_modify(|report| report.set_state(ReencryptionState::Paused));
            sleep(2 * STALL_TIME).await;
            assert!(!is_stalled());
        };
        tokio::select! {
            () = work => {}
            never = watch_progress(&sender, &health) => match never {},
        }
    }
}
