//! Following keys: what is there, then what changes, without a gap.

use std::fmt;
use std::sync::Arc;

use super::{Change, KeyRange, KeyValue, KvError, KvStore, Range, Revision, Watch, WatchFrom, WatchMessage};

/// What [`Follow`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Update {
    /// All that is there. What is not among it isn't there: forget what was told before.
    ///
    /// It comes first, and again when changes were lost to a compaction.
    All {
        /// The newest revision when it was read.
        revision: Revision,
        /// The keys in their order.
        kvs: Vec<KeyValue>,
    },
    /// What changed since, in order.
    Changes(Vec<Change>),
}

/// Follows keys: reads what is there, watches from the revision after that, and does the same again when the watch has
/// lost changes to a compaction. Between the two nothing is missed and nothing is told twice.
pub struct Follow {
    store: Arc<dyn KvStore>,
    keys: KeyRange,
    watch: Option<Watch>,
}

impl Follow {
    /// Will follow these keys; nothing is asked before the first [`next`](Self::next).
    pub fn new(store: Arc<dyn KvStore>, keys: KeyRange) -> Follow {
        Follow { store, keys, watch: None }
    }

    /// What there is next.
    ///
    /// # Errors
    /// Those of the store but [`KvError::Compacted`]. It can be called again after each: what is told next is
    /// [`Update::All`]. After [`KvError::Stopped`] that is of no use.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: nothing is lost.
    pub async fn next(&mut self) -> Result<Update, KvError> {
        loop {
            let Some(watch) = &mut self.watch else {
                if let Some(all) = self.read().await? {
                    return Ok(all);
                }
                continue;
            };
            match watch.message().await {
                Some(Ok(WatchMessage::Changes(changes))) => return Ok(Update::Changes(changes)),
                Some(Ok(WatchMessage::Progress(_))) => {}
                Some(Err(KvError::Compacted { .. })) => self.watch = None,
                Some(Err(error)) => {
                    self.watch = None;
                    return Err(error);
                }
                None => {
                    self.watch = None;
                    return Err(KvError::Stopped);
                }
            }
        }
    }

    /// Reads and begins to watch; none where the revision that was read was compacted meanwhile.
    async fn read(&mut self) -> Result<Option<Update>, KvError> {
        let read = self.store.range(Range::new(self.keys.clone())).await?;
        let from = WatchFrom::Revision(read.revision.next());
        match self.store.watch(self.keys.clone(), from).await {
            Ok(watch) => self.watch = Some(watch),
            Err(KvError::Compacted { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
        Ok(Some(Update::All { revision: read.revision, kvs: read.kvs }))
    }
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").field("keys", &self.keys).finish_non_exhaustive()
    }
}
