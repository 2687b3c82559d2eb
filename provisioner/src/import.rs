//! Imports a directory as the volume of a claim: the directory becomes a volume, and then gets its
//! PersistentVolume.

pub(crate) mod decide;

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use crate::api::call::{error_hint, none_if_not_found, status_code};
use crate::api::timeout::with_timeout;
use crate::claim::decide::ObservedClaim;
use crate::claim::manifest::build_persistent_volume;
use crate::claim::spec::{ClaimRejection, VolumeSpec};
use crate::dir_store::{ImportMode, ImportOutcome, SourceError, VolumeImporter};
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::import::decide::{ImportAction, ImportRejection, plan_import};
use crate::objects::{class_name, is_in_store};
use crate::step::{StepHook, StepRunner, VolumeStep};

/// A directory to import, and its claim.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct ImportRequest {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name. No pod may use it yet.
    pub claim: String,
    /// The directory: an absolute path in UTF-8.
    pub source: PathBuf,
    /// Copy or move.
    pub mode: ImportMode,
}

/// The dependencies of an import.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct ImportDeps {
    /// The API server.
    pub client: Client,
    /// The store.
    pub importer: Arc<VolumeImporter>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
}

/// An import failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The claim does not exist.
    #[error("PersistentVolumeClaim {namespace}/{claim} does not exist: create it first")]
    NoClaim {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        claim: String,
    },
    /// The claim can't get this volume; nothing was changed.
    #[error("can't import for claim {namespace}/{claim}")]
    Rejected {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        claim: String,
        /// The cause.
        #[source]
        source: ImportRejection,
    },
    /// The directory can't become a volume. The message tells whether it was moved.
    #[error(transparent)]
    Source(SourceError),
    /// The API server failed, or rejected the call. Repeat the import to resume.
    #[error("can't {call}{}; repeat the command to resume", error_hint(source))]
    Api {
        /// The failed call.
        call: &'static str,
        /// The cause.
        #[source]
        source: kube::Error,
    },
    /// The claim was deleted, or got another volume, while the directory became a volume.
    #[error(
        "claim {namespace}/{claim} was deleted or bound meanwhile; the data are kept as volume {id}, which has no \
         PersistentVolume"
    )]
    ClaimChanged {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        claim: String,
        /// The volume.
        id: VolumeId,
    },
    /// The runtime shut down. Repeat the import to resume.
    #[error("the import was interrupted: repeat the command to resume")]
    Interrupted,
}

/// Makes a directory the volume of a claim, and creates its PersistentVolume, which is retained when the claim
/// is deleted. Success also if an earlier call did it.
///
/// The claim is not changed: the cluster's volume controllers bind it. A provisioner that serves the
/// node may run at the same time; where it creates an empty volume for the claim first, because a pod uses the claim,
/// the import fails and the directory keeps its data.
///
/// # Errors
/// [`ImportError`]: the message names the remedy. Each call can be repeated, also after a kill.
///
/// # Cancel safety
/// A dropped future leaves the directory at one of its places; the next call resumes.
pub async fn import_directory(
    identity: &ProvisionerIdentity,
    deps: &ImportDeps,
    request: &ImportRequest,
) -> Result<(VolumeId, ImportOutcome), ImportError> {
    let import = Import { identity, deps, request, steps: StepRunner::new(deps.hook.clone()) };
    let (id, outcome) = match import.plan().await? {
        ImportAction::Done(id) => (id, ImportOutcome::AlreadyDone),
        ImportAction::Import(spec) => {
            // First the directory: a PersistentVolume promises that there is one.
            let outcome = import.store_directory(&spec).await?;
            import.create_volume(&spec).await?;
            (spec.id, outcome)
        }
    };
    // Last, the record of the import goes. Until then, a repeated call finds the directory and resumes.
    deps.importer.finish(&id).map_err(ImportError::Source)?;
    Ok((id, outcome))
}

struct Import<'a> {
    identity: &'a ProvisionerIdentity,
    deps: &'a ImportDeps,
    request: &'a ImportRequest,
    steps: StepRunner,
}

