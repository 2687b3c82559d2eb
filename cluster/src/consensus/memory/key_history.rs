//! Keys with their history: plain data, without tasks, clock or IO.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::consensus::kv::{
    KeyEvent, KeyRange, KeyValue, KvError, LeaseId, RangeRequest, RangeResponse, Revision, Txn, TxnOp,
    TxnOpResponse, TxnResponse,
};

/// The value of a key after a change: `None` if the change deleted it.
type KeyVersion = (Revision, Option<KeyValue>);

/// All keys with their history.
#[derive(Debug)]
pub(super) struct KeyHistory {
    newest_revision: Revision,
    /// History before this revision is discarded.
    oldest_revision: Revision,
    keys: BTreeMap<Vec<u8>, Vec<KeyVersion>>,
    changes: BTreeMap<Revision, Vec<KeyEvent>>,
    leases: BTreeMap<LeaseId, BTreeSet<Vec<u8>>>,
    next_lease_id: i64,
}

impl KeyHistory {
    pub(super) fn new() -> KeyHistory {
        KeyHistory {
            newest_revision: Revision(1),
            oldest_revision: Revision(1),
            keys: BTreeMap::new(),
            changes: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease_id: 1,
        }
    }

    pub(super) fn newest_revision(&self) -> Revision {
        self.newest_revision
    }

    pub(super) fn range(&self, range: &RangeRequest) -> Result<RangeResponse, KvError> {
        range.keys.check_keys()?;
        self.check_revision(range)?;
        let at = range.revision.unwrap_or(self.newest_revision);
        let limit = range.limit.map_or(usize::MAX, |limit| limit.get() as usize);
        let mut kvs = self.versions_in(&range.keys).filter_map(|(_, past)| value_at(past, at).cloned());
        let read = kvs.by_ref().take(limit).collect();
        Ok(RangeResponse::new(self.newest_revision, read, kvs.next().is_some()))
    }

    pub(super) fn txn(&mut self, txn: &Txn) -> Result<TxnResponse, KvError> {
        txn.check_keys()?;
        let succeeded =
            txn.when.iter().all(|compare| compare.is_satisfied_by(self.current_value(&compare.key)));
        let ops = if succeeded { &txn.then } else { &txn.or_else };
        self.check_ops(ops)?;
        let revision = self.newest_revision.next();
        let mut changes = Vec::new();
        let mut results = Vec::with_capacity(ops.len());
        for op in ops {
            let result = self.apply_op(op, revision, &mut changes)?;
            results.push(result);
        }
        self.commit(revision, changes);
        for result in &mut results {
            if let TxnOpResponse::Range(ranged) = result {
                ranged.revision = self.newest_revision;
            }
        }
        Ok(TxnResponse::new(self.newest_revision, succeeded, results))
    }

    pub(super) fn compact(&mut self, before: Revision) -> Result<(), KvError> {
        if before > self.newest_revision {
            return Err(KvError::FutureRevision { revision: before });
        }
        if before <= self.oldest_revision {
            return Ok(());
        }
        self.oldest_revision = before;
        self.changes = self.changes.split_off(&before);
        self.keys.retain(|_, past| {
            let kept = past.iter().rposition(|(at, _)| *at <= before).unwrap_or(0);
            past.drain(..kept);
            !matches!(past[..], [(_, None)])
        });
        Ok(())
    }

    /// The changes of these keys in the first revision that has any, starting at `from`.
    pub(super) fn events_from(
        &self,
        keys: &KeyRange,
        from: Revision,
    ) -> Result<Option<(Revision, Vec<KeyEvent>)>, KvError> {
        if from < self.oldest_revision {
            return Err(KvError::Compacted { oldest: self.oldest_revision });
        }
        let concerned = |changes: &[KeyEvent]| -> Vec<KeyEvent> {
            changes.iter().filter(|change| keys.contains(change.key())).cloned().collect()
        };
        let revisions = self.changes.range(from..).map(|(at, changes)| (*at, concerned(changes)));
        Ok({ revisions }.find(|(_, changes)| !changes.is_empty()))
    }

    pub(super) fn grant_lease(&mut self) -> LeaseId {
        let id = LeaseId(self.next_lease_id);
        self.next_lease_id += 1;
        self.leases.insert(id, BTreeSet::new());
        id
    }

    /// Revokes a lease and deletes its keys; returns whether it existed.
    pub(super) fn revoke_lease(&mut self, lease: LeaseId) -> bool {
        let Some(keys) = self.leases.remove(&lease) else { return false };
        let revision = self.newest_revision.next();
        let mut changes = Vec::new();
        for key in keys {
            self.remove_key(key, revision, &mut changes);
        }
        self.commit(revision, changes);
        true
    }

