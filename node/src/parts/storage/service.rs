//! root.storage: opens the volume, waits for a key where it has to, and closes it when its users have stopped.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::stat::fstat;
use nodekeel_localstorage::volume::{DataVolume, MountState, UnlockKey, UnlockSecret, VolumeError};
use nodekeel_supervisor::{Backoff, Context, Failure, RunFuture, Runnable};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, sleep};

use super::DN;
use super::decision::Attempt;
use super::device::{BLOCK_BYTES, DeviceOpener, OpenedVolume, left_out_fault};
use super::error::StorageError;
use super::faults::VolumeFaults;
use super::keys::{RemoteKeyService, VolumeKeys};
use super::opener::VolumeOpener;
use super::presence::{check_presence, wait_for_loss};
use super::reencryption::VolumeReencryption;
use super::unlock::{ClusterKeySource, UnlockStatus, VolumeUnlock, random_fraction};
use crate::block_events::{BlockAction, BlockEvents};
use crate::blocking::run_blocking;
use crate::device_faults::DeviceFaults;
use crate::error_chain::error_chain;
use crate::health::HealthChanges;
use crate::volume::{CloseOnDrop, NodeVolume, storage_stop_timeout};

/// The time that a busy volume has to become free.
const BUSY_TIME: Duration = Duration::from_secs(1);
/// The pause between two attempts to unmount it. The kernel reports when a file system is gone (`IN_UNMOUNT`), but not when
/// the last file on it is closed: umount2(2) answers `EBUSY` until then, or detaches it from every later use.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The pauses between two attempts to grow the volume, the first and the longest.
const MIN_GROWTH_PAUSE: Duration = Duration::from_secs(10);
const MAX_GROWTH_PAUSE: Duration = Duration::from_secs(3600);

/// Between two requests for the cluster's key: who keeps it may be back at any time, and does not say so.
const ASK_BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(500), factor: 2.0, max: Duration::from_secs(8), jitter: 0.25 };

/// Opens the volume, and closes it when the runnables on it have stopped.
#[derive(Clone)]
pub(super) struct StorageService {
    pub(super) opener: VolumeOpener,
    /// Those who are asked for the cluster's key while the volume is locked.
    pub(super) cluster_keys: Option<Arc<dyn ClusterKeySource>>,
    pub(super) keys: Arc<VolumeKeys>,
    pub(super) unlock: Arc<VolumeUnlock>,
    pub(super) volume: NodeVolume,
    /// The faults of its devices, and where they come from and go to.
    pub(super) faults: VolumeFaults,
    pub(super) reencryption: VolumeReencryption,
    pub(super) device_faults: DeviceFaults,
    pub(super) health: HealthChanges,
    /// `node.grace`.
    pub(super) grace: Duration,
}

impl Runnable for StorageService {
    fn run(&self, ctx: Context) -> RunFuture {
        let service = self.clone();
        Box::pin(async move { service.run_storage(ctx).await })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(storage_stop_timeout(self.grace))
    }
}

