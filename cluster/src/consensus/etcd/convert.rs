//! Between what is asked here and what etcd speaks.

use std::time::Duration;

use etcd_client as api;
use tonic::Code;

use crate::consensus::MembershipError;
use crate::consensus::kv::{
    Change, Compare, CompareTo, Is, KeyRange, KeyValue, KvError, LeaseId, Op, OpResult, Range, Ranged,
    Revision, Txn, TxnResult,
};

/// One call that takes longer has failed. etcd itself gives up after five seconds and the time of two elections.
pub(super) const CALL_WITHIN: Duration = Duration::from_secs(8);

/// The first key and the one behind the last, as etcd wants them: one zero byte is "to the end", none "one key".
///
/// *Source:* `RangeRequest` in etcd's rpc.proto.
pub(super) fn bounds(keys: &KeyRange) -> (Vec<u8>, Option<Vec<u8>>) {
    match keys {
        KeyRange::Key(key) => (key.clone(), None),
        KeyRange::Between { start, end } => (start.clone(), Some(end.clone())),
        KeyRange::Prefix(prefix) => {
            let start = if prefix.is_empty() { vec![0] } else { prefix.clone() };
            (start, Some(behind(prefix)))
        }
    }
}

/// The first key behind all that begin so.
fn behind(prefix: &[u8]) -> Vec<u8> {
    let Some(at) = prefix.iter().rposition(|byte| *byte != 0xff) else { return vec![0] };
    let mut end = prefix[..=at].to_vec();
    end[at] += 1;
    end
}

pub(super) fn get(range: &Range) -> (Vec<u8>, api::GetOptions) {
    let (key, end) = bounds(&range.keys);
    let mut options = api::GetOptions::new();
    if let Some(end) = end {
        options = options.with_range(end);
    }
    if let Some(revision) = range.revision {
        options = options.with_revision(revision.0);
    }
    if let Some(limit) = range.limit {
        options = options.with_limit(i64::from(limit.get()));
    }
    (key, options)
}

pub(super) fn txn(txn: Txn) -> api::Txn {
    let ops = |ops: Vec<Op>| ops.into_iter().map(op).collect::<Vec<_>>();
    api::Txn::new()
        .when(txn.when.into_iter().map(compare).collect::<Vec<_>>())
        .and_then(ops(txn.then))
        .or_else(ops(txn.otherwise))
}

fn compare(compare: Compare) -> api::Compare {
    let is = match compare.is {
        Is::Equal => api::CompareOp::Equal,
        Is::NotEqual => api::CompareOp::NotEqual,
        Is::Greater => api::CompareOp::Greater,
        Is::Less => api::CompareOp::Less,
    };
    match compare.to {
        CompareTo::Created(revision) => api::Compare::create_revision(compare.key, is, revision.0),
        CompareTo::Modified(revision) => api::Compare::mod_revision(compare.key, is, revision.0),
        CompareTo::Version(version) => api::Compare::version(compare.key, is, version),
        CompareTo::Value(value) => api::Compare::value(compare.key, is, value),
    }
}

fn op(op: Op) -> api::TxnOp {
    match op {
        Op::Put { key, value, lease } => {
            let options = lease.map(|lease| api::PutOptions::new().with_lease(lease.0));
            api::TxnOp::put(key, value, options)
        }
        Op::Delete(keys) => {
            let (key, end) = bounds(&keys);
            api::TxnOp::delete(key, end.map(|end| api::DeleteOptions::new().with_range(end)))
        }
        Op::Range(range) => {
            let (key, options) = get(&range);
            api::TxnOp::get(key, Some(options))
        }
    }
}

pub(super) fn revision(header: Option<&api::ResponseHeader>) -> Revision {
    header.map_or(Revision::NONE, |header| Revision(header.revision()))
}

pub(super) fn ranged(answer: &api::GetResponse) -> Ranged {
    let kvs = answer.kvs().iter().map(key_value).collect();
    Ranged::new(revision(answer.header()), kvs, answer.more())
}

