//! Compares the limits of volumes with their PersistentVolumes, and sets them again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::runtime::reflector::ObjectRef;
use nodekeel_fsquota::{Bytes, Inodes};
use nodekeel_supervisor::Backoff;
use tokio::sync::{Notify, watch};
use tokio::time::sleep_until;

use crate::api::call::ApiCall;
use crate::api::retry_tracker::{later, random_fraction};
use crate::api::watches::ObjectCaches;
use crate::api::writer::ApiWriter;
use crate::claim::size;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError};
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::limits::decide::{LimitAction, PromisedLimits, plan_limits};
use crate::loss::condition::required_volume;
use crate::objects::named_kind;
use crate::resize::bound_claim::volume_capacity;
use crate::resize::claim_status::allocated_size;
use crate::store::{PublishAttempts, VolumeStore, VolumeStoreError};
use crate::volume_locks::VolumeLocks;

/// Compares the limits of volumes with their PersistentVolumes.
pub(crate) struct LimitReconciler {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) caches: ObjectCaches,
    pub(crate) locks: Arc<VolumeLocks>,
    /// Notified when a PersistentVolume has changed.
    pub(crate) volumes_changed: Arc<watch::Sender<()>>,
    /// The volumes that are not limited as promised, with the reason.
    pub(crate) unlimited: Arc<watch::Sender<BTreeMap<VolumeId, String>>>,
    pub(crate) failures: FailureReporter,
    pub(crate) backoff: Backoff,
    pub(crate) findings: LimitFindings,
}

/// What is known of the limits of volumes.
#[derive(Default)]
pub(crate) struct LimitFindings {
    found: Mutex<Findings>,
    /// Notified when a comparison of all volumes has left some of them unsettled.
    unsettled: Notify,
}

#[derive(Default)]
struct Findings {
    /// The volumes whose limits are wrong or not known, until they are right.
    unsettled: BTreeMap<VolumeId, Unsettled>,
    /// The number of files and directories that don't count against the limits of a volume, as of the last audit, or of
    /// setting its limits again since.
    uncounted: BTreeMap<VolumeId, u64>,
}

struct Unsettled {
    /// Why they are wrong; `None`: that is not known.
    text: Option<String>,
    /// The capacity of the PersistentVolume that was compared.
    capacity: Bytes,
}

/// The inode limits of VolumeAttributesClasses that were read, by name.
type ClassInodes = BTreeMap<String, Option<Inodes>>;

impl LimitReconciler {
    /// Compares all volumes of this node, sets the limits that are wrong, and reports what can't be set. Returns whether
    /// limits of this store can be lost at all.
    pub(crate) async fn reconcile_all(&self) -> bool {
        let ids: BTreeSet<_> = self.required_volumes().collect();
        let has_limits = self.reconcile_volumes(&ids, &PublishAttempts::default()).await;
        self.found().unsettled.retain(|id, _| ids.contains(id));
        self.publish_findings();
        self.findings.unsettled.notify_one();
        has_limits
    }

    /// Compares volumes again when a pod gets them, and those whose limits are not right also after their expansion, and
    /// with a growing delay. Never returns.
    pub(crate) async fn run(&self) {
        let mut volumes = self.volumes_changed.subscribe();
        let (mut failures, mut due) = (1, later(self.backoff.max));
        loop {
            let unsettled: BTreeSet<_> = self.found().unsettled.keys().cloned().collect();
            let mut attempts = PublishAttempts::default();
            tokio::select! {
                found = self.store.wait_for_publish() => attempts = found,
                () = self.findings.unsettled.notified() => {}
                _ = volumes.changed(), if !unsettled.is_empty() => {
                    attempts.volumes = self.expanded_volumes();
                    if attempts.volumes.is_empty() {
                        continue;
                    }
                }
                () = sleep_until(due), if !unsettled.is_empty() => {
                    self.reconcile_volumes(&unsettled, &attempts).await;
                    failures += 1;
                    due = later(self.backoff.jittered_delay(failures, random_fraction()));
                    continue;
                }
            }
            if attempts.has_failed {
                self.failures.store_failed.notify_one();
            }
            self.reconcile_volumes(&attempts.volumes, &attempts).await;
            // Something has changed, so that a retry may succeed soon.
            failures = 1;
            due = later(self.backoff.jittered_delay(failures, random_fraction()));
        }
    }

    /// Records how much of each volume does not count against its limits, as an audit has found it.
    pub(crate) fn set_uncounted(&self, uncounted: BTreeMap<VolumeId, u64>) {
        let required: BTreeSet<_> = self.required_volumes().collect();
        self.found().uncounted = uncounted.into_iter().filter(|(id, _)| required.contains(id)).collect();
        self.publish_findings();
    }

