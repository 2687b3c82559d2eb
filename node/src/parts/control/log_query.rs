//! The query of a request for logs.

use std::error::Error;
use std::time::SystemTime;

use nodekeel_logtree::{BacklogLimit, Dn, KindFilter, LogCursor, LogQuery, TextPattern};
use tonic::Status;

use super::suggestions::quote_prefix;
use crate::client::level_from_wire;
use crate::v1;

/// Maximum length of a pattern in bytes: an error repeats it, in a header of at most 16 KiB.
const MAX_PATTERN_BYTES: usize = 1024;

#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
pub(super) fn from_request(dn: Dn, request: &v1::LogsRequest) -> Result<LogQuery, Status> {
    // The wire has no value for the whole log: a request without a backlog means it.
    let backlog = match request.backlog {
        None => BacklogLimit::All,
        Some(0) => BacklogLimit::None,
        Some(newest) => BacklogLimit::Last(usize::try_from(newest).unwrap_or(usize::MAX)),
    };
    let kind = match request.kind() {
        v1::logs_request::Kind::Unspecified => KindFilter::All,
        v1::logs_request::Kind::Leveled => KindFilter::Leveled,
        v1::logs_request::Kind::Raw => KindFilter::Raw,
    };
    let mut query = LogQuery::of_dn(dn).backlog_limit(backlog).kind_filter(kind);
    if request.children {
        query = query.include_descendants();
    }
    if request.follow {
        query = query.follow();
    }
    if let Some(level) = level_from_wire(request.min_level()) {
        query = query.min_level(level);
    }
    if let Some(since) = request.since {
        query = query.since(SystemTime::try_from(since).map_err(invalid_query)?);
    }
    if request.pattern.len() > MAX_PATTERN_BYTES {
        let pattern = quote_prefix(&request.pattern);
        return Err(Status::invalid_argument(format!(
            "can't search for {pattern}: a pattern has at most {MAX_PATTERN_BYTES} bytes"
        )));
    }
    if !request.pattern.is_empty() {
        query = query.matching(TextPattern::new(&request.pattern).map_err(invalid_query)?);
    }
    for field in &request.fields {
        query = query.with_field(&field.name, &field.value);
    }
    if !request.cursor.is_empty() {
        query = query.after(request.cursor.parse::<LogCursor>().map_err(invalid_query)?);
    }
    Ok(query)
}

pub(super) fn invalid_query(error: impl Error) -> Status {
    Status::invalid_argument(error.to_string())
}
