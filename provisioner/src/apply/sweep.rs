//! Sweeping of volumes without a PersistentVolume.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::ListParams;

use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError, is_on_node};
use crate::claim::decide::{ClaimIgnoreReason, claim_ignore_reason};
use crate::id::VolumeId;
use crate::loss::store::named_store;
use crate::store::VolumeStoreError;
use crate::store_id::StoreId;

/// Page size of claim lists.
const PAGE_SIZE: u32 = 500;

/// The result of sweeping a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SweepOutcome {
    /// It has a PersistentVolume, or will get one.
    Kept,
    /// It was empty and was removed.
    Removed,
    /// It may hold data and was kept.
    Orphan,
}

/// The state of a volume's claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimState {
    /// It is pending on this node, so its volume will be provisioned again.
    Pending,
    /// It is bound to a volume, or has lost it.
    BoundOrLost,
    /// It is deleted, or belongs to another node or driver by now.
    Gone,
}

impl ActionApplier {
    /// Whether the store has this volume, or cannot tell.
    pub(crate) async fn volume_exists(&self, id: &VolumeId) -> bool {
        !matches!(self.store.usage(id).await, Err(VolumeStoreError::NotFound { .. }))
    }

    /// Removes a volume that was created and never published: a crash came between its directory and its
    /// PersistentVolume, and its claim was deleted since, or has its volume on another node.
    ///
    /// Only an empty volume: one with data was in use, and its PersistentVolume may have been deleted in
    /// order to keep them. None that a PersistentVolume of another node needs, which names the served store.
    pub(crate) async fn sweep_volume(
        &self,
        id: &VolumeId,
        (state, store): (ClaimState, Option<&StoreId>),
    ) -> Result<SweepOutcome, ApplyError> {
        let _lock = self.locks.lock(id).await;
        match (self.read_volume(id.as_str()).await?, state) {
            (Some(volume), _) if is_on_node(&self.identity, &volume) => Ok(SweepOutcome::Kept),
            // It is the volume of another node, whose disk was moved here.
            (Some(volume), _) if store.is_some() && named_store(&volume).as_ref() == store => {
                Ok(SweepOutcome::Kept)
            }
            (Some(_), _) | (None, ClaimState::Gone) => self.remove_if_empty(id).await,
            (None, ClaimState::Pending) => Ok(SweepOutcome::Kept),
            (None, ClaimState::BoundOrLost) => Ok(SweepOutcome::Orphan),
        }
    }

    /// Removes a volume without a PersistentVolume on this node, if it is empty.
    pub(crate) async fn remove_if_empty(&self, id: &VolumeId) -> Result<SweepOutcome, ApplyError> {
        let _reservation = self.reserve_volume(id).await?;
        let claim_uid = id.claim_uid();
        tracing::info!(handle = %id, claim_uid, "deleting volume if empty: no PersistentVolume on this node");
        match self.store.remove_empty(id).await.map_err(ApplyError::Store)? {
            true => Ok(SweepOutcome::Removed),
            false => Ok(SweepOutcome::Orphan),
        }
    }

    /// The states of the claims of volumes. Lists all claims once; a missing claim is deleted for good,
    /// because a volume is younger than its claim, and UIDs are never reused.
    pub(crate) async fn claim_states(
        &self,
        ids: &BTreeSet<VolumeId>,
    ) -> Result<HashMap<VolumeId, ClaimState>, ApplyError> {
        let mut states: HashMap<_, _> = ids.iter().map(|id| (id.clone(), ClaimState::Gone)).collect();
        self.for_each_claim(|claim| {
            let id = VolumeId::from_uid(claim.metadata.uid.as_deref().unwrap_or_default());
            if let Some(state) = id.ok().and_then(|id| states.get_mut(&id)) {
                *state = match claim_ignore_reason(&self.identity, &claim) {
                    None => ClaimState::Pending,
                    Some(ClaimIgnoreReason::HasVolume | ClaimIgnoreReason::NotPending) => {
                        ClaimState::BoundOrLost
                    }
                    Some(_) => ClaimState::Gone,
                };
            }
            ControlFlow::Continue(())
        })
        .await?;
        Ok(states)
    }

    /// Finds the claim that a volume was created for by its UID, whatever its name is.
    pub(crate) async fn find_claim(
        &self,
        id: &VolumeId,
    ) -> Result<Option<PersistentVolumeClaim>, ApplyError> {
        let mut found = None;
        self.for_each_claim(|claim| {
            if claim.metadata.uid.as_deref() != Some(id.claim_uid()) {
                return ControlFlow::Continue(());
            }
            found = Some(claim);
            ControlFlow::Break(())
        })
        .await?;
        Ok(found)
    }

    /// Visits all claims of the cluster, page by page.
    async fn for_each_claim(
        &self,
        mut visit: impl FnMut(PersistentVolumeClaim) -> ControlFlow<()> + Send,
    ) -> Result<(), ApplyError> {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.client.0.clone());
        let mut params = ListParams::default().limit(PAGE_SIZE);
        loop {
            let page = with_timeout(claims.list(&params)).await.map_err(ApiCall::ListClaims.wrap_error())?;
            if page.items.into_iter().try_for_each(&mut visit).is_break() {
                return Ok(());
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}