impl StorageService {
    async fn run_storage(self, ctx: Context) -> Result<(), Failure> {
        let unlock = &*self.unlock;
        let mut closed = ClosedOnDrop { unlock, status: UnlockStatus::default() };
        // The error of the attempt before, with its token to erase the disk, stays visible until this attempt ends.
        if !matches!(unlock.status(), UnlockStatus::Closed { error: Some(_), .. }) {
            unlock.set_status(UnlockStatus::Opening { work: None });
        }
        unlock.cancel_work(false);
        let opened = self.open_volume(&ctx).await?.and_then(|opened| {
            // What could not be unmounted is used as it is, if it can be.
            check_presence(&opened.dir)?;
            let watched = opened.dir.try_clone().map_err(StorageError::Directory)?;
            Ok((opened, watched))
        });
        let (OpenedVolume { volume, dir, slot, left_out }, watched) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(closed.with(error)),
        };
        tracing::info!("opened the data volume in {}", dir.path().display());
        let file_system = fstat(&dir).map_err(std::io::Error::from)?.st_dev;
        // The volume is open before root.storage is ready: a runnable that waits for it finds the volume.
        self.volume.open(dir);
        let open = CloseOnDrop(self.volume.clone());
        unlock.set_status(UnlockStatus::Open { slot });
        if let Some(fault) = left_out_fault(left_out)
            && self.faults.add_at_least(fault, left_out.bytes / BLOCK_BYTES)
        {
            let (faults, opener, health) = (self.faults.clone(), self.opener.clone(), self.health.clone());
            spawn_blocking(move || faults.announce(&opener, &health)).await?;
        }
        if self.keys.are_with_tang() || self.keys.kept_by_voters().is_some() {
            ctx.run_child("keys", RemoteKeyService::new(Arc::clone(&self.keys), self.health.clone()))?;
        }
        ctx.signal_ready()?;
        let canceled = tokio::select! {
            // A fault counts, also the one with which the volume is lost.
            biased;
            canceled = ctx.canceled() => canceled,
            never = self.faults.follow(&self.device_faults, file_system, &self.opener, &self.health) => match never {},
            // Nothing on it can go on: its users restart, and the next attempt unmounts it when they have stopped.
            loss = wait_for_loss(watched, &self.device_faults) => return Err(closed.with(loss)),
            never = self.follow_size() => match never {},
            loss = self.reencryption.follow(&self.volume) => return Err(closed.with(loss)),
        };
        // The users stop before the unmount, since an open file keeps the file system busy.
        open.close().await;
        if let Err(error) = unmount(volume).await? {
            // Containers outlive containerd. The next incarnation uses it as it is.
            tracing::warn!("the data volume stays open: {}", error_chain(&error));
        }
        Err(canceled.into())
    }

    /// Grows the open volume when its disk has grown. What fails is tried again.
    async fn follow_size(&self) -> Infallible {
        let Some(device) = self.opener.device() else { return std::future::pending().await };
        let Err(error) = self.follow_device(device).await;
        tracing::warn!("the data volume grows at a restart of {DN} only: {}", error_chain(&error));
        std::future::pending().await
    }

    async fn follow_device(&self, device: &Arc<DeviceOpener>) -> io::Result<Infallible> {
        let mut events = BlockEvents::subscribe(BlockAction::Change)?;
        let mut pause = MIN_GROWTH_PAUSE;
        loop {
            tokio::select! {
                changed = events.next() => {
                    changed?;
                    pause = MIN_GROWTH_PAUSE;
                }
                () = sleep(pause), if device.may_grow_later() => pause = (2 * pause).min(MAX_GROWTH_PAUSE),
            }
            let before = device.size_problem();
            let (opener, secret) = (Arc::clone(device), self.unlock.secret().unwrap_or(UnlockSecret::Node));
            run_blocking(move || opener.follow_size(&secret)).await;
            if before != device.size_problem() {
                self.health.announce();
            }
        }
    }

    /// Opens the volume with the secrets that the node has, or else waits for a key.
    async fn open_volume(&self, ctx: &Context) -> Result<Result<OpenedVolume, StorageError>, Failure> {
        let unlock = &self.unlock;
        // A permit counts for one attempt.
        let erase_permit = unlock.take_erase_permit();
        let mut locked = None;
        for secret in self.opener.own_secrets(unlock.secret()) {
            match self.try_secret(ctx, secret, erase_permit.clone()).await? {
                // Another secret helps only if this one does not fit.
                Err(error) if error.needs_key() => locked = locked.or(Some(error)),
                opened => return Ok(opened),
            }
        }
        match locked {
            Some(error) => self.wait_for_key(ctx, error).await,
            // `own_secrets` is never empty.
            None => std::future::pending().await,
        }
    }

    /// Tries a secret. The volume is not left half-open: a stop waits for the attempt. The reading of a disk, and the wipe of
    /// a new volume, end soon, and the next attempt resumes them.
    async fn try_secret(
        &self,
        ctx: &Context,
        secret: UnlockSecret,
        erase_permit: Option<String>,
    ) -> Result<Result<OpenedVolume, StorageError>, Failure> {
        let (opener, tried, span) = (self.opener.clone(), secret.clone(), tracing::Span::current());
        let mut attempt = spawn_blocking(move || {
            span.in_scope(|| {
                let attempt = Attempt::OpenOrCreate { erase_permit: erase_permit.as_deref() };
                opener.open(&secret, attempt)
            })
        });
        let opened = tokio::select! {
            opened = &mut attempt => opened?,
            canceled = ctx.canceled() => {
                self.unlock.cancel_work(true);
                match attempt.await? {
                    Err(StorageError::Open(
                        VolumeError::ReadingCanceled { .. }
                        | VolumeError::WipeCanceled { .. }
                        | VolumeError::CopyCanceled { .. },
                    )) => return Err(canceled.into()),
                    opened => opened,
                }
            }
        };
        // Without a slot the secret was not used: the volume is not encrypted, or was open. That of a volume that was copied
        // does not open the copy, and the node's does.
        if let Ok(OpenedVolume { slot: Some(slot), .. }) = &opened {
            self.unlock.keep_secret(if *slot == tried.slot_kind() { tried } else { UnlockSecret::Node });
        }
        Ok(opened)
    }

    /// Waits until an operator, or who keeps the cluster's key, gives a key that opens the volume.
    async fn wait_for_key(
        &self,
        ctx: &Context,
        error: StorageError,
    ) -> Result<Result<OpenedVolume, StorageError>, Failure> {
        let unlock = &self.unlock;
        let reason = match &self.cluster_keys {
            // Its answer comes at once, and is told if it does not help.
            Some(_) => "it has asked for the other half of its key".to_owned(),
            None => {
                let reason = error_chain(&error);
                tracing::warn!("the data volume is locked: {reason}");
                reason
            }
        };
        let mut offers = unlock.wait_for_secrets(reason);
        let mut asked = pin!(self.ask_for_keys(Duration::ZERO));
        let mut failures = 0;
        loop {
            tokio::select! {
                Some(offer) = offers.recv() => match self.try_secret(ctx, offer.secret, None).await? {
                    Err(error) if error.needs_key() => {
                        // The client that has offered it may have gone.
                        let _ = offer.result.send(Err(error_chain(&error)));
                    }
                    opened => {
                        let result = opened.as_ref().map(drop).map_err(|error| error_chain(error));
                        let _ = offer.result.send(result);
                        return Ok(opened);
                    }
                },
                answer = &mut asked => {
                    let reason = match answer {
                        Ok(keys) => match self.try_keys(ctx, keys).await? {
                            Some(Err(error)) if error.needs_key() => error_chain(&error),
                            Some(opened) => return Ok(opened),
                            None => "nobody has the other half of its key".to_owned(),
                        },
                        Err(error) => error_chain(&*error),
                    };
                    if unlock.set_lock_reason(reason.clone()) {
                        tracing::warn!("the data volume stays locked: {reason}");
                        self.health.announce();
                    }
                    failures += 1;
                    asked.set(self.ask_for_keys(ASK_BACKOFF.jittered_delay(failures, random_fraction())));
                }
                canceled = ctx.canceled() => return Err(canceled.into()),
            }
        }
    }

    /// Tries the keys of an answer. The outcome of the last one; `None` if there is none.
    async fn try_keys(
        &self,
        ctx: &Context,
        keys: Vec<UnlockKey>,
    ) -> Result<Option<Result<OpenedVolume, StorageError>>, Failure> {
        let mut last = None;
        for key in keys {
            match self.try_secret(ctx, UnlockSecret::Cluster(key), None).await? {
                Err(error) if error.needs_key() => last = Some(Err(error)),
                opened => return Ok(Some(opened)),
            }
        }
        Ok(last)
    }

    /// Asks for the cluster's key after a pause.
    async fn ask_for_keys(&self, pause: Duration) -> Result<Vec<UnlockKey>, Box<dyn Error + Send + Sync>> {
        sleep(pause).await;
        match &self.cluster_keys {
            Some(source) => source.cluster_keys().await,
            None => std::future::pending().await,
        }
    }
}

