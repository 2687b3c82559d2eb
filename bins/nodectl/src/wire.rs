//! Values of the wire as the output has them.

use std::time::SystemTime;

use crate::time::format_rfc3339;

/// A text, or `None` where the wire has an empty one.
pub(crate) fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// A time; `None` also for one that a `SystemTime` can't hold.
pub(crate) fn system_time(time: Option<impl TryInto<SystemTime>>) -> Option<SystemTime> {
    time.and_then(|time| time.try_into().ok())
}

/// A time as RFC 3339.
pub(crate) fn time_text(time: Option<impl TryInto<SystemTime>>) -> Option<String> {
    system_time(time).map(format_rfc3339)
}
