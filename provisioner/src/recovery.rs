//! Actions of an operator for volumes whose PersistentVolume, or whose disk, is lost.

pub(crate) mod orphan;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Patch, PostParams};
use serde_json::json;

use crate::api::call::{ApiCall, ApiError, error_hint};
use crate::api::writer::ApiWriter;
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::objects::{is_marked_lost, is_of_driver, is_on_node, named_store};
use crate::recovery::orphan::{
    OrphanState, OrphanVolume, adopted_volume, is_removal, plan_orphan, removed_volume,
};
use crate::snapshot::{SnapshotId, SnapshotOwner, list_ready_snapshots, list_snapshot_owners};
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store_id::StoreId;

/// The reason why an action of an operator failed. Each can be repeated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// The volume is not an orphan, or may still be needed; nothing was changed.
    #[error("can't {action} volume {id}: {}", describe_state(state))]
    Unsuitable {
        /// The action.
        action: &'static str,
        /// The volume.
        id: VolumeId,
        /// The reason.
        state: Box<OrphanState>,
    },
    /// The API server failed, or rejected the call.
    #[error("can't {call}{}", error_hint(source))]
    Api {
        /// The failed call.
        call: &'static str,
        /// The cause.
        #[source]
        source: kube::Error,
    },
}

fn describe_state(state: &OrphanState) -> String {
    match state {
        OrphanState::Owned => {
            "it has a PersistentVolume: delete its claim, if its data is not needed".to_owned()
        }
        OrphanState::Provisioning => "it is being provisioned for its claim: wait".to_owned(),
        OrphanState::OnOtherNode { node } => {
            format!("its PersistentVolume is on node {node}: move or delete that first")
        }
        OrphanState::InOtherStore { store } => {
            let store = store
                .as_ref()
                .map_or("the store without a name".to_owned(), |name| format!("store {name:?}"));
            format!(
                "its PersistentVolume is in {store} of this node: compare the two, and remove the directory here if its data are \
                 not needed"
            )
        }
        OrphanState::Claimed { claim, .. } => {
            let [namespace, name] =
                [&claim.namespace, &claim.name].map(|text| text.as_deref().unwrap_or_default());
            format!(
                "claim {namespace}/{name}, which it was created for, exists: adopt it, or delete the claim first"
            )
        }
        OrphanState::Unclaimed => "its claim does not exist any more".to_owned(),
    }
}

impl From<ApiError> for RecoveryError {
    fn from(ApiError { call, source }: ApiError) -> Self {
        Self::Api { call: call.text(), source }
    }
}

/// Acts on the API server for an operator, whether the provisioner of the node runs or not. It changes no directory.
pub struct VolumeRecovery {
    api: ApiWriter,
}

/// The PersistentVolumes and claims that volumes of a node may belong to.
#[derive(Debug)]
#[non_exhaustive]
pub struct VolumeOwners {
    /// All PersistentVolumes of the driver, by name.
    pub volumes: BTreeMap<String, PersistentVolume>,
    /// The claims whose UID is that of a volume.
    pub claims: BTreeMap<VolumeId, PersistentVolumeClaim>,
}

impl VolumeRecovery {
    /// For the volumes of this driver and node. The hook is called at each step; for tests.
    pub fn new(client: Client, identity: ProvisionerIdentity, hook: Option<Arc<dyn StepHook>>) -> Self {
        Self { api: ApiWriter::new(identity, client, StepRunner::new(hook)) }
    }

    /// Reads who owns volumes: the PersistentVolumes of the driver, and the claims of these volumes.
    ///
    /// # Errors
    /// [`RecoveryError::Api`].
    pub async fn read_owners(&self, ids: &BTreeSet<VolumeId>) -> Result<VolumeOwners, RecoveryError> {
        let mut claims = BTreeMap::new();
        let visit = |claim: PersistentVolumeClaim| {
            let id = VolumeId::from_uid(claim.metadata.uid.as_deref().unwrap_or_default()).ok();
            if let Some(id) = id.filter(|id| ids.contains(id)) {
                claims.insert(id, claim);
            }
            ControlFlow::Continue(())
        };
        self.api.for_each(ApiCall::ListClaims, visit).await?;
        // Afterwards: a volume that is provisioned in between has a claim, or a PersistentVolume.
        let mut volumes = BTreeMap::new();
        let visit = |volume: PersistentVolume| {
            if is_of_driver(&self.api.identity, &volume) {
                volumes.insert(volume.metadata.name.clone().unwrap_or_default(), volume);
            }
            ControlFlow::Continue(())
        };
        self.api.for_each(ApiCall::ListVolumes, visit).await?;
        Ok(VolumeOwners { volumes, claims })
    }

    /// Lists the snapshots of this node that were taken and are not being removed; none without the snapshot API, or without
    /// the permission to list their objects. A directory without an identity and without any of them is not a new store:
    /// [`plan_new_store`](crate::plan_new_store).
    ///
    /// # Errors
    /// [`RecoveryError::Api`].
    pub async fn list_ready_snapshots(&self) -> Result<BTreeSet<SnapshotId>, RecoveryError> {
        let listed = list_ready_snapshots(self.api.client(), &self.api.identity).await;
        Ok(listed.map_err(|error| ApiCall::ListSnapshotContents.wrap_error(error))?)
    }

