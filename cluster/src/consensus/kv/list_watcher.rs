//! List and watch: reads the present keys, then watches for changes, without a gap.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::{KeyEvent, KeyRange, KeyValue, KvError, KvStore, WatchStream};

/// An update of a [`ListWatcher`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListWatchUpdate {
    /// All present keys, in their order. Keys that are not among them do not exist: discard earlier updates.
    ///
    /// It is the first update, and is repeated when changes were lost to a compaction.
    Snapshot(Vec<KeyValue>),
    /// Changes since then, in order.
    Events(Vec<KeyEvent>),
}

impl ListWatchUpdate {
    /// Makes the known keys, with their values, those of the store.
    pub fn apply_to(self, known: &mut BTreeMap<Vec<u8>, Vec<u8>>) {
        match self {
            Self::Snapshot(kvs) => *known = kvs.into_iter().map(|kv| (kv.key, kv.value)).collect(),
            Self::Events(events) => {
                for event in events {
                    match event {
                        KeyEvent::Put(kv) => known.insert(kv.key, kv.value),
                        KeyEvent::Delete { key, .. } => known.remove(&key),
                    };
                }
            }
        }
    }
}

/// Lists keys and watches them, like a Kubernetes informer: reads the present keys, watches from the next
/// revision, and lists again when the watch has lost changes to a compaction. No change is missed or reported
/// twice.
pub struct ListWatcher {
    store: Arc<dyn KvStore>,
    keys: KeyRange,
    watch: Option<WatchStream>,
}

impl ListWatcher {
    /// Watches these keys; no request is sent before the first [`next_update`](Self::next_update).
    pub fn new(store: Arc<dyn KvStore>, keys: KeyRange) -> ListWatcher {
        ListWatcher { store, keys, watch: None }
    }

    /// The next update.
    ///
    /// # Errors
    /// Those of the store except [`KvError::Compacted`]. It can be called again after any error: the next
    /// update is a [`ListWatchUpdate::Snapshot`]. After [`KvError::Stopped`] every call fails.
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no update is lost.
    pub async fn next_update(&mut self) -> Result<ListWatchUpdate, KvError> {
        loop {
            let Some(watch) = &mut self.watch else {
                let read = self.store.range(self.keys.clone()).await?;
                // From the revision after the read: no change is missed, and none is in the snapshot already.
                match self.store.watch(self.keys.clone(), read.revision.next()).await {
                    Ok(watch) => self.watch = Some(watch),
                    // Compacted since the read: it is repeated.
                    Err(KvError::Compacted) => continue,
                    Err(error) => return Err(error),
                }
                return Ok(ListWatchUpdate::Snapshot(read.kvs));
            };
            match watch.next_events().await {
                Some(Ok(events)) => return Ok(ListWatchUpdate::Events(events)),
                // Changes are lost: the loop reads the present keys, and continues from there.
                Some(Err(KvError::Compacted)) => self.watch = None,
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
}

impl fmt::Debug for ListWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListWatcher").field("keys", &self.keys).finish_non_exhaustive()
    }
}
