//! Calls of the control API about the data volume and its keys.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use futures_util::{Stream, stream};
use nix::sys::statvfs::fstatvfs;
use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_fsquota::Bytes;
use nodekeel_localstorage::volume::{
    DataVolume, EncryptionStatus, HeaderBackup, KeyPolicy, KeySlotStatus, LuksError, RecoveryPassphrase,
    ReencryptionProgress, SealError, UnlockSecret, VolumeEncryption, VolumeError,
};
use nodekeel_supervisor::wall_clock_time;
use tokio::task::{JoinError, spawn_blocking};
use tonic::{Code, Status};

use super::config::{EncryptionMode, StorageConfig, VolumeKind};
use super::decision::Attempt;
use super::device::OpenedVolume;
use super::error::StorageError;
use super::faults::VolumeFaults;
use super::health::describe_copy;
use super::keys::{ClusterKeyState, VolumeKeyError, VolumeKeys};
use super::opener::VolumeOpener;
use super::reencryption::{ReencryptionReport, ReencryptionState, VolumeReencryption};
use super::scrub::{ScrubError, ScrubRate, VolumeScrub};
use super::scrub_report::ScrubReport;
use super::unlock::{CreationWork, UnlockError, UnlockStatus, VolumeUnlock};
use crate::control::stopping_status;
use crate::dn::STORAGE as STORAGE_DN;
use crate::error_chain::error_chain;
use crate::health::HealthChanges;
use crate::program_name::program_name;
use crate::supervisor_slot::SupervisorSlot;
use crate::volume::{NodeVolume, VolumeHandle};
use crate::{sys, v1, wire};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Answers the calls about the data volume and its keys.
#[derive(Debug)]
pub(crate) struct StorageControl {
    pub(super) keys: Arc<VolumeKeys>,
    pub(super) unlock: Arc<VolumeUnlock>,
    pub(super) volume: NodeVolume,
    pub(super) supervisor: SupervisorSlot,
    pub(super) config: StorageConfig,
    pub(super) opener: VolumeOpener,
    pub(super) faults: VolumeFaults,
    pub(super) scrub: VolumeScrub,
    pub(super) reencryption: VolumeReencryption,
    pub(super) health: HealthChanges,
}

impl StorageControl {
    /// What root.storage does with the data volume.
    pub(crate) fn unlock_status(&self) -> UnlockStatus {
        self.unlock.status()
    }

    /// What opens the data volume; `None` if it is not encrypted.
    pub(crate) async fn encryption_status(&self) -> Result<Option<EncryptionStatus>, BoxError> {
        self.keys.encryption_status().await.map_err(Into::into)
    }

    /// Removes what the node knows of its volume, which is lost. It blocks.
    pub(crate) fn forget_volume(&self) -> Result<(), BoxError> {
        self.opener.forget_volume().map_err(Into::into)
    }

    /// Records that the operator gave up the volume, which is there and does not open. It blocks.
    pub(crate) fn give_up_volume(&self) -> Result<(), BoxError> {
        self.opener.give_up_volume().map_err(Into::into)
    }

    /// The volume that the next start finds once this one was given up, and what it does with it, for people.
    pub(crate) async fn describe_next_start(&self, is_lost: bool) -> Result<String, JoinError> {
        let opener = self.opener.clone();
        spawn_blocking(move || opener.describe_next_start(is_lost)).await
    }

    /// Opens the volume of a node that does not run, by the node's own key; creates none, and records nothing. It blocks.
    pub(crate) fn open_offline(&self) -> Option<Arc<dyn DataVolume>> {
        if !self.opener.may_have_volume() {
            return None;
        }
        let mut opened = None;
        self.unlock.set_status(match self.opener.open(&UnlockSecret::Node, Attempt::Open) {
            Ok(OpenedVolume { dir, slot, volume, .. }) => {
                self.volume.open(dir);
                opened = Some(volume);
                UnlockStatus::Open { slot }
            }
            Err(StorageError::NoVolume) => UnlockStatus::default(),
            Err(error) if error.needs_key() => {
                UnlockStatus::Locked { since: Instant::now(), reason: error_chain(&error) }
            }
            Err(error) => UnlockStatus::Closed {
                is_lost: error.is_lost(),
                error: Some(error_chain(&error)),
                erase_token: error.erase_token(),
            },
        });
        opened
    }

