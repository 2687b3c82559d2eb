//! The process behind a call of the control API.

use std::fmt;

use crate::v1;

/// The process behind a call, as the kernel reports it for the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The effective user of the process when it connected.
    pub(crate) uid: u32,
    /// The name of that user, if it is known.
    pub(crate) user: Option<String>,
    /// The process id when it connected, as noded sees it; `None` for a process of another PID namespace.
    pub(crate) pid: Option<u32>,
    /// The name of the program with that id when it called, which the process can change; `None` if it is not readable.
    pub(crate) program: Option<String>,
}

impl fmt::Display for Caller {
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
        let Caller { uid, user, pid, program } = caller.clone();
        Self { uid, user: user.unwrap_or_default(), pid, program: program.unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_described_by_what_is_known() {
        let mut caller = Caller { uid: 1000, user: None, pid: None, program: None };
        assert_eq!(caller.to_string(), "uid 1000");
        caller.pid = Some(123);
        assert_eq!(caller.to_string(), "uid 1000, pid 123");
        caller.user = Some("alice".into());
        caller.program = Some("nodectl".into());
        assert_eq!(caller.to_string(), "uid 1000 (alice), pid 123 nodectl");
    }
}
