//! Who is behind a call of the control API.

use std::fmt;
use std::net::SocketAddr;

use crate::v1;

/// The uid of a caller that is no process of this machine: no user has it.
///
/// *Source:* setresuid(2), which takes it for "unchanged".
const NO_UID: u32 = u32::MAX;

/// Who is behind a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Caller {
    /// A process, on the control socket.
    Process(CallingProcess),
    /// An operator on another machine.
    Operator {
        /// The name by which the node knows the operator's key.
        name: String,
        /// The other end of the connection.
        address: SocketAddr,
    },
}

/// The process behind a call, as the kernel reports it for the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallingProcess {
    /// The effective user of the process when it connected.
    pub(crate) uid: u32,
    /// The name of that user, if it is known.
    pub(crate) user: Option<String>,
    /// The process id when it connected, as noded sees it; `None` for a process of another PID namespace.
    pub(crate) pid: Option<u32>,
    /// The name of the program with that id when it called, which the process can change; `None` if it is not readable.
    pub(crate) program: Option<String>,
}

/// The operator behind a call from another machine. The gate of the API adds it to a request that it admits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteCaller {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(process) => process.fmt(f),
            Self::Operator { name, address } => write!(f, "operator {name}, {address}"),
        }
    }
}

impl fmt::Display for CallingProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {}", self.uid)?;
        if let Some(user) = &self.user {
            write!(f, " ({user})")?;
        }
        if let Some(pid) = self.pid {
            write!(f, ", pid {pid}")?;
        }
        match &self.program {
            Some(program) => write!(f, " {program}"),
            None => Ok(()),
        }
    }
}

impl From<&Caller> for v1::Caller {
    fn from(caller: &Caller) -> Self {
        match caller.clone() {
            Caller::Process(CallingProcess { uid, user, pid, program }) => Self {
                uid,
                user: user.unwrap_or_default(),
                pid,
                program: program.unwrap_or_default(),
                ..Self::default()
            },
            Caller::Operator { name, address } => {
                Self { uid: NO_UID, operator: name, address: address.to_string(), ..Self::default() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_described_by_what_is_known() {
        let mut caller = CallingProcess { uid: 1000, user: None, pid: None, program: None };
        assert_eq!(caller.to_string(), "uid 1000");
        caller.pid = Some(123);
        assert_eq!(caller.to_string(), "uid 1000, pid 123");
        caller.user = Some("alice".into());
        caller.program = Some("nodectl".into());
        assert_eq!(Caller::Process(caller).to_string(), "uid 1000 (alice), pid 123 nodectl");
        let operator = Caller::Operator { name: "alice".into(), address: ([192, 0, 2, 9], 50_412).into() };
        assert_eq!(operator.to_string(), "operator alice, 192.0.2.9:50412");
        assert_eq!(v1::Caller::from(&operator).uid, u32::MAX, "an earlier client does not take it for root");
    }
}
