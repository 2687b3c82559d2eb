//! Whether containers may be less likely to be killed than containerd.

use serde::Deserialize;

/// The permission of containers to have a lower OOM score than containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum OomScorePolicy {
    /// `detect`: allowed if this process has `CAP_SYS_RESOURCE`; without the capability, no pod would start.
    Detect,
    /// `restricted`: not allowed.
    Restricted,
    /// `free`: allowed.
    Free,
}

impl OomScorePolicy {
    pub(super) fn is_restricted(self) -> bool {
        match self {
            Self::Restricted => true,
            Self::Free => false,
            Self::Detect => {
                // Without this capability a score can't go below the last one that a process with it has set.
                // *Source:* Linux's `Documentation/filesystems/proc.rst`, section 3.1.
                let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
                !has_sys_resource(&status)
            }
        }
    }
}

/// Returns whether the process of this `/proc/PID/status` has `CAP_SYS_RESOURCE`; true if the field is missing.
///
/// *Source:* proc_pid_status(5); `linux/capability.h`.
fn has_sys_resource(status: &str) -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let mut lines = status.lines();
    let field = lines.find_map(|line| line.strip_prefix("CapEff:"));
    let effective = field.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    effective.is_none_or(|capabilities| capabilities >> CAP_SYS_RESOURCE & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_capability_is_detected() {
        assert!(has_sys_resource("CapPrm:\t0\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_resource("Name:\tx\nCapEff:\t00000000a80425fb\n"));
        assert!(has_sys_resource(""));
    }
}
