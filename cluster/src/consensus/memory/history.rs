//! Keys with their history: a value of plain data, without tasks, clock or IO.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::consensus::kv::{
    Change, KeyRange, KeyValue, KvError, LeaseId, Op, OpResult, Range, Ranged, Revision, Txn, TxnResult,
};

/// What a key was after a change: none where the change removed it.
type Past = (Revision, Option<KeyValue>);

/// All keys, and how they came to be what they are.
#[derive(Debug)]
pub(super) struct History {
    newest: Revision,
    /// Nothing before this is kept.
    oldest: Revision,
    keys: BTreeMap<Vec<u8>, Vec<Past>>,
    changes: BTreeMap<Revision, Vec<Change>>,
    leases: BTreeMap<LeaseId, BTreeSet<Vec<u8>>>,
    next_lease: i64,
}

impl History {
    pub(super) fn new() -> History {
        History {
            newest: Revision(1),
            oldest: Revision(1),
            keys: BTreeMap::new(),
            changes: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease: 1,
        }
    }

    pub(super) fn newest(&self) -> Revision {
        self.newest
    }

    pub(super) fn range(&self, range: &Range) -> Result<Ranged, KvError> {
        range.keys.check()?;
        self.check_revision(range)?;
        let at = range.revision.unwrap_or(self.newest);
        let limit = range.limit.map_or(usize::MAX, |limit| limit.get() as usize);
        let mut kvs = self.within(&range.keys).filter_map(|(_, past)| as_of(past, at).cloned());
        let read = kvs.by_ref().take(limit).collect();
        Ok(Ranged::new(self.newest, read, kvs.next().is_some()))
    }

    pub(super) fn txn(&mut self, txn: &Txn) -> Result<TxnResult, KvError> {
        txn.check()?;
        let succeeded = txn.when.iter().all(|compare| compare.holds(self.now(&compare.key)));
        let ops = if succeeded { &txn.then } else { &txn.otherwise };
        self.check_ops(ops)?;
        let revision = self.newest.next();
        let mut changes = Vec::new();
        let mut results = Vec::with_capacity(ops.len());
        for op in ops {
            let result = self.apply(op, revision, &mut changes)?;
            results.push(result);
        }
        self.commit(revision, changes);
        for result in &mut results {
            if let OpResult::Ranged(ranged) = result {
                ranged.revision = self.newest;
            }
        }
        Ok(TxnResult::new(self.newest, succeeded, results))
    }

    pub(super) fn compact(&mut self, before: Revision) -> Result<(), KvError> {
        if before > self.newest {
            return Err(KvError::FutureRevision { revision: before });
        }
        if before <= self.oldest {
            return Ok(());
        }
        self.oldest = before;
        self.changes = self.changes.split_off(&before);
        self.keys.retain(|_, past| {
            let kept = past.iter().rposition(|(at, _)| *at <= before).unwrap_or(0);
            past.drain(..kept);
            !matches!(past[..], [(_, None)])
        });
        Ok(())
    }

    /// The changes of these keys by the first revision that made any, from `from` on.
    pub(super) fn changes_from(
        &self,
        keys: &KeyRange,
        from: Revision,
    ) -> Result<Option<(Revision, Vec<Change>)>, KvError> {
        if from < self.oldest {
            return Err(KvError::Compacted { oldest: self.oldest });
        }
        let concerned = |changes: &[Change]| -> Vec<Change> {
            changes.iter().filter(|change| keys.contains(change.key())).cloned().collect()
        };
        let revisions = self.changes.range(from..).map(|(at, changes)| (*at, concerned(changes)));
        Ok({ revisions }.find(|(_, changes)| !changes.is_empty()))
    }

    pub(super) fn grant(&mut self) -> LeaseId {
        let id = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.leases.insert(id, BTreeSet::new());
        id
    }

    /// Ends a lease and removes its keys; tells whether there was one.
    pub(super) fn revoke(&mut self, lease: LeaseId) -> bool {
        let Some(keys) = self.leases.remove(&lease) else { return false };
        let revision = self.newest.next();
        let mut changes = Vec::new();
        for key in keys {
            self.remove(key, revision, &mut changes);
        }
        self.commit(revision, changes);
        true
    }

