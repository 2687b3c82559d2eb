//! What an operator does about volumes whose PersistentVolume, or whose disk, is lost.

pub(crate) mod orphan;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::api::timeout::with_timeout;
use crate::apply::{error_hint, status_code};
use crate::deletion::decide::ownership_mismatch;
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::loss::store::{is_marked_lost, named_store};
use crate::plan::ProvisionerIdentity;
use crate::recovery::orphan::{OrphanState, adopted_volume, is_removal, plan_orphan, removed_volume};
use crate::snapshot::{SnapshotId, list_ready_snapshots};
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store::VolumeUsage;
use crate::store_id::StoreId;

/// Page size of lists.
const PAGE_SIZE: u32 = 500;

/// Why an action of an operator failed. Each can be repeated.
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
        /// Why.
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

fn api_error(call: &'static str) -> impl FnOnce(kube::Error) -> RecoveryError {
    move |source| RecoveryError::Api { call, source }
}

/// Acts on the API server for an operator, beside the provisioner of the node or without it. It changes no directory.
pub struct VolumeRecovery {
    client: Client,
    identity: ProvisionerIdentity,
    steps: StepRunner,
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
        Self { client, identity, steps: StepRunner::new(hook) }
    }

    /// Reads who owns volumes: the PersistentVolumes of the driver, and the claims of these volumes.
    ///
    /// # Errors
    /// [`RecoveryError::Api`].
    pub async fn read_owners(&self, ids: &BTreeSet<VolumeId>) -> Result<VolumeOwners, RecoveryError> {
        let mut claims = BTreeMap::new();
        self.for_each("list the claims", |claim: PersistentVolumeClaim| {
            let id = VolumeId::from_uid(claim.metadata.uid.as_deref().unwrap_or_default()).ok();
            if let Some(id) = id.filter(|id| ids.contains(id)) {
                claims.insert(id, claim);
            }
        })
        .await?;
        // Afterwards: a volume that is provisioned meanwhile has a claim, or a PersistentVolume.
        let mut volumes = BTreeMap::new();
        self.for_each("list the PersistentVolumes", |volume: PersistentVolume| {
            let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            if csi.is_some_and(|csi| csi.driver == self.identity.driver.as_str()) {
                volumes.insert(volume.metadata.name.clone().unwrap_or_default(), volume);
            }
        })
        .await?;
        Ok(VolumeOwners { volumes, claims })
    }

    /// Lists the snapshots of this node that were taken and are not being removed; none without the snapshot API, or without
    /// the permission to list their objects. A directory without an identity and without any of them is not a new store:
    /// [`plan_new_store`](crate::plan_new_store).
    ///
    /// # Errors
    /// [`RecoveryError::Api`].
    pub async fn list_ready_snapshots(&self) -> Result<BTreeSet<SnapshotId>, RecoveryError> {
        let listed = list_ready_snapshots(&self.client, &self.identity).await;
        listed.map_err(api_error("list the VolumeSnapshotContents of this node"))
    }

    /// Creates the PersistentVolume of an orphan. Success also if an earlier call did it.
    ///
    /// # Errors
    /// [`RecoveryError::Unsuitable`] or [`RecoveryError::Api`].
    pub async fn adopt_volume(
        &self,
        store: &StoreId,
        (id, kind, usage): (&VolumeId, VolumeKind, &VolumeUsage),
        class: Option<&str>,
    ) -> Result<(), RecoveryError> {
        let state = self.read_state(id).await?;
        match adopted_volume((&self.identity, store), (id, kind, usage), (&state, class)) {
            Some(volume) => self.create_volume(&volume).await,
            None if state == OrphanState::Owned => Ok(()),
            None => {
                Err(RecoveryError::Unsuitable { action: "adopt", id: id.clone(), state: Box::new(state) })
            }
        }
    }

    /// Has the provisioner of the node remove an orphan: creates a released PersistentVolume for it, which the provisioner
    /// deletes with the volume, unless that is in use. Success also if an earlier call did it.
    ///
    /// # Errors
    /// [`RecoveryError::Unsuitable`]: also if a claim exists that it was created for; or [`RecoveryError::Api`].
    pub async fn remove_volume(
        &self,
        store: &StoreId,
        (id, kind, usage): (&VolumeId, VolumeKind, &VolumeUsage),
    ) -> Result<(), RecoveryError> {
        let owners = self.read_owners(&BTreeSet::from([id.clone()])).await?;
        let state = owners.orphan_state(&self.identity, id);
        match removed_volume((&self.identity, store), (id, kind, usage), &state) {
            Some(volume) => self.create_volume(&volume).await,
            None if state == OrphanState::Owned
                && owners.volumes.get(id.as_str()).is_some_and(|volume| is_removal(id, volume)) =>
            {
                Ok(())
            }
            None => {
                Err(RecoveryError::Unsuitable { action: "remove", id: id.clone(), state: Box::new(state) })
            }
        }
    }

    /// Declares the disk of a store lost for good: annotates each PersistentVolume of this node that names it. So the
    /// provisioner serves another store, and deletes those volumes after their claims. Returns their names.
    ///
    /// # Errors
    /// [`RecoveryError::Api`]: some may be annotated; a repeated call annotates the rest.
    pub async fn declare_lost(&self, store: &StoreId) -> Result<Vec<String>, RecoveryError> {
        let owners = self.read_owners(&BTreeSet::new()).await?;
        let is_here = |volume: &PersistentVolume| {
            volume.spec.as_ref().is_some_and(|spec| ownership_mismatch(&self.identity, spec).is_none())
        };
        let mut names = Vec::new();
        for (name, volume) in owners.volumes {
            if !is_here(&volume) || named_store(&volume).as_ref() != Some(store) {
                continue;
            }
            if !is_marked_lost(&self.identity, &volume) {
                self.mark_lost(&volume, store).await?;
            }
            names.push(name);
        }
        Ok(names)
    }

    /// Annotates exactly this version of a PersistentVolume.
    async fn mark_lost(&self, volume: &PersistentVolume, store: &StoreId) -> Result<(), RecoveryError> {
        let metadata = json!({
            "uid": volume.metadata.uid,
            "resourceVersion": volume.metadata.resource_version,
            "annotations": { self.identity.driver.lost_annotation(): store.as_str() },
        });
        let (api, name) = (self.volumes_api(), volume.metadata.name.as_deref().unwrap_or_default());
        let (patch, params) = (Patch::Merge(json!({ "metadata": metadata })), PatchParams::default());
        let patched =
            self.steps.run_async(VolumeStep::MarkLost, with_timeout(api.patch(name, &params, &patch)));
        match patched.await {
            // It was deleted meanwhile.
            Err(error) if status_code(&error) == Some(404) => Ok(()),
            patched => patched.map(drop).map_err(api_error("annotate the PersistentVolume")),
        }
    }

    async fn create_volume(&self, volume: &PersistentVolume) -> Result<(), RecoveryError> {
        let (api, params) = (self.volumes_api(), PostParams::default());
        let create = with_timeout(api.create(&params, volume));
        let created = self.steps.run_async(VolumeStep::CreatePersistentVolume, create).await;
        created.map(drop).map_err(api_error("create the PersistentVolume"))
    }

    async fn read_state(&self, id: &VolumeId) -> Result<OrphanState, RecoveryError> {
        let owners = self.read_owners(&BTreeSet::from([id.clone()])).await?;
        Ok(owners.orphan_state(&self.identity, id))
    }

    fn volumes_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Visits all objects of a kind, page by page.
    async fn for_each<K>(&self, call: &'static str, mut visit: impl FnMut(K)) -> Result<(), RecoveryError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug,
    {
        let api: Api<K> = Api::all(self.client.clone());
        let mut params = ListParams::default().limit(PAGE_SIZE);
        loop {
            let page = with_timeout(api.list(&params)).await.map_err(api_error(call))?;
            page.items.into_iter().for_each(&mut visit);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

impl VolumeOwners {
    /// Why a volume has no PersistentVolume on its node, if it has none.
    pub fn orphan_state(&self, identity: &ProvisionerIdentity, id: &VolumeId) -> OrphanState {
        plan_orphan(identity, self.volumes.get(id.as_str()), self.claims.get(id))
    }
}

impl fmt::Debug for VolumeRecovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeRecovery").field("identity", &self.identity).finish_non_exhaustive()
    }
}
