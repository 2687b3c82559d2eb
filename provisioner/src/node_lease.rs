//! The Lease of a node: shows that its provisioner runs, for as long as it is renewed.
//!
//! What a process leaves behind says nothing about it: a killed one leaves its sockets, and so the CSINode, and its
//! CSIStorageCapacity objects. Only what it does again and again shows that it runs. The agent of the cluster takes a node
//! whose Lease is not renewed as one without the driver. As the Lease of a kubelet, it belongs to the Node, is held by it,
//! and is deleted with it.
//!
//! An ordered stop deletes it once the kubelet has lost the driver, and the CSINode tells as much: a provisioner that is
//! removed for good, or replaced by a release without Leases, leaves no node that looks hung.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::wait::await_condition;
use nodekeel_fsquota::Bytes;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::api::call::{ApiCall, ApiError, none_if_not_found, status_code};
use crate::api::retry_tracker::random_fraction;
use crate::api::writer::ApiWriter;
use crate::capacity::objects::DRIVER_LABEL;
use crate::claim::peers::has_driver;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError};
use crate::identity::ProvisionerIdentity;
use crate::image::ImageFormat;
#[cfg(feature = "agent")]
use crate::image::VolumeKind;
use crate::loss::status::ServedStore;
use crate::node::NodeObserver;
use crate::{DriverName, NodeName, StoreName};

/// A Lease that was not renewed for this time is expired. The pods of a killed provisioner are to be elsewhere within 15 s,
/// of which the scheduler needs some.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(10);

/// The time between two renewals: two may fail before the Lease expires. A kubelet renews its Lease every 10 s.
pub(crate) const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// The delay after a failed renewal; a server that rejects it is not asked more often than one that accepts it.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Timeout of a renewal.
const RENEW_TIMEOUT: Duration = Duration::from_secs(4);

/// The name of the Lease of a driver on a node. Both names together have at most 127 characters.
pub(crate) fn lease_name(driver: &DriverName, node: &NodeName) -> String {
    format!("{driver}-{node}")
}

/// The stores of a node, whether they can be used or not. The store without a name is listed only if something is known of it:
/// each node has one.
///
/// The node says so in the labels of its Lease: of a claim that no scheduler places, nothing else tells that no node can serve
/// it.
pub(crate) type OfferedStores = BTreeMap<Option<StoreName>, StoreOffer>;

/// What a store offers to new volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StoreOffer {
    /// The size of the largest one; `None` if it is not limited or not known.
    pub(crate) size: Option<Bytes>,
    /// The formats of strict volumes that can't be created.
    pub(crate) lacking: BTreeSet<ImageFormat>,
}

/// What a label says of a store.
#[derive(Clone, Copy)]
enum StoreLabel {
    /// The size of its largest new volume.
    Size,
    /// The formats that it lacks, separated by points.
    Lacking,
}

impl StoreLabel {
    const ALL: [Self; 2] = [Self::Size, Self::Lacking];

    /// The label about a store.
    fn of(self, driver: &DriverName, store: Option<&StoreName>) -> String {
        match store {
            Some(name) => format!("{}{name}", self.prefix(driver)),
            None => self.unnamed(driver),
        }
    }

    /// The prefix of the labels of the named stores.
    fn prefix(self, driver: &DriverName) -> String {
        match self {
            Self::Size => format!("stores.{driver}/"),
            Self::Lacking => format!("lacking.{driver}/"),
        }
    }

    /// The label of the store without a name.
    fn unnamed(self, driver: &DriverName) -> String {
        match self {
            Self::Size => format!("{driver}/free"),
            Self::Lacking => format!("{driver}/lacking"),
        }
    }
}

/// Returns whether a label says something of a store.
fn is_store_label(driver: &DriverName, label: &str) -> bool {
    let is_kind = |kind: StoreLabel| label == kind.unnamed(driver) || label.starts_with(&kind.prefix(driver));
    StoreLabel::ALL.into_iter().any(is_kind)
}

