//! The permissions of a process, in addition to those of its user.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// The permissions of a process, in addition to those of its user. All of it also holds for its descendants.
///
/// The default changes nothing, but for `no_new_privs` and `umask`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Privileges {
    /// The supplementary groups, by id. Only root may set them. `None`: none if it runs as another
    /// [user](super::Process::uid), otherwise those of this program.
    pub groups: Option<Vec<u32>>,
    /// The capabilities that it keeps, also as a user that is not root. It loses all others for good. Only root
    /// may set them. `None`: what the kernel gives its user.
    pub capabilities: Option<CapabilitySet>,
    /// True if no program that it executes can gain privileges, as a set-user-ID program does. `None`: true,
    /// unless it runs as root.
    pub no_new_privs: Option<bool>,
    /// Paths that it can't write to, with everything mounted below them. They must exist at its start. It gets a
    /// private mount namespace, in which the host's later mounts appear, writable also below such a path; its own
    /// mounts don't appear on the host.
    /// Only root may set them; needs Linux 5.12. A process that keeps the capability `sys_admin`, as root does, can
    /// undo it.
    pub read_only_paths: Vec<PathBuf>,
    /// The permissions that the files that it creates don't get, `[0, 0o777]`. `None`: 0o022, whatever this program's is.
    pub umask: Option<u32>,
}

impl Privileges {
    /// Sets the [supplementary groups](Self::groups), by id.
    #[must_use]
    pub fn with_groups(mut self, groups: impl IntoIterator<Item = u32>) -> Self {
        self.groups = Some(groups.into_iter().collect());
        self
    }

    /// Keeps these [capabilities](Self::capabilities), and no others.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: impl IntoIterator<Item = Capability>) -> Self {
        self.capabilities = Some(capabilities.into_iter().collect());
        self
    }

    /// Sets whether its programs can [gain privileges](Self::no_new_privs): true if none can.
    #[must_use]
    pub fn with_no_new_privs(mut self, no_new_privs: bool) -> Self {
        self.no_new_privs = Some(no_new_privs);
        self
    }

    /// Adds a [path that it can't write to](Self::read_only_paths).
    #[must_use]
    pub fn with_read_only_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.read_only_paths.push(path.into());
        self
    }

    /// Sets the [umask](Self::umask), `[0, 0o777]`.
    #[must_use]
    pub fn with_umask(mut self, umask: u32) -> Self {
        self.umask = Some(umask);
        self
    }
}

/// A capability of Linux.
///
/// *Source:* capabilities(7), linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Capability(u8);

/// By number.
const CAPABILITY_NAMES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

/// The text is not the name of a capability.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown capability {0:?}: use a name of capabilities(7), like \"net_bind_service\"")]
pub struct ParseCapabilityError(pub String);

impl FromStr for Capability {
    type Err = ParseCapabilityError;

    /// Accepts `net_bind_service` and `CAP_NET_BIND_SERVICE`, in any case.
    fn from_str(text: &str) -> Result<Self, ParseCapabilityError> {
        let lower = text.to_ascii_lowercase();
        let name = lower.strip_prefix("cap_").unwrap_or(&lower);
        let number = CAPABILITY_NAMES.iter().position(|known| *known == name);
        number
            .and_then(|number| u8::try_from(number).ok())
            .map(Self)
            .ok_or_else(|| ParseCapabilityError(text.to_owned()))
    }
}

impl fmt::Display for Capability {
    /// `net_bind_service`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(CAPABILITY_NAMES[usize::from(self.0)])
    }
}

/// A set of capabilities. Default: empty.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CapabilitySet(u64);

impl CapabilitySet {
    /// Returns whether the set has it.
    pub fn contains(self, capability: Capability) -> bool {
        self.0 >> capability.0 & 1 == 1
    }

    /// The set as the kernel numbers it: bit 0 is `chown`.
    pub(super) fn bits(self) -> u64 {
        self.0
    }
}

impl FromIterator<Capability> for CapabilitySet {
    fn from_iter<I: IntoIterator<Item = Capability>>(capabilities: I) -> Self {
        Self(capabilities.into_iter().fold(0, |bits, capability| bits | 1 << capability.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_has_its_name_and_number() {
        for (number, name) in (0..).zip(CAPABILITY_NAMES) {
            let capability: Capability = name.parse().expect(name);
            assert_eq!((capability, capability.to_string().as_str()), (Capability(number), name));
        }
        assert_eq!("CAP_SYS_ADMIN".parse(), Ok(Capability(21)));
        assert_eq!("CAP_CHECKPOINT_RESTORE".parse(), Ok(Capability(40)));
        assert_eq!("root".parse::<Capability>(), Err(ParseCapabilityError("root".into())));
    }

    #[test]
    fn a_set_has_exactly_its_capabilities() {
        let set: CapabilitySet = [Capability(0), Capability(40)].into_iter().collect();
        assert_eq!(set.bits(), 1 | 1 << 40);
        assert!(set.contains(Capability(40)) && !set.contains(Capability(1)));
        assert_eq!(CapabilitySet::default().bits(), 0);
    }
}
