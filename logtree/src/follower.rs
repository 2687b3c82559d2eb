//! The way from appends to the readers that wait for them.
//!
//! A reader that has read all of a name waits there, and leaves with the first record that it wants: an
//! append pays for the readers that it wakes, not for those that are idle.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::Dn;
use crate::class::ClassMask;
use crate::missed::MissedEntries;
use crate::name_log::NameLog;
use crate::query::LogQuery;

/// The part of a following reader that writers know.
#[derive(Debug)]
pub(crate) struct Follower {
    query: LogQuery,
    pub(crate) mask: ClassMask,
    inbox: Mutex<Inbox>,
}

/// The events since the reader looked.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// Ids of names with records for the reader, and of those that were forgotten; some of them twice.
    pub(crate) ready: Vec<u64>,
    /// Names of its query that were created, by id.
    pub(crate) created: HashMap<u64, Arc<NameLog>>,
    /// The entries of names that were created and forgotten since.
    pub(crate) forgotten: MissedEntries,
    waker: Option<Waker>,
}

impl Follower {
    pub(crate) fn new(query: LogQuery, mask: ClassMask) -> Follower {
        Follower { query, mask, inbox: Mutex::default() }
    }

    fn lock_inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn matches_dn(&self, dn: &Dn) -> bool {
        self.query.matches_dn(dn)
    }

    /// Adds a name that was created. The reader waits there from the start.
    pub(crate) fn add_created(&self, log: &Arc<NameLog>) {
        self.lock_inbox().created.insert(log.id, Arc::clone(log));
    }

    /// Removes a name that is forgotten; all of its records have been evicted, `missed` in number.
    pub(crate) fn forget_name(&self, id: u64, missed: MissedEntries) {
        let mut inbox = self.lock_inbox();
        // The reader has no cursor for a name that it has not taken over, so the count is for the inbox.
        if inbox.created.remove(&id).is_some() {
            inbox.ready.retain(|&ready| ready != id);
            inbox.forgotten.add(missed);
        } else {
            inbox.ready.push(id);
        }
    }

    /// Notifies it of a record; returns the waker, to be called without locks.
    fn notify(&self, id: u64) -> Option<Waker> {
        let mut inbox = self.lock_inbox();
        inbox.ready.push(id);
        inbox.waker.take()
    }

    /// Takes what has happened; `None` if it is nothing.
    pub(crate) fn take_inbox(&self) -> Option<Inbox> {
        let mut inbox = self.lock_inbox();
        let is_empty = inbox.ready.is_empty() && inbox.created.is_empty() && inbox.forgotten.count == 0;
        (!is_empty).then(|| {
            let waker = inbox.waker.take();
            std::mem::replace(&mut *inbox, Inbox { waker, ..Inbox::default() })
        })
    }

    /// Registers the waker for the next record. Returns the previous waker; or this one as an error, if
    /// something has already happened.
    pub(crate) fn set_waker(&self, waker: Waker) -> Result<Option<Waker>, Waker> {
        let mut inbox = self.lock_inbox();
        // A created name has nothing to read until its first record makes it ready.
        let is_idle = inbox.ready.is_empty() && inbox.forgotten.count == 0;
        if is_idle { Ok(inbox.waker.replace(waker)) } else { Err(waker) }
    }

    /// Takes the waker, to be dropped without locks: it may run foreign code.
    pub(crate) fn take_waker(&self) -> Option<Waker> {
        self.lock_inbox().waker.take()
    }
}

/// The readers that want the same classes.
#[derive(Debug)]
struct FollowerGroup {
    mask: ClassMask,
    followers: Vec<Arc<Follower>>,
}

/// The readers that have read all of a name, by the classes they want: there are few different sets.
#[derive(Debug, Default)]
pub(crate) struct WaitingFollowers {
    groups: Vec<FollowerGroup>,
    /// All classes that one of them wants.
    wanted: ClassMask,
}

impl WaitingFollowers {
    pub(crate) fn add(&mut self, follower: &Arc<Follower>) {
        self.wanted = self.wanted.union(follower.mask);
        match self.groups.iter_mut().find(|group| group.mask == follower.mask) {
            Some(group) => group.followers.push(Arc::clone(follower)),
            None => {
                let group = FollowerGroup { mask: follower.mask, followers: vec![Arc::clone(follower)] };
                self.groups.push(group);
            }
        }
    }

    pub(crate) fn remove(&mut self, follower: &Arc<Follower>) {
        for group in self.groups.iter_mut().filter(|group| group.mask == follower.mask) {
            group.followers.retain(|waiting| !Arc::ptr_eq(waiting, follower));
        }
        self.groups.retain(|group| group.mask != follower.mask || !group.followers.is_empty());
        self.count_wanted();
    }

    /// Notifies those that want a record of this class, and removes them.
    #[inline]
    pub(crate) fn notify(&mut self, class: u8, id: u64, wake: &mut Vec<Waker>) {
        if self.wanted.contains(class) {
            self.notify_group(class, id, wake);
        }
    }

    #[cold]
    fn notify_group(&mut self, class: u8, id: u64, wake: &mut Vec<Waker>) {
        // A group stays when it is empty: its readers come back when they have read the record.
        for group in self.groups.iter_mut().filter(|group| group.mask.contains(class)) {
            wake.extend(group.followers.drain(..).filter_map(|follower| follower.notify(id)));
        }
        self.count_wanted();
    }

    fn count_wanted(&mut self) {
        let waiting = self.groups.iter().filter(|group| !group.followers.is_empty());
        self.wanted = waiting.fold(ClassMask::default(), |wanted, group| wanted.union(group.mask));
    }
}