/// The stores of the node of a Lease.
#[cfg(feature = "agent")]
pub(crate) fn stores_of_lease(driver: &DriverName, lease: &Lease) -> OfferedStores {
    let mut stores = OfferedStores::new();
    for kind in StoreLabel::ALL {
        let (prefix, unnamed) = (kind.prefix(driver), kind.unnamed(driver));
        for (label, value) in lease.metadata.labels.iter().flatten() {
            let name = match label.strip_prefix(&prefix).map(StoreName::try_new) {
                Some(Ok(name)) => Some(name),
                None if *label == unnamed => None,
                _ => continue,
            };
            let offer = stores.entry(name).or_default();
            match kind {
                StoreLabel::Size => offer.size = value.parse().ok().map(Bytes),
                StoreLabel::Lacking => {
                    // A later release may know more of them.
                    let kinds = value.split('.').filter_map(|word| word.parse::<VolumeKind>().ok());
                    offer.lacking = kinds.filter_map(VolumeKind::image_format).collect();
                }
            }
        }
    }
    stores
}

/// The labels by which a node says what its stores offer.
fn store_labels(driver: &DriverName, stores: &OfferedStores) -> impl Iterator<Item = (String, String)> {
    stores.iter().flat_map(|(name, offer)| {
        let size = offer.size.map(|size| size.0.to_string());
        // A named store is listed whatever it offers.
        let size = size.or(name.is_some().then(String::new));
        let lacking: Vec<_> = offer.lacking.iter().map(|format| format.as_str()).collect();
        let lacking = Some(lacking.join(".")).filter(|formats| !formats.is_empty());
        let label = |kind: StoreLabel| kind.of(driver, name.as_ref());
        [(label(StoreLabel::Size), size), (label(StoreLabel::Lacking), lacking)]
            .into_iter()
            .filter_map(|(label, value)| Some((label, value?)))
    })
}

/// The Lease of a node with these stores, to be renewed now.
fn renewed_lease(identity: &ProvisionerIdentity, stores: &OfferedStores, node_uid: &str) -> Lease {
    let labels = store_labels(&identity.driver, stores);
    let labels = labels.chain([(DRIVER_LABEL.to_owned(), identity.driver.to_string())]);
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: identity.node.to_string(),
        uid: node_uid.to_owned(),
        ..OwnerReference::default()
    };
    Lease {
        metadata: ObjectMeta {
            name: Some(lease_name(&identity.driver, &identity.node)),
            labels: Some(labels.collect()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(identity.node.to_string()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            // Informational: who reads it has another clock.
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        }),
    }
}

/// Why the Lease of this node is not renewed, as others can see it. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct LeaseStatus(Arc<Mutex<Option<String>>>);

impl LeaseStatus {
    /// The reason why the Lease has expired; `None` while it has not.
    pub(crate) fn expiry(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, why: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}

/// Renews the Lease of this node.
pub(crate) struct LeaseRenewer {
    pub(crate) api: ApiWriter,
    /// The node's stores.
    pub(crate) stores: BTreeMap<Option<StoreName>, ServedStore>,
    pub(crate) node: NodeObserver,
    pub(crate) failures: FailureReporter,
    pub(crate) status: LeaseStatus,
}

impl LeaseRenewer {
    /// Renews the Lease for as long as the Node exists. Never returns.
    pub(crate) async fn run(&self) {
        // The version that is replaced: if it is another one, that is looked at first.
        let (mut held, mut renewed_at): (Option<Lease>, _) = (None, Instant::now());
        loop {
            let node_uid = self.node.wait_until_known().await;
            let renewal = timeout(RENEW_TIMEOUT, self.renew(held.as_ref(), &node_uid));
            let delay = match renewal.await {
                Ok(Ok(lease)) => {
                    (held, renewed_at) = (Some(lease), Instant::now());
                    self.status.set(None);
                    // Not all nodes at once.
                    RENEW_INTERVAL.mul_f64(1.0 - random_fraction() / 10.0)
                }
                failed => {
                    let (why, delay) = match failed {
                        Ok(Err(error)) => {
                            let text = format_chain(&error);
                            let is_rejected = status_code(&error.source) == Some(403);
                            self.failures.count(&ReconcileError::Api(error));
                            (text, if is_rejected { RENEW_INTERVAL } else { RETRY_DELAY })
                        }
                        _ => (format!("the API server did not answer within {RENEW_TIMEOUT:?}"), RETRY_DELAY),
                    };
                    held = None;
                    if renewed_at.elapsed() > LEASE_DURATION && self.status.expiry().is_none() {
                        tracing::error!(
                            "the Lease of this node is not renewed, so that new claims go to other nodes: {why}"
                        );
                        self.status.set(Some(why));
                    }
                    delay
                }
            };
            sleep(delay).await;
        }
    }

