//! The keys of one module's space.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Change, Compare, KeyRange, KeyValue, KvError, KvStore, Lease, Op, OpResult, Range, Ranged, Revision, Txn,
    TxnResult, Watch, WatchFrom, WatchMessage,
};
use crate::consensus::InvalidName;

/// What lies below `MODULE:SPACE` of another store. Its keys begin with a slash, so no two spaces share one.
///
/// Leases and revisions are those of the store below; [`compact`](KvStore::compact) is, too, and concerns all spaces.
///
/// *Source:* Monogon's consensus has the same form of prefix.
#[derive(Clone, Debug)]
pub struct Namespaced {
    store: Arc<dyn KvStore>,
    prefix: Vec<u8>,
}

impl Namespaced {
    /// The space of a module.
    ///
    /// # Errors
    /// [`InvalidName::Namespace`].
    pub fn new(store: Arc<dyn KvStore>, module: &str, space: &str) -> Result<Namespaced, InvalidName> {
        check("module", module)?;
        check("space", space)?;
        Ok(Namespaced { store, prefix: format!("{module}:{space}").into_bytes() })
    }

    /// What its keys have before them in the store below.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    fn key(&self, key: &[u8]) -> Result<Vec<u8>, KvError> {
        if !key.starts_with(b"/") {
            return Err(KvError::InvalidKey { key: key.to_vec(), problem: "does not begin with a slash" });
        }
        Ok([&self.prefix, key].concat())
    }

    fn keys(&self, keys: KeyRange) -> Result<KeyRange, KvError> {
        Ok(match keys {
            KeyRange::Key(key) => KeyRange::Key(self.key(&key)?),
            KeyRange::Prefix(prefix) if prefix.is_empty() => KeyRange::Prefix(self.key(b"/")?),
            KeyRange::Prefix(prefix) => KeyRange::Prefix(self.key(&prefix)?),
            KeyRange::Between { start, end } => {
                // The first key behind the space: `0` follows the slash.
                let end = if end == b"0" { [&self.prefix, &end[..]].concat() } else { self.key(&end)? };
                KeyRange::Between { start: self.key(&start)?, end }
            }
        })
    }

    fn op(&self, op: Op) -> Result<Op, KvError> {
        Ok(match op {
            Op::Put { key, value, lease } => Op::Put { key: self.key(&key)?, value, lease },
            Op::Delete(keys) => Op::Delete(self.keys(keys)?),
            Op::Range(range) => Op::Range(self.ranged_keys(range)?),
        })
    }

    fn ranged_keys(&self, range: Range) -> Result<Range, KvError> {
        Ok(Range { keys: self.keys(range.keys)?, ..range })
    }

    fn ranged(&self, mut ranged: Ranged) -> Ranged {
        ranged.kvs.iter_mut().for_each(|kv| strip(&self.prefix, &mut kv.key));
        ranged
    }
}

#[async_trait]
impl KvStore for Namespaced {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        let ranged = self.store.range(self.ranged_keys(range)?).await?;
        Ok(self.ranged(ranged))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        let compare = |compare: Compare| Ok(Compare { key: self.key(&compare.key)?, ..compare });
        let txn = Txn {
            when: txn.when.into_iter().map(compare).collect::<Result<_, KvError>>()?,
            then: txn.then.into_iter().map(|op| self.op(op)).collect::<Result<_, _>>()?,
            otherwise: txn.otherwise.into_iter().map(|op| self.op(op)).collect::<Result<_, _>>()?,
        };
        let mut done = self.store.txn(txn).await?;
        for result in &mut done.results {
            if let OpResult::Ranged(ranged) = result {
                *ranged = self.ranged(std::mem::take(ranged));
            }
        }
        Ok(done)
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        let watch = self.store.watch(self.keys(keys)?, from).await?;
        let prefix = self.prefix.clone();
        Ok(watch.map(move |message| {
            message.map(|message| match message {
                WatchMessage::Changes(mut changes) => {
                    for change in &mut changes {
                        let (Change::Put(KeyValue { key, .. }) | Change::Deleted { key, .. }) = change;
                        strip(&prefix, key);
                    }
                    WatchMessage::Changes(changes)
                }
                message => message,
            })
        }))
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.store.lease(ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.store.compact(before).await
    }
}

/// The store gives nothing but keys that begin with the prefix: it was asked for no others.
fn strip(prefix: &[u8], key: &mut Vec<u8>) {
    if key.starts_with(prefix) {
        key.drain(..prefix.len());
    }
}

fn check(what: &'static str, name: &str) -> Result<(), InvalidName> {
    let is_fit = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
    match (1..=63).contains(&name.len()) && name.bytes().all(is_fit) {
        true => Ok(()),
        false => Err(InvalidName::Namespace { what, name: name.to_owned() }),
    }
}
