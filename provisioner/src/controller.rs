//! The loop: watches in, decisions, effects, and when to look again.

use std::future::ready;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, Stream, StreamExt as _, future, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::runtime::controller::{Action, Config as ControllerConfig, Error as ControllerError, applier};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio_util::sync::CancellationToken;

use crate::apply::{Applied, ApplyError, about_claim, about_volume, code};
use crate::chain::chain;
use crate::event::Reason;
use crate::plan::{
    ClaimAction, ClaimIgnored, ClaimRefusal, SeenClaim, VolumeAction, class_name, plan_claim, plan_volume,
};
use crate::provisioner::Provisioner;

mod attempts;
mod living;
mod sift;
mod sweeper;
mod trouble;

use attempts::Attempts;
use living::Living;
use sift::{Sifter, Signals};
use trouble::{Troubles, patiently};

/// How long what may only not have been heard of is waited for, before it is said to be missing.
const HEARSAY: Duration = Duration::from_secs(1);

/// Everything that a decision needs.
struct World {
    provisioner: Provisioner,
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
    classes: Store<StorageClass>,
    attempts: Arc<Attempts>,
    living: Arc<Living>,
}

/// Runs until the token is cancelled, or a watch ends.
pub(crate) async fn run(
    provisioner: &Provisioner,
    token: &CancellationToken,
    on_ready: impl FnOnce() + Send,
) {
    let (claims, claims_writer) = reflector::store();
    let (volumes, volumes_writer) = reflector::store();
    let (classes, classes_writer) = reflector::store();
    let attempts = Arc::new(Attempts::new(provisioner.config.backoff));
    let (living, (signals, heard)) = (Arc::new(Living::default()), Signals::new());
    let world = Arc::new(World {
        provisioner: provisioner.clone(),
        claims: claims.clone(),
        volumes: volumes.clone(),
        classes,
        attempts: Arc::clone(&attempts),
        living: Arc::clone(&living),
    });
    let sifter = Sifter {
        me: provisioner.config.identity.clone(),
        attempts,
        living,
        signals,
        claims: claims.clone(),
        volumes: volumes.clone(),
    };

    let troubles = Troubles::default();
    let claim_events = {
        let sifter = sifter.clone();
        watch(world.api(), &troubles)
            .filter_map(move |event| ready(sifter.claim(event)))
            .reflect(claims_writer)
    };
    let volume_events = {
        let sifter = sifter.clone();
        watch(world.api(), &troubles)
            .filter_map(move |event| ready(sifter.volume(event)))
            .reflect(volumes_writer)
    };
    let class_events = watch(world.api(), &troubles)
        .filter_map(move |event| ready(sifter.class(event)))
        .reflect(classes_writer)
        .for_each(|_| ready(()));

    let config = ControllerConfig::default().concurrency(provisioner.config.concurrency.get());
    let queue = stream::select(changed(claim_events), heard.claims.map(Ok)).take_until(token.cancelled());
    let claim_loop = applier(
        |object, world| Box::pin(claim(object, world)),
        claim_failed,
        Arc::clone(&world),
        claims,
        queue,
        config.clone(),
    );
    let queue = changed(volume_events).take_until(token.cancelled());
    let volume_loop = applier(
        |object, world| Box::pin(volume(object, world)),
        volume_failed,
        Arc::clone(&world),
        volumes,
        queue,
        config,
    );
    let readiness = async {
        world.wait_until_ready(on_ready).await;
        std::future::pending().await
    };
    let sweeping = async {
        world.synced().await;
        sweeper::run(&world, heard.sweeps).await;
    };
    tokio::select! {
        ((), ()) = future::join(end(claim_loop), end(volume_loop)) => {}
        () = class_events => {}
        () = readiness => {}
        () = sweeping => {}
        () = world.cancelled_before_lists(token) => {}
    }
}

/// Everything of a kind, from its first list on, with bookmarks, and again after errors.
///
/// No selector can say what is ours: the driver of a claim is an annotation, and that of a volume a field that the API server
/// doesn't index. A label would say it, but whoever removed the label would make the volume leak. So everything is decoded
/// once, and what isn't ours is dropped before it is stored; lists come in pages.
fn watch<K>(
    api: Api<K>,
    troubles: &Troubles,
) -> impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send + use<K>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    patiently(watcher(api, watcher::Config::default()), troubles.clone())
}

