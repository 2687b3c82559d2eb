//! The keys of an etcd, and a watch of them that resumes where its connection ended.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client as api;
use futures_util::stream;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::convert::{self, CALL_TIMEOUT, kv_error};
use crate::consensus::MemberId;
use crate::consensus::kv::{
    KeyEvent, KeyRange, KvError, KvStore, RangeResponse, Revision, Txn, TxnResponse, WatchStream,
};

/// The first pause after a lost connection of a watch; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The keys of an etcd, until the token is canceled.
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
        // Every answer has the header; this key is one that each cluster has.
        let answer = self.call(OPERATION, client.get(crate::pki::CA_CERT_PATH, None)).await?;
        let headless =
            || KvError::Rejected { operation: OPERATION, source: "the response has no header".into() };
        answer.header().map(|header| MemberId(header.member_id())).ok_or_else(headless)
    }

    /// Makes a call with a timeout, until the store is stopped.
    async fn call<T>(
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
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        keys.check_keys()?;
        let (key, options) = convert::get_request(keys);
        let mut client = self.client.kv_client();
        Ok(convert::range_response(&self.call("read keys", client.get(key, options)).await?))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        txn.check_keys()?;
        let mut client = self.client.kv_client();
        let answer = self.call("perform a transaction", client.txn(convert::txn_request(txn))).await?;
        Ok(convert::txn_response(&answer))
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        keys.check_keys()?;
        let kv = self.clone();
        let mut cursor = WatchCursor { kv, keys, next_revision: from, connection: None, pause: FIRST_PAUSE };
        cursor.connect().await?;
        Ok(WatchStream::new(stream::try_unfold(cursor, |mut cursor| async {
            let events = cursor.next_events().await?;
            Ok(Some((events, cursor)))
        })))
    }
}

impl fmt::Debug for EtcdKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdKv").finish_non_exhaustive()
    }
}

/// The position of a watch, which outlives its connections.
struct WatchCursor {
    kv: EtcdKv,
    keys: KeyRange,
    /// The first revision that was not delivered.
    next_revision: Revision,
    connection: Option<WatchConnection>,
    /// The pause before the next connection.
    pause: Duration,
}

struct WatchConnection {
    responses: api::WatchResponseStream,
    /// etcd ends the watch when its sender is dropped.
    _sender: api::WatchRequestSender,
}

impl WatchCursor {
    async fn next_events(&mut self) -> Result<Vec<KeyEvent>, KvError> {
        loop {
            let Some(connection) = &mut self.connection else {
                self.reconnect().await?;
                continue;
            };
            let response = tokio::select! {
                biased;
                () = self.kv.stop_token.cancelled() => return Err(KvError::Stopped),
                response = connection.responses.message() => response,
            };
            match response {
                Ok(Some(response)) => {
                    if let Some(events) = self.process_response(&response)? {
                        return Ok(events);
                    }
                }
                // The member has closed the stream: another connection continues where this one ended.
                Ok(None) => self.connection = None,
                Err(error) => {
                    self.connection = None;
                    only_retryable(kv_error("watch keys", error))?;
                }
            }
        }
    }

    /// The events in a response, if any.
    fn process_response(&mut self, response: &api::WatchResponse) -> Result<Option<Vec<KeyEvent>>, KvError> {
        // History before this revision is gone: the caller has to read the present keys.
        if response.compact_revision() > 0 {
            return Err(KvError::Compacted);
        }
        if response.canceled() {
            // The member has lost its leader, or is shutting down. Another connection will report more.
            self.connection = None;
            return Ok(None);
        }
        if response.created() {
            return Ok(None);
        }
        // The connection works: the next loss is a new one.
        self.pause = FIRST_PAUSE;
        let events = response.events().iter().filter_map(convert::key_event);
        // No event is delivered twice, even if etcd sends more than was asked for.
        let events: Vec<_> = events.filter(|event| event.mod_revision() >= self.next_revision).collect();
        // A response without events, such as a progress notification, moves nothing.
        let Some(last) = events.last() else { return Ok(None) };
        // All events of a revision come in one response, since the watch asks for no fragments.
        self.next_revision = last.mod_revision().next();
        Ok(Some(events))
    }

    /// Retries until it is connected, or can never be.
    async fn reconnect(&mut self) -> Result<(), KvError> {
        tokio::select! {
            biased;
            () = self.kv.stop_token.cancelled() => return Err(KvError::Stopped),
            () = sleep(self.pause) => {}
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        // After a failed attempt there is no connection, and `next_events` tries again, with a longer pause.
        self.connect().await.or_else(only_retryable)
    }

    /// Opens a stream, and waits until etcd's watch is active.
    async fn connect(&mut self) -> Result<(), KvError> {
        let (key, end) = convert::range_bounds(self.keys.clone());
        let mut options = api::WatchOptions::new().with_start_revision(self.next_revision.0);
        if let Some(end) = end {
            options = options.with_range(end);
        }
        let mut client = self.kv.client.watch_client();
        // etcd confirms a watch by its first response: until then, a change could be missed.
        let opening = async {
            let (sender, mut responses) = client.watch(key, Some(options)).await?.split();
            let first = responses.message().await?;
            Ok((WatchConnection { responses, _sender: sender }, first))
        };
        let (connection, first) = self.kv.call("watch keys", opening).await?;
        // Without a first response the stream has ended already.
        let Some(first) = first else { return Ok(()) };
        self.connection = Some(connection);
        self.process_response(&first).map(drop)
    }
}

/// Returns errors that a retry would not change.
fn only_retryable(error: KvError) -> Result<(), KvError> {
    if error.is_retryable() { Ok(()) } else { Err(error) }
}