/// Unmounts the volume, again and again for a moment: a measurement of its free space keeps it busy, or a thread that
/// completes a write.
async fn unmount(volume: Arc<dyn DataVolume>) -> Result<Result<(), VolumeError>, JoinError> {
    let until = Instant::now() + BUSY_TIME;
    loop {
        let attempt = Arc::clone(&volume);
        let unmounted = spawn_blocking(move || attempt.unmount()).await?;
        if unmounted.is_ok() || volume.state() != MountState::Mounted || Instant::now() >= until {
            return Ok(unmounted);
        }
        sleep(BUSY_PAUSE).await;
    }
}

/// Sets the status to closed, with the reason, in whichever way root.storage ends.
struct ClosedOnDrop<'a> {
    unlock: &'a VolumeUnlock,
    status: UnlockStatus,
}

impl ClosedOnDrop<'_> {
    /// It is closed for this reason, which is the failure of root.storage.
    fn with(&mut self, error: StorageError) -> Failure {
        self.status = UnlockStatus::Closed {
            error: Some(error_chain(&error)),
            erase_token: error.erase_token(),
            is_lost: error.is_lost(),
        };
        error.into()
    }
}

impl Drop for ClosedOnDrop<'_> {
    fn drop(&mut self) {
        self.unlock.set_status(std::mem::take(&mut self.status));
    }
}
