//! The operators that a cluster has recorded, for all of its nodes.
//!
//! The record of an operator is at `/NAME` in the namespace `api:operators` of the cluster's store. Each voter that serves its API
//! watches them: it applies a change as soon as it learns of it, tells it to the workers that follow it, and keeps what it knew while
//! it is cut off.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{Compare, KeyRange, KvError, KvStore, ListWatcher, Txn, TxnOp};
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_cluster::node::NodeId;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use prost::Message;
use thiserror::Error;
use tonic::Status;

use super::cluster_records::parse_operator;
use super::config::{DN, NOT_IN_CLUSTER, is_valid_operator_name};
use super::identities::{Identity, Source};
use super::shared::Api;
use crate::access::{PublicKey, Role};
use crate::error_chain::error_chain;
use crate::node_v1;

/// The module and the namespace of the records.
const NAMESPACE: (&str, &str) = ("api", "operators");

/// The number of times that a change is tried again after concurrent ones.
const ATTEMPTS: usize = 16;

/// The value of a record.
#[derive(Clone, PartialEq, Message)]
struct OperatorRecord {
    /// The public key, as text.
    #[prost(string, tag = "1")]
    key: String,
    /// The name of the role.
    #[prost(string, tag = "2")]
    role: String,
}

fn record_key(name: &str) -> String {
    format!("/{name}")
}

/// The operator of a record; `None` if it is none that this release knows, for which nobody is admitted.
fn parse_record(key: &[u8], value: &[u8]) -> Option<Identity> {
    let name = std::str::from_utf8(key.strip_prefix(b"/")?).ok()?;
    let OperatorRecord { key, role } = OperatorRecord::decode(value).ok()?;
    parse_operator(&node_v1::Operator { name: name.to_owned(), key, role })
}

