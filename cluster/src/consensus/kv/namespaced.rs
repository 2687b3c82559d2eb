//! The keys of one module's namespace.

use std::sync::Arc;

use async_trait::async_trait;

use super::{
    KeyRange, KeyValue, KvError, KvStore, RangeResponse, Revision, Txn, TxnOp, TxnResponse, WatchStream,
};
use crate::consensus::InvalidName;

/// The keys with the prefix `MODULE:NAMESPACE` of another store. They start with a slash, so that no two
/// namespaces share a key. Revisions are those of the underlying store.
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

    fn full_key(&self, key: &[u8]) -> Result<Vec<u8>, KvError> {
        if !key.starts_with(b"/") {
            return Err(KvError::InvalidKey { key: key.to_vec(), problem: "must start with a slash" });
        }
        Ok([&self.key_prefix, key].concat())
    }

    fn full_range(&self, keys: KeyRange) -> Result<KeyRange, KvError> {
        Ok(match keys {
            KeyRange::Key(key) => KeyRange::Key(self.full_key(&key)?),
            // With the slash: the bare prefix would match namespaces whose names begin with this one's.
            KeyRange::Prefix(prefix) if prefix.is_empty() => KeyRange::Prefix(self.full_key(b"/")?),
            KeyRange::Prefix(prefix) => KeyRange::Prefix(self.full_key(&prefix)?),
        })
    }

    fn full_ops(&self, ops: Vec<TxnOp>) -> Result<Vec<TxnOp>, KvError> {
        let full_op = |op| {
            Ok(match op {
                TxnOp::Put { key, value } => TxnOp::Put { key: self.full_key(&key)?, value },
                TxnOp::Delete(keys) => TxnOp::Delete(self.full_range(keys)?),
                TxnOp::Range(keys) => TxnOp::Range(self.full_range(keys)?),
            })
        };
        ops.into_iter().map(full_op).collect()
    }

    fn strip_prefixes(&self, kvs: &mut [KeyValue]) {
        kvs.iter_mut().for_each(|kv| strip_prefix(&self.key_prefix, &mut kv.key));
    }
}

#[async_trait]
impl KvStore for NamespacedKv {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        let mut read = self.store.range(self.full_range(keys)?).await?;
        self.strip_prefixes(&mut read.kvs);
        Ok(read)
    }

    async fn txn(&self, mut txn: Txn) -> Result<TxnResponse, KvError> {
        for compare in &mut txn.when {
            compare.key = self.full_key(&compare.key)?;
        }
        txn.then = self.full_ops(txn.then)?;
        txn.or_else = self.full_ops(txn.or_else)?;
        let mut done = self.store.txn(txn).await?;
        self.strip_prefixes(&mut done.kvs);
        Ok(done)
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        let watch = self.store.watch(self.full_range(keys)?, from).await?;
        // The stream outlives this handle, so it owns a copy.
        let prefix = self.key_prefix.clone();
        Ok(watch.map_keys(move |key| strip_prefix(&prefix, key)))
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
    if (1..=63).contains(&name.len()) && name.bytes().all(is_fit) {
        return Ok(());
    }
    Err(InvalidName::Namespace { what, name: name.to_owned() })
}
