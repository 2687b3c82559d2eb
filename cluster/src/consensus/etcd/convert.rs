//! Conversion between this crate's requests and responses and those of etcd.

use std::time::Duration;

use etcd_client as api;
use tonic::Code;

use crate::consensus::MembershipError;
use crate::consensus::kv::{
    Compare, KeyCondition, KeyEvent, KeyRange, KeyValue, KvError, RangeResponse, Revision, Txn, TxnOp,
    TxnResponse,
};

/// The timeout of one call. etcd itself gives up after five seconds and the time of two elections.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(8);
/// The timeout of a status, which comes from the memory of a process.
pub(super) const STATUS_TIMEOUT: Duration = Duration::from_secs(1);

/// The first key and the range end in etcd's format: one zero byte is "to the end", none is "one key".
///
/// *Source:* `RangeRequest` in etcd's rpc.proto.
pub(super) fn range_bounds(keys: KeyRange) -> (Vec<u8>, Option<Vec<u8>>) {
    match keys {
        KeyRange::Key(key) => (key, None),
        KeyRange::Prefix(prefix) => {
            let end = Some(prefix_end(&prefix));
            // etcd rejects an empty key; one zero byte is the first key that can exist.
            (if prefix.is_empty() { vec![0] } else { prefix }, end)
        }
    }
}

/// The first key after all keys with this prefix.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    // No key follows those that begin with 0xff alone: the range goes to the end.
    let Some(at) = prefix.iter().rposition(|byte| *byte != 0xff) else { return vec![0] };
    let mut end = prefix[..=at].to_vec();
    end[at] += 1;
    end
}

pub(super) fn get_request(keys: KeyRange) -> (Vec<u8>, Option<api::GetOptions>) {
    let (key, end) = range_bounds(keys);
    (key, end.map(|end| api::GetOptions::new().with_range(end)))
}

pub(super) fn txn_request(txn: Txn) -> api::Txn {
    let ops = |ops: Vec<TxnOp>| ops.into_iter().map(txn_op).collect::<Vec<_>>();
    api::Txn::new()
        .when(txn.when.into_iter().map(compare_request).collect::<Vec<_>>())
        .and_then(ops(txn.then))
        .or_else(ops(txn.or_else))
}

fn compare_request(compare: Compare) -> api::Compare {
    match compare.condition {
        // etcd can't compare existence; a key that does not exist has the create revision 0.
        KeyCondition::Absent => api::Compare::create_revision(compare.key, api::CompareOp::Equal, 0),
        KeyCondition::Present => api::Compare::create_revision(compare.key, api::CompareOp::NotEqual, 0),
        KeyCondition::WrittenBy(revision) => {
            api::Compare::mod_revision(compare.key, api::CompareOp::Equal, revision.0)
        }
        KeyCondition::PrefixNotWrittenSince(revision) => {
            let end = prefix_end(&compare.key);
            let next = revision.next().0;
            api::Compare::mod_revision(compare.key, api::CompareOp::Less, next).with_range(end)
        }
    }
}

fn txn_op(op: TxnOp) -> api::TxnOp {
    match op {
        TxnOp::Put { key, value } => api::TxnOp::put(key, value, None),
        TxnOp::Delete(keys) => {
            let (key, end) = range_bounds(keys);
            api::TxnOp::delete(key, end.map(|end| api::DeleteOptions::new().with_range(end)))
        }
        TxnOp::Range(keys) => {
            let (key, options) = get_request(keys);
            api::TxnOp::get(key, options)
        }
    }
}

fn header_revision(header: Option<&api::ResponseHeader>) -> Revision {
    header.map_or(Revision::default(), |header| Revision(header.revision()))
}

pub(super) fn range_response(answer: &api::GetResponse) -> RangeResponse {
    RangeResponse::new(header_revision(answer.header()), answer.kvs().iter().map(key_value).collect())
}