impl Import<'_> {
    /// Reads the claim, its class and its volume, and decides.
    async fn plan(&self) -> Result<ImportAction, ImportError> {
        let ImportRequest { namespace, claim: name, source, .. } = self.request;
        let claim = self.read_claim().await?;
        let claim = claim
            .ok_or_else(|| ImportError::NoClaim { namespace: namespace.clone(), claim: name.clone() })?;
        let class = self.read_class(class_name(&claim).unwrap_or_default()).await?;
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let id = VolumeId::from_uid(uid).map_err(|_| {
            self.rejected(ImportRejection::Claim(ClaimRejection::InvalidUid { uid: uid.to_owned() }))
        })?;
        let volume = self.read_volume(&id).await?;
        let observed = ObservedClaim {
            claim: &claim,
            class: class.as_ref(),
            volume: volume.as_ref(),
            node_labels: None,
        };
        let source = source.to_string_lossy();
        plan_import(self.identity, observed, &source).map_err(|rejection| self.rejected(rejection))
    }

    fn rejected(&self, source: ImportRejection) -> ImportError {
        let ImportRequest { namespace, claim, .. } = self.request.clone();
        ImportError::Rejected { namespace, claim, source }
    }

    async fn read_claim(&self) -> Result<Option<PersistentVolumeClaim>, ImportError> {
        let claims = Api::namespaced(self.deps.client.clone(), &self.request.namespace);
        let claim = with_timeout(claims.get(&self.request.claim)).await;
        none_if_not_found(claim).map_err(api_error("read the claim"))
    }

    /// Listed, because the node's account may not get a single class.
    async fn read_class(&self, name: &str) -> Result<Option<StorageClass>, ImportError> {
        let classes: Api<StorageClass> = Api::all(self.deps.client.clone());
        let params = ListParams::default().fields(&format!("metadata.name={name}"));
        let found =
            with_timeout(classes.list(&params)).await.map_err(api_error("list the storage classes"))?;
        Ok(found.items.into_iter().find(|class| class.metadata.name.as_deref() == Some(name)))
    }

    async fn read_volume(&self, id: &VolumeId) -> Result<Option<PersistentVolume>, ImportError> {
        let volumes: Api<PersistentVolume> = Api::all(self.deps.client.clone());
        none_if_not_found(with_timeout(volumes.get(id.as_str())).await)
            .map_err(api_error("read the PersistentVolume"))
    }

    /// Makes the directory a volume.
    async fn store_directory(&self, spec: &VolumeSpec) -> Result<ImportOutcome, ImportError> {
        let (importer, id, limits) = (Arc::clone(&self.deps.importer), spec.id.clone(), spec.limits);
        let ImportRequest { source, mode, .. } = self.request.clone();
        let import = move || importer.import(&id, limits, &source, mode);
        // A copy blocks for as long as the disk takes.
        let imported = tokio::task::spawn_blocking(import).await;
        imported.map_err(|_| ImportError::Interrupted)?.map_err(ImportError::Source)
    }

    async fn create_volume(&self, spec: &VolumeSpec) -> Result<(), ImportError> {
        let changed = || {
            let ImportRequest { namespace, claim, .. } = self.request.clone();
            ImportError::ClaimChanged { namespace, claim, id: spec.id.clone() }
        };
        // The copy may have taken long, so the claim may have been deleted or replaced.
        let claim = self.read_claim().await?.map(|claim| claim.metadata);
        claim
            .filter(|claim| claim.uid == spec.claim_ref.uid && claim.deletion_timestamp.is_none())
            .ok_or_else(changed)?;
        let mut volume = build_persistent_volume(self.identity, Some(self.deps.importer.identity()), spec);
        volume.metadata.annotations.get_or_insert_default().extend([self.import_annotation()]);
        let (api, params) = (Api::all(self.deps.client.clone()), PostParams::default());
        let create = with_timeout(api.create(&params, &volume));
        match self.steps.run_async(VolumeStep::CreatePersistentVolume, create).await {
            Ok(_) => Ok(()),
            // An earlier call, or the provisioner, has created it for the same directory.
            Err(error) if status_code(&error) == Some(409) => {
                let found = self.read_volume(&spec.id).await?.filter(|found| self.is_of_claim(found, spec));
                self.retain_volume(&found.ok_or_else(changed)?).await
            }
            Err(error) => Err(api_error("create the PersistentVolume")(error)),
        }
    }

    /// The annotation with the directory.
    fn import_annotation(&self) -> (String, String) {
        (self.identity.driver.import_annotation(), self.request.source.to_string_lossy().into_owned())
    }

    /// Returns whether a PersistentVolume is on this node and of the claim of this volume.
    fn is_of_claim(&self, found: &PersistentVolume, spec: &VolumeSpec) -> bool {
        let claim = found.spec.as_ref().and_then(|found| found.claim_ref.as_ref());
        claim.is_some_and(|claim| claim.uid == spec.claim_ref.uid) && is_in_store(self.identity, found)
    }

    /// Makes an existing PersistentVolume that of this import, in any version: the volume controllers bind it at the
    /// same time.
    async fn retain_volume(&self, volume: &PersistentVolume) -> Result<(), ImportError> {
        let (key, source) = self.import_annotation();
        let patch = Patch::Merge(json!({
            "metadata": { "uid": volume.metadata.uid, "annotations": { key: source } },
            "spec": { "persistentVolumeReclaimPolicy": "Retain" },
        }));
        let volumes: Api<PersistentVolume> = Api::all(self.deps.client.clone());
        let (name, params) = (volume.metadata.name.as_deref().unwrap_or_default(), PatchParams::default());
        let patched = with_timeout(volumes.patch(name, &params, &patch));
        let retained = self.steps.run_async(VolumeStep::UpdateVolume, patched).await;
        retained.map(drop).map_err(api_error("retain the PersistentVolume"))
    }
}

fn api_error(call: &'static str) -> impl FnOnce(kube::Error) -> ImportError {
    move |source| ImportError::Api { call, source }
}

impl std::fmt::Debug for ImportDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImportDeps").field("importer", &self.importer).finish_non_exhaustive()
    }
}
