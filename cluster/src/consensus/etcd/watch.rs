//! A watch that resumes where its connection ended.

use std::sync::Arc;
use std::time::Duration;

use etcd_client as api;
use futures_util::stream;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::convert;
use super::kv::EtcdKv;
use crate::consensus::kv::{KeyRange, KvError, Revision, WatchFrom, WatchResponse, WatchStream};

/// The first pause after a lost connection; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

pub(super) async fn open_watch(kv: EtcdKv, keys: KeyRange, from: WatchFrom) -> Result<WatchStream, KvError> {
    let progress = Arc::new(Notify::new());
    let progress_requests = Arc::clone(&progress);
    let first = if let WatchFrom::Revision(revision) = from { Some(revision) } else { None };
    let mut cursor = WatchCursor {
        kv,
        keys,
        next_revision: first,
        stream: None,
        pause: FIRST_PAUSE,
        progress_requests,
        is_finished: false,
    };
    cursor.connect().await?;
    let messages = stream::unfold(cursor, |mut cursor| async {
        let message = cursor.next_response().await?;
        Some((message, cursor))
    });
    Ok(WatchStream::new(messages, move || progress.notify_one()))
}

/// The position of a watch.
struct WatchCursor {
    kv: EtcdKv,
    keys: KeyRange,
    /// The first revision that was not delivered; `None` before the first connection of a watch that starts
    /// now.
    next_revision: Option<Revision>,
    stream: Option<(api::WatchRequestSender, api::WatchResponseStream)>,
    pause: Duration,
    progress_requests: Arc<Notify>,
    is_finished: bool,
}

/// What ended the wait.
enum WatchSignal {
    Stopped,
    ProgressRequested,
    Response(Result<Option<api::WatchResponse>, api::Error>),
}

impl WatchCursor {
    async fn next_response(&mut self) -> Option<Result<WatchResponse, KvError>> {
        if self.is_finished {
            return None;
        }
        let message = self.advance().await;
        self.is_finished = message.is_err();
        Some(message)
    }

    async fn advance(&mut self) -> Result<WatchResponse, KvError> {
        loop {
            let Some((sender, stream)) = &mut self.stream else {
                self.reconnect().await?;
                continue;
            };
            let signal = tokio::select! {
                biased;
                () = self.kv.stop_token.cancelled() => WatchSignal::Stopped,
                () = self.progress_requests.notified() => WatchSignal::ProgressRequested,
                response = stream.message() => WatchSignal::Response(response),
            };
            match signal {
                WatchSignal::Stopped => return Err(KvError::Stopped),
                WatchSignal::ProgressRequested => {
                    if sender.request_progress().await.is_err() {
                        self.stream = None;
                    }
                }
                WatchSignal::Response(Ok(Some(response))) => {
                    if let Some(message) = self.process_response(&response)? {
                        return Ok(message);
                    }
                }
                WatchSignal::Response(Ok(None)) => self.stream = None,
                WatchSignal::Response(Err(error)) => {
                    self.stream = None;
                    only_retryable(convert::kv_error("watch keys", error))?;
                }
            }
        }
    }

    /// The message in a response, if any.
    fn process_response(&mut self, response: &api::WatchResponse) -> Result<Option<WatchResponse>, KvError> {
        if response.compact_revision() > 0 {
            return Err(KvError::Compacted { oldest: Revision(response.compact_revision()) });
        }
        if response.canceled() {
            // The member has lost its leader, or is shutting down. Another connection will report more.
            self.stream = None;
            return Ok(None);
        }
        if response.created() {
            self.note_created(response);
            return Ok(None);
        }
        self.pause = FIRST_PAUSE;
        let next = self.next_revision.unwrap_or_default();
        let changes = response.events().iter().filter_map(convert::key_event);
        let changes: Vec<_> = changes.filter(|change| change.mod_revision() >= next).collect();
        if let Some(last) = changes.last() {
            self.next_revision = Some(last.mod_revision().next());
            return Ok(Some(WatchResponse::Events(changes)));
        }
        let is_progress = response.events().is_empty();
        Ok(is_progress.then(|| WatchResponse::Progress(convert::header_revision(response.header()))))
    }

    fn note_created(&mut self, response: &api::WatchResponse) {
        let newest = convert::header_revision(response.header());
        self.next_revision.get_or_insert(newest.next());
    }

    /// Retries until it is connected, or can never be.
    async fn reconnect(&mut self) -> Result<(), KvError> {
        tokio::select! {
            biased;
            () = self.kv.stop_token.cancelled() => return Err(KvError::Stopped),
            () = sleep(self.pause) => {}
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.connect().await.or_else(only_retryable)
    }

    /// Opens a stream, and waits until etcd's watch is active.
    async fn connect(&mut self) -> Result<(), KvError> {
        let (key, end) = convert::range_bounds(&self.keys);
        let mut options = api::WatchOptions::new();
        if let Some(end) = end {
            options = options.with_range(end);
        }
        if let Some(next) = self.next_revision {
            options = options.with_start_revision(next.0);
        }
        let mut client = self.kv.client.watch_client();
        let opening = async {
            let (sender, mut stream) = client.watch(key, Some(options)).await?.split();
            let first = stream.message().await?;
            Ok((sender, stream, first))
        };
        let (sender, stream, first) = self.kv.call("watch keys", opening).await?;
        self.stream = Some((sender, stream));
        match first {
            Some(response) => self.process_response(&response).map(drop),
            None => {
                self.stream = None;
                Ok(())
            }
        }
    }
}

/// Returns errors that a retry would not change.
fn only_retryable(error: KvError) -> Result<(), KvError> {
    if error.is_retryable() { Ok(()) } else { Err(error) }
}