/// The reason why a record was not changed.
#[derive(Debug, Error)]
pub(crate) enum RecordError {
    #[error("invalid name {0:?} of an operator; use 1 to 64 letters, digits, '.', '_', '@' and '-'")]
    Name(String),
    #[error(
        "operator {name} has another key, {key}: `nodectl operator remove {name}` first, or use another name"
    )]
    OtherKey { name: String, key: PublicKey },
    #[error("operator {name} has this key: `nodectl operator remove {name}` first")]
    KeyInUse { name: String },
    #[error("node {node} has this key: an operator needs one of its own, `nodectl key new FILE`")]
    KeyOfNode { node: NodeId },
    #[error("operator {name} is not recorded in the cluster{hint}")]
    Unknown { name: String, hint: &'static str },
    #[error("the operators of the cluster are being changed by others: try again")]
    Contended,
    #[error("can't change the operators of the cluster")]
    Store(#[source] KvError),
}

impl From<RecordError> for Status {
    fn from(error: RecordError) -> Self {
        let text = error_chain(&error);
        match error {
            RecordError::Name(_) => Self::invalid_argument(text),
            RecordError::Contended => Self::aborted(text),
            RecordError::Store(source) if source.is_retryable() => Self::aborted(text),
            RecordError::Store(_) => Self::internal(text),
            _ => Self::failed_precondition(text),
        }
    }
}

/// Records an operator, or gives the recorded one another role.
pub(crate) async fn add(kv: &dyn KvStore, name: &str, key: PublicKey, role: Role) -> Result<(), RecordError> {
    if !is_valid_operator_name(name) {
        return Err(RecordError::Name(name.to_owned()));
    }
    let value = OperatorRecord { key: key.to_string(), role: role.to_string() }.encode_to_vec();
    for _ in 0..ATTEMPTS {
        let present = kv.range(KeyRange::all_keys()).await.map_err(RecordError::Store)?.kvs;
        let known = present.iter().find(|kv| kv.key == record_key(name).into_bytes());
        for operator in present.iter().filter_map(|kv| parse_record(&kv.key, &kv.value)) {
            if operator.name == name && operator.key != key {
                return Err(RecordError::OtherKey { name: operator.name, key: operator.key });
            }
            if operator.name != name && operator.key == key {
                return Err(RecordError::KeyInUse { name: operator.name });
            }
        }
        if known.is_some_and(|known| known.value == value) {
            return Ok(());
        }
        // Only from what was read: a concurrent change is looked at again.
        let unchanged = match known {
            Some(known) => Compare::key_unchanged(known),
            None => Compare::key_absent(record_key(name)),
        };
        let put = Txn::new().when(unchanged).then(TxnOp::put(record_key(name), &*value));
        if kv.txn(put).await.map_err(RecordError::Store)?.succeeded {
            return Ok(());
        }
    }
    Err(RecordError::Contended)
}

/// Removes the record of an operator. A repetition is an error: the name may be mistyped.
pub(crate) async fn remove(kv: &dyn KvStore, name: &str, configured: bool) -> Result<(), RecordError> {
    let deleted = kv.delete(KeyRange::single_key(record_key(name))).await.map_err(RecordError::Store)?;
    if deleted > 0 {
        return Ok(());
    }
    let hint = if configured {
        ", but in the configuration: remove it from api.operators there, and reload"
    } else {
        ""
    };
    Err(RecordError::Unknown { name: name.to_owned(), hint })
}

/// The records of a node's cluster.
#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
pub(crate) fn store(cluster: &ClusterNode) -> Result<Arc<dyn KvStore>, Status> {
    cluster
        .namespaced_kv(NAMESPACE.0, NAMESPACE.1)
        .map_err(|error| Status::failed_precondition(error_chain(&error)))
}

/// Keeps the operators of the cluster current, once the node is in it.
pub(crate) struct RecordWatch {
    pub(crate) api: Arc<Api>,
    pub(crate) cluster: ClusterNode,
}

impl Runnable for RecordWatch {
    fn run(&self, ctx: Context) -> RunFuture {
        let (api, cluster) = (Arc::clone(&self.api), self.cluster.clone());
        Box::pin(async move {
            tokio::select! {
                canceled = ctx.canceled() => Err(canceled.into()),
                failed = watch_cluster(&api, &cluster, &ctx) => failed.map(|never| match never {}),
            }
        })
    }
}

async fn watch_cluster(api: &Api, cluster: &ClusterNode, ctx: &Context) -> Result<Infallible, Failure> {
    ctx.signal_not_ready(NOT_IN_CLUSTER)?;
    // The state of the run before is replaced when this one starts.
    while cluster.wait_finished().await.is_err() {
        cluster.wait_phase_left(EnrolmentPhase::Failed).await;
    }
    let kv = cluster.namespaced_kv(NAMESPACE.0, NAMESPACE.1)?;
    let apply = |operators: Vec<Identity>| {
        if api.cluster_operators {
            api.identities.replace(Source::Cluster, operators.clone());
        }
        api.records.send_modify(|records| records.operators = Some(operators));
    };
    let never = watch(apply, kv, || ctx.signal_ready()).await?;
    Ok(never)
}

/// Applies the records, and each change of them. `ready` is called once they are known.
async fn watch(
    apply: impl Fn(Vec<Identity>),
    kv: Arc<dyn KvStore>,
    ready: impl FnOnce() -> Result<(), nodekeel_supervisor::LifecycleSignalError>,
) -> Result<Infallible, Failure> {
    let (mut watcher, mut records) = (ListWatcher::new(kv, KeyRange::all_keys()), BTreeMap::new());
    let mut ready = Some(ready);
    loop {
        watcher.next_update().await?.apply_to(&mut records);
        let known: Vec<_> = records.iter().filter_map(|(key, value)| parse_record(key, value)).collect();
        let unknown = records.len() - known.len();
        if unknown > 0 {
            tracing::warn!(dn = DN, "{unknown} records of operators are not understood, and admit nobody");
        }
        apply(known);
        if let Some(ready) = ready.take() {
            ready()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_cluster::consensus::memory::MemoryKv;

    use super::super::identities::Identities;
    use super::*;
    use crate::access::{Principal, PrivateKey};

    fn key() -> PublicKey {
        PrivateKey::generate().expect("random numbers").public_key()
    }

    #[tokio::test]
    async fn an_operator_has_one_key_and_a_key_one_operator() {
        let (kv, alice, bob) = (MemoryKv::new(), key(), key());
        let text = async |added: Result<(), RecordError>| added.err().map(|error| error.to_string());
        add(&kv, "alice", alice, Role::Admin).await.expect("added");
        let before = kv.get(b"/alice").await.expect("read");
        add(&kv, "alice", alice, Role::Admin).await.expect("repeated");
        assert_eq!(kv.get(b"/alice").await.expect("read"), before, "a repetition changes nothing");
        let other = text(add(&kv, "alice", bob, Role::Admin).await).await;
        assert!(
            other.is_some_and(
                |text| text.contains("has another key") && text.contains("operator remove alice")
            )
        );
        let taken = text(add(&kv, "eve", alice, Role::Reader).await).await;
        assert!(taken.is_some_and(|text| text.contains("operator alice has this key")));
        assert!(matches!(add(&kv, "a b", bob, Role::Admin).await, Err(RecordError::Name(_))));
        add(&kv, "alice", alice, Role::Reader).await.expect("another role");
        let stored = kv.get(b"/alice").await.expect("read").expect("there");
        assert_eq!(
            parse_record(&stored.key, &stored.value).map(|operator| operator.principal),
            Some(Principal::Operator(Role::Reader))
        );
        remove(&kv, "alice", false).await.expect("removed");
        assert!(matches!(remove(&kv, "alice", false).await, Err(RecordError::Unknown { .. })));
        let configured = remove(&kv, "alice", true).await.expect_err("in the configuration");
        assert!(configured.to_string().contains("api.operators"), "{configured}");
    }

    #[tokio::test]
    async fn a_change_of_a_record_is_applied_when_it_is_made() {
        let (kv, alice, bob) = (Arc::new(MemoryKv::new()), key(), key());
        let identities = Arc::new(Identities::default());
        add(&*kv, "alice", alice, Role::Admin).await.expect("added");
        add(&*kv, "bob", bob, Role::Reader).await.expect("added");
        let (known, is_known) = tokio::sync::oneshot::channel();
        let watching = {
            let (identities, kv) = (Arc::clone(&identities), Arc::clone(&kv));
            tokio::spawn(async move {
                let ready = || {
                    let _ = known.send(());
                    Ok(())
                };
                watch(|known| identities.replace(Source::Cluster, known), kv, ready).await
            })
        };
        is_known.await.expect("known");
        let of_alice = identities.connect(alice).expect("admitted");
        let of_bob = identities.connect(bob).expect("admitted");
        remove(&*kv, "alice", false).await.expect("removed");
        of_alice.closed().cancelled().await;
        assert!(identities.find(&alice).is_none() && !of_bob.closed().is_cancelled());
        add(&*kv, "bob", bob, Role::Operator).await.expect("another role");
        of_bob.closed().cancelled().await;
        // A record of a later release admits nobody, and hides no other.
        let later = OperatorRecord { key: alice.to_string(), role: "auditor".into() }.encode_to_vec();
        kv.put(b"/alice", &later).await.expect("written");
        kv.put(b"/x", b"\xff").await.expect("written");
        add(&*kv, "carol", key(), Role::Reader).await.expect("added");
        let names =
            || identities.list().into_iter().map(|(_, operator, _)| operator.name).collect::<Vec<_>>();
        while names() != ["bob", "carol"] {
            tokio::task::yield_now().await;
        }
        watching.abort();
    }
}