impl World {
    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.provisioner.applier.client.0.clone())
    }

    /// Waits for the first lists; where a watch has ended before, for ever, because the run ends.
    async fn synced(&self) {
        let lists = (
            self.claims.wait_until_ready(),
            self.volumes.wait_until_ready(),
            self.classes.wait_until_ready(),
        );
        if let (Ok(()), Ok(()), Ok(())) = futures_util::join!(lists.0, lists.1, lists.2) {
            return;
        }
        std::future::pending().await
    }

    /// Waits for a cancellation before the first lists are complete: then the loops haven't begun, and would never end.
    async fn cancelled_before_lists(&self, token: &CancellationToken) {
        token.cancelled().await;
        if self.synced().now_or_never().is_some() {
            std::future::pending().await
        }
    }

    async fn wait_until_ready(&self, on_ready: impl FnOnce() + Send) {
        self.synced().await;
        if let Some(mut registered) = self.provisioner.registered.clone() {
            // Where nobody can register any more, it never becomes ready.
            if registered.wait_for(|&registered| registered).await.is_err() {
                tracing::warn!("the kubelet will not know the driver: its registration has ended");
                std::future::pending::<()>().await;
            }
        }
        on_ready();
    }

    /// The PersistentVolume of a claim's volume, if it is one of ours.
    fn volume_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let uid = claim.metadata.uid.as_deref()?;
        self.volumes.get(&ObjectRef::new(&format!("pvc-{uid}")))
    }

    async fn claim(&self, claim: &PersistentVolumeClaim) -> Result<Action, ApplyError> {
        self.synced().await;
        let applier = &self.provisioner.applier;
        let class = class_name(claim).and_then(|name| self.classes.get(&ObjectRef::new(name)));
        let volume = self.volume_of(claim);
        let seen = SeenClaim { claim, class: class.as_deref(), volume: volume.as_deref() };
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let applied = match plan_claim(&applier.me, seen) {
            ClaimAction::Provision(spec) => {
                // It was given up here, and comes back: every time a bit later.
                if let Some(time) = self.attempts.held(&uid) {
                    return Ok(Action::requeue(time));
                }
                let Some(class) = &class else { return Ok(Action::await_change()) };
                let give_up = self.attempts.failures(&uid) + 1 >= self.provisioner.config.give_up_after;
                applier.provision(&spec, class, give_up).await?
            }
            ClaimAction::TakeNode => {
                let within = self.provisioner.config.take_within;
                let held = self.attempts.held(&uid).unwrap_or_default();
                match self.attempts.wait_for(&uid, || held.max(within.mul_f64(attempts::chance()))) {
                    Some(time) => return Ok(Action::requeue(time)),
                    None => applier.take_node(claim).await?,
                }
                // Whether it can be provisioned here will be seen: what has failed before isn't forgotten.
                return Ok(Action::await_change());
            }
            ClaimAction::Wait(refusal) => match self.attempts.wait_for(&uid, || HEARSAY) {
                Some(time) => return Ok(Action::requeue(time)),
                None => Applied::Refused(refusal),
            },
            ClaimAction::Refuse(refusal) => Applied::Refused(refusal),
            ClaimAction::Ignore(ClaimIgnored::AwaitsNode) => return Ok(Action::await_change()),
            ClaimAction::Ignore(_) => Applied::Done,
        };
        match applied {
            Applied::Done => {
                self.attempts.succeeded(&uid);
                Ok(Action::await_change())
            }
            Applied::GivenUp => {
                self.attempts.given_up(&uid);
                Ok(Action::await_change())
            }
            Applied::Refused(refusal) => Ok(self.refuse(claim, &uid, &refusal).await),
        }
    }

    /// Tells a refusal, once, and waits for a change; what is refused for somebody else's object is looked at again.
    async fn refuse(&self, claim: &PersistentVolumeClaim, uid: &str, refusal: &ClaimRefusal) -> Action {
        let text = refusal.to_string();
        if self.attempts.is_new(uid, &text) {
            let about = about_claim(claim);
            self.provisioner.applier.recorder.tell(&about, Reason::ProvisioningFailed, &text).await;
        }
        match refusal {
            ClaimRefusal::Taken { .. } => Action::requeue(self.provisioner.config.backoff.max),
            _ => Action::await_change(),
        }
    }

    async fn volume(&self, volume: &PersistentVolume) -> Result<Action, ApplyError> {
        self.synced().await;
        let applier = &self.provisioner.applier;
        let uid = volume.metadata.uid.clone().unwrap_or_default();
        match plan_volume(&applier.me, volume) {
            VolumeAction::Delete(id) => {
                applier.delete(volume, &id, self.living.has(id.claim_uid())).await?;
            }
            VolumeAction::Protect => applier.protect(volume).await?,
            VolumeAction::Release => applier.unprotect(volume).await?,
            VolumeAction::Ignore(_) => {}
            VolumeAction::Refuse(refusal) => {
                let text = refusal.to_string();
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                if self.attempts.is_new(&uid, &text) {
                    tracing::warn!(pv = name, "not deleting: {text}");
                    let about = about_volume(volume);
                    applier.recorder.tell(&about, Reason::VolumeFailedDelete, &text).await;
                }
                return Ok(Action::await_change());
            }
        }
        self.attempts.succeeded(&uid);
        Ok(Action::await_change())
    }
}

