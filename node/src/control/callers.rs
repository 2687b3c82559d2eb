//! The processes that call the control API.

use std::collections::BTreeMap;

use nix::unistd::{Uid, User, geteuid};
use nodekeel_supervisor::Supervisor;
use tonic::Request;
use tonic::transport::server::UdsConnectInfo;

use super::ControlService;
use crate::caller::Caller;

/// Longest name of a program that the kernel knows.
///
/// *Source:* proc_pid_comm(5), `TASK_COMM_LEN`.
const MAX_PROGRAM_BYTES: usize = 15;

/// Longest text of an action in an event, in characters: a client chooses a part of it.
const MAX_ACTION_CHARS: usize = 512;

/// The names of the users that may call.
#[derive(Debug, Clone)]
pub(super) struct CallerNames(BTreeMap<u32, String>);

impl CallerNames {
    /// Looks them up, once: a lookup may have to ask another machine.
    pub(super) fn look_up() -> Self {
        let name = |uid: Uid| Some((uid.as_raw(), User::from_uid(uid).ok()??.name));
        Self([Uid::from_raw(0), geteuid()].into_iter().filter_map(name).collect())
    }

    /// The caller of an admitted request.
    pub(super) fn caller_of<T>(&self, request: &Request<T>) -> Option<Caller> {
        let peer = request.extensions().get::<UdsConnectInfo>()?.peer_cred?;
        let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        let user = self.0.get(&peer.uid()).cloned();
        Some(Caller { uid: peer.uid(), user, pid, program: pid.and_then(program_name) })
    }
}

impl ControlService {
    /// Adds the request for an action on a DN to the events, if the node knows the DN, and returns the request.
    pub(super) fn record_action<T>(
        &self,
        request: Request<T>,
        describe: impl FnOnce(&T) -> (&str, String),
    ) -> T {
        let (dn, action) = describe(request.get_ref());
        if self.is_known_dn(dn) {
            let tree = self.shared.with_supervisor(Supervisor::snapshot).unwrap_or_default();
            let generation =
                tree.iter().find(|status| *status.dn == *dn).map_or(0, |status| status.generation);
            let caller = self.callers.caller_of(&request);
            let action: String = action.chars().take(MAX_ACTION_CHARS).collect();
            self.shared.history.add_request((dn, generation), &action, caller);
        }
        request.into_inner()
    }
}

fn program_name(pid: u32) -> Option<String> {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(&comm[..comm.len().min(MAX_PROGRAM_BYTES)]);
    let printable =
        |c: char| if nodekeel_logtree::is_unprintable(c) { char::REPLACEMENT_CHARACTER } else { c };
    Some(name.trim_end_matches('\n').chars().map(printable).collect())
        .filter(|name: &String| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_program_is_one_printable_word_of_the_kernel() {
        let own = program_name(std::process::id()).expect("readable");
        assert!(!own.is_empty() && own.len() <= MAX_PROGRAM_BYTES && !own.contains('\n'), "{own:?}");
        // No process has a pid this high.
        assert_eq!(program_name(4_194_305), None);
    }
}