    fn found(&self) -> MutexGuard<'_, Findings> {
        self.findings.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn required_volumes(&self) -> impl Iterator<Item = VolumeId> {
        self.caches.volumes.iter().filter_map(|object| required_volume(&self.api.identity, &object))
    }

    /// The unsettled volumes whose PersistentVolumes have another capacity than the one that was compared.
    fn expanded_volumes(&self) -> BTreeSet<VolumeId> {
        let is_expanded = |(id, unsettled): &(&VolumeId, &Unsettled)| {
            let object = self.caches.volumes.get(id.as_str());
            object.is_none_or(|object| volume_capacity(&object) != unsettled.capacity)
        };
        self.found().unsettled.iter().filter(is_expanded).map(|(id, _)| id.clone()).collect()
    }

    /// Compares these volumes, and publishes what is found. Returns whether limits of this store can be lost at all.
    async fn reconcile_volumes(&self, ids: &BTreeSet<VolumeId>, attempts: &PublishAttempts) -> bool {
        let (mut classes, mut has_limits) = (ClassInodes::new(), true);
        for id in ids {
            let object = self.caches.volumes.get(id.as_str());
            let object =
                object.filter(|object| required_volume(&self.api.identity, object).as_ref() == Some(id));
            let Some(object) = object else {
                self.found().unsettled.remove(id);
                continue;
            };
            let restored = attempts.restored.get(id).copied();
            // No expansion sets a limit between the look and the act.
            let _lock = self.locks.lock(id).await;
            let text = match self.reconcile(id, &object, restored, &mut classes).await {
                Ok(LimitState::Right) | Err(ReconcileError::Store(VolumeStoreError::NotFound { .. })) => {
                    self.found().unsettled.remove(id);
                    continue;
                }
                Ok(LimitState::Unlosable) => {
                    has_limits = false;
                    break;
                }
                Ok(LimitState::Wrong(text)) => Some(text),
                Err(error) => {
                    self.failures.count(&error);
                    tracing::warn!(pv = %id, "compare the limits of the volume: {}; retrying", format_chain(&error));
                    // An API server that does not answer says nothing of the limits.
                    let is_unknown = matches!(error, ReconcileError::Api(_));
                    (!is_unknown).then(|| {
                        format!(
                            "the limits of the volume are not those of its PersistentVolume, or can't be read: {}; run \
                             `dirquota audit DIRECTORY` on the directory of the volumes",
                            format_chain(&error)
                        )
                    })
                }
            };
            let capacity = volume_capacity(&object);
            let mut found = self.found();
            let text = text.or_else(|| found.unsettled.get(id)?.text.clone());
            found.unsettled.insert(id.clone(), Unsettled { text, capacity });
        }
        self.publish_findings();
        has_limits
    }

    fn publish_findings(&self) {
        let found = self.found();
        let uncounted = found.uncounted.iter().filter(|(_, count)| **count > 0);
        let mut wrong: BTreeMap<_, _> =
            uncounted.map(|(id, count)| (id.clone(), uncounted_text(*count))).collect();
        let texts = found.unsettled.iter().filter_map(|(id, it)| Some((id.clone(), it.text.clone()?)));
        wrong.extend(texts);
        self.failures.metrics.set_wrong_limits(wrong.len());
        self.unlimited.send_if_modified(|old| std::mem::replace(old, wrong.clone()) != wrong);
    }

