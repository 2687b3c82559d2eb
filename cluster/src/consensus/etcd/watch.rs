//! A watch that goes on where its connection ended.

use std::sync::Arc;
use std::time::Duration;

use etcd_client as api;
use futures_util::stream;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::convert;
use super::kv::EtcdKv;
use crate::consensus::kv::{KeyRange, KvError, Revision, Watch, WatchFrom, WatchMessage};

/// The pause after a connection was lost doubles from here.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// And ends here.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

pub(super) async fn open(kv: EtcdKv, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
    let progress = Arc::new(Notify::new());
    let asked = Arc::clone(&progress);
    let first = if let WatchFrom::Revision(revision) = from { Some(revision) } else { None };
    let mut watching =
        Watching { kv, keys, next: first, stream: None, pause: FIRST_PAUSE, asked, is_over: false };
    watching.connect().await?;
    let messages = stream::unfold(watching, |mut watching| async {
        let message = watching.message().await?;
        Some((message, watching))
    });
    Ok(Watch::new(messages, move || progress.notify_one()))
}

/// Where a watch is.
struct Watching {
    kv: EtcdKv,
    keys: KeyRange,
    /// The first revision that was not told; none before the first connection, from now on.
    next: Option<Revision>,
    stream: Option<(api::WatchRequestSender, api::WatchResponseStream)>,
    pause: Duration,
    asked: Arc<Notify>,
    is_over: bool,
}

/// What came of waiting.
enum Turn {
    Stopped,
    Asked,
    Came(Result<Option<api::WatchResponse>, api::Error>),
}

impl Watching {
    async fn message(&mut self) -> Option<Result<WatchMessage, KvError>> {
        if self.is_over {
            return None;
        }
        let message = self.advance().await;
        self.is_over = message.is_err();
        Some(message)
    }

    async fn advance(&mut self) -> Result<WatchMessage, KvError> {
        loop {
            let Some((sender, stream)) = &mut self.stream else {
                self.reconnect().await?;
                continue;
            };
            let turn = tokio::select! {
                biased;
                () = self.kv.stopped.cancelled() => Turn::Stopped,
                () = self.asked.notified() => Turn::Asked,
                came = stream.message() => Turn::Came(came),
            };
            match turn {
                Turn::Stopped => return Err(KvError::Stopped),
                Turn::Asked => {
                    if sender.request_progress().await.is_err() {
                        self.stream = None;
                    }
                }
                Turn::Came(Ok(Some(response))) => {
                    if let Some(message) = self.told(&response)? {
                        return Ok(message);
                    }
                }
                Turn::Came(Ok(None)) => self.stream = None,
                Turn::Came(Err(error)) => {
                    self.stream = None;
                    retryable(convert::kv_error("watch keys", error))?;
                }
            }
        }
    }

    /// What a response tells, if anything.
    fn told(&mut self, response: &api::WatchResponse) -> Result<Option<WatchMessage>, KvError> {
        if response.compact_revision() > 0 {
            return Err(KvError::Compacted { oldest: Revision(response.compact_revision()) });
        }
        if response.canceled() {
            // It has lost its leader, or is going down. Another connection tells more.
            self.stream = None;
            return Ok(None);
        }
        if response.created() {
            self.created(response);
            return Ok(None);
        }
        self.pause = FIRST_PAUSE;
        let next = self.next.unwrap_or_default();
        let changes = response.events().iter().filter_map(convert::change);
        let changes: Vec<_> = changes.filter(|change| change.modified() >= next).collect();
        if let Some(last) = changes.last() {
            self.next = Some(last.modified().next());
            return Ok(Some(WatchMessage::Changes(changes)));
        }
        let is_progress = response.events().is_empty();
        Ok(is_progress.then(|| WatchMessage::Progress(convert::revision(response.header()))))
    }

    fn created(&mut self, response: &api::WatchResponse) {
        let newest = convert::revision(response.header());
        self.next.get_or_insert(newest.next());
    }

    /// Tries again until it is connected, or will never be.
    async fn reconnect(&mut self) -> Result<(), KvError> {
        tokio::select! {
            biased;
            () = self.kv.stopped.cancelled() => return Err(KvError::Stopped),
            () = sleep(self.pause) => {}
        }
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.connect().await.or_else(retryable)
    }

    /// Opens a stream, and waits until etcd watches.
    async fn connect(&mut self) -> Result<(), KvError> {
        let (key, end) = convert::bounds(&self.keys);
        let mut options = api::WatchOptions::new();
        if let Some(end) = end {
            options = options.with_range(end);
        }
        if let Some(next) = self.next {
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
            Some(response) => self.told(&response).map(drop),
            None => {
                self.stream = None;
                Ok(())
            }
        }
    }
}

/// Hands on what no other try would change.
fn retryable(error: KvError) -> Result<(), KvError> {
    if error.is_retryable() { Ok(()) } else { Err(error) }
}
