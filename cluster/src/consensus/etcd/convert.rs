//! Conversion between this crate's requests and responses and those of etcd.

use std::time::Duration;

use etcd_client as api;
use tonic::Code;

use crate::consensus::MembershipError;
use crate::consensus::kv::{
    Compare, CompareOp, CompareTarget, KeyEvent, KeyRange, KeyValue, KvError, LeaseId, RangeRequest,
    RangeResponse, Revision, Txn, TxnOp, TxnOpResponse, TxnResponse,
};

/// The timeout of one call. etcd itself gives up after five seconds and the time of two elections.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(8);

/// The first key and the range end in etcd's format: one zero byte is "to the end", none is "one key".
///
/// *Source:* `RangeRequest` in etcd's rpc.proto.
pub(super) fn range_bounds(keys: &KeyRange) -> (Vec<u8>, Option<Vec<u8>>) {
    match keys {
        KeyRange::Key(key) => (key.clone(), None),
        KeyRange::Between { start, end } => (start.clone(), Some(end.clone())),
        KeyRange::Prefix(prefix) => {
            let start = if prefix.is_empty() { vec![0] } else { prefix.clone() };
            (start, Some(prefix_end(prefix)))
        }
    }
}

/// The first key after all keys with this prefix.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let Some(at) = prefix.iter().rposition(|byte| *byte != 0xff) else { return vec![0] };
    let mut end = prefix[..=at].to_vec();
    end[at] += 1;
    end
}

pub(super) fn get_request(range: &RangeRequest) -> (Vec<u8>, api::GetOptions) {
    let (key, end) = range_bounds(&range.keys);
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

pub(super) fn txn_request(txn: Txn) -> api::Txn {
    let ops = |ops: Vec<TxnOp>| ops.into_iter().map(txn_op).collect::<Vec<_>>();
    api::Txn::new()
        .when(txn.when.into_iter().map(compare_request).collect::<Vec<_>>())
        .and_then(ops(txn.then))
        .or_else(ops(txn.or_else))
}

fn compare_request(compare: Compare) -> api::Compare {
    let is = match compare.op {
        CompareOp::Equal => api::CompareOp::Equal,
        CompareOp::NotEqual => api::CompareOp::NotEqual,
        CompareOp::Greater => api::CompareOp::Greater,
        CompareOp::Less => api::CompareOp::Less,
    };
    match compare.target {
        CompareTarget::CreateRevision(revision) => api::Compare::create_revision(compare.key, is, revision.0),
        CompareTarget::ModRevision(revision) => api::Compare::mod_revision(compare.key, is, revision.0),
        CompareTarget::Version(version) => api::Compare::version(compare.key, is, version),
        CompareTarget::Value(value) => api::Compare::value(compare.key, is, value),
    }
}

fn txn_op(op: TxnOp) -> api::TxnOp {
    match op {
        TxnOp::Put { key, value, lease } => {
            let options = lease.map(|lease| api::PutOptions::new().with_lease(lease.0));
            api::TxnOp::put(key, value, options)
        }
        TxnOp::Delete(keys) => {
            let (key, end) = range_bounds(&keys);
            api::TxnOp::delete(key, end.map(|end| api::DeleteOptions::new().with_range(end)))
        }
        TxnOp::Range(range) => {
            let (key, options) = get_request(&range);
            api::TxnOp::get(key, Some(options))
        }
    }
}

pub(super) fn header_revision(header: Option<&api::ResponseHeader>) -> Revision {
    header.map_or(Revision::NONE, |header| Revision(header.revision()))
}

pub(super) fn range_response(answer: &api::GetResponse) -> RangeResponse {
    let kvs = answer.kvs().iter().map(key_value).collect();
    RangeResponse::new(header_revision(answer.header()), kvs, answer.more())
}

pub(super) fn txn_response(answer: &api::TxnResponse) -> TxnResponse {
    let newest = header_revision(answer.header());
    let result = |response| match response {
        api::TxnOpResponse::Get(answer) => {
            let mut ranged = range_response(&answer);
            // Only the whole response has a header.
            ranged.revision = newest;
            TxnOpResponse::Range(ranged)
        }
        api::TxnOpResponse::Delete(answer) => TxnOpResponse::Delete(answer.deleted().unsigned_abs()),
        _ => TxnOpResponse::Put,
    };
    TxnResponse::new(newest, answer.succeeded(), answer.op_responses().into_iter().map(result).collect())
}

fn key_value(kv: &api::KeyValue) -> KeyValue {
    let mut read = KeyValue::new(kv.key(), kv.value(), Revision(kv.mod_revision()));
    read.create_revision = Revision(kv.create_revision());
    read.version = kv.version();
    read.lease = Some(kv.lease()).filter(|lease| *lease != 0).map(LeaseId);
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
    let says = |part| text.contains(part);
    match () {
        () if says("required revision has been compacted") => KvError::Compacted { oldest: Revision::NONE },
        () if says("required revision is a future revision") => {
            KvError::FutureRevision { revision: Revision::NONE }
        }
        () if says("requested lease not found") => KvError::LeaseNotFound { lease: LeaseId(0) },
        () if says("duplicate key given") => KvError::DuplicateKey,
        () if is_rejection(&error) => KvError::Rejected { operation, source: error.into() },
        () => KvError::Unavailable { operation, source: error.into() },
    }
}

/// Maps etcd's rejection of a change of members.
pub(super) fn membership_error(operation: &'static str, error: api::Error) -> MembershipError {
    let text = error_message(&error);
    let says = |part| text.contains(part);
    match () {
        () if says("too many learner members") => MembershipError::TooManyLearners,
        () if says("not enough started members") => MembershipError::QuorumLoss,
        () if is_rejection(&error) => MembershipError::Rejected { operation, source: error.into() },
        () => MembershipError::Unavailable { operation, source: error.into() },
    }
}

/// Whether etcd rejects a change of members since these have not been connected for five seconds.
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

/// Whether etcd answered, and rejected the call. Any other failure may disappear with a retry.
fn is_rejection(error: &api::Error) -> bool {
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
    fn the_range_of_a_prefix_ends_before_the_next_prefix() {
        let end = |prefix: &[u8]| range_bounds(&KeyRange::prefix(prefix)).1.unwrap();
        assert_eq!(end(b"/a/"), b"/a0");
        assert_eq!(end(b"a\xff\xff"), b"b");
        assert_eq!(end(b"\xff"), b"\0", "to the end");
        assert_eq!(range_bounds(&KeyRange::all_keys()), (vec![0], Some(vec![0])));
        assert_eq!(range_bounds(&KeyRange::single_key("k")), (b"k".to_vec(), None));
    }
}