    fn current_value(&self, key: &[u8]) -> Option<&KeyValue> {
        self.keys.get(key)?.last()?.1.as_ref()
    }

    fn versions_in<'a>(
        &'a self,
        keys: &'a KeyRange,
    ) -> impl Iterator<Item = (&'a Vec<u8>, &'a Vec<KeyVersion>)> {
        let start = match keys {
            KeyRange::Key(start) | KeyRange::Prefix(start) | KeyRange::Between { start, .. } => start,
        };
        let from = (Bound::Included(start.as_slice()), Bound::Unbounded);
        self.keys.range::<[u8], _>(from).take_while(|(key, _)| keys.contains(key))
    }

    /// Checks these operations against the present state, before anything is done.
    fn check_ops(&self, ops: &[TxnOp]) -> Result<(), KvError> {
        for op in ops {
            match op {
                TxnOp::Put { lease: Some(lease), .. } if !self.leases.contains_key(lease) => {
                    return Err(KvError::LeaseNotFound { lease: *lease });
                }
                TxnOp::Range(range) => self.check_revision(range)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn check_revision(&self, range: &RangeRequest) -> Result<(), KvError> {
        match range.revision {
            Some(revision) if revision > self.newest_revision => Err(KvError::FutureRevision { revision }),
            Some(revision) if revision < self.oldest_revision => {
                Err(KvError::Compacted { oldest: self.oldest_revision })
            }
            _ => Ok(()),
        }
    }

    fn apply_op(
        &mut self,
        op: &TxnOp,
        revision: Revision,
        changes: &mut Vec<KeyEvent>,
    ) -> Result<TxnOpResponse, KvError> {
        Ok(match op {
            TxnOp::Put { key, value, lease } => {
                self.put_key(key, value, *lease, revision, changes);
                TxnOpResponse::Put
            }
            TxnOp::Delete(keys) => {
                let existing = self
                    .versions_in(keys)
                    .filter(|(_, past)| past.last().is_some_and(|last| last.1.is_some()));
                let existing: Vec<_> = existing.map(|(key, _)| key.clone()).collect();
                let count = existing.len() as u64;
                existing.into_iter().for_each(|key| self.remove_key(key, revision, changes));
                TxnOpResponse::Delete(count)
            }
            // Earlier writes of the same transaction are visible.
            TxnOp::Range(range) if range.revision.is_none() => {
                let limit = range.limit.map_or(usize::MAX, |limit| limit.get() as usize);
                let mut kvs = self.versions_in(&range.keys).filter_map(|(_, past)| past.last()?.1.clone());
                let read = kvs.by_ref().take(limit).collect();
                TxnOpResponse::Range(RangeResponse::new(revision, read, kvs.next().is_some()))
            }
            TxnOp::Range(range) => TxnOpResponse::Range(self.range(range)?),
        })
    }

    fn put_key(
        &mut self,
        key: &[u8],
        value: &[u8],
        lease: Option<LeaseId>,
        revision: Revision,
        changes: &mut Vec<KeyEvent>,
    ) {
        let before = self.current_value(key).cloned();
        let mut kv = KeyValue::new(key, value, revision);
        kv.lease = lease;
        if let Some(before) = before {
            (kv.create_revision, kv.version) = (before.create_revision, before.version.saturating_add(1));
            self.detach_lease(&before);
        }
        if let Some(keys) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
            keys.insert(key.to_vec());
        }
        self.keys.entry(key.to_vec()).or_default().push((revision, Some(kv.clone())));
        changes.push(KeyEvent::Put(kv));
    }

    fn remove_key(&mut self, key: Vec<u8>, revision: Revision, changes: &mut Vec<KeyEvent>) {
        let Some(before) = self.current_value(&key).cloned() else { return };
        self.detach_lease(&before);
        self.keys.entry(key.clone()).or_default().push((revision, None));
        changes.push(KeyEvent::Delete { key, mod_revision: revision });
    }

    fn detach_lease(&mut self, kv: &KeyValue) {
        if let Some(keys) = kv.lease.and_then(|lease| self.leases.get_mut(&lease)) {
            keys.remove(&kv.key);
        }
    }

    fn commit(&mut self, revision: Revision, changes: Vec<KeyEvent>) {
        if !changes.is_empty() {
            self.newest_revision = revision;
            self.changes.insert(revision, changes);
        }
    }
}

fn value_at(past: &[KeyVersion], at: Revision) -> Option<&KeyValue> {
    past.iter().rev().find(|(revision, _)| *revision <= at)?.1.as_ref()
}
