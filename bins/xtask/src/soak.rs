//! `cargo xtask soak`: the random tests at counts that a test run has no time for.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::report::Report;
use crate::run::{Log, run_command};
use crate::test::binaries;
use crate::test::launch::{RunAs, TestCommand, TestSelection, test_command};
use crate::{fuzz, kernel_test, newcomer, oci, planted, test};

/// Long enough for the longest test at its full count.
const WITHIN: Duration = Duration::from_secs(3600);
/// The end-to-end tests of CSI drivers: an emulated node needs a minute for each of hundreds.
const SUITE_WITHIN: Duration = Duration::from_secs(12 * 3600);
/// For each file system: three to ten times what it takes.
const STORAGE_WITHIN: Duration = Duration::from_secs(1800);

/// A stress run, by its name on the command line.
struct Soak {
    name: &'static str,
    work: Work,
    /// The variable from which the tests read their count, and the full count. One that the caller has set
    /// wins.
    count: Option<(&'static str, &'static str)>,
}

enum Work {
    /// Tests of a package's target with this text in their names.
    Tests(&'static str, &'static str, &'static str),
    /// The same, with the image of provisionerd.
    ImageTests(&'static str, &'static str, &'static str),
    /// Tests in a guest, by filters of `cargo xtask kernel-test`.
    GuestTests(&'static [&'static str]),
    /// The rounds of child processes, as every user.
    ProcessRounds,
    /// The bugs that the random tests of the state machines have to find.
    PlantedBugs,
    /// Every fuzz target.
    Fuzz,
    /// The examples of the packaged crates, in programs outside the workspace.
    Examples,
    /// The README's commands in a bare chroot, and the examples.
    Newcomer,
}

const SOAKS: &[Soak] = &[
    // Of all lists, or of those whose paths contain `NODEKEEL_PLANTED`, as `power-cuts`.
    Soak { name: "planted-bugs", work: Work::PlantedBugs, count: Some(("NODEKEEL_PLANTED", "")) },
    Soak { name: "fuzz", work: Work::Fuzz, count: None },
    Soak { name: "examples", work: Work::Examples, count: None },
    // Up to the command `cargo xtask test`; up to the demo with `NODEKEEL_NEWCOMER=demo`.
    Soak { name: "newcomer", work: Work::Newcomer, count: Some(("NODEKEEL_NEWCOMER", "test")) },
    Soak {
        name: "supervisor-core",
        work: Work::Tests("nodekeel-supervisor", "--lib", "random_operations_keep_the_invariants"),
        count: Some(("NODEKEEL_OPS", "5000000")),
    },
    // Every order of events of trees of three and four runnables.
    Soak {
        name: "supervisor-explore",
        work: Work::Tests("nodekeel-supervisor", "--lib", "every_order_of_events_of_small_trees"),
        count: Some(("NODEKEEL_EXPLORE", "all")),
    },
    Soak {
        name: "cluster-core",
        work: Work::Tests("nodekeel-cluster", "--lib", "random_runs_keep_the_invariants"),
        count: Some(("NODEKEEL_LIVES", "200000")),
    },
    // A node and its etcd killed at every moment of bootstrap, join and restart, with both releases of etcd.
    Soak {
        name: "cluster-kills",
        work: Work::Tests("nodekeel-cluster", "it", "enrolment::etcd::a_node_killed_at_any_point"),
        count: Some(("NODEKEEL_CLUSTER_KILLS", "all")),
    },
    // A member and its etcd killed at sixteen moments of bootstrap, join and a change of its address.
    Soak {
        name: "member-kills",
        work: Work::Tests("nodekeel-cluster", "it", "killed_at_any_time"),
        count: Some(("NODEKEEL_CLUSTER_KILLS", "all")),
    },
    // All tests of voters on Debian's etcd, too; `cargo xtask test` runs the longest on the newest alone.
    Soak {
        name: "cluster-releases",
        work: Work::Tests("nodekeel-cluster", "it", "voters::debian::"),
        count: None,
    },
    // Reads and writes over three voters in network namespaces, while disks are lost, tickets kept, nodes killed
    // and cut off, with both releases of etcd.
    Soak {
        name: "cluster-history",
        work: Work::Tests(
            "nodekeel-cluster",
            "it",
            "no_acknowledged_write_is_lost_whatever_happens_to_three_voters",
        ),
        count: Some(("NODEKEEL_HISTORY_OPS", "20000")),
    },
    // provisionerd killed at each moment of a volume's life, on a real API server: 30 kills a time.
    Soak {
        name: "volume-kills",
        work: Work::Tests(
            "provisionerd",
            "it",
            "crash::a_daemon_killed_repeatedly_leaks_nothing_and_provisions_nothing_twice",
        ),
        count: Some(("NODEKEEL_VOLUME_KILLS", "34")),
    },
    // The same on a real node, with XFS and with ext4; `cargo xtask test` kills once around each step.
    Soak {
        name: "node-volume-kills",
        work: Work::Tests("provisionerd", "node", "kills::a_daemon_killed_at_each_moment"),
        count: None,
    },
    // Kubernetes' end-to-end tests of CSI drivers: hours, and an interrupted run goes on where it ended.
    Soak {
        name: "external-storage",
        work: Work::ImageTests("provisionerd", "node", "external_storage::"),
        count: Some(("NODEKEEL_EXTERNAL_STORAGE", "all")),
    },
    // noded killed with a hundred restarts pending, as a plain user and as root, who has cgroups.
    Soak {
        name: "node-kills",
        work: Work::Tests("nodekeel-node", "it", "node_killed_with_restarts_pending"),
        count: Some(("NODEKEEL_NODE_KILLS", "100")),
    },
    // A node's control API while a thousand services start at one instant, and while all of them fail.
    Soak {
        name: "many-services",
        work: Work::Tests("nodekeel-node", "it", "a_node_with_many_services_answers"),
        count: Some(("NODEKEEL_SERVICES", "1000")),
    },
    Soak { name: "supervisor-process", work: Work::ProcessRounds, count: Some(("NODEKEEL_ROUNDS", "1000")) },
    // Disks of every format, with their heads zeroed; `cargo xtask test` takes a sample.
    Soak {
        name: "fifty-disks",
        work: Work::Tests("nodekeel-localstorage", "it", "fifty_disks::"),
        count: Some(("NODEKEEL_FIFTY_DISKS", "all")),
    },
    // Creation, rotation and confirmation of an encrypted volume, killed at each system call.
    Soak {
        name: "luks-kills",
        work: Work::Tests("nodekeel-localstorage", "it", "luks::kills::"),
        count: Some(("NODEKEEL_LUKS_KILLS", "all")),
    },
    // Every system call of the code that writes a node's files, on each file system that a node has, and the
    // whole count of kills of mkfs.xfs.
    Soak {
        name: "storage-kills",
        work: Work::GuestTests(&["nodekeel-localstorage it "]),
        count: Some(("NODEKEEL_KILLS", "all")),
    },
    // A node's volume on disks and partitions: encrypted by both modes, grown, found again, its keys changed.
    Soak { name: "node-storage", work: Work::GuestTests(&["nodekeel-node it storage_"]), count: None },
    // The power cut between the writes of volumes, key slots, journals, files, credentials and limits. Each test
    // prints its count, and the seed that repeats it.
    Soak {
        name: "power-cuts",
        work: Work::GuestTests(&[
            "nodekeel-localstorage it power_cut",
            "nodekeel-fsquota it kernel::power_cut",
        ]),
        count: Some(("NODEKEEL_POWER_CUTS", "all")),
    },
];

/// Runs the named one, or all.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let chosen: Vec<&Soak> = SOAKS.iter().filter(|soak| name.is_none_or(|name| name == soak.name)).collect();
    if chosen.is_empty() {
        let names: Vec<_> = SOAKS.iter().map(|soak| soak.name).collect();
        bail!("unknown stress run {:?}; known: {}", name.unwrap_or_default(), names.join(", "));
    }
    let mut report = Report::new(Log::default());
    for soak in chosen {
        soak.run(&mut report).with_context(|| format!("run {}", soak.name))?;
    }
    Ok(report.finish())
}