    /// Deletes the Lease after an ordered stop, once the CSINode no longer has the driver, by which alone a node without a
    /// Lease is judged. A kubelet that has stopped, too, leaves it there.
    pub(crate) async fn release(&self) {
        let release = async {
            let nodes: Api<CSINode> = Api::all(self.api.client().clone());
            let ProvisionerIdentity { driver, node, .. } = &self.api.identity;
            let is_gone = |found: Option<&CSINode>| found.is_none_or(|found| !has_driver(found, driver));
            if let Err(error) = await_condition(nodes, node.as_str(), is_gone).await {
                tracing::warn!("watch CSINode {node}: {}", format_chain(&error));
                return Ok(());
            }
            self.delete().await
        };
        // Left behind, it only expires.
        match timeout(RENEW_TIMEOUT, release).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("{}; it expires", format_chain(&error)),
            Err(_) => {
                tracing::warn!("the Lease of this node was not deleted within {RENEW_TIMEOUT:?}; it expires")
            }
        }
    }

    async fn delete(&self) -> Result<(), ApiError> {
        let leases: Api<Lease> = Api::default_namespaced(self.api.client().clone());
        let name = lease_name(&self.api.identity.driver, &self.api.identity.node);
        let found = none_if_not_found(leases.get(&name).await);
        let Some(found) = found.map_err(|error| ApiCall::ReadLease.wrap_error(error))? else { return Ok(()) };
        // Another process may renew it by now.
        let preconditions = Some(Preconditions {
            uid: found.metadata.uid,
            resource_version: found.metadata.resource_version,
        });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        match leases.delete(&name, &params).await {
            Ok(_) => Ok(()),
            Err(error) if matches!(status_code(&error), Some(404 | 409)) => Ok(()),
            Err(error) => Err(ApiCall::DeleteLease.wrap_error(error)),
        }
    }

    /// Renews the Lease: the version `held`, or the one that exists, or a new one.
    async fn renew(&self, held: Option<&Lease>, node_uid: &str) -> Result<Lease, ApiError> {
        // In the namespace of the credentials, as the CSIStorageCapacity objects: for a pod, its own.
        let leases: Api<Lease> = Api::default_namespaced(self.api.client().clone());
        let offer = |served: &ServedStore| StoreOffer {
            size: served.offered(),
            lacking: served.missing_formats().keys().copied().collect(),
        };
        let stores = self.stores.iter().map(|(name, served)| (name.clone(), offer(served))).collect();
        let wanted = renewed_lease(&self.api.identity, &stores, node_uid);
        let name = wanted.metadata.name.as_deref().unwrap_or_default();
        let found = match held {
            Some(held) => Some(held.clone()),
            None => {
                let found = none_if_not_found(leases.get(name).await);
                found.map_err(|error| ApiCall::ReadLease.wrap_error(error))?
            }
        };
        let Some(found) = found else {
            let created = leases.create(&PostParams::default(), &wanted).await;
            return created.map_err(|error| ApiCall::CreateLease.wrap_error(error));
        };
        let driver = &self.api.identity.driver;
        let old = found.metadata.labels.iter().flatten().filter(|(label, _)| is_store_label(driver, label));
        // The later value counts. In a merge patch (RFC 7386), null removes the label of a store that the node had.
        let labels: BTreeMap<_, Option<&String>> = old
            .map(|(label, _)| (label, None))
            .chain(wanted.metadata.labels.iter().flatten().map(|(label, value)| (label, Some(value))))
            .collect();
        let patch = Patch::Merge(json!({
            "metadata": {
                "uid": found.metadata.uid,
                "resourceVersion": found.metadata.resource_version,
                "labels": labels,
                "ownerReferences": wanted.metadata.owner_references,
            },
            "spec": wanted.spec,
        }));
        match leases.patch(name, &PatchParams::default(), &patch).await {
            Ok(lease) => Ok(lease),
            // Another client has changed or deleted it since: once more, on what there is now.
            Err(error) if held.is_some() && matches!(status_code(&error), Some(404 | 409)) => {
                Box::pin(self.renew(None, node_uid)).await
            }
            Err(error) => Err(ApiCall::PatchLease.wrap_error(error)),
        }
    }
}
