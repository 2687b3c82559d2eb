//! The processes that call the control API.

use std::collections::BTreeMap;

use nix::unistd::{Uid, User, geteuid};
use tonic::Request;
use tonic::transport::server::UdsConnectInfo;

use crate::caller::{Caller, CallingProcess, RemoteCaller};

/// Longest name of a program that the kernel knows.
///
/// *Source:* proc_pid_comm(5), `TASK_COMM_LEN`.
const MAX_PROGRAM_BYTES: usize = 15;

/// The names of the users that may call.
#[derive(Debug, Clone)]
pub(crate) struct CallerNames(BTreeMap<u32, String>);

impl CallerNames {
    /// Looks them up, once: a lookup may have to ask another machine.
    pub(crate) fn look_up() -> Self {
        // A user without an entry is shown by its number: that is no reason to refuse the call.
        let name = |uid: Uid| Some((uid.as_raw(), User::from_uid(uid).ok()??.name));
        Self([Uid::from_raw(0), geteuid()].into_iter().filter_map(name).collect())
    }

    /// The caller of an admitted request.
    pub(crate) fn caller_of<T>(&self, request: &Request<T>) -> Option<Caller> {
        if let Some(RemoteCaller { name, address, .. }) = request.extensions().get() {
            return Some(Caller::Operator { name: name.clone(), address: *address });
        }
        let peer = request.extensions().get::<UdsConnectInfo>()?.peer_cred?;
        // The kernel reports pid 0 for a process that is not visible in noded's PID namespace.
        let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        let user = self.0.get(&peer.uid()).cloned();
        Some(Caller::Process(CallingProcess {
            uid: peer.uid(),
            user,
            pid,
            program: pid.and_then(program_name),
        }))
    }
}

fn program_name(pid: u32) -> Option<String> {
    // The file is read only for display: the process may have ended, and its pid may be another one's by now.
    let comm = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(&comm[..comm.len().min(MAX_PROGRAM_BYTES)]);
    // The process chooses its own name, and it reaches terminals and logs: control characters are replaced.
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
