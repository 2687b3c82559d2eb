//! The synchronization of the clock: certificates and tokens are only valid at the right time.

use super::HealthCondition;
use crate::sys;

/// Returns whether the kernel's clock is synchronized; `None` if the kernel does not report it.
pub(super) fn is_synchronized() -> Option<bool> {
    sys::read_clock_status().ok().map(|status| status & nix::libc::STA_UNSYNC == 0)
}

/// A machine whose clock nothing synchronizes can still do its work.
pub(super) fn clock_condition(is_synchronized: Option<bool>) -> Vec<HealthCondition> {
    match is_synchronized {
        Some(false) => vec![
            HealthCondition::warning("clock", "is not synchronized: nothing sets it by NTP or PTP").hint(
                "run chronyd or systemd-timesyncd; `timedatectl` or `chronyc tracking` shows its state",
            ),
        ],
        // An unknown state is no warning: a sandbox may forbid the call.
        Some(true) | None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_not_synchronized_is_a_warning() {
        assert_eq!(clock_condition(Some(true)), []);
        assert_eq!(clock_condition(None), []);
        let [warning] = &clock_condition(Some(false))[..] else { panic!("one") };
        assert_eq!(warning.to_string(), "clock: is not synchronized: nothing sets it by NTP or PTP");
    }

    #[test]
    fn the_kernel_says_whether_the_clock_is_synchronized() {
        assert!(is_synchronized().is_some());
    }
}
