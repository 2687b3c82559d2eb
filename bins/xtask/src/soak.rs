//! `cargo xtask soak`: the random tests at counts that a test run has no time for.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::fuzz;
use crate::kernel_test::counted;
use crate::planted;
use crate::report::Report;
use crate::run::{self, Echo};
use crate::test;

/// A test at its full count.
struct Soak {
    name: &'static str,
    /// Which test, as `cargo test` wants it.
    test: &'static [&'static str],
    /// The variable that the test reads its count from, where it has one.
    count: Option<(&'static str, &'static str)>,
}

/// Tests in a guest at their full count.
struct Kernel {
    name: &'static str,
    /// Which tests, as `cargo xtask kernel-test` wants them.
    filter: &'static str,
    count: (&'static str, &'static str),
}

const CORE: Soak = Soak {
    name: "supervisor-core",
    test: &[
        "-p",
        "nodekeel-supervisor",
        "--lib",
        "--",
        "random_operations_keep_the_invariants",
        "--nocapture",
    ],
    count: Some(("NODEKEEL_OPS", "5000000")),
};
const LIVES: Soak = Soak {
    name: "cluster-core",
    test: &["-p", "nodekeel-cluster", "--lib", "--", "random_lives_keep_the_invariants", "--nocapture"],
    count: Some(("NODEKEEL_LIVES", "200000")),
};
/// A node and its etcd killed at every moment of founding, joining and starting again, with both releases of etcd.
const NODES: Soak = Soak {
    name: "cluster-kills",
    test: &[
        "-p",
        "nodekeel-cluster",
        "--test",
        "it",
        "--",
        "machine::etcd::a_node_killed_at_any_moment",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ],
    count: Some(("NODEKEEL_CLUSTER_KILLS", "all")),
};
/// The rounds of child processes, in every way in which they have to hold.
const PROCESS: (&str, (&str, &str)) = ("supervisor-process", ("NODEKEEL_ROUNDS", "1000"));
/// The bugs that the random operations and lives of the machines have to find.
const PLANTED: &str = "planted-bugs";
/// Every fuzz target.
const FUZZ: &str = "fuzz";
/// Every system call of what keeps a node's files, on each file system that a node has.
const STORAGE: Kernel = Kernel {
    name: "storage-kills",
    filter: "nodekeel-localstorage it kernel::",
    count: ("NODEKEEL_KILLS", "all"),
};
/// The program that makes volumes, killed at each moment of a volume's life, on a real API server: 30 kills a time.
const VOLUMES: Soak = Soak {
    name: "volume-kills",
    test: &[
        "-p",
        "provisionerd",
        "--test",
        "it",
        "--",
        "crash::killed_again_and_again",
        "--ignored",
        "--nocapture",
    ],
    count: Some(("NODEKEEL_VOLUME_KILLS", "34")),
};
/// The same once more, on a node of its own with ext4; on XFS `cargo xtask test` has it.
const NODE_VOLUMES: Soak = Soak {
    name: "node-volume-kills",
    test: &[
        "-p",
        "provisionerd",
        "--test",
        "node",
        "--",
        "kills::killed_at_each_moment_on_ext4",
        "--ignored",
        "--nocapture",
    ],
    count: None,
};
const WITHIN: Duration = Duration::from_secs(3600);
/// For each file system: three to ten times what it takes.
const STORAGE_WITHIN: Duration = Duration::from_secs(1800);

/// The soaks that are one test each.
const TESTS: [Soak; 5] = [CORE, LIVES, NODES, VOLUMES, NODE_VOLUMES];

/// Runs the named one, or all.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let is_chosen = |soak: &str| name.is_none_or(|name| name == soak);
    let tests = TESTS.iter().map(|soak| soak.name);
    let names: Vec<_> = tests.chain([PROCESS.0, PLANTED, FUZZ, STORAGE.name]).collect();
    if !names.iter().copied().any(is_chosen) {
        bail!("no such soak; there are: {}", names.join(", "));
    }
    let mut report = Report::default();
    if is_chosen(PLANTED) {
        planted::run(&mut report)?;
    }
    if is_chosen(FUZZ) {
        fuzz::run(&mut report)?;
    }
    for soak in TESTS {
        if is_chosen(soak.name) {
            soak.run(&mut report)?;
        }
    }
    if is_chosen(PROCESS.0) {
        test::process_rounds(PROCESS.1, WITHIN, &mut report)?;
    }
    if is_chosen(STORAGE.name) {
        counted::run(STORAGE.filter, STORAGE.count, STORAGE_WITHIN, &mut report)?;
    }
    Ok(report.finish())
}

impl Soak {
    fn run(&self, report: &mut Report) -> Result<()> {
        let counted = self.count.map(|(variable, count)| format!(" ({variable}={count})"));
        run::headline(&format!("{}{}", self.name, counted.unwrap_or_default()));
        let mut command = run::cargo(&["test", "--all-features"]);
        command.args(self.test).envs(self.count);
        let ran = run::stream(command, Echo::Shown, WITHIN)?;
        report.checked(self.name, ran.took, ran.problem);
        Ok(())
    }
}
