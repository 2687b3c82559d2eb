//! The control plane of the benchmark, and claims in it.

use std::collections::HashSet;
use std::future::ready;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use nodekeel_provisioner::SELECTED_NODE;
use serde_json::{Value, json};
use testbed::{Kube, KubeDaemon, KubeUser};

use crate::contender::{Contender, api_client};
use crate::watches::ObjectWatches;

/// Maximum number of parallel requests of this program.
const MAX_PARALLEL: usize = 32;

/// Timeout for the events of claims.
pub(crate) const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct BenchCluster {
    pub(crate) kube: Kube,
    client: Client,
    watches: ObjectWatches,
}

/// The StorageClass of a contender.
pub(crate) fn storage_class(contender: Contender) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": { "name": contender.name() },
        "provisioner": contender.driver(),
        "volumeBindingMode": "WaitForFirstConsumer", "reclaimPolicy": "Delete",
    })
}

/// Claims that were created together.
pub(crate) struct ClaimBatch {
    contender: Contender,
    label: String,
    claims: HashSet<String>,
    volumes: HashSet<String>,
}

impl ClaimBatch {
    /// The names of their volumes.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = &str> {
        self.volumes.iter().map(String::as_str)
    }
}

impl BenchCluster {
    pub(crate) async fn start() -> Result<Self> {
        let account = KubeUser::service_account("nodekeel", "provisionerd");
        // etcd usually has another disk than volumes; on a shared disk, each would wait for the other.
        let etcd = (KubeDaemon::Etcd, "--unsafe-no-fsync");
        let builder = Kube::builder()
            .with_user(account)
            .without_daemon(KubeDaemon::Scheduler)
            .with_argument(etcd.0, etcd.1);
        let kube = builder.with_controller_requests_per_second(2000).start()?;
        kube.apply_manifests(include_str!("../../../../deploy/namespace.yaml"))?;
        kube.apply_manifests(include_str!("../../../../deploy/rbac.yaml"))?;
        for contender in Contender::ALL {
            kube.apply_manifests(&storage_class(contender).to_string())?;
        }
        let client = api_client(&kube.kubeconfig_file("admin")?).await?;
        let watches = ObjectWatches::start(&client);
        Ok(Self { kube, client, watches })
    }

    /// The kubeconfig of the account that deploy/rbac.yaml is for.
    pub(crate) fn account_kubeconfig(&self) -> Result<PathBuf> {
        self.kube.kubeconfig_file("system:serviceaccount:nodekeel:provisionerd")
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Creates claims at once and waits until all are bound; returns the milliseconds it took.
    pub(crate) async fn bind_claims(
        &mut self,
        contender: Contender,
        label: &str,
        count: usize,
    ) -> Result<(ClaimBatch, f64)> {
        let claims = self.claims();
        let start = Instant::now();
        let created = stream::iter(0..count).map(|number| {
            let claims = claims.clone();
            async move {
                claims
                    .create(&PostParams::default(), &claim_object(contender, label, number)?)
                    .await
                    .context("claim")
            }
        });
        let created: Vec<PersistentVolumeClaim> =
            created.buffer_unordered(MAX_PARALLEL).try_collect().await?;
        let names = created.iter().filter_map(|claim| claim.metadata.name.clone());
        let uids = created.iter().filter_map(|claim| claim.metadata.uid.as_deref());
        let batch = ClaimBatch {
            contender,
            label: label.to_owned(),
            volumes: uids.map(|uid| format!("pvc-{uid}")).collect(),
            claims: names.collect(),
        };
        let bound = self.watches.wait_bound(batch.claims.clone()).await?;
        Ok((batch, (bound - start).as_secs_f64() * 1e3))
    }

    /// Creates volumes of another driver.
    pub(crate) async fn create_foreign_volumes(&self, count: usize) -> Result<()> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let created =
            stream::iter(0..count).map(|number| {
                let volumes = volumes.clone();
                async move {
                    volumes.create(&PostParams::default(), &foreign_volume(number)?).await.context("volume")
                }
            });
        created.buffer_unordered(MAX_PARALLEL).try_for_each(|_| ready(Ok(()))).await
    }

    /// Deletes the claims and waits until their volumes are deleted; returns the milliseconds it took.
    pub(crate) async fn delete_claims(&mut self, batch: ClaimBatch) -> Result<f64> {
        let start = Instant::now();
        let labelled = ListParams::default().labels(&format!("bench={}", batch.label));
        let deleted = self.claims().delete_collection(&DeleteParams::default(), &labelled).await;
        deleted.context("delete the claims")?;
        if batch.contender == Contender::Null {
            // The null provisioner deletes nothing: this program does it instead.
            let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
            let deleted = stream::iter(&batch.volumes).map(|name| {
                let volumes = volumes.clone();
                async move { volumes.delete(name, &DeleteParams::default()).await.map(drop) }
            });
            deleted.buffer_unordered(MAX_PARALLEL).try_collect::<()>().await.context("delete the volumes")?;
        }
        let deleted_at = self.watches.wait_deleted(batch.volumes).await?;
        Ok((deleted_at - start).as_secs_f64() * 1e3)
    }
}

fn claim_object(contender: Contender, label: &str, number: usize) -> Result<PersistentVolumeClaim> {
    let claim = json!({
        "metadata": {
            "name": format!("{label}-{number}"),
            "labels": { "bench": label },
            "annotations": { SELECTED_NODE: contender.node() },
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
            "storageClassName": contender.name(),
        },
    });
    serde_json::from_value(claim).context("read the claim")
}

/// A volume as the external-provisioner creates it.
fn foreign_volume(number: usize) -> Result<PersistentVolume> {
    let node = format!("node-{}", number % 100);
    let uid = format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012}");
    let volume = json!({
        "metadata": {
            "name": format!("pvc-{uid}"),
            "annotations": {
                "pv.kubernetes.io/provisioned-by": "foreign.bench.nodekeel",
                "volume.kubernetes.io/provisioner-deletion-secret-name": "",
                "volume.kubernetes.io/provisioner-deletion-secret-namespace": "",
            },
            "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "1Gi" },
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "elsewhere",
                "name": format!("claim-{number}"), "uid": uid,
            },
            "csi": {
                "driver": "foreign.bench.nodekeel", "volumeHandle": uid,
                "volumeAttributes": { "storage.kubernetes.io/csiProvisionerIdentity": "1-8081-foreign" },
            },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                { "key": "kubernetes.io/hostname", "operator": "In", "values": [node] },
            ] }] } },
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "foreign",
        },
    });
    serde_json::from_value(volume).context("read the volume")
}
