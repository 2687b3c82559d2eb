//! The keys of an etcd.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client as api;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::convert::{self, CALL_WITHIN, kv_error};
use super::{lease, watch};
use crate::consensus::MemberId;
use crate::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, Range, Ranged, Revision, Txn, TxnResult, Watch, WatchFrom,
};

/// The keys of an etcd, until they are stopped.
#[derive(Clone)]
pub(super) struct EtcdKv {
    pub(super) client: api::Client,
    pub(super) stopped: CancellationToken,
}

impl EtcdKv {
    pub(super) fn new(client: api::Client, stopped: CancellationToken) -> EtcdKv {
        EtcdKv { client, stopped }
    }

    /// The number of the member that answers.
    pub(super) async fn member_id(&self) -> Result<MemberId, KvError> {
        const OPERATION: &str = "ask the member for its number";
        let mut client = self.client.kv_client();
        let answer = self.call(OPERATION, client.get(crate::pki::CA, None)).await?;
        let nameless = || KvError::Refused { operation: OPERATION, source: "it tells none".into() };
        answer.header().map(|header| MemberId(header.member_id())).ok_or_else(nameless)
    }

    /// Makes a call that ends in any case.
    pub(super) async fn call<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, api::Error>>,
    ) -> Result<T, KvError> {
        tokio::select! {
            biased;
            () = self.stopped.cancelled() => Err(KvError::Stopped),
            answer = timeout(CALL_WITHIN, call) => match answer {
                Ok(answer) => answer.map_err(|error| kv_error(operation, error)),
                Err(late) => Err(KvError::Unavailable { operation, source: late.into() }),
            },
        }
    }
}

#[async_trait]
impl KvStore for EtcdKv {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        range.keys.check()?;
        let (key, options) = convert::get(&range);
        let mut client = self.client.kv_client();
        let answer = self.call("read keys", client.get(key, Some(options))).await;
        match answer {
            Ok(answer) => Ok(convert::ranged(&answer)),
            Err(KvError::FutureRevision { .. }) => {
                Err(KvError::FutureRevision { revision: range.revision.unwrap_or_default() })
            }
            Err(error) => Err(error),
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        txn.check()?;
        let mut client = self.client.kv_client();
        let answer = self.call("do a transaction", client.txn(convert::txn(txn))).await?;
        Ok(convert::txn_result(&answer))
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        keys.check()?;
        watch::open(self.clone(), keys, from).await
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        lease::grant(self.clone(), ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        let mut client = self.client.kv_client();
        match self.call("compact", client.compact(before.0, None)).await {
            // What is forgotten already is done.
            Ok(_) | Err(KvError::Compacted { .. }) => Ok(()),
            Err(KvError::FutureRevision { .. }) => Err(KvError::FutureRevision { revision: before }),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Debug for EtcdKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdKv").finish_non_exhaustive()
    }
}