    /// Describes what root.storage does with the data volume, and what opens it.
    pub(crate) async fn status(&self) -> v1::StorageResponse {
        let mut response = describe_state(self.unlock.status());
        response.faults = self.faults.lines();
        let scrubs = self.scrub.status();
        response.scrub = scrubs.running.map(describe_scrub);
        response.last_scrub = scrubs.last.map(describe_scrub);
        response.path = self.volume.path().map(|path| path.display().to_string()).unwrap_or_default();
        // The disk is locked while it is being opened or created.
        if response.state != "opening" {
            match self.keys.encryption_status().await {
                Ok(status) => {
                    let begun = status.as_ref().and_then(|status| status.reencryption);
                    response.reencryption = self.describe_reencryption(begun);
                    response.encryption = status.map(|status| self.describe_encryption(status));
                }
                Err(error) => response.encryption_error = error_chain(&error),
            }
        }
        response
    }

    fn describe_encryption(&self, status: EncryptionStatus) -> v1::StorageEncryption {
        let volume = self.unlock.encrypted_volume();
        let device = volume.map(|volume| volume.device_path().display().to_string());
        let (cluster_key, cluster_key_detail) = match (status.keys, self.keys.cluster_key_state()) {
            (KeyPolicy::Local, _) => ("", String::new()),
            (_, ClusterKeyState::Unknown) => ("unknown", String::new()),
            (_, ClusterKeyState::Stored) => ("stored", String::new()),
            (_, ClusterKeyState::Incomplete(why)) => ("incomplete", why),
            (_, ClusterKeyState::Pending(why)) => ("pending", why),
            (_, ClusterKeyState::Lost) => ("lost", String::new()),
        };
        v1::StorageEncryption {
            device: device.unwrap_or_default(),
            volume: status.volume,
            encryption: status.encryption.to_string(),
            keys: if status.keys == KeyPolicy::Local { "local" } else { "split" }.to_owned(),
            cold_start: status.cold_start.map(|cold_start| cold_start.to_string()).unwrap_or_default(),
            node: status.node.unwrap_or_default(),
            has_both_headers: status.has_both_headers,
            slots: status.slots.into_iter().map(describe_slot).collect(),
            cluster_key: cluster_key.to_owned(),
            cluster_key_detail,
            rollback: status.rollback.map(|rollback| rollback.to_string()).unwrap_or_default(),
            foreign_tokens: status.foreign_tokens,
        }
    }

    /// The re-encryption that is in the header, or that this process has completed.
    fn describe_reencryption(&self, begun: Option<ReencryptionProgress>) -> Option<v1::StorageReencryption> {
        let report = self.reencryption.report();
        let described = match (report.state.clone(), begun) {
            (ReencryptionState::None, None) => return None,
            // root.storage has not continued it yet.
            (ReencryptionState::None | ReencryptionState::Complete, Some(_)) => {
                v1::StorageReencryption { state: "paused".to_owned(), ..Default::default() }
            }
            _ => describe_report(&report),
        };
        let known =
            begun.filter(|begun| begun.done_bytes > described.done_bytes || described.total_bytes == 0);
        Some(match known {
            Some(ReencryptionProgress { done_bytes, total_bytes, .. }) => {
                v1::StorageReencryption { done_bytes, total_bytes, ..described }
            }
            None => described,
        })
    }

    /// Begins to re-encrypt the volume, or follows the re-encryption that was begun, and returns its reports until it has
    /// ended. A client that disconnects does not end it.
    pub(crate) async fn reencrypt(
        &self,
        cluster: Option<ClusterNode>,
        request: v1::ReencryptStorageRequest,
    ) -> Result<impl Stream<Item = v1::StorageReencryption> + Send + use<>, Status> {
        let passphrase = request.passphrase.map(parse_passphrase).transpose()?;
        if self.volume.path().is_none() {
            let why = "can't re-encrypt the data volume: it is not open; see `nodectl storage status`";
            return Err(Status::failed_precondition(why));
        }
        let keys = Arc::clone(&self.keys);
        detached(async move { keys.reencrypt(cluster.as_ref(), passphrase, request.drop_slots).await })
            .await?;
        // After it: what was before is not of this one.
        self.reencryption.resume();
        let mut reports = self.reencryption.watch();
        reports.mark_changed();
        Ok(stream::unfold(Some(reports), |reports| async {
            let mut reports = reports?;
            reports.changed().await.ok()?;
            let report = reports.borrow_and_update().clone();
            Some((describe_report(&report), (!report.has_ended()).then_some(reports)))
        }))
    }