pub(super) fn txn_response(answer: &api::TxnResponse) -> TxnResponse {
    let mut done = TxnResponse::default();
    (done.revision, done.succeeded) = (header_revision(answer.header()), answer.succeeded());
    for response in answer.op_responses() {
        match response {
            api::TxnOpResponse::Get(answer) => done.kvs.extend(answer.kvs().iter().map(key_value)),
            api::TxnOpResponse::Delete(answer) => done.deleted += answer.deleted().unsigned_abs(),
            // A put has no result of its own.
            _ => {}
        }
    }
    done
}

fn key_value(kv: &api::KeyValue) -> KeyValue {
    let mut read = KeyValue::new(kv.key(), kv.value(), Revision(kv.mod_revision()));
    read.version = kv.version();
    read
}

pub(super) fn key_event(event: &api::Event) -> Option<KeyEvent> {
    let kv = event.kv()?;
    Some(match event.event_type() {
        api::EventType::Put => KeyEvent::Put(key_value(kv)),
        api::EventType::Delete => {
            KeyEvent::Delete { key: kv.key().to_vec(), mod_revision: Revision(kv.mod_revision()) }
        }
    })
}

/// Maps etcd's rejection of a call on keys. The texts are part of etcd's interface: its own client compares
/// them.
///
/// *Source:* etcd's `api/v3/v3rpc/rpctypes/error.go`.
pub(super) fn kv_error(operation: &'static str, error: api::Error) -> KvError {
    let text = error_message(&error);
    if text.contains("required revision has been compacted") {
        KvError::Compacted
    } else if text.contains("duplicate key given") {
        KvError::DuplicateKey
    } else if is_rejection(&error) && !text.contains("not supported for learner") {
        // Not of a learner, which answers once it has its vote: 3.7 calls that a failed precondition.
        KvError::Rejected { operation, source: error.into() }
    } else {
        KvError::Unavailable { operation, source: error.into() }
    }
}

/// Maps etcd's rejection of a change of members.
pub(super) fn membership_error(operation: &'static str, error: api::Error) -> MembershipError {
    let text = error_message(&error);
    if text.contains("too many learner members") {
        MembershipError::TooManyLearners
    } else if text.contains("not enough started members") {
        MembershipError::QuorumLoss
    } else if is_rejection(&error) {
        MembershipError::Rejected { operation, source: error.into() }
    } else {
        MembershipError::Unavailable { operation, source: error.into() }
    }
}

/// Returns whether etcd rejects a change of members since these have not been connected for five seconds.
///
/// *Source:* etcd's `HealthInterval` in `etcdserver/server.go`.
pub(super) fn is_unhealthy(error: &api::Error) -> bool {
    error_message(error).contains("unhealthy cluster")
}

pub(super) fn error_message(error: &api::Error) -> &str {
    match error {
        api::Error::GRpcStatus(status) => status.message(),
        _ => "",
    }
}

/// Returns whether etcd answered, and rejected the call. Any other failure may disappear with a retry.
fn is_rejection(error: &api::Error) -> bool {
    let api::Error::GRpcStatus(status) = error else {
        // The client itself has rejected these, before it sent anything.
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
    fn a_learner_may_answer_later_in_each_release() {
        for code in [Code::Unavailable, Code::FailedPrecondition] {
            let status = tonic::Status::new(code, "etcdserver: rpc not supported for learner");
            assert!(kv_error("read keys", api::Error::GRpcStatus(status)).is_retryable(), "{code}");
        }
    }

    #[test]
    fn the_range_of_a_prefix_ends_before_the_next_prefix() {
        let end = |prefix: &[u8]| range_bounds(KeyRange::prefix(prefix)).1.unwrap();
        assert_eq!(end(b"/a/"), b"/a0");
        assert_eq!(end(b"a\xff\xff"), b"b");
        assert_eq!(end(b"\xff"), b"\0", "to the end");
        assert_eq!(range_bounds(KeyRange::all_keys()), (vec![0], Some(vec![0])));
        assert_eq!(range_bounds(KeyRange::single_key("k")), (b"k".to_vec(), None));
    }
}
