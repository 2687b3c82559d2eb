//! Watches.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::{KeyValue, KvError, Revision};

/// Where a watch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every kind")]
pub enum WatchFrom {
    /// At the first change after the call.
    Now,
    /// At this revision, if it exists, or the next one. To continue after a read, watch from the
    /// [next](Revision::next) revision.
    Revision(Revision),
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every kind")]
pub enum KeyEvent {
    /// It was written.
    Put(KeyValue),
    /// It was deleted, by a call or by the end of its lease.
    Delete {
        /// The key.
        key: Vec<u8>,
        /// The revision that deleted it.
        mod_revision: Revision,
    },
}

impl KeyEvent {
    /// The key.
    pub fn key(&self) -> &[u8] {
        match self {
            KeyEvent::Put(kv) => &kv.key,
            KeyEvent::Delete { key, .. } => key,
        }
    }

    /// The revision of the change.
    pub fn mod_revision(&self) -> Revision {
        match self {
            KeyEvent::Put(kv) => kv.mod_revision,
            KeyEvent::Delete { mod_revision: modified, .. } => *modified,
        }
    }
}

/// A message of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchResponse {
    /// Changes of the watched keys, in order: never empty, and all changes of one revision in one response.
    Events(Vec<KeyEvent>),
    /// The answer to [`WatchStream::request_progress`]: all changes up to this revision have been delivered.
    ///
    /// etcd before 3.4.25 and 3.5.8 may report a revision before its changes: do not resume from it there.
    /// *Source:* etcd issue 15220.
    Progress(Revision),
}

/// A running watch: delivers each change of its keys once, in order.
///
/// # Contract
/// - It survives the loss of a connection or of a leader, without a gap and without a repeat.
/// - [`KvError::Compacted`] reports that changes were compacted before they were delivered; then the watch
///   ends.
/// - It ends with [`KvError::Stopped`] when the store is stopped. Nothing follows an error.
pub struct WatchStream {
    responses: BoxStream<'static, Result<WatchResponse, KvError>>,
    progress_requester: Box<dyn Fn() + Send + Sync>,
}

impl WatchStream {
    /// A watch of these responses: for implementations. `progress` requests a [`WatchResponse::Progress`],
    /// without blocking.
    pub fn new(
        messages: impl Stream<Item = Result<WatchResponse, KvError>> + Send + 'static,
        progress: impl Fn() + Send + Sync + 'static,
    ) -> WatchStream {
        WatchStream { responses: messages.boxed(), progress_requester: Box::new(progress) }
    }

    /// The next response; `None` after the end.
    ///
    /// # Errors
    /// See the type.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no response is lost.
    pub async fn next_response(&mut self) -> Option<Result<WatchResponse, KvError>> {
        self.responses.next().await
    }

    /// Requests the watch's progress: a [`WatchResponse::Progress`] follows unless the connection is lost
    /// first.
    pub fn request_progress(&self) {
        (self.progress_requester)();
    }

    /// The same watch with its responses mapped.
    pub(super) fn map_responses(
        self,
        change: impl FnMut(Result<WatchResponse, KvError>) -> Result<WatchResponse, KvError> + Send + 'static,
    ) -> WatchStream {
        WatchStream {
            responses: self.responses.map(change).boxed(),
            progress_requester: self.progress_requester,
        }
    }
}

impl Stream for WatchStream {
    type Item = Result<WatchResponse, KvError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.responses.poll_next_unpin(context)
    }
}

impl fmt::Debug for WatchStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchStream").finish_non_exhaustive()
    }
}