    /// Opens a locked volume by its recovery passphrase.
    pub(crate) async fn unlock(&self, passphrase: Option<v1::RecoveryPassphrase>) -> Result<(), Status> {
        let secret = UnlockSecret::Recovery(require_passphrase(passphrase)?);
        self.unlock.unlock(secret).await.map_err(|error| {
            let code = match error {
                UnlockError::NotLocked | UnlockError::Closed(_) => Code::FailedPrecondition,
                UnlockError::Rejected(_) | UnlockError::WrongToken { .. } => Code::InvalidArgument,
            };
            Status::new(code, error_chain(&error))
        })
    }

    /// Gives the volume new keys, and returns the key slots that noded did not add: they stay. A client that disconnects
    /// does not end it.
    pub(crate) async fn rotate(
        &self,
        cluster: Option<ClusterNode>,
        passphrase: Option<v1::RecoveryPassphrase>,
    ) -> Result<v1::RotateStorageKeysResponse, Status> {
        let passphrase = passphrase.map(parse_passphrase).transpose()?;
        let keys = Arc::clone(&self.keys);
        let status = detached(async move {
            keys.rotate(cluster.as_ref(), passphrase).await?;
            keys.encryption_status().await
        });
        let slots = status.await?.map(|status| status.slots).unwrap_or_default();
        let foreign_slots = slots.iter().filter(|slot| slot.is_foreign()).map(|slot| slot.slot).collect();
        Ok(v1::RotateStorageKeysResponse { foreign_slots })
    }

    /// Adds a recovery passphrase, which the response shows once.
    pub(crate) async fn add_recovery(
        &self,
        cluster: Option<ClusterNode>,
        passphrase: Option<v1::RecoveryPassphrase>,
    ) -> Result<v1::AddRecoveryPassphraseResponse, Status> {
        let passphrase = passphrase.map(parse_passphrase).transpose()?;
        let keys = Arc::clone(&self.keys);
        let added =
            detached(async move { keys.add_recovery_passphrase(cluster.as_ref(), passphrase).await }).await?;
        let text = added.reveal().to_owned();
        Ok(v1::AddRecoveryPassphraseResponse { passphrase: Some(v1::RecoveryPassphrase { text }) })
    }

    /// Confirms that the operator has the newest recovery passphrase.
    pub(crate) async fn confirm_recovery(
        &self,
        passphrase: Option<v1::RecoveryPassphrase>,
    ) -> Result<(), Status> {
        let passphrase = require_passphrase(passphrase)?;
        let keys = Arc::clone(&self.keys);
        detached(async move { keys.confirm_recovery_passphrase(passphrase).await }).await
    }

    /// Erases what root.storage has found, by its next attempt.
    pub(crate) fn erase(&self, token: &str) -> Result<(), Status> {
        self.unlock.permit_erase(token).map_err(|error| Status::invalid_argument(error_chain(&error)))?;
        // The permit is set before the restart, which takes it.
        let restarted = self.supervisor.with(|supervisor| supervisor.restart_runnable(STORAGE_DN));
        restarted.ok_or_else(stopping_status)?.map_err(|error| Status::failed_precondition(error.to_string()))
    }

    /// Copies the header of the volume.
    pub(crate) async fn back_up_header(&self) -> Result<v1::BackUpStorageHeaderResponse, Status> {
        let keys = Arc::clone(&self.keys);
        let backup = detached(async move { keys.back_up_header().await }).await?;
        let volume = backup.volume().unwrap_or_default();
        Ok(v1::BackUpStorageHeaderResponse { header: backup.as_bytes().to_vec(), volume })
    }

    /// Writes a header of the volume to its disk. Then root.storage tries again to open it.
    pub(crate) async fn restore_header(
        &self,
        request: v1::RestoreStorageHeaderRequest,
    ) -> Result<(), Status> {
        let passphrase = request.passphrase.map(parse_passphrase).transpose()?;
        let (opener, backup) = (self.opener.clone(), HeaderBackup::from_bytes(request.header));
        let restored =
            spawn_blocking(move || opener.restore_header(&backup, passphrase, request.allow_older)).await;
        let restored = restored.map_err(|error| Status::internal(error_chain(&error)))?;
        restored.map_err(|error| Status::failed_precondition(error_chain(&error)))?;
        if !matches!(self.unlock.status(), UnlockStatus::Open { .. }) {
            // One that was stopped is started by the operator.
            let _ = self.supervisor.with(|supervisor| supervisor.restart_runnable(STORAGE_DN));
        }
        Ok(())
    }

