//! Compares the limits of all volumes with their PersistentVolumes, and sets them again.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::runtime::reflector::ObjectRef;
use nodekeel_fsquota::{Bytes, Inodes};
use tokio::sync::watch;

use crate::api::call::ApiCall;
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
use crate::store::{VolumeStore, VolumeStoreError};
use crate::volume_locks::VolumeLocks;

/// Compares the limits of volumes with their PersistentVolumes.
pub(crate) struct LimitReconciler {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) caches: ObjectCaches,
    pub(crate) locks: Arc<VolumeLocks>,
    /// The volumes whose limits are wrong and can't be set, with the reason.
    pub(crate) unlimited: Arc<watch::Sender<BTreeMap<VolumeId, String>>>,
    pub(crate) failures: FailureReporter,
}

/// The inode limits of VolumeAttributesClasses that were read, by name.
type ClassInodes = BTreeMap<String, Option<Inodes>>;

impl LimitReconciler {
    /// Compares all volumes of this node, sets the limits that are wrong, and reports what can't be set. Returns whether
    /// limits of this store can be lost at all.
    pub(crate) async fn reconcile_all(&self) -> bool {
        let (mut wrong, mut classes, mut has_limits) = (BTreeMap::new(), ClassInodes::new(), true);
        for object in self.caches.volumes.state() {
            let Some(id) = required_volume(&self.api.identity, &object) else { continue };
            // No expansion sets a limit between the look and the act.
            let _lock = self.locks.lock(&id).await;
            match self.reconcile(&id, &object, &mut classes).await {
                Ok(LimitState::Right) | Err(ReconcileError::Store(VolumeStoreError::NotFound { .. })) => {}
                Ok(LimitState::Unlosable) => {
                    has_limits = false;
                    break;
                }
                Ok(LimitState::TooLarge(text)) => drop(wrong.insert(id, text)),
                Err(error) => {
                    self.failures.count(&error);
                    let text = format!(
                        "the limits of the volume are not those of its PersistentVolume, or can't be read: {}; run \
                         `dirquota audit` on its directory",
                        format_chain(&error)
                    );
                    tracing::warn!(pv = %id, "{text}");
                    wrong.insert(id, text);
                }
            }
        }
        self.failures.metrics.set_wrong_limits(wrong.len());
        self.unlimited.send_if_modified(|old| std::mem::replace(old, wrong.clone()) != wrong);
        has_limits
    }

    /// Compares one volume, and sets its limits. The caller holds its lock.
    async fn reconcile(
        &self,
        id: &VolumeId,
        object: &PersistentVolume,
        classes: &mut ClassInodes,
    ) -> Result<LimitState, ReconcileError> {
        let Some(found) = self.store.find_limits(id).await.map_err(ReconcileError::Store)? else {
            return Ok(LimitState::Unlosable);
        };
        let mut promised = self.promised_limits(object, classes).await?;
        let mut action = plan_limits(&promised, &found);
        if action != LimitAction::Keep {
            // The cache may be older than an expansion that has just ended, or is in progress.
            let Some(object) = self.api.read_volume(id.as_str()).await? else { return Ok(LimitState::Right) };
            promised = self.promised_limits(&object, classes).await?;
            promised.most = promised.most.max(self.allocated(&object).await?);
            action = plan_limits(&promised, &found);
        }
        match action {
            LimitAction::Keep => Ok(LimitState::Right),
            LimitAction::Restore(limits) => {
                self.store.restore_limits(id, limits).await.map_err(ReconcileError::Store)?;
                self.failures.metrics.record_restored_limits();
                let (bytes, before) = (promised.bytes.0, found.limits.bytes.map(|bytes| bytes.0));
                tracing::warn!(pv = %id, bytes, before, "the volume had lost its limits: they are set again");
                Ok(LimitState::Right)
            }
            LimitAction::ReportTooLarge { limit, used } => Ok(LimitState::TooLarge(format!(
                "the volume has a limit of {limit}, more than the {} of its PersistentVolume, and uses {used}: expand its \
                 claim, or remove files",
                promised.bytes
            ))),
        }
    }

    /// What a PersistentVolume promises.
    async fn promised_limits(
        &self,
        object: &PersistentVolume,
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
        let default_inodes = class.and_then(|class| size::inode_limit(bytes, &class).ok());
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
    /// The limit is larger than what was promised, and in use.
    TooLarge(String),
}
