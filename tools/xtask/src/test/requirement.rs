//! What an ignored test needs, as its `#[ignore = "needs …"]` says, and where it runs.

use std::collections::BTreeMap;

use testbed::{gotool, tools};

use super::events::IgnoredTest;
use super::lanes::Lane;
use super::launch::RunAs;
use crate::kernel_test::need::GuestNeed;
use crate::oci;

/// Ignored tests by where they run.
#[derive(Debug, Default)]
pub(crate) struct TestGroups {
    /// On this machine.
    pub(crate) host: BTreeMap<(RunAs, Lane), Vec<String>>,
    pub(crate) guest: Vec<(GuestNeed, String)>,
    /// In a guest, by `cargo xtask kernel-test` and `cargo xtask soak` alone.
    pub(crate) guest_soak: Vec<(GuestNeed, String)>,
    /// Nowhere: the test, and why.
    pub(crate) unmet: Vec<(String, String)>,
}

/// Groups tests by what they need; those that measure time run alone. Those of `cargo xtask soak` are left
/// out.
pub(crate) fn group_tests(
    ignored: Vec<IgnoredTest>,
    is_root: bool,
    measures: impl Fn(&str) -> bool,
) -> TestGroups {
    let mut groups = TestGroups::default();
    for IgnoredTest { name, reason } in ignored {
        match parse_reason(&reason, is_root) {
            Ok(Location::Host(run_as, lane)) => {
                let lane = if measures(&name) { Lane::Alone } else { lane };
                groups.host.entry((run_as, lane)).or_default().push(name);
            }
            Ok(Location::Guest(need)) => groups.guest.push((need, name)),
            Ok(Location::GuestSoak(need)) => groups.guest_soak.push((need, name)),
            Ok(Location::Soak) => {}
            Err(why) => groups.unmet.push((name, why)),
        }
    }
    groups
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Location {
    Host(RunAs, Lane),
    Guest(GuestNeed),
    GuestSoak(GuestNeed),
    Soak,
}

/// Reads `needs A, B and C: why`, `soak: why`, or `soak: needs kernel with A: why`.
fn parse_reason(reason: &str, is_root: bool) -> Result<Location, String> {
    if let Some(reason) = reason.strip_prefix("soak") {
        return match reason.strip_prefix(": needs ") {
            Some(needs) => parse_guest_need(needs).map(Location::GuestSoak),
            None => Ok(Location::Soak),
        };
    }
    let needs =
        reason.strip_prefix("needs ").ok_or(format!("is ignored for an unknown need ({reason:?})"))?;
    if needs.starts_with("kernel") {
        return parse_guest_need(needs).map(Location::Guest);
    }
    let needs = needs.split(':').next().unwrap_or_default();
    let (mut run_as, mut lane) = (RunAs::Caller, Lane::Computing);
    for need in needs.replace(" and ", ", ").split(", ") {
        match need.trim() {
            "root" if is_root => {}
            "root" => return Err("needs root".into()),
            "plain user" | "a plain user" => run_as = RunAs::PlainUser,
            "PID 1" | "to be PID 1" => run_as = RunAs::Pid1,
            // Setup has installed or built the programs of them all.
            "a node" => lane = Lane::Guest,
            "kube" | oci::IMAGE_NEED => lane = lane.max(Lane::Waiting),
            tool if tool == tools::QEMU.package => lane = Lane::Guest,
            tool if is_known(tool) => lane = lane.max(Lane::Waiting),
            other => return Err(format!("needs {other:?}, which this command doesn't know")),
        }
    }
    Ok(Location::Host(run_as, lane))
}

fn parse_guest_need(text: &str) -> Result<GuestNeed, String> {
    GuestNeed::parse(text.split(':').next().unwrap_or_default())
}

fn is_known(tool: &str) -> bool {
    tools::ALL.iter().any(|known| known.name == tool || known.package == tool)
        || gotool::ALL.iter().any(|known| known.name == tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_says_as_whom_and_in_which_lane_a_test_runs() {
        let host = |reason: &str| match parse_reason(reason, true) {
            Ok(Location::Host(run_as, lane)) => (run_as, lane),
            other => panic!("{reason}: {other:?}"),
        };
        assert_eq!(host("needs root: it mounts"), (RunAs::Caller, Lane::Computing));
        assert_eq!(host("needs etcd, containerd and root: it kills both"), (RunAs::Caller, Lane::Waiting));
        assert_eq!(host("needs kube"), (RunAs::Caller, Lane::Waiting));
        assert_eq!(host("needs kube, a node and provisionerd's image"), (RunAs::Caller, Lane::Guest));
        assert_eq!(host("needs qemu-system-x86"), (RunAs::Caller, Lane::Guest));
        assert_eq!(host("needs plain user: root passes every check"), (RunAs::PlainUser, Lane::Computing));
        assert_eq!(host("needs to be PID 1"), (RunAs::Pid1, Lane::Computing));
        assert_eq!(parse_reason("soak: 1,000 rounds", true), Ok(Location::Soak));
        let need = GuestNeed::parse("kernel with network").unwrap();
        let guest = parse_reason("needs kernel with network: it probes", true);
        assert_eq!(guest, Ok(Location::Guest(need.clone())));
        assert_eq!(parse_reason("soak: needs kernel with network", true), Ok(Location::GuestSoak(need)));
    }

    #[test]
    fn a_need_that_cannot_be_met_or_is_not_stated_is_an_error() {
        assert!(parse_reason("needs root", false).is_err());
        assert!(parse_reason("soak: needs a moon rocket", true).is_err());
        assert!(parse_reason("flaky", true).is_err());
        assert!(parse_reason("", true).is_err());
        assert!(parse_reason("needs a moon rocket", true).unwrap_err().contains("a moon rocket"));
        assert!(parse_reason("needs kernel with a moon rocket", true).unwrap_err().contains("a moon rocket"));
    }
}
