//! The keys of one module's namespace.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Compare, KeyEvent, KeyRange, KeyValue, KvError, KvStore, Lease, RangeRequest, RangeResponse, Revision,
    Txn, TxnOp, TxnOpResponse, TxnResponse, WatchFrom, WatchResponse, WatchStream,
};
use crate::consensus::InvalidName;

/// The keys with the prefix `MODULE:NAMESPACE` of another store. They start with a slash, so that no two
/// namespaces share a key.
///
/// Leases and revisions are those of the underlying store; so is [`compact`](KvStore::compact), which affects
/// all namespaces.
///
/// *Source:* Monogon's consensus has prefixes of the same form.
#[derive(Clone, Debug)]
pub struct NamespacedKv {
    store: Arc<dyn KvStore>,
    key_prefix: Vec<u8>,
}

impl NamespacedKv {
    /// The namespace of a module.
    ///
    /// # Errors
    /// [`InvalidName::Namespace`].
    pub fn new(store: Arc<dyn KvStore>, module: &str, namespace: &str) -> Result<NamespacedKv, InvalidName> {
        check_namespace("module", module)?;
        check_namespace("namespace", namespace)?;
        Ok(NamespacedKv { store, key_prefix: format!("{module}:{namespace}").into_bytes() })
    }

    /// The prefix of its keys in the underlying store.
    pub fn key_prefix(&self) -> &[u8] {
        &self.key_prefix
    }

    fn full_key(&self, key: &[u8]) -> Result<Vec<u8>, KvError> {
        if !key.starts_with(b"/") {
            return Err(KvError::InvalidKey { key: key.to_vec(), problem: "must start with a slash" });
        }
        Ok([&self.key_prefix, key].concat())
    }

    fn full_key_range(&self, keys: KeyRange) -> Result<KeyRange, KvError> {
        Ok(match keys {
            KeyRange::Key(key) => KeyRange::Key(self.full_key(&key)?),
            KeyRange::Prefix(prefix) if prefix.is_empty() => KeyRange::Prefix(self.full_key(b"/")?),
            KeyRange::Prefix(prefix) => KeyRange::Prefix(self.full_key(&prefix)?),
            KeyRange::Between { start, end } => {
                // The first key after the namespace: `0` follows the slash.
                let end =
                    if end == b"0" { [&self.key_prefix, &end[..]].concat() } else { self.full_key(&end)? };
                KeyRange::Between { start: self.full_key(&start)?, end }
            }
        })
    }

    fn full_op(&self, op: TxnOp) -> Result<TxnOp, KvError> {
        Ok(match op {
            TxnOp::Put { key, value, lease } => TxnOp::Put { key: self.full_key(&key)?, value, lease },
            TxnOp::Delete(keys) => TxnOp::Delete(self.full_key_range(keys)?),
            TxnOp::Range(range) => TxnOp::Range(self.full_request(range)?),
        })
    }

    fn full_request(&self, range: RangeRequest) -> Result<RangeRequest, KvError> {
        Ok(RangeRequest { keys: self.full_key_range(range.keys)?, ..range })
    }

    fn relative_response(&self, mut ranged: RangeResponse) -> RangeResponse {
        ranged.kvs.iter_mut().for_each(|kv| strip_prefix(&self.key_prefix, &mut kv.key));
        ranged
    }
}

#[async_trait]
impl KvStore for NamespacedKv {
    async fn range(&self, range: RangeRequest) -> Result<RangeResponse, KvError> {
        let ranged = self.store.range(self.full_request(range)?).await?;
        Ok(self.relative_response(ranged))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        let compare = |compare: Compare| Ok(Compare { key: self.full_key(&compare.key)?, ..compare });
        let txn = Txn {
            when: txn.when.into_iter().map(compare).collect::<Result<_, KvError>>()?,
            then: txn.then.into_iter().map(|op| self.full_op(op)).collect::<Result<_, _>>()?,
            or_else: txn.or_else.into_iter().map(|op| self.full_op(op)).collect::<Result<_, _>>()?,
        };
        let mut done = self.store.txn(txn).await?;
        for result in &mut done.responses {
            if let TxnOpResponse::Range(ranged) = result {
                *ranged = self.relative_response(std::mem::take(ranged));
            }
        }
        Ok(done)
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<WatchStream, KvError> {
        let watch = self.store.watch(self.full_key_range(keys)?, from).await?;
        let prefix = self.key_prefix.clone();
        Ok(watch.map_responses(move |message| {
            message.map(|message| match message {
                WatchResponse::Events(mut changes) => {
                    for change in &mut changes {
                        let (KeyEvent::Put(KeyValue { key, .. }) | KeyEvent::Delete { key, .. }) = change;
                        strip_prefix(&prefix, key);
                    }
                    WatchResponse::Events(changes)
                }
                message => message,
            })
        }))
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.store.grant_lease(ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.store.compact(before).await
    }
}

/// The store returns only keys with the prefix: no others were requested.
fn strip_prefix(prefix: &[u8], key: &mut Vec<u8>) {
    if key.starts_with(prefix) {
        key.drain(..prefix.len());
    }
}

fn check_namespace(what: &'static str, name: &str) -> Result<(), InvalidName> {
    let is_fit = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
    match (1..=63).contains(&name.len()) && name.bytes().all(is_fit) {
        true => Ok(()),
        false => Err(InvalidName::Namespace { what, name: name.to_owned() }),
    }
}
