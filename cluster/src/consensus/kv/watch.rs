//! Watches.

use std::fmt;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _};

use super::{KeyValue, KvError, Revision};

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every kind")]
pub enum KeyEvent {
    /// The key was written.
    Put(KeyValue),
    /// The key was deleted.
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
            KeyEvent::Delete { mod_revision, .. } => *mod_revision,
        }
    }
}

/// A running watch: delivers each change of its keys once, in order.
///
/// # Contract
/// - It survives the loss of a connection or of a leader, without a gap and without a repeat.
/// - Each response has at least one event, and all events of a revision.
/// - [`KvError::Compacted`] reports that changes were compacted before they were delivered; then the watch
///   ends.
/// - It ends with [`KvError::Stopped`] when the store is stopped. Nothing follows an error.
pub struct WatchStream(BoxStream<'static, Result<Vec<KeyEvent>, KvError>>);

impl WatchStream {
    /// A watch of these responses: for implementations.
    pub fn new(
        responses: impl Stream<Item = Result<Vec<KeyEvent>, KvError>> + Send + 'static,
    ) -> WatchStream {
        WatchStream(responses.boxed())
    }

    /// The next events; `None` after the end.
    ///
    /// # Errors
    /// See the type.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no event is lost.
    pub async fn next_events(&mut self) -> Option<Result<Vec<KeyEvent>, KvError>> {
        self.0.next().await
    }

    /// The same watch with another name for each key.
    pub(super) fn map_keys(self, change: impl Fn(&mut Vec<u8>) + Send + 'static) -> WatchStream {
        WatchStream::new(self.0.map(move |response| {
            let mut events = response?;
            for event in &mut events {
                let (KeyEvent::Put(KeyValue { key, .. }) | KeyEvent::Delete { key, .. }) = event;
                change(key);
            }
            Ok(events)
        }))
    }
}

impl fmt::Debug for WatchStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchStream").finish_non_exhaustive()
    }
}
