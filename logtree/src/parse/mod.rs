//! Parsers of known log formats into leveled messages.
//!
//! Each takes a line without its terminator and the current time, and returns `None` for a line that does not
//! fully match its format. Times without a zone are in UTC.

mod capnslog;
mod format;
mod klog;
mod kmsg;
mod kubernetes;
mod logfmt;
#[cfg(test)]
mod table_test;
mod time;
mod zap;

pub use capnslog::{capnslog_line, etcd_line};
pub use format::{LineParser, LogFormat, ParseFormatError};
pub use klog::klog_line;
pub use kmsg::{KmsgRecord, kmsg_record};
pub use kubernetes::json_line;
pub use logfmt::logfmt_line;
pub use zap::zap_line;
