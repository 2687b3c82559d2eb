//! The guard around each call into a part: a panic there is an error that names the part and the call.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use thiserror::Error;

use super::{Part, PartPlanner};
use crate::config::{ConfigSection, ConfigViolation, NodedConfig};
use crate::dependency::DependencyEntry;

/// A call of the node panicked: a bug of the part, or of the node. The node is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{culprit} panicked in {call}: {message}")]
pub struct CallPanic {
    /// `part <name>`, or `the node`.
    culprit: String,
    call: &'static str,
    message: String,
}

impl CallPanic {
    /// Of a payload that was caught around a call.
    pub(crate) fn from_payload(payload: Box<dyn Any + Send>, call: &'static str) -> Self {
        match payload.downcast::<Self>() {
            Ok(named) => *named,
            Err(payload) => Self { culprit: "the node".to_owned(), call, message: message_of(&*payload) },
        }
    }
}

/// The message of a panic.
///
/// *Source:* `std::panic::PanicHookInfo::payload`: usually a `&'static str` or a `String`.
fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Calls into a part. Its panic goes on under the name of the part and the call, up to [`catch_panic`]: so that calls whose
/// type has no error have one.
pub(crate) fn call_part<T>(part: &str, call: &'static str, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        // A panic that has a name keeps it: the outer call is not its cause.
        if payload.is::<CallPanic>() {
            resume_unwind(payload)
        }
        let (culprit, message) = (format!("part {part}"), message_of(&*payload));
        resume_unwind(Box::new(CallPanic { culprit, call, message }))
    })
}

/// Makes an error of a panic. What the body has changed in memory must not be used then.
pub(crate) fn catch_panic<T>(call: &'static str, body: impl FnOnce() -> T) -> Result<T, CallPanic> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| CallPanic::from_payload(payload, call))
}

/// The part that plans a DN.
pub(crate) fn part_of_dn(dn: &str) -> &str {
    dn.split('.').nth(1).unwrap_or(dn)
}

/// A part whose calls are guarded.
struct GuardedPart {
    name: String,
    part: Arc<dyn Part>,
}

/// The part with guarded calls.
pub(super) fn guard_part(part: Arc<dyn Part>) -> Arc<dyn Part> {
    let name = call_part("without a name", "name", || part.name().to_owned());
    Arc::new(GuardedPart { name, part })
}

impl Part for GuardedPart {
    fn name(&self) -> &str {
        &self.name
    }

    fn sections(&self) -> Vec<ConfigSection> {
        call_part(&self.name, "sections", || self.part.sections())
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        call_part(&self.name, "check", || self.part.check(config))
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        call_part(&self.name, "dependencies", || self.part.dependencies(config))
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        call_part(&self.name, "plan", || self.part.plan(planner));
    }
}