    /// Forgets the faults of the volume's devices. Returns those that it has had.
    pub(crate) async fn acknowledge_faults(&self) -> Result<Vec<String>, Status> {
        let (faults, opener) = (self.faults.clone(), self.opener.clone());
        let forgotten = spawn_blocking(move || faults.acknowledge(opener.esp()?));
        let forgotten = forgotten.await.map_err(|error| Status::internal(error_chain(&error)))?;
        let forgotten = forgotten.map_err(|error| Status::failed_precondition(error_chain(&error)))?;
        self.health.announce();
        Ok(forgotten)
    }

    /// Starts a scrub of the volume, and returns its reports until it has ended. A client that disconnects does not end it.
    pub(crate) async fn scrub(
        &self,
        bytes_per_second: Option<u64>,
    ) -> Result<impl Stream<Item = v1::StorageScrub> + Send + use<>, Status> {
        let refused = |error: ScrubError| Status::failed_precondition(error_chain(&error));
        let status = match self.keys.encryption_status().await {
            // It is not open, or its disk fails: opening it says so.
            Err(_) if self.volume.path().is_none() => None,
            status => status.map_err(|error| refused(ScrubError::Header(error_chain(&error))))?,
        };
        // The header of a volume of an earlier release does not have it.
        let says_unwiped = self.config.wipe == Some(false);
        if status.is_some_and(|status| {
            let is_authenticated = status.encryption == VolumeEncryption::EncryptedAndAuthenticated;
            status.is_unwiped || is_authenticated && says_unwiped
        }) {
            return Err(refused(ScrubError::Unwiped));
        }
        let volume = self.volume.handle_of_call().ok_or_else(|| refused(ScrubError::NotOpen))?;
        let rate = bytes_per_second.map_or(ScrubRate::Share, |bytes| ScrubRate::PerSecond(Bytes(bytes)));
        // Before the start: no report is missed.
        let mut reports = self.scrub.watch();
        self.scrub.start(volume, rate).map_err(refused)?;
        reports.mark_changed();
        Ok(stream::unfold(Some(reports), |reports| async {
            let mut reports = reports?;
            reports.changed().await.ok()?;
            let status = reports.borrow_and_update().clone();
            match (status.running, status.last) {
                (Some(running), _) => Some((describe_scrub(running), Some(reports))),
                (None, last) => Some((describe_scrub(last?), None)),
            }
        }))
    }

    /// Ends the scrub of the volume.
    pub(crate) fn cancel_scrub(&self) -> Result<(), Status> {
        let is_running = self.scrub.cancel();
        is_running
            .then_some(())
            .ok_or_else(|| Status::failed_precondition("no scrub of the data volume is running"))
    }

    /// Discards the free blocks of the volume, and returns their bytes.
    pub(crate) async fn trim(&self) -> Result<u64, Status> {
        let storage = &self.config;
        let refused = match (storage.kind, storage.encryption) {
            (VolumeKind::Directory, _) => Some("it is a directory; use fstrim on its file system".to_owned()),
            (_, Some(EncryptionMode::EncryptedAndAuthenticated)) => {
                Some("it is encrypted and authenticated, and dm-integrity passes no discards".to_owned())
            }
            (_, Some(EncryptionMode::Encrypted)) if storage.discards != Some(true) => Some(format!(
                "discards show who reads the disk which blocks are free; set storage.discards = true and restart {}",
                program_name()
            )),
            _ => None,
        };
        if let Some(why) = refused {
            return Err(Status::failed_precondition(format!("can't trim the data volume: {why}")));
        }
        let not_open = || Status::failed_precondition("can't trim the data volume: it is not open");
        // The handle keeps the volume open during the trim.
        let volume = self.volume.handle_of_call().ok_or_else(not_open)?;
        let trimmed = spawn_blocking(move || trim_volume(&volume));
        let trimmed = trimmed.await.map_err(|error| Status::internal(error_chain(&error)))?;
        trimmed.map_err(|why| Status::failed_precondition(format!("can't trim the data volume: {why}")))
    }
}

