//! A provisioner that makes no volumes: our watches, one PersistentVolume and one event for each claim, nothing else.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures_util::{Stream, StreamExt as _, future, stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::events::v1::Event as ToldEvent;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use nodekeel_provisioner::{ClaimAction, Identity, SeenClaim, VolumeSpec, manifest, plan_claim};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use crate::scene;
use crate::side::{READY, Side, client};

/// As many at a time as ours works on.
const AT_ONCE: usize = 16;

pub(crate) async fn run(kubeconfig: &Path) -> Result<()> {
    let client = client(kubeconfig).await?;
    let null = Null {
        me: Side::Null.identity(None)?,
        class: serde_json::from_value(scene::class(Side::Null)).context("read the class")?,
        client: client.clone(),
    };
    let listed = Arc::new(Semaphore::new(0));
    let claims = objects::<PersistentVolumeClaim>(&client, &listed);
    let volumes = objects::<PersistentVolume>(&client, &listed).for_each(|_| future::ready(()));
    let classes = objects::<StorageClass>(&client, &listed).for_each(|_| future::ready(()));
    let mut seen = HashSet::new();
    let new = claims.filter_map(|claim| {
        let spec = null.plan(&claim).filter(|spec| seen.insert(spec.id.clone()));
        future::ready(spec)
    });
    let work = new.for_each_concurrent(AT_ONCE, |spec| async {
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

/// Everything of a kind that is there or changes; a permit tells that the first list is complete.
fn objects<K>(client: &Client, listed: &Arc<Semaphore>) -> impl Stream<Item = K> + Send
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

struct Null {
    me: Identity,
    class: StorageClass,
    client: Client,
}

impl Null {
    fn plan(&self, claim: &PersistentVolumeClaim) -> Option<Box<VolumeSpec>> {
        match plan_claim(&self.me, SeenClaim { claim, class: Some(&self.class), volume: None }) {
            ClaimAction::Provision(spec) => Some(spec),
            _ => None,
        }
    }

    async fn serve(&self, spec: VolumeSpec) -> Result<()> {
        let mut volume = manifest(&self.me, &spec);
        volume.metadata.labels = Some(BTreeMap::from([("bench".to_owned(), "null".to_owned())]));
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        volumes.create(&PostParams::default(), &volume).await.context("create the volume")?;
        let namespace = spec.claim.namespace.clone().unwrap_or_default();
        let events: Api<ToldEvent> = Api::namespaced(self.client.clone(), &namespace);
        events.create(&PostParams::default(), &self.event(spec.claim)).await.context("tell it")?;
        Ok(())
    }

    fn event(&self, claim: ObjectReference) -> ToldEvent {
        let now = Timestamp::now();
        let name = format!("{}.{:x}", claim.name.as_deref().unwrap_or_default(), now.as_nanosecond());
        ToldEvent {
            action: Some("Provision".to_owned()),
            event_time: Some(MicroTime(now)),
            metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
            note: Some("Successfully provisioned volume".to_owned()),
            reason: Some("ProvisioningSucceeded".to_owned()),
            regarding: Some(claim),
            reporting_controller: Some(self.me.driver.to_string()),
            reporting_instance: Some(self.me.node.to_string()),
            type_: Some("Normal".to_owned()),
            ..ToldEvent::default()
        }
    }
}