/// Whether people should hear of a failure: not of the API server's own troubles, which pass and would only be repeated.
fn is_worth_an_event(error: &ApplyError) -> bool {
    match error {
        ApplyError::Api { source, .. } => {
            code(source).is_some_and(|code| (400..409).contains(&code) || code == 422)
        }
        _ => true,
    }
}

async fn claim(claim: Arc<PersistentVolumeClaim>, world: Arc<World>) -> Result<Action, ApplyError> {
    let done = caught(world.claim(&claim)).await;
    if let Err(error) = &done
        && is_worth_an_event(error)
    {
        let (recorder, about) = (&world.provisioner.applier.recorder, about_claim(&claim));
        recorder.tell(&about, Reason::ProvisioningFailed, &chain(error)).await;
    }
    done
}

async fn volume(volume: Arc<PersistentVolume>, world: Arc<World>) -> Result<Action, ApplyError> {
    let done = caught(world.volume(&volume)).await;
    if let Err(error) = &done
        && is_worth_an_event(error)
    {
        let (recorder, about) = (&world.provisioner.applier.recorder, about_volume(&volume));
        recorder.tell(&about, Reason::VolumeFailedDelete, &chain(error)).await;
    }
    done
}

/// Turns a panic into an error: a defect shall cost one object, not the node.
async fn caught(work: impl Future<Output = Result<Action, ApplyError>>) -> Result<Action, ApplyError> {
    let panicked = |payload: Box<dyn std::any::Any + Send>| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(ApplyError::Panicked { text })
    };
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}

fn claim_failed(claim: Arc<PersistentVolumeClaim>, error: &ApplyError, world: Arc<World>) -> Action {
    let time = world.attempts.failed(claim.metadata.uid.as_deref().unwrap_or_default());
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    tracing::warn!(claim = name, "can't provision, will try again in {time:?}: {}", chain(error));
    Action::requeue(time)
}

fn volume_failed(volume: Arc<PersistentVolume>, error: &ApplyError, world: Arc<World>) -> Action {
    let time = world.attempts.failed(volume.metadata.uid.as_deref().unwrap_or_default());
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    tracing::warn!(pv = name, "can't delete, will try again in {time:?}: {}", chain(error));
    Action::requeue(time)
}

/// The objects that changed. That a watch failed was told, and it goes on by itself.
fn changed<K>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
) -> impl Stream<Item = Result<ObjectRef<K>, watcher::Error>> + Send
where
    K: kube::Resource<DynamicType = ()> + Send,
{
    let objects = events.applied_objects().filter_map(|object| ready(object.ok()));
    objects.map(|object| Ok(ObjectRef::from_obj(&object)))
}

/// Runs a loop to its end. What failed was told where it happened; that an object was gone before its turn is no failure.
async fn end<K>(
    outcomes: impl Stream<Item = Result<(ObjectRef<K>, Action), ControllerError<ApplyError, watcher::Error>>>,
) where
    K: kube::Resource<DynamicType = ()>,
{
    let tell = |outcome| {
        if let Err(ControllerError::RunnerError(error)) = outcome {
            tracing::error!("the loop over the API's objects failed: {error}");
        }
        ready(())
    };
    outcomes.for_each(tell).await;
}