    /// Lists whom the driver's snapshots belong to, on any node: one in the store without an owner is an orphan.
    ///
    /// # Errors
    /// [`RecoveryError::Api`], also without the snapshot API: then nothing is known of them.
    pub async fn list_snapshot_owners(&self) -> Result<BTreeMap<SnapshotId, SnapshotOwner>, RecoveryError> {
        let listed = list_snapshot_owners(self.api.client(), &self.api.identity).await;
        Ok(listed.map_err(|error| ApiCall::ListSnapshotContents.wrap_error(error))?)
    }

    /// Creates the PersistentVolume of an orphan. Success also if an earlier call did it.
    ///
    /// # Errors
    /// [`RecoveryError::Unsuitable`] or [`RecoveryError::Api`].
    pub async fn adopt_volume(
        &self,
        orphan: &OrphanVolume,
        class: Option<&str>,
    ) -> Result<(), RecoveryError> {
        let owners = self.read_owners(&BTreeSet::from([orphan.id.clone()])).await?;
        let state = owners.orphan_state(&self.api.identity, &orphan.id);
        match adopted_volume(&self.api.identity, orphan, &state, class) {
            Some(volume) => self.create_volume(&volume).await,
            None if state == OrphanState::Owned => Ok(()),
            None => Err(RecoveryError::Unsuitable {
                action: "adopt",
                id: orphan.id.clone(),
                state: Box::new(state),
            }),
        }
    }

    /// Has the provisioner of the node remove an orphan: creates a released PersistentVolume for it, which the provisioner
    /// deletes with the volume, unless that is in use. Success also if an earlier call did it.
    ///
    /// # Errors
    /// [`RecoveryError::Unsuitable`]: also if a claim exists that it was created for; or [`RecoveryError::Api`].
    pub async fn remove_volume(&self, orphan: &OrphanVolume) -> Result<(), RecoveryError> {
        let owners = self.read_owners(&BTreeSet::from([orphan.id.clone()])).await?;
        let state = owners.orphan_state(&self.api.identity, &orphan.id);
        let is_requested =
            || owners.volumes.get(orphan.id.as_str()).is_some_and(|volume| is_removal(&orphan.id, volume));
        match removed_volume(&self.api.identity, orphan, &state) {
            Some(volume) => self.create_volume(&volume).await,
            // The object exists. Only the one of an earlier removal counts as success: another one may keep the data.
            None if state == OrphanState::Owned && is_requested() => Ok(()),
            None => Err(RecoveryError::Unsuitable {
                action: "remove",
                id: orphan.id.clone(),
                state: Box::new(state),
            }),
        }
    }

    /// Declares the disk of a store lost for good: annotates each PersistentVolume of this node that names it. So the
    /// provisioner serves another store, and deletes those volumes after their claims. Returns their names.
    ///
    /// # Errors
    /// [`RecoveryError::Api`]: some may be annotated; a repeated call annotates the rest.
    pub async fn declare_lost(&self, store: &StoreId) -> Result<Vec<String>, RecoveryError> {
        let owners = self.read_owners(&BTreeSet::new()).await?;
        let mut names = Vec::new();
        for (name, volume) in owners.volumes {
            if !is_on_node(&self.api.identity, &volume) || named_store(&volume).as_ref() != Some(store) {
                continue;
            }
            // An earlier call may have been killed after some of them.
            if !is_marked_lost(&self.api.identity, &volume) {
                self.mark_lost(&volume, store).await?;
            }
            names.push(name);
        }
        Ok(names)
    }

    /// Annotates exactly this version of a PersistentVolume.
    async fn mark_lost(&self, volume: &PersistentVolume, store: &StoreId) -> Result<(), RecoveryError> {
        // The version protects a volume that has changed since it was read.
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": volume.metadata.uid,
            "resourceVersion": volume.metadata.resource_version,
            "annotations": { self.api.identity.driver.lost_annotation(): store.as_str() },
        } }));
        let marked = self.api.patch_volume(VolumeStep::MarkLost, volume, &patch).await;
        marked.map_err(|error| RecoveryError::Api {
            call: "annotate the PersistentVolume",
            source: error.source,
        })
    }

    async fn create_volume(&self, volume: &PersistentVolume) -> Result<(), RecoveryError> {
        let (api, params) = (self.api.all::<PersistentVolume>(), PostParams::default());
        let created = self.api.write(VolumeStep::CreatePersistentVolume, api.create(&params, volume)).await;
        created.map_err(|error| ApiCall::CreateVolume.wrap_error(error))?;
        Ok(())
    }
}

impl VolumeOwners {
    /// The reason why a volume has no PersistentVolume on its node, if it has none.
    pub fn orphan_state(&self, identity: &ProvisionerIdentity, id: &VolumeId) -> OrphanState {
        plan_orphan(identity, self.volumes.get(id.as_str()), self.claims.get(id))
    }
}

impl fmt::Debug for VolumeRecovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeRecovery").field("identity", &self.api.identity).finish_non_exhaustive()
    }
}