impl Soak {
    fn run(&self, report: &mut Report) -> Result<()> {
        let count = self.count.unwrap_or_default();
        match self.work {
            Work::PlantedBugs => planted::run_all(&env::var(count.0).unwrap_or_default(), report),
            Work::Fuzz => fuzz::run(report),
            Work::Examples => newcomer::examples::run(report),
            Work::Newcomer => newcomer::run(&env::var(count.0).unwrap_or_else(|_| count.1.into()), report),
            Work::ProcessRounds => test::run_process_rounds(count, WITHIN, report),
            Work::GuestTests(filters) => filters
                .iter()
                .try_for_each(|filter| kernel_test::run_counted(filter, count, STORAGE_WITHIN, report)),
            Work::Tests(package, target, text) => {
                self.run_tests((package, target), text, None, WITHIN, report)
            }
            Work::ImageTests(package, target, text) => {
                let (image, _) = oci::build_for_tests(&report.log)?;
                self.run_tests((package, target), text, Some((oci::IMAGE_FILE, image)), SUITE_WITHIN, report)
            }
        }
    }

    fn run_tests(
        &self,
        (package, target): (&str, &str),
        text: &str,
        image: Option<(&str, PathBuf)>,
        within: Duration,
        report: &mut Report,
    ) -> Result<()> {
        let target = if target == "--lib" { vec![target] } else { vec!["--test", target] };
        let build = [&["test", "--all-features", "-p", package], &*target].concat();
        let binary = binaries::build_one(&build, WITHIN)?;
        let selection = TestSelection::Matching(text.to_owned());
        let TestCommand { mut command, .. } = test_command(&binary, RunAs::Caller, &selection)?;
        command.args(["--nocapture", "--test-threads=1"]);
        let count = self.count.map(|(name, count)| (name, env::var(name).unwrap_or_else(|_| count.into())));
        let counted = count.as_ref().map(|(name, count)| format!(" ({name}={count})")).unwrap_or_default();
        report.log.headline(&format!("{}{counted}", self.name));
        command.envs(count).envs(image);
        let outcome = run_command(command, &report.log, test::events::show_event, within)?;
        test::add_tests(self.name, &outcome, &selection, report);
        Ok(())
    }
}
