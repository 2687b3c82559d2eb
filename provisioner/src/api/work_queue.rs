//! Reconciles the objects of a kind: each by one call at a time, and again when a call asks for it.
//!
//! kube's `applier` does the same, but passes each object through a timer, whose unit is a millisecond: a claim would
//! wait for one or two of them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, Stream, StreamExt as _};
use kube::Resource;
use kube::runtime::reflector::{ObjectRef, Store};
use tokio_util::time::{DelayQueue, delay_queue::Key};

/// The longest delay: a [`DelayQueue`] panics at more than two years.
const MAX_DELAY: Duration = Duration::from_secs(365 * 86_400);

/// When an object is reconciled again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextRun {
    /// When it changes.
    OnChange,
    /// After this time, or when it changes.
    After(Duration),
}

/// The work for an object. An object without an entry has none.
enum WorkState {
    /// Is in the queue.
    Due,
    /// Is reconciled again when its delay is over.
    Delayed(Key),
    /// Being reconciled, and then again if it has changed since the start.
    Running { has_changed: bool },
}

/// The objects with work, in the order in which they became due.
struct WorkQueue<K: Resource<DynamicType = ()>> {
    states: HashMap<ObjectRef<K>, WorkState>,
    due: VecDeque<ObjectRef<K>>,
    delays: DelayQueue<ObjectRef<K>>,
}

impl<K: Resource<DynamicType = ()>> WorkQueue<K> {
    fn new() -> Self {
        Self { states: HashMap::new(), due: VecDeque::new(), delays: DelayQueue::new() }
    }

    /// Queues an object that has changed.
    fn add_change(&mut self, object: ObjectRef<K>) {
        match self.states.entry(object.clone()) {
            Entry::Vacant(entry) => drop(entry.insert(WorkState::Due)),
            Entry::Occupied(mut entry) => match entry.get_mut() {
                WorkState::Due => return,
                WorkState::Running { has_changed } => {
                    *has_changed = true;
                    return;
                }
                // The change may have removed the cause of the failure, so the object does not wait for its delay.
                WorkState::Delayed(key) => {
                    self.delays.remove(key);
                    entry.insert(WorkState::Due);
                }
            },
        }
        self.due.push_back(object);
    }

    /// Ends all delays.
    fn end_delays(&mut self) {
        let delayed = self.states.iter().filter(|(_, state)| matches!(state, WorkState::Delayed(_)));
        let mut delayed: Vec<_> = delayed.map(|(object, _)| object.clone()).collect();
        // The map has no order, and which of them comes first should not depend on chance.
        delayed.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        for object in delayed {
            self.add_change(object);
        }
    }

    /// Queues an object whose delay is over.
    fn end_delay(&mut self, object: ObjectRef<K>) {
        self.states.insert(object.clone(), WorkState::Due);
        self.due.push_back(object);
    }

    /// Takes the next object to reconcile, which is running from now on.
    fn start_next(&mut self) -> Option<ObjectRef<K>> {
        let object = self.due.pop_front()?;
        self.states.insert(object.clone(), WorkState::Running { has_changed: false });
        Some(object)
    }

    /// Ends the call for a running object, and queues or delays the object again.
    fn finish(&mut self, object: ObjectRef<K>, next: NextRun) {
        let state = self.states.remove(&object);
        match next {
            // The call may have read the object before its change, so its answer counts no longer.
            _ if matches!(state, Some(WorkState::Running { has_changed: true })) => self.add_change(object),
            NextRun::OnChange => {}
            NextRun::After(delay) => {
                let key = self.delays.insert(object.clone(), delay.min(MAX_DELAY));
                self.states.insert(object, WorkState::Delayed(key));
            }
        }
    }
}

/// Calls `reconcile` for each object of the stream, once the cache has been filled, for at most `concurrency` of them at
/// a time. When the stream ends, it waits for the calls in progress and returns. Each item of `wakes` ends the delays of
/// all objects: their cause may be gone.
///
/// # Cancel safety
/// Dropping it drops the calls in progress.
pub(crate) async fn reconcile_changes<K, F>(
    changes: impl Stream<Item = ObjectRef<K>>,
    wakes: impl Stream<Item = ()>,
    objects: Store<K>,
    concurrency: NonZeroU16,
    reconcile: impl Fn(Arc<K>) -> F,
) where
    K: Resource<DynamicType = ()> + Clone + 'static,
    F: Future<Output = NextRun>,
{
    let (mut changes, mut wakes) = (std::pin::pin!(changes.fuse()), std::pin::pin!(wakes.fuse()));
    let mut filled = std::pin::pin!(objects.wait_until_ready().fuse());
    let (mut queue, mut running, mut is_filled) = (WorkQueue::new(), FuturesUnordered::new(), false);
    loop {
        // Before the cache is filled, an object that exists would look deleted.
        while is_filled
            && running.len() < usize::from(concurrency.get())
            && let Some(name) = queue.start_next()
        {
            // A deleted one has no work.
            match objects.get(&name) {
                Some(object) => running.push(start_call(name, || reconcile(object))),
                None => queue.finish(name, NextRun::OnChange),
            }
        }
        tokio::select! {
            Some((object, next)) = running.next(), if !running.is_empty() => queue.finish(object, next),
            change = changes.next() => match change {
                Some(object) => queue.add_change(object),
                None => break,
            },
            Some(()) = wakes.next() => queue.end_delays(),
            Some(expired) = poll_fn(|cx| queue.delays.poll_expired(cx)), if !queue.delays.is_empty() => {
                queue.end_delay(expired.into_inner());
            }
            // Waiting fails only if the watch has ended, and then the stream of changes ends, too.
            done = &mut filled, if !is_filled => is_filled = done.is_ok(),
        }
    }
    while running.next().await.is_some() {}
}

/// A call in a box: without optimization, it would be copied through the stack of the loop.
fn start_call<K, F>(
    object: ObjectRef<K>,
    call: impl FnOnce() -> F,
) -> Pin<Box<impl Future<Output = (ObjectRef<K>, NextRun)>>>
where
    K: Resource<DynamicType = ()>,
    F: Future<Output = NextRun>,
{
    Box::pin(call().map(|next| (object, next)))
}

#[cfg(test)]
#[path = "work_queue_test.rs"]
mod tests;
