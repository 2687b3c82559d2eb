//! Volumes that nobody refers to.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::ListParams;

use crate::apply::{Applier, ApplyError, Call, is_here};
use crate::id::VolumeId;
use crate::in_time::in_time;
use crate::plan::{ClaimIgnored, ignored};
use crate::store::StoreError;

/// How many claims are asked for at a time.
const PAGE: u32 = 500;

/// What became of a volume without an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swept {
    /// It has an object, or will have.
    Nothing,
    /// It was empty, and has been removed.
    Removed,
    /// It may hold data, and has been left alone.
    Orphan,
}

/// Where the claim of a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// It is here, and its volume will be asked for again.
    Pending,
    /// It has a volume, or has lost it.
    Served,
    /// It is gone, or somebody else's by now.
    Gone,
}

impl Applier {
    /// Whether there is such a volume, as far as can be told without the API.
    pub(crate) async fn exists(&self, id: &VolumeId) -> bool {
        !matches!(self.store.usage(id).await, Err(StoreError::NotFound { .. }))
    }

    /// Removes a volume that was made and never handed out: a crash came between its directory and its object, and its claim
    /// is gone since, or has its volume on another node.
    ///
    /// Only an empty one: what holds data was in use, and whoever removed its object may have wanted to keep them.
    pub(crate) async fn sweep(&self, id: &VolumeId, owner: Owner) -> Result<Swept, ApplyError> {
        let _lock = self.locks.lock(id).await;
        match (self.live_volume(id.as_str()).await?, owner) {
            (Some(volume), _) if is_here(&self.me, &volume) => Ok(Swept::Nothing),
            (Some(_), _) | (None, Owner::Gone) => self.remove_unused(id).await,
            (None, Owner::Pending) => Ok(Swept::Nothing),
            (None, Owner::Served) => Ok(Swept::Orphan),
        }
    }

    /// Removes a volume without an object on this node, if it is empty.
    pub(super) async fn remove_unused(&self, id: &VolumeId) -> Result<Swept, ApplyError> {
        let _reserved = self.reserve(id).await?;
        tracing::info!(handle = %id, claim_uid = id.claim_uid(), "deleting volume if it is empty: it was never used here");
        match self.store.remove_empty(id).await.map_err(ApplyError::Store)? {
            true => Ok(Swept::Removed),
            false => Ok(Swept::Orphan),
        }
    }

    /// Where the claims of volumes are. It lists all claims once; one that isn't there is gone for good, because a volume is
    /// younger than its claim, and no UID is used again.
    pub(crate) async fn owners(
        &self,
        ids: &BTreeSet<VolumeId>,
    ) -> Result<HashMap<VolumeId, Owner>, ApplyError> {
        let mut owners: HashMap<_, _> = ids.iter().map(|id| (id.clone(), Owner::Gone)).collect();
        self.each_claim(|claim| {
            let id = VolumeId::from_uid(claim.metadata.uid.as_deref().unwrap_or_default());
            if let Some(owner) = id.ok().and_then(|id| owners.get_mut(&id)) {
                *owner = match ignored(&self.me, &claim) {
                    None => Owner::Pending,
                    Some(ClaimIgnored::HasVolume | ClaimIgnored::NotPending) => Owner::Served,
                    Some(_) => Owner::Gone,
                };
            }
            ControlFlow::Continue(())
        })
        .await?;
        Ok(owners)
    }

    /// The claim that a volume was made for, whatever its name is.
    pub(super) async fn claim_of(&self, id: &VolumeId) -> Result<Option<PersistentVolumeClaim>, ApplyError> {
        let mut found = None;
        self.each_claim(|claim| {
            if claim.metadata.uid.as_deref() != Some(id.claim_uid()) {
                return ControlFlow::Continue(());
            }
            found = Some(claim);
            ControlFlow::Break(())
        })
        .await?;
        Ok(found)
    }

    /// Shows all claims of the cluster, page by page.
    async fn each_claim(
        &self,
        mut show: impl FnMut(PersistentVolumeClaim) -> ControlFlow<()> + Send,
    ) -> Result<(), ApplyError> {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.client.0.clone());
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let page = in_time(claims.list(&params)).await.map_err(Call::ListClaims.failed())?;
            if page.items.into_iter().try_for_each(&mut show).is_break() {
                return Ok(());
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}
