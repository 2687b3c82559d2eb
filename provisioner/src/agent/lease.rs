//! Leader election by a Lease.
//!
//! As in Kubernetes' own components, no clocks are compared: a candidate waits for the Lease's duration after
//! it has seen its last change, and a leader stops earlier than that after the start of its last renewal. Each
//! write names the UID and the version of the Lease that it replaces, so of several candidates one succeeds.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{AgentConfig, AgentState};
use crate::api::call::status_code;
use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;
use crate::error_chain::format_chain;

/// A Lease that was not renewed for this time may be taken. *Source:* this and the next two are the defaults
/// of the external-provisioner.
const LEASE_DURATION: Duration = Duration::from_secs(15);

/// A leader that could not renew its Lease for this time stops.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// The time between the starts of two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);

/// An answer that took longer tells nothing of renewals by nodes that the server has not taken until then.
pub(super) const SLOW_ANSWER: Duration = Duration::from_secs(2);

/// The delay after a failed write of the Lease.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Competes for a Lease.
#[derive(Debug)]
pub(super) struct LeaderElection {
    leases: Api<Lease>,
    name: String,
    identity: String,
    watch_errors: WatchErrors,
}

/// The Lease, as the watch has reported it.
struct ObservedLease {
    /// `None` if it does not exist.
    lease: Option<Lease>,
    /// When this candidate has seen its last change.
    changed_at: Instant,
}

/// A Lease that this agent holds.
#[derive(Debug)]
pub(super) struct HeldLease {
    lease: Lease,
    /// Until then it must be renewed.
    valid_until: Instant,
}

impl LeaderElection {
    pub(super) fn new(client: Client, config: &AgentConfig, watch_errors: WatchErrors) -> Self {
        let leases = Api::namespaced(client, &config.lease_namespace);
        let (name, identity) = (config.lease_name.clone(), config.identity.clone());
        Self { leases, name, identity, watch_errors }
    }

    /// Waits until the Lease is free or expired, and takes it.
    pub(super) async fn acquire_lease(&self, state: &watch::Sender<AgentState>) -> HeldLease {
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let mut events = pin!(with_backoff(watcher(self.leases.clone(), config), self.watch_errors.clone()));
        let (mut observed, mut listed, mut retry_at) = (None, None, Instant::now());
        loop {
            let due = observed.as_ref().map(|seen| self.free_at(seen).max(retry_at));
            tokio::select! {
                // Errors were logged, and the watch retries; it never ends.
                Some(event) = events.next() => {
                    let Ok(event) = event else { continue };
                    if let Some(lease) = self.observe_event(event, &mut listed) {
                        observed = Some(update_observed(observed, lease));
                        state.send_if_modified(|state| {
                            std::mem::replace(state, AgentState::Standby) != AgentState::Standby
                        });
                    }
                }
                () = sleep_until_due(due) => {
                    let lease = observed.as_ref().and_then(|seen| seen.lease.as_ref());
                    match self.take_lease(lease).await {
                        Ok(held) => return held,
                        Err(error) => {
                            log_failure("take", &error);
                            // If another candidate was faster, the watch reports it.
                            retry_at = Instant::now() + RETRY_DELAY;
                        }
                    }
                }
            }
        }
    }

    /// The Lease after a watch event; `None` while a list is in progress, or if the event is about another one.
    fn observe_event(&self, event: Event<Lease>, listed: &mut Option<Lease>) -> Option<Option<Lease>> {
        let is_ours = |lease: &Lease| lease.name_any() == self.name;
        match event {
            Event::Init => {
                *listed = None;
                None
            }
            Event::InitApply(lease) => {
                if is_ours(&lease) {
                    *listed = Some(lease);
                }
                None
            }
            Event::InitDone => Some(listed.take()),
            Event::Apply(lease) => is_ours(&lease).then_some(Some(lease)),
            Event::Delete(lease) => is_ours(&lease).then_some(None),
        }
    }

    /// When the Lease may be taken.
    fn free_at(&self, seen: &ObservedLease) -> Instant {
        let spec = seen.lease.as_ref().and_then(|lease| lease.spec.as_ref());
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        // A released Lease has no holder to wait for, nor has one of a former process with this identity.
        if holder.is_empty() || holder == self.identity {
            return seen.changed_at;
        }
        let seconds =
            spec.and_then(|spec| spec.lease_duration_seconds).and_then(|number| number.try_into().ok());
        seen.changed_at + seconds.map_or(LEASE_DURATION, Duration::from_secs)
    }

