//! The record of what operators on other machines and other nodes have called, and of who was refused.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::response::Response;
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore};
use tonic::{Code, Status};

use super::rate_limit::RateLimit;
use crate::access::{Callers, Principal, PublicKey, Role, callers_of};
use crate::parts::api::config::DN;
use crate::parts::api::identities::Identity;

/// Calls that only read, and calls that the role does not permit, have DNs of their own: however many there are, they evict no
/// entry about an act.
const READS_DN: &str = "root.api.reads";
const DENIED_DN: &str = "root.api.denied";
const CALLS_DN: &str = "root.api.calls";
/// So have those of other nodes, which no person makes.
const NODES_DN: &str = "root.api.nodes";
/// And those of strangers that admitted nobody: anyone can make them.
const STRANGERS_DN: &str = "root.api.strangers";

/// Refusals are logged this often at most. Anyone who reaches the port can be refused: the entries must not evict others.
const REFUSAL_PERIOD: Duration = Duration::from_secs(1);
/// The refusals that are logged at once after a quiet time.
const REFUSAL_BURST: u32 = 5;

/// The reason why a connection was closed before its first call.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The key is neither an operator's nor another node's.
    UnknownKey(PublicKey),
    /// It does not speak TLS as they do, or not in time.
    Handshake(io::Error),
}

/// Writes entries about calls and refusals.
#[derive(Debug)]
pub(super) struct Audit {
    log_store: LogStore,
    refusals: Mutex<RateLimit>,
    /// Of calls of strangers that admitted nobody.
    strangers: Mutex<RateLimit>,
}

impl Audit {
    pub(super) fn new(log_store: LogStore) -> Self {
        let now = Instant::now();
        Self {
            log_store,
            refusals: Mutex::new(RateLimit::new(REFUSAL_PERIOD, REFUSAL_BURST, now)),
            strangers: Mutex::new(RateLimit::of_strangers(now)),
        }
    }

    fn write(&self, dn: &str, message: LogMessage) {
        let dn: Dn = dn.parse().expect("a constant");
        self.log_store.append_message(&dn, message);
    }

    /// Records a call when it has its answer, or when the client no longer waits for one.
    pub(super) fn begin(self: &Arc<Self>, caller: &Identity, address: SocketAddr, path: &str) -> Call {
        Call { audit: Arc::clone(self), caller: caller.clone(), address, path: path.to_owned(), code: None }
    }

    /// Records a connection that was closed before its first call.
    pub(super) fn refused(&self, address: SocketAddr, refusal: &Refusal) {
        let Some(unlogged) = next_of(&self.refusals) else { return };
        let mut text = match refusal {
            Refusal::UnknownKey(key) => {
                format!("refused {address}: unknown key {key}; {}", admission_hint(*key))
            }
            Refusal::Handshake(error) => format!("refused {address}: {error}"),
        };
        text += &more_text(unlogged);
        self.write(DN, LogMessage::new(Level::Warn, text));
    }
}

/// If one may be logged: the number of those before it that were not.
fn next_of(limit: &Mutex<RateLimit>) -> Option<u64> {
    limit.lock().unwrap_or_else(PoisonError::into_inner).next(Instant::now())
}

fn more_text(unlogged: u64) -> String {
    if unlogged > 0 { format!(" (and {unlogged} more before it)") } else { String::new() }
}

/// A call in progress.
#[derive(Debug)]
pub(super) struct Call {
    audit: Arc<Audit>,
    caller: Identity,
    address: SocketAddr,
    path: String,
    code: Option<Code>,
}

impl Call {
    pub(super) fn end(mut self, response: &Response) {
        // An answer that is no error has its status after its content; the one of a stream is not waited for.
        let status = Status::from_header_map(response.headers());
        self.code = Some(status.map_or(Code::Ok, |status| status.code()));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Identity { name, principal, .. } = &self.caller;
        let method = method_name(&self.path);
        let result = match self.code {
            Some(Code::Ok) => "ok".to_owned(),
            Some(code) => format!("{code:?}"),
            // The client has gone: whether the call has acted is in the events.
            None => "canceled".to_owned(),
        };
        let mut more = String::new();
        let is_unadmitted = *principal == Principal::Stranger && self.code != Some(Code::Ok);
        if is_unadmitted {
            // Anyone can make it fail, and the entries must not evict others.
            let Some(unlogged) = next_of(&self.audit.strangers) else { return };
            more = more_text(unlogged);
        }
        let (level, dn) = match self.code {
            _ if is_unadmitted => (Level::Warn, STRANGERS_DN),
            Some(Code::PermissionDenied) => (Level::Warn, DENIED_DN),
            _ if *principal == Principal::Node => (Level::Info, NODES_DN),
            _ if callers_of(&self.path) == Callers::Operators(Role::Reader) => (Level::Info, READS_DN),
            _ => (Level::Info, CALLS_DN),
        };
        let message = LogMessage::new(level, format!("{method} by {name}: {result}{more}"));
        let message = match principal {
            Principal::Operator(role) => {
                message.with_field("operator", name.as_str()).with_field("role", role.as_str())
            }
            Principal::Node => message.with_field("node", name.as_str()),
            Principal::Stranger => message.with_field("key", name.as_str()),
        };
        let message = message
            .with_field("address", self.address.to_string())
            .with_field("method", method)
            .with_field("result", result);
        self.audit.write(dn, message);
    }
}

/// The name of a method in its path, as messages and entries have it.
pub(super) fn method_name(path: &str) -> &str {
    // Each client can choose it, and nobody needs a longer one.
    const MAX_BYTES: usize = 64;
    let name = path.rsplit('/').next().unwrap_or(path);
    if name.len() <= MAX_BYTES && name.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        name
    } else {
        "unknown"
    }
}

/// How to admit an operator with this key.
fn admission_hint(key: PublicKey) -> String {
    format!(
        "to admit it, add it to api.operators and reload, or type `nodectl operator add NAME --key {key} --role ROLE` \
         on a voter, with api.cluster_operators"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_word_is_the_name_of_a_method() {
        assert_eq!(method_name("/nodekeel.control.v1.Control/Restart"), "Restart");
        for path in ["/a/b\u{1b}[2J", "/a/%0a", &format!("/a/{}", "x".repeat(65))] {
            assert_eq!(method_name(path), "unknown", "{path}");
        }
    }
}
