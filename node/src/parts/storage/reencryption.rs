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

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_localstorage::volume::{
    LuksError, LuksVolume, ReencryptionEnd, ReencryptionProgress, UnlockSecret, VolumeError,
};
use nodekeel_supervisor::Backoff;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

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

    fn advance(&mut self, progress: ReencryptionProgress, now: SystemTime) {
        self.state = ReencryptionState::Running;
        self.first.get_or_insert((now, progress));
        self.progress = Some(progress);
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
        self.report.send_modify(|report| {
            if report.state != ReencryptionState::Running {
                *report = ReencryptionReport { state: ReencryptionState::Running, ..Default::default() };
            }
        });
        self.begun.notify_one();
    }

    /// Continues whatever was begun, for as long as the volume is open. Returns only if the volume is to be closed.
    pub(super) async fn follow(&self, volume: &NodeVolume) -> StorageError {
        let mut failures = 0;
        loop {
            let ended = match self.unlock.encrypted_volume() {
                Some(encrypted) => self.continue_once(encrypted, volume).await,
                None => std::future::pending().await,
            };
            match ended {
                // None is in the header.
                Ok(None) => self.begun.notified().await,
                Ok(Some(ReencryptionEnd::Complete)) => {
                    failures = 0;
                    tracing::info!(
                        dn = STORAGE,
                        "the data volume is re-encrypted: no header of before opens it"
                    );
                    self.set_state(ReencryptionState::Complete);
                }
                Ok(Some(_)) => {
                    self.set_state(ReencryptionState::Paused);
                    std::future::pending::<()>().await;
                }
                Err(error) if is_killed(&error) => {
                    self.set_state(ReencryptionState::Paused);
                    return StorageError::Reencryption(error);
                }
                Err(error) => {
                    let reason = error_chain(&error);
                    tracing::warn!(
                        dn = STORAGE,
                        "the re-encryption of the data volume can't go on: {reason}"
                    );
                    self.set_state(ReencryptionState::Failed(reason));
                    failures += 1;
                    tokio::select! {
                        () = sleep(RETRY.jittered_delay(failures, random_fraction())) => {}
                        () = self.begun.notified() => {}
                    }
                }
            }
        }
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

    fn set_state(&self, state: ReencryptionState) {
        self.report.send_modify(|report| {
            report.state = state;
            report.first = None;
        });
        self.health.announce();
    }
}

fn is_killed(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Encryption { source, .. } if matches!(**source, LuksError::ReencryptionKilled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_this_run() {
        let progress = |done_bytes, total_bytes| ReencryptionProgress::new(done_bytes, total_bytes);
        let start = SystemTime::UNIX_EPOCH;
        let mut report = ReencryptionReport::default();
        assert_eq!((report.name(), report.time_left(start)), ("none", None));
        // Another noded has done half of it.
        report.advance(progress(500, 1000), start);
        assert_eq!((report.name(), report.time_left(start)), ("running", None));
        let later = start + Duration::from_secs(10);
        report.advance(progress(600, 1000), later);
        assert_eq!(report.time_left(later), Some(Duration::from_secs(40)));
        assert!(!report.has_ended() && report.began() == Some(start));
    }
}
