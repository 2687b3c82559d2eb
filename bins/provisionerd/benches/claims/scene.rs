//! The control plane, and claims in it.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use nodekeel_provisioner::SELECTED_NODE;
use serde_json::{Value, json};
use testbed::{Kube, Part, User};

use crate::side::{Side, client};
use crate::watches::Watches;

/// How many requests this program makes at the same time.
const AT_ONCE: usize = 32;

/// Those that wait for a claim's events wait no longer.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Scene {
    pub(crate) kube: Kube,
    client: Client,
    watches: Watches,
}

/// The class whose claims a side serves.
pub(crate) fn class(side: Side) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": { "name": side.name() },
        "provisioner": side.driver(),
        "volumeBindingMode": "WaitForFirstConsumer", "reclaimPolicy": "Delete",
    })
}

/// Claims that were made together.
pub(crate) struct Batch {
    side: Side,
    label: String,
    claims: HashSet<String>,
    volumes: HashSet<String>,
}

impl Scene {
    pub(crate) async fn start() -> Result<Self> {
        let account = User::service_account("nodekeel", "provisionerd");
        // It is on another disk than volumes as a rule; here it would wait for theirs, and they for its.
        let etcd = (Part::Etcd, "--unsafe-no-fsync");
        let builder = Kube::builder().user(account).without(Part::Scheduler).argument(etcd.0, etcd.1);
        let kube = builder.controller_requests_per_second(2000).start()?;
        kube.apply(include_str!("../../../../deploy/namespace.yaml"))?;
        kube.apply(include_str!("../../../../deploy/rbac.yaml"))?;
        for side in Side::ALL {
            kube.apply(&class(side).to_string())?;
        }
        let client = client(&kube.kubeconfig("admin")?).await?;
        let watches = Watches::start(&client);
        Ok(Self { kube, client, watches })
    }

    /// The kubeconfig of the account that deploy/rbac.yaml is for.
    pub(crate) fn account(&self) -> Result<PathBuf> {
        self.kube.kubeconfig("system:serviceaccount:nodekeel:provisionerd")
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Makes so many claims at once and waits until all are bound: how long it took, in milliseconds.
    pub(crate) async fn bind(&mut self, side: Side, label: &str, count: usize) -> Result<(Batch, f64)> {
        let claims = self.claims();
        let start = Instant::now();
        let made = stream::iter(0..count).map(|number| {
            let claims = claims.clone();
            async move {
                claims.create(&PostParams::default(), &claim(side, label, number)?).await.context("claim")
            }
        });
        let made: Vec<PersistentVolumeClaim> = made.buffer_unordered(AT_ONCE).try_collect().await?;
        let names = made.iter().filter_map(|claim| claim.metadata.name.clone());
        let uids = made.iter().filter_map(|claim| claim.metadata.uid.as_deref());
        let batch = Batch {
            side,
            label: label.to_owned(),
            volumes: uids.map(|uid| format!("pvc-{uid}")).collect(),
            claims: names.collect(),
        };
        let bound = self.watches.bound(batch.claims.clone()).await?;
        Ok((batch, (bound - start).as_secs_f64() * 1e3))
    }

    /// Deletes the claims and waits until their volumes are gone: how long it took, in milliseconds.
    pub(crate) async fn delete(&mut self, batch: Batch) -> Result<f64> {
        let start = Instant::now();
        let labelled = ListParams::default().labels(&format!("bench={}", batch.label));
        let deleted = self.claims().delete_collection(&DeleteParams::default(), &labelled).await;
        deleted.context("delete the claims")?;
        if batch.side == Side::Null {
            // It deletes nothing: what a null provisioner does for that, this program does.
            let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
            let deleted = stream::iter(&batch.volumes).map(|name| {
                let volumes = volumes.clone();
                async move { volumes.delete(name, &DeleteParams::default()).await.map(drop) }
            });
            deleted.buffer_unordered(AT_ONCE).try_collect::<()>().await.context("delete the volumes")?;
        }
        let gone = self.watches.gone(batch.volumes).await?;
        Ok((gone - start).as_secs_f64() * 1e3)
    }
}

fn claim(side: Side, label: &str, number: usize) -> Result<PersistentVolumeClaim> {
    let claim = json!({
        "metadata": {
            "name": format!("{label}-{number}"),
            "labels": { "bench": label },
            "annotations": { SELECTED_NODE: side.node() },
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
            "storageClassName": side.name(),
        },
    });
    serde_json::from_value(claim).context("read the claim")
}