/// The state of root.storage, as clients see it.
pub(crate) fn describe_state(status: UnlockStatus) -> v1::StorageResponse {
    let of_state = |state: &str| v1::StorageResponse { state: state.to_owned(), ..Default::default() };
    match status {
        UnlockStatus::Closed { error, erase_token, is_lost } => v1::StorageResponse {
            detail: error.unwrap_or_default(),
            erase_token: erase_token.unwrap_or_default(),
            ..of_state(if is_lost { "lost" } else { "closed" })
        },
        UnlockStatus::Opening { work: None } => of_state("opening"),
        UnlockStatus::Opening { work: Some(CreationWork::Wiping(wipe)) } => v1::StorageResponse {
            wiped_bytes: Some(wipe.done_bytes),
            wipe_bytes: Some(wipe.total_bytes),
            ..of_state("opening")
        },
        UnlockStatus::Opening { work: Some(CreationWork::Copying { from, copy }) } => v1::StorageResponse {
            detail: describe_copy(&from, copy),
            copied_bytes: Some(copy.done_bytes),
            copy_bytes: Some(copy.total_bytes),
            ..of_state("opening")
        },
        UnlockStatus::Opening { work: Some(CreationWork::Reading(reading)) } => v1::StorageResponse {
            detail: reading.to_string(),
            read_bytes: Some(reading.progress.read_bytes),
            disk_bytes: Some(reading.progress.disk_bytes),
            left_seconds: reading.left.map(|left| left.as_secs()),
            erase_token: reading.erase_token.unwrap_or_default(),
            ..of_state("opening")
        },
        UnlockStatus::Locked { since, reason } => v1::StorageResponse {
            detail: reason,
            since: wire::timestamp(wall_clock_time(since)),
            ..of_state("locked")
        },
        UnlockStatus::Open { .. } => of_state("open"),
    }
}

fn describe_report(report: &ReencryptionReport) -> v1::StorageReencryption {
    let progress = report.progress;
    let reason = match &report.state {
        ReencryptionState::Failed(reason) => reason.clone(),
        _ => String::new(),
    };
    v1::StorageReencryption {
        state: report.name().to_owned(),
        reason,
        began: report.began().and_then(wire::timestamp),
        done_bytes: progress.map_or(0, |progress| progress.done_bytes),
        total_bytes: progress.map_or(0, |progress| progress.total_bytes),
        left_seconds: report.time_left(SystemTime::now()).map(|left| left.as_secs()),
    }
}

fn describe_scrub(report: ScrubReport) -> v1::StorageScrub {
    let elapsed = report.began.elapsed().unwrap_or_default();
    let (done, rest) = (report.done_bytes, report.device_bytes.saturating_sub(report.done_bytes));
    let left = u128::from(rest) * elapsed.as_millis() / 1000 / u128::from(done.max(1));
    let left_seconds = (report.ended.is_none() && done > 0).then(|| u64::try_from(left).unwrap_or(u64::MAX));
    let ranges = report.first_unreadable.into_iter();
    v1::StorageScrub {
        began: wire::timestamp(report.began),
        ended: report.ended.and_then(|(at, _)| wire::timestamp(at)),
        state: report.ended.map_or("running", |(_, end)| end.name()).to_owned(),
        device: report.device,
        done_bytes: done,
        device_bytes: report.device_bytes,
        left_seconds,
        unreadable_ranges: report.unreadable_ranges,
        unreadable_bytes: report.unreadable_bytes,
        first_unreadable: ranges.map(|range| v1::ByteRange { start: range.start, end: range.end }).collect(),
    }
}

fn describe_slot(slot: KeySlotStatus) -> v1::StorageKeySlot {
    v1::StorageKeySlot {
        slot: slot.slot,
        kind: slot.name.map(|(kind, _)| kind.to_string()).unwrap_or_default(),
        generation: slot.name.map_or(0, |(_, generation)| generation),
        is_opened: slot.is_opened,
        is_stale: slot.is_stale,
        is_unconfirmed: slot.is_unconfirmed,
    }
}

/// The bytes that the kernel trims at once: a stop of root.storage waits for that.
const TRIM_BYTES: u64 = 16 << 30;

