//! The API server: calls and their deadlines, watches and their retries, work queues, and events.

pub(crate) mod call;
pub(crate) mod claim_queue;
pub(crate) mod event;
pub(crate) mod health;
mod recovery_probe;
pub(crate) mod retry_tracker;
pub(crate) mod timeout;
pub(crate) mod volume_cache;
pub(crate) mod watch_backoff;
pub(crate) mod watch_errors;
pub(crate) mod watches;
pub(crate) mod work_queue;
pub(crate) mod writer;