    fn now(&self, key: &[u8]) -> Option<&KeyValue> {
        self.keys.get(key)?.last()?.1.as_ref()
    }

    fn within<'a>(&'a self, keys: &'a KeyRange) -> impl Iterator<Item = (&'a Vec<u8>, &'a Vec<Past>)> {
        let start = match keys {
            KeyRange::Key(start) | KeyRange::Prefix(start) | KeyRange::Between { start, .. } => start,
        };
        let from = (Bound::Included(start.as_slice()), Bound::Unbounded);
        self.keys.range::<[u8], _>(from).take_while(|(key, _)| keys.contains(key))
    }

    /// What may be wrong with these operations now, before anything is done.
    fn check_ops(&self, ops: &[Op]) -> Result<(), KvError> {
        for op in ops {
            match op {
                Op::Put { lease: Some(lease), .. } if !self.leases.contains_key(lease) => {
                    return Err(KvError::NoLease { lease: *lease });
                }
                Op::Range(range) => self.check_revision(range)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn check_revision(&self, range: &Range) -> Result<(), KvError> {
        match range.revision {
            Some(revision) if revision > self.newest => Err(KvError::FutureRevision { revision }),
            Some(revision) if revision < self.oldest => Err(KvError::Compacted { oldest: self.oldest }),
            _ => Ok(()),
        }
    }

    fn apply(&mut self, op: &Op, revision: Revision, changes: &mut Vec<Change>) -> Result<OpResult, KvError> {
        Ok(match op {
            Op::Put { key, value, lease } => {
                self.put(key, value, *lease, revision, changes);
                OpResult::Put
            }
            Op::Delete(keys) => {
                let there =
                    self.within(keys).filter(|(_, past)| past.last().is_some_and(|last| last.1.is_some()));
                let there: Vec<_> = there.map(|(key, _)| key.clone()).collect();
                let count = there.len() as u64;
                there.into_iter().for_each(|key| self.remove(key, revision, changes));
                OpResult::Deleted(count)
            }
            // What was written before in the same transaction is seen.
            Op::Range(range) if range.revision.is_none() => {
                let limit = range.limit.map_or(usize::MAX, |limit| limit.get() as usize);
                let mut kvs = self.within(&range.keys).filter_map(|(_, past)| past.last()?.1.clone());
                let read = kvs.by_ref().take(limit).collect();
                OpResult::Ranged(Ranged::new(revision, read, kvs.next().is_some()))
            }
            Op::Range(range) => OpResult::Ranged(self.range(range)?),
        })
    }

    fn put(
        &mut self,
        key: &[u8],
        value: &[u8],
        lease: Option<LeaseId>,
        revision: Revision,
        changes: &mut Vec<Change>,
    ) {
        let before = self.now(key).cloned();
        let mut kv = KeyValue::new(key, value, revision);
        kv.lease = lease;
        if let Some(before) = before {
            (kv.created, kv.version) = (before.created, before.version.saturating_add(1));
            self.detach(&before);
        }
        if let Some(keys) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
            keys.insert(key.to_vec());
        }
        self.keys.entry(key.to_vec()).or_default().push((revision, Some(kv.clone())));
        changes.push(Change::Put(kv));
    }

    fn remove(&mut self, key: Vec<u8>, revision: Revision, changes: &mut Vec<Change>) {
        let Some(before) = self.now(&key).cloned() else { return };
        self.detach(&before);
        self.keys.entry(key.clone()).or_default().push((revision, None));
        changes.push(Change::Deleted { key, modified: revision });
    }

    fn detach(&mut self, kv: &KeyValue) {
        if let Some(keys) = kv.lease.and_then(|lease| self.leases.get_mut(&lease)) {
            keys.remove(&kv.key);
        }
    }

    fn commit(&mut self, revision: Revision, changes: Vec<Change>) {
        if !changes.is_empty() {
            self.newest = revision;
            self.changes.insert(revision, changes);
        }
    }
}

fn as_of(past: &[Past], at: Revision) -> Option<&KeyValue> {
    past.iter().rev().find(|(revision, _)| *revision <= at)?.1.as_ref()
}
