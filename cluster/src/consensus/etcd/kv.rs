//! The keys of an etcd.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client as api;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::convert::{self, CALL_TIMEOUT, kv_error};
use super::{lease, watch};
use crate::consensus::MemberId;
use crate::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, RangeRequest, RangeResponse, Revision, Txn, TxnResponse, WatchFrom,
    WatchStream,
};

/// The keys of an etcd, until the token is cancelled.
#[derive(Clone)]
pub(super) struct EtcdKv {
    pub(super) client: api::Client,
    pub(super) stop_token: CancellationToken,
}

impl EtcdKv {
    pub(super) fn new(client: api::Client, stop_token: CancellationToken) -> EtcdKv {
        EtcdKv { client, stop_token }
    }

    /// The id of the member that answers.
    pub(super) async fn member_id(&self) -> Result<MemberId, KvError> {
        const OPERATION: &str = "read the member's id";
        let mut client = self.client.kv_client();
        let answer = self.call(OPERATION, client.get(crate::pki::CA_CERT_PATH, None)).await?;
        let headless =
            || KvError::Rejected { operation: OPERATION, source: "the response has no header".into() };
        answer.header().map(|header| MemberId(header.member_id())).ok_or_else(headless)
    }

    /// Makes a call with a timeout, until the store is stopped.
    pub(super) async fn call<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, api::Error>>,
    ) -> Result<T, KvError> {
        tokio::select! {
            biased;
            () = self.stop_token.cancelled() => Err(KvError::Stopped),
            answer = timeout(CALL_TIMEOUT, call) => match answer {
                Ok(answer) => answer.map_err(|error| kv_error(operation, error)),
                Err(late) => Err(KvError::Unavailable { operation, source: late.into() }),
            },
        }
    }
}

#[async_trait]
impl KvStore for EtcdKv {
    async fn range(&self, range: RangeRequest) -> Result<RangeResponse, KvError> {
        range.keys.check_keys()?;
        let (key, options) = convert::get_request(&range);
        let mut client = self.client.kv_client();
        let answer = self.call("read keys", client.get(key, Some(options))).await;
        match answer {
            Ok(answer) => Ok(convert::range_response(&answer)),
            Err(KvError::FutureRevision { .. }) => {
                Err(KvError::FutureRevision { revision: range.revision.unwrap_or_default() })
            }
            Err(error) => Err(error),
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        txn.check_keys()?;
        let mut client = self.client.kv_client();
        let answer = self.call("perform a transaction", client.txn(convert::txn_request(txn))).await?;
        Ok(convert::txn_response(&answer))
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<WatchStream, KvError> {
        keys.check_keys()?;
        watch::open_watch(self.clone(), keys, from).await
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        lease::grant_lease(self.clone(), ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        let mut client = self.client.kv_client();
        match self.call("compact", client.compact(before.0, None)).await {
            // A revision that is already compacted counts as done.
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
