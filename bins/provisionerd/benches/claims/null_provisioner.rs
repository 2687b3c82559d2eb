//! A provisioner without volumes: our watches, one PersistentVolume and one event for each claim, nothing
//! else.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures_util::{Stream, StreamExt as _, future, stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::events::v1::Event as ApiEvent;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use nodekeel_provisioner::{
    ClaimAction, ObservedClaim, ProvisionerIdentity, VolumeSpec, build_persistent_volume, plan_claim,
};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use crate::bench_cluster;
use crate::contender::{Contender, READY, api_client};

/// The concurrency of ours.
const MAX_PARALLEL: usize = 16;

pub(crate) async fn run(kubeconfig: &Path) -> Result<()> {
    let client = api_client(kubeconfig).await?;
    let null = NullProvisioner {
        me: Contender::Null.identity(None)?,
        class: serde_json::from_value(bench_cluster::storage_class(Contender::Null))
            .context("read the class")?,
        client: client.clone(),
    };
    let listed = Arc::new(Semaphore::new(0));
    let claims = watch_objects::<PersistentVolumeClaim>(&client, &listed);
    let volumes = watch_objects::<PersistentVolume>(&client, &listed).for_each(|_| future::ready(()));
    let classes = watch_objects::<StorageClass>(&client, &listed).for_each(|_| future::ready(()));
    let mut seen = HashSet::new();
    let new = claims.filter_map(|claim| {
        let spec = null.plan(&claim).filter(|spec| seen.insert(spec.id.clone()));
        future::ready(spec)
    });
    let work = new.for_each_concurrent(MAX_PARALLEL, |spec| async {
        if let Err(error) = null.serve(*spec).await {
            eprintln!("{error:#}");
        }
    });
    let ready = async {
        if listed.acquire_many(3).await.is_ok() {
            println!("{READY}");
        }
    };
    future::join4(work, volumes, classes, ready).await;
    Ok(())
}

/// All existing and changed objects of a kind; a permit shows that the first list is complete.
fn watch_objects<K>(client: &Client, listed: &Arc<Semaphore>) -> impl Stream<Item = K> + Send
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let listed = Arc::clone(listed);
    let events = watcher(Api::<K>::all(client.clone()), watcher::Config::default()).default_backoff();
    events.flat_map(move |event| {
        stream::iter(match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => Some(object),
            Ok(Event::InitDone) => {
                listed.add_permits(1);
                None
            }
            Ok(_) => None,
            Err(error) => {
                eprintln!("{error}");
                None
            }
        })
    })
}

struct NullProvisioner {
    me: ProvisionerIdentity,
    class: StorageClass,
    client: Client,
}

impl NullProvisioner {
    fn plan(&self, claim: &PersistentVolumeClaim) -> Option<Box<VolumeSpec>> {
        match plan_claim(
            &self.me,
            ObservedClaim { claim, class: Some(&self.class), volume: None, node_labels: None },
        ) {
            ClaimAction::Provision(spec) => Some(spec),
            _ => None,
        }
    }

    async fn serve(&self, spec: VolumeSpec) -> Result<()> {
        let mut volume = build_persistent_volume(&self.me, None, &spec);
        volume.metadata.labels = Some(BTreeMap::from([("bench".to_owned(), "null".to_owned())]));
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        volumes.create(&PostParams::default(), &volume).await.context("create the volume")?;
        let namespace = spec.claim_ref.namespace.clone().unwrap_or_default();
        let events: Api<ApiEvent> = Api::namespaced(self.client.clone(), &namespace);
        events
            .create(&PostParams::default(), &self.event(spec.claim_ref))
            .await
            .context("create the event")?;
        Ok(())
    }

    fn event(&self, claim: ObjectReference) -> ApiEvent {
        let now = Timestamp::now();
        let name = format!("{}.{:x}", claim.name.as_deref().unwrap_or_default(), now.as_nanosecond());
        ApiEvent {
            action: Some("Provision".to_owned()),
            event_time: Some(MicroTime(now)),
            metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
            note: Some("Successfully provisioned volume".to_owned()),
            reason: Some("ProvisioningSucceeded".to_owned()),
            regarding: Some(claim),
            reporting_controller: Some(self.me.driver.to_string()),
            reporting_instance: Some(self.me.node.to_string()),
            type_: Some("Normal".to_owned()),
            ..ApiEvent::default()
        }
    }
}