pub(super) fn txn_result(answer: &api::TxnResponse) -> TxnResult {
    let newest = revision(answer.header());
    let result = |response| match response {
        api::TxnOpResponse::Get(answer) => {
            let mut ranged = ranged(&answer);
            // Only the whole answer has a header.
            ranged.revision = newest;
            OpResult::Ranged(ranged)
        }
        api::TxnOpResponse::Delete(answer) => OpResult::Deleted(answer.deleted().unsigned_abs()),
        _ => OpResult::Put,
    };
    TxnResult::new(newest, answer.succeeded(), answer.op_responses().into_iter().map(result).collect())
}

fn key_value(kv: &api::KeyValue) -> KeyValue {
    let mut read = KeyValue::new(kv.key(), kv.value(), Revision(kv.mod_revision()));
    read.created = Revision(kv.create_revision());
    read.version = kv.version();
    read.lease = Some(kv.lease()).filter(|lease| *lease != 0).map(LeaseId);
    read
}

pub(super) fn change(event: &api::Event) -> Option<Change> {
    let kv = event.kv()?;
    Some(match event.event_type() {
        api::EventType::Put => Change::Put(key_value(kv)),
        api::EventType::Delete => {
            Change::Deleted { key: kv.key().to_vec(), modified: Revision(kv.mod_revision()) }
        }
    })
}

/// What etcd's refusal of a call to its keys means. Its texts are part of its interface: its own client compares them.
///
/// *Source:* etcd's `api/v3/v3rpc/rpctypes/error.go`.
pub(super) fn kv_error(operation: &'static str, error: api::Error) -> KvError {
    let text = message(&error);
    let says = |part| text.contains(part);
    match () {
        () if says("required revision has been compacted") => KvError::Compacted { oldest: Revision::NONE },
        () if says("required revision is a future revision") => {
            KvError::FutureRevision { revision: Revision::NONE }
        }
        () if says("requested lease not found") => KvError::NoLease { lease: LeaseId(0) },
        () if says("duplicate key given") => KvError::DuplicateKey,
        () if is_refusal(&error) => KvError::Refused { operation, source: error.into() },
        () => KvError::Unavailable { operation, source: error.into() },
    }
}

/// What etcd's refusal of a change of members means.
pub(super) fn membership_error(operation: &'static str, error: api::Error) -> MembershipError {
    let text = message(&error);
    let says = |part| text.contains(part);
    match () {
        () if says("too many learner members") => MembershipError::TooManyLearners,
        () if says("not enough started members") => MembershipError::NoQuorum,
        // "unhealthy cluster" is among the rest: it has not heard of all members for five seconds.
        () if is_refusal(&error) => MembershipError::Refused { operation, source: error.into() },
        () => MembershipError::Unavailable { operation, source: error.into() },
    }
}

pub(super) fn message(error: &api::Error) -> &str {
    match error {
        api::Error::GRpcStatus(status) => status.message(),
        _ => "",
    }
}

/// Whether it is an answer, and the answer is no. Whatever else went wrong may be right the next time.
fn is_refusal(error: &api::Error) -> bool {
    let api::Error::GRpcStatus(status) = error else {
        return matches!(error, api::Error::InvalidArgs(_) | api::Error::InvalidUri(_));
    };
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_next_one() {
        let end = |prefix: &[u8]| bounds(&KeyRange::prefix(prefix)).1.unwrap();
        assert_eq!(end(b"/a/"), b"/a0");
        assert_eq!(end(b"a\xff\xff"), b"b");
        assert_eq!(end(b"\xff"), b"\0", "to the end");
        assert_eq!(bounds(&KeyRange::all()), (vec![0], Some(vec![0])));
        assert_eq!(bounds(&KeyRange::key("k")), (b"k".to_vec(), None));
    }
}