    /// Makes this agent the holder of exactly this version of the Lease.
    async fn take_lease(&self, lease: Option<&Lease>) -> Result<HeldLease, kube::Error> {
        // The validity counts from before the write: the server may carry it out at any moment until the answer.
        let (started, now) = (Instant::now(), MicroTime(Timestamp::now()));
        let valid_until = started + RENEW_DEADLINE;
        let transitions = lease.map_or(0, |lease| {
            let count = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
            count.unwrap_or(0).saturating_add(1)
        });
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        };
        let write = async {
            match lease {
                Some(lease) => self.patch_lease(lease, json!(spec)).await,
                None => {
                    let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                    let lease = Lease { metadata, spec: Some(spec) };
                    // If another candidate creates it first, this call fails with 409.
                    self.leases.create(&PostParams::default(), &lease).await
                }
            }
        };
        let lease = timeout_at(valid_until, write).await.unwrap_or_else(|_| Err(no_answer()))?;
        Ok(HeldLease { lease, valid_until })
    }

    /// Renews the Lease for as long as it is held, and returns why it no longer is.
    /// Sends the times in which the server was slow or did not answer.
    pub(super) async fn keep_lease(
        &self,
        held: &mut HeldLease,
        unanswered: &mpsc::UnboundedSender<Duration>,
    ) -> String {
        let mut next = Instant::now() + RENEW_INTERVAL;
        let mut expected = next;
        loop {
            // The deadline also holds while renewals fail.
            sleep_until(next.min(held.valid_until)).await;
            let started = Instant::now();
            if started >= held.valid_until {
                return format!("the Lease was not renewed within {RENEW_DEADLINE:?}");
            }
            let renewal = self.patch_lease(&held.lease, json!({ "renewTime": MicroTime(Timestamp::now()) }));
            let renewed = timeout_at(held.valid_until, renewal).await.unwrap_or_else(|_| Err(no_answer()));
            next = match renewed {
                Ok(lease) => {
                    let late = expected.elapsed();
                    if late > SLOW_ANSWER {
                        // Nobody may lead any more.
                        let _ = unanswered.send(late);
                    }
                    expected = started + RENEW_INTERVAL;
                    *held = HeldLease { lease, valid_until: started + RENEW_DEADLINE };
                    started + RENEW_INTERVAL
                }
                Err(error) if matches!(status_code(&error), Some(404 | 409)) => {
                    // Another agent has taken it, or something else has changed it.
                    match timeout_at(held.valid_until, self.leases.get_opt(&self.name)).await {
                        // The version is new, but not the deadline: only a successful renewal extends it.
                        Ok(Ok(Some(lease))) if self.is_holder(&lease) => held.lease = lease,
                        Ok(Ok(Some(_))) => return "another agent has taken the Lease".to_owned(),
                        Ok(Ok(None)) => return "the Lease was deleted".to_owned(),
                        Ok(Err(error)) => log_failure("read", &error),
                        Err(_) => {}
                    }
                    Instant::now() + RETRY_DELAY
                }
                Err(error) => {
                    log_failure("renew", &error);
                    Instant::now() + RETRY_DELAY
                }
            };
        }
    }

    /// Releases the Lease if this agent holds it, so that another one need not wait until it expires.
    pub(super) async fn release_lease(&self) {
        let release = async {
            match self.leases.get_opt(&self.name).await? {
                Some(lease) if self.is_holder(&lease) => {
                    // The API rejects a duration of 0, so client-go releases a Lease with 1, too.
                    self.patch_lease(&lease, json!({ "holderIdentity": null, "leaseDurationSeconds": 1 }))
                        .await
                }
                Some(lease) => Ok(lease),
                None => Ok(Lease::default()),
            }
        };
        let released = timeout_at(Instant::now() + RENEW_DEADLINE, release).await;
        if let Err(error) = released.unwrap_or_else(|_| Err(no_answer())) {
            log_failure("release", &error);
        }
    }

    fn is_holder(&self, lease: &Lease) -> bool {
        let spec = lease.spec.as_ref();
        spec.and_then(|spec| spec.holder_identity.as_deref()) == Some(self.identity.as_str())
    }

    /// Patches the specification of exactly this version of the Lease.
    async fn patch_lease(&self, lease: &Lease, spec: Value) -> Result<Lease, kube::Error> {
        let patch = Patch::Merge(json!({
            "metadata": { "uid": lease.metadata.uid, "resourceVersion": lease.metadata.resource_version },
            "spec": spec,
        }));
        self.leases.patch(&self.name, &PatchParams::default(), &patch).await
    }
}

/// A list that repeats the known version changes nothing: the holder has not renewed it since.
fn update_observed(observed: Option<ObservedLease>, lease: Option<Lease>) -> ObservedLease {
    let version = |lease: &Option<Lease>| lease.as_ref().and_then(|lease| lease.resource_version());
    match observed {
        Some(seen) if version(&seen.lease) == version(&lease) => seen,
        _ => ObservedLease { lease, changed_at: Instant::now() },
    }
}

/// Waits for a time, or for ever if nothing is due.
pub(super) async fn sleep_until_due(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn no_answer() -> kube::Error {
    kube::Error::Service(Box::new(std::io::Error::from(std::io::ErrorKind::TimedOut)))
}

fn log_failure(verb: &str, error: &kube::Error) {
    match status_code(error) {
        Some(409) => tracing::debug!("{verb} the Lease: another agent was faster"),
        _ => tracing::warn!("{verb} the Lease: {}", format_chain(error)),
    }
}
