//! Watches.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::{KeyValue, KvError, Revision};

/// Where a watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum WatchFrom {
    /// With the first change after the call.
    Now,
    /// With this change, if it is one, and those after it. To go on after a read, watch from its revision's
    /// [next](Revision::next).
    Revision(Revision),
}

/// What happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum Change {
    /// It was written.
    Put(KeyValue),
    /// It was removed, by a call or by the end of its lease.
    Deleted {
        /// The key.
        key: Vec<u8>,
        /// The change that did it.
        modified: Revision,
    },
}

impl Change {
    /// The key.
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(kv) => &kv.key,
            Change::Deleted { key, .. } => key,
        }
    }

    /// The change that did it.
    pub fn modified(&self) -> Revision {
        match self {
            Change::Put(kv) => kv.modified,
            Change::Deleted { modified, .. } => *modified,
        }
    }
}

/// What a watch tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchMessage {
    /// Changes of the watched keys, in order: never none, and all that one revision changed in one message.
    Changes(Vec<Change>),
    /// The answer to [`Watch::request_progress`]: changes up to this revision have all been told.
    ///
    /// etcd before 3.4.25 and 3.5.8 may tell a revision whose changes follow only then: don't go on from it there.
    /// *Source:* etcd issue 15220.
    Progress(Revision),
}

/// A watch that runs: each change of its keys once, in order.
///
/// # Contract
/// - It goes on over the loss of a connection or of a leader, without a gap and without a repeat.
/// - [`KvError::Compacted`] says that changes were lost to a compaction, before the watch saw them; then it ends.
/// - It ends with [`KvError::Stopped`] when the store is stopped. After an error there is nothing.
pub struct Watch {
    messages: BoxStream<'static, Result<WatchMessage, KvError>>,
    progress: Box<dyn Fn() + Send + Sync>,
}

impl Watch {
    /// A watch of these messages: for implementations. `progress` asks for a [`WatchMessage::Progress`], and doesn't block.
    pub fn new(
        messages: impl Stream<Item = Result<WatchMessage, KvError>> + Send + 'static,
        progress: impl Fn() + Send + Sync + 'static,
    ) -> Watch {
        Watch { messages: messages.boxed(), progress: Box::new(progress) }
    }

    /// The next message; none after the end.
    ///
    /// # Errors
    /// See the type.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no message is lost.
    pub async fn message(&mut self) -> Option<Result<WatchMessage, KvError>> {
        self.messages.next().await
    }

    /// Asks how far the watch is: a [`WatchMessage::Progress`] comes, unless the connection is lost before.
    pub fn request_progress(&self) {
        (self.progress)();
    }

    /// The same watch with its messages changed.
    pub(super) fn map(
        self,
        change: impl FnMut(Result<WatchMessage, KvError>) -> Result<WatchMessage, KvError> + Send + 'static,
    ) -> Watch {
        Watch { messages: self.messages.map(change).boxed(), progress: self.progress }
    }
}

impl Stream for Watch {
    type Item = Result<WatchMessage, KvError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.messages.poll_next_unpin(context)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
