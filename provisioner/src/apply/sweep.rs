//! Volumes that nobody refers to.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::ListParams;
use nodekeel_fsquota::Bytes;

use crate::apply::{Applier, ApplyError, Call};
use crate::id::VolumeId;
use crate::plan::{ClaimIgnored, ignored};
use crate::store::{StoreError, VolumeUsage};

/// How many claims are asked for at a time.
const PAGE: u32 = 500;

/// What an empty directory takes at most.
const EMPTY: Bytes = Bytes(64 << 10);

/// What became of a volume without an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swept {
    /// There is no such volume, or it has an object, or will have.
    Nothing,
    /// It was empty, and has been removed.
    Removed,
    /// It holds data, and has been left alone.
    Orphan,
}

/// Where the claim of a volume without an object is.
enum Owner {
    /// It is here, and its volume will be asked for again.
    Pending,
    /// It has a volume, or has lost it.
    Served,
    /// It is gone, or somebody else's by now.
    Gone,
}

impl Applier {
    /// Removes a volume that was made and never handed out: a crash came between its directory and its object, and its claim
    /// is gone since.
    ///
    /// Only an empty one: what holds data was in use, and whoever removed its object may have wanted to keep them.
    pub(crate) async fn sweep(&self, id: &VolumeId) -> Result<Swept, ApplyError> {
        let _lock = self.locks.lock(id).await;
        let usage = match self.store.usage(id).await {
            Ok(volume) => volume,
            Err(StoreError::NotFound { .. }) => return Ok(Swept::Nothing),
            Err(error) => return Err(ApplyError::Store(error)),
        };
        if self.live_volume(id.as_str()).await?.is_some() {
            return Ok(Swept::Nothing);
        }
        match self.owner(id).await? {
            Owner::Pending => Ok(Swept::Nothing),
            Owner::Gone if is_empty(&usage) => {
                tracing::info!(handle = %id, claim_uid = id.claim_uid(), "deleting volume: it is empty and was never used");
                self.store.remove(id).await.map_err(ApplyError::Store)?;
                Ok(Swept::Removed)
            }
            Owner::Served | Owner::Gone => {
                tracing::warn!(handle = %id, "a volume with data has no PersistentVolume; it is left alone");
                Ok(Swept::Orphan)
            }
        }
    }

    /// What the claim with the volume's UID says, wherever it is.
    async fn owner(&self, id: &VolumeId) -> Result<Owner, ApplyError> {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.client.0.clone());
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let page = claims.list(&params).await.map_err(Call::ListClaims.failed())?;
            let owner = page.items.iter().find(|claim| claim.metadata.uid.as_deref() == Some(id.claim_uid()));
            if let Some(claim) = owner {
                return Ok(match ignored(&self.me, claim) {
                    None => Owner::Pending,
                    Some(ClaimIgnored::HasVolume | ClaimIgnored::NotPending) => Owner::Served,
                    Some(_) => Owner::Gone,
                });
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(Owner::Gone),
            }
        }
    }
}

fn is_empty(volume: &VolumeUsage) -> bool {
    volume.usage.inodes.0 <= 1 && volume.usage.bytes <= EMPTY
}