    /// Compares one volume, and sets its limits. `restored`: they have just been set again, and this much does not count.
    /// The caller holds its lock.
    async fn reconcile(
        &self,
        id: &VolumeId,
        object: &PersistentVolume,
        restored: Option<u64>,
        classes: &mut ClassInodes,
    ) -> Result<LimitState, ReconcileError> {
        let is_image = named_kind(object) != Ok(VolumeKind::Directory);
        let find = || async { self.store.find_limits(id, is_image).await.map_err(ReconcileError::Store) };
        if let Some(uncounted) = restored {
            self.record_restored(id, uncounted);
        }
        let Some(mut found) = find().await? else { return Ok(LimitState::Unlosable) };
        // Who has set the limits again did not know the class.
        let is_class_due = restored.is_some();
        let mut promised = self.promised_limits(object, is_class_due, classes).await?;
        let mut action = plan_limits(&promised, &found);
        if action != LimitAction::Keep {
            // The cache may be older than an expansion that has just ended, or is in progress.
            let Some(object) = self.api.read_volume(id.as_str()).await? else { return Ok(LimitState::Right) };
            promised = self.promised_limits(&object, is_class_due, classes).await?;
            promised.most = promised.most.max(self.allocated(&object).await?);
            action = plan_limits(&promised, &found);
        }
        // The second time it is known what the volume itself uses.
        for _ in 0..2 {
            let LimitAction::Restore(limits) = action else { break };
            let uncounted = self.store.restore_limits(id, limits).await.map_err(ReconcileError::Store)?;
            self.record_restored(id, uncounted);
            let (bytes, before) =
                (limits.bytes.map(|bytes| bytes.0), found.limits.bytes.map(|bytes| bytes.0));
            tracing::warn!(pv = %id, bytes, before, "the limits of the volume were not those of its PersistentVolume: set again");
            let Some(now) = find().await? else { return Ok(LimitState::Unlosable) };
            found = now;
            action = plan_limits(&promised, &found);
        }
        Ok(match action {
            LimitAction::Keep => LimitState::Right,
            LimitAction::Restore(_) => LimitState::Wrong(
                "the limits of the volume were set, and are other ones again: find the program that sets them".to_owned(),
            ),
            LimitAction::ReportNoCapacity => LimitState::Wrong(format!(
                "the capacity of the PersistentVolume can't be read, so its volume is not compared with it: correct it by \
                 `kubectl edit pv {id}`"
            )),
            LimitAction::ReportTooLarge { limit, used } => LimitState::Wrong(format!(
                "the volume has a limit of {limit}, more than the {} of its PersistentVolume, and uses {used}: expand its \
                 claim, or remove files",
                promised.bytes
            )),
        })
    }

    /// Records that the limits of a volume were lost and are set again, and how much in it does not count.
    fn record_restored(&self, id: &VolumeId, uncounted: u64) {
        self.failures.metrics.record_restored_limits();
        self.found().uncounted.insert(id.clone(), uncounted);
    }

    /// What a PersistentVolume promises; with the inode limit of its class, if that is due.
    async fn promised_limits(
        &self,
        object: &PersistentVolume,
        is_class_due: bool,
        classes: &mut ClassInodes,
    ) -> Result<PromisedLimits, ReconcileError> {
        let spec = object.spec.as_ref();
        let bytes = volume_capacity(object);
        let attributes = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
        let inodes = match attributes.filter(|name| !name.is_empty()) {
            Some(name) => self.class_inodes(name, classes).await?,
            None => None,
        };
        let class = spec.and_then(|spec| spec.storage_class_name.as_deref());
        let class = class.and_then(|name| self.caches.classes.get(&ObjectRef::new(name)));
        let class_inodes = class.and_then(|class| size::inode_limit(bytes, &class).ok());
        let inodes = inodes.or(class_inodes.filter(|_| is_class_due));
        let default_inodes = class_inodes.unwrap_or_else(|| size::default_inodes(bytes));
        let is_image = named_kind(object) != Ok(VolumeKind::Directory);
        Ok(PromisedLimits { bytes, most: bytes, inodes, default_inodes, is_image })
    }

    /// The inode limit of a VolumeAttributesClass; `None` if it sets none, or does not exist any more.
    async fn class_inodes(
        &self,
        name: &str,
        classes: &mut ClassInodes,
    ) -> Result<Option<Inodes>, ReconcileError> {
        if let Some(inodes) = classes.get(name) {
            return Ok(*inodes);
        }
        let api = self.api.all::<VolumeAttributesClass>();
        let class = self.api.read(ApiCall::ReadAttributesClass, &api, name).await?;
        let inodes = class.and_then(|class| size::inodes_parameter(class.parameters.as_ref()).ok().flatten());
        classes.insert(name.to_owned(), inodes);
        Ok(inodes)
    }

    /// What an expansion of the volume's claim may have set already.
    async fn allocated(&self, object: &PersistentVolume) -> Result<Bytes, ReconcileError> {
        let Some(reference) = object.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
            return Ok(Bytes(0));
        };
        let claim = self.api.read_claim(reference).await?;
        Ok(claim.and_then(|claim| allocated_size(&claim.status?)).unwrap_or_default())
    }
}

/// The end of a comparison.
enum LimitState {
    /// The limits are right, or were set again.
    Right,
    /// The store has limits that can't be lost.
    Unlosable,
    /// They are not, and can't be set now, for this reason.
    Wrong(String),
}

fn uncounted_text(count: u64) -> String {
    format!(
        "{count} files and directories of the volume don't count against its limits: run \
         `dirquota audit DIRECTORY --repair` on the directory of the volumes. Take those that it names as unowned from \
         their project first (`chattr -R -p 0 PATH`), and directories with limits of their own (`dirquota clear -r PATH`)"
    )
}