/// Trims the volume, and ends early when it closes. It blocks.
fn trim_volume(volume: &VolumeHandle) -> Result<u64, String> {
    let size = fstatvfs(volume.dir()).map_err(|errno| errno.to_string())?;
    trim_ranges(size.blocks().saturating_mul(size.fragment_size()), |range| {
        // Checked between two ranges, so that a stop waits for one of them at most.
        if volume.is_closing() {
            Err("it is closing; try again when it is open".to_owned())
        } else {
            sys::trim_file_system(volume.dir(), range).map_err(|error| error.to_string())
        }
    })
}

/// Trims a file system of this size, one range after the other, and returns the bytes that were discarded.
fn trim_ranges(size: u64, mut trim: impl FnMut(Range<u64>) -> Result<u64, String>) -> Result<u64, String> {
    // The last one has no end: what the file system keeps for itself counts, too.
    let starts = (0..size.max(1)).step_by(TRIM_BYTES as usize);
    let end = |start: u64| start.checked_add(TRIM_BYTES).filter(|end| *end < size).unwrap_or(u64::MAX);
    starts.map(|start| trim(start..end(start))).sum()
}

/// Runs a change of keys to its end, also if the client disconnects.
async fn detached<T: Send + 'static>(
    change: impl Future<Output = Result<T, VolumeKeyError>> + Send + 'static,
) -> Result<T, Status> {
    match tokio::spawn(change).await {
        Ok(done) => done.map_err(|error| Status::new(error_code(&error), error_chain(&error))),
        Err(error) => Err(Status::internal(error_chain(&error))),
    }
}

fn require_passphrase(passphrase: Option<v1::RecoveryPassphrase>) -> Result<RecoveryPassphrase, Status> {
    parse_passphrase(
        passphrase.ok_or_else(|| Status::invalid_argument("the request has no recovery passphrase"))?,
    )
}

fn parse_passphrase(passphrase: v1::RecoveryPassphrase) -> Result<RecoveryPassphrase, Status> {
    RecoveryPassphrase::parse(&passphrase.text).map_err(|error| Status::invalid_argument(error_chain(&error)))
}

fn error_code(error: &VolumeKeyError) -> Code {
    match error {
        VolumeKeyError::Volume(VolumeError::Encryption { source, .. }) => match source.key_error() {
            // The given key or passphrase does not fit: the caller can give another one.
            LuksError::NoSlot { .. }
            | LuksError::SlotClosed { .. }
            | LuksError::WrongClusterKey { .. }
            | LuksError::NotNewest { .. } => Code::InvalidArgument,
            LuksError::NodeKeyMissing { .. }
            | LuksError::WrongNodeKey { .. }
            | LuksError::Reencrypting { .. }
            | LuksError::Seal(SealError::Tpm { .. }) => Code::FailedPrecondition,
            _ => Code::Internal,
        },
        VolumeKeyError::Volume(_) | VolumeKeyError::Unsettled => Code::Internal,
        VolumeKeyError::Store(error) if error.is_retryable() => Code::Aborted,
        VolumeKeyError::Store(_) => Code::Internal,
        VolumeKeyError::NotEncrypted
        | VolumeKeyError::NoCluster
        | VolumeKeyError::Cluster(_)
        | VolumeKeyError::Identity(_)
        | VolumeKeyError::Tang(_)
        | VolumeKeyError::Voters(_)
        | VolumeKeyError::NeedsPassphrase
        | VolumeKeyError::Authenticated
        | VolumeKeyError::Reencryption(_)
        | VolumeKeyError::KeptSlot { .. }
        | VolumeKeyError::LacksPassphrase => Code::FailedPrecondition,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trim_covers_the_volume_in_ranges_and_ends_early_when_it_closes() {
        for (size, count) in [(0, 1), (1, 1), (TRIM_BYTES, 1), (TRIM_BYTES + 1, 2), (5 * TRIM_BYTES / 2, 3)] {
            let mut ranges: Vec<Range<u64>> = Vec::new();
            let trimmed = trim_ranges(size, |range| {
                ranges.push(range);
                Ok(7)
            });
            assert_eq!((trimmed, ranges.len()), (Ok(7 * count), count as usize), "{size}");
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
            assert_eq!((ranges[0].start, ranges.last().map(|last| last.end)), (0, Some(u64::MAX)));
        }
        let mut calls = 0;
        let closing = trim_ranges(4 * TRIM_BYTES, |_| {
            calls += 1;
            if calls < 3 { Ok(1) } else { Err("it is closing".to_owned()) }
        });
        assert_eq!((closing, calls), (Err("it is closing".to_owned()), 3));
    }
}
