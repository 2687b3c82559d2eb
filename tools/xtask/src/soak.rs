//! `cargo xtask soak`: the random tests at counts that a test run has no time for.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use testbed::{KillPlace, KillTally};

use crate::report::Report;
use crate::run::{Log, run_command};
use crate::test::binaries;
use crate::test::launch::{RunAs, TestCommand, TestSelection, test_command};
use crate::{fuzz, kernel_test, mutants, newcomer, oci, test};

/// Long enough for the longest test at its full count.
const WITHIN: Duration = Duration::from_secs(3600);
/// The kills of daemons with volumes: most wait for a pod in an emulated guest.
const KILLS_WITHIN: Duration = Duration::from_secs(6 * 3600);
/// The end-to-end tests of CSI drivers: an emulated node needs a minute for each of hundreds.
const SUITE_WITHIN: Duration = Duration::from_secs(12 * 3600);
/// For each file system: three to ten times what it takes.
const STORAGE_WITHIN: Duration = Duration::from_secs(1800);

/// Power cuts and kills of noded with a data volume: an emulated guest needs half a minute for each of hundreds.
const CORNERS_WITHIN: Duration = Duration::from_secs(3 * 3600);

/// The kills of processes with volumes, in whole runs of both soaks: of all, of those in guests, and at each point.
const LEAST_KILLS: [usize; 3] = [1000, 500, 20];
/// Before and after each step of nodekeel-provisioner.
const LEAST_POINTS: usize = 90;
const KILL_SOAKS: [&str; 2] = ["volume-kills", "node-volume-kills"];

enum Work {
    /// The tests of `PACKAGE TARGET TEXT` with this text in their names.
    Tests(&'static str),
    /// The same, with the image of a release of provisionerd.
    ImageTests(&'static str),
    /// Tests in a guest, by a filter of `cargo xtask kernel-test`.
    GuestTests(&'static str),
    /// The same by several filters, with at least so many power cuts in a whole run.
    PowerCuts(&'static [&'static str], usize),
    /// The rounds of child processes, as every user.
    ProcessRounds,
    /// Mutants of the state machines, which their tests have to find.
    Mutants,
    /// Every fuzz target.
    Fuzz,
    /// The examples of the packaged crates, in programs outside the workspace.
    Examples,
    /// The README's commands in a bare chroot, and the examples.
    Newcomer,
}

use Work::{GuestTests, ImageTests, PowerCuts, Tests};

/// A stress run: its name on the command line, its work, and the variable from which the tests read their count with the
/// full count. One that the caller has set wins.
type Soak = (&'static str, Work, &'static str);

const SOAKS: &[Soak] = &[
    // Of so many equal shares the first; all without.
    ("mutants", Work::Mutants, "NODEKEEL_MUTANTS=1"),
    ("fuzz", Work::Fuzz, ""),
    ("examples", Work::Examples, ""),
    // Up to the command `cargo xtask test`; up to the demo with `NODEKEEL_NEWCOMER=demo`.
    ("newcomer", Work::Newcomer, "NODEKEEL_NEWCOMER=test"),
    (
        "supervisor-core",
        Tests("nodekeel-supervisor --lib random_operations_keep_the_invariants"),
        "NODEKEEL_OPS=5000000",
    ),
    // Every order of events of trees of three and four runnables.
    (
        "supervisor-explore",
        Tests("nodekeel-supervisor --lib every_order_of_events_of_small_trees"),
        "NODEKEEL_EXPLORE=all",
    ),
    (
        "cluster-core",
        Tests("nodekeel-cluster --lib random_runs_keep_the_invariants"),
        "NODEKEEL_LIVES=200000",
    ),
    // A node and its etcd killed at every moment of bootstrap, join and restart, with both releases of etcd.
    (
        "cluster-kills",
        Tests("nodekeel-cluster it enrolment::etcd::a_node_killed_at_any_point"),
        "NODEKEEL_CLUSTER_KILLS=all",
    ),
    // A member and its etcd killed at sixteen moments of bootstrap, join and a change of its address.
    ("member-kills", Tests("nodekeel-cluster it killed_at_any_time"), "NODEKEEL_CLUSTER_KILLS=all"),
    // The longest tests of voters on Debian's etcd, too; `cargo xtask test` runs them on the newest alone.
    ("cluster-releases", Tests("nodekeel-cluster it _debian"), ""),
    // Reads and writes over three voters in network namespaces, while nodes are stopped, killed, frozen and cut off, disks
    // lost, and older copies put back, with both releases of etcd. Porcupine judges the history.
    (
        "cluster-linearizable",
        Tests("nodekeel-cluster it no_acknowledged_write_is_lost_whatever_happens_to_three_voters"),
        "NODEKEEL_HISTORY_OPS=60000",
    ),
    // The disk of a lone voter, of a follower and of the leader stalls, with both releases of etcd.
    ("cluster-stalls", Tests("nodekeel-cluster it whose_disk_stalls"), ""),
    // Three members upgraded one by one from Debian's etcd over 3.5 and 3.6 to the newest, under load.
    ("cluster-upgrade", Tests("nodekeel-cluster it upgrade::"), ""),
    // Workers in one process, which enrol at once.
    ("cluster-workers", Tests("noded it workers_enrol_at_once"), "NODEKEEL_WORKERS=100"),
    // Voters replaced by others, each with a kill in a step of the replacement.
    (
        "cluster-replaces",
        Tests("nodekeel-cluster it a_replacement_killed_at_any_step_ends_with_one_successor"),
        "NODEKEEL_REPLACES=20",
    ),
    // provisionerd killed at each moment of a volume's life, on a real API server; then an import, publications of
    // capacity, a mounter and a store.
    ("volume-kills", Tests("provisionerd it crash::a_daemon_killed"), "NODEKEEL_VOLUME_KILLS=20"),
    (
        "volume-kills",
        Tests("provisionerd it import::an_import_killed_at_each_step"),
        "NODEKEEL_VOLUME_KILLS=20",
    ),
    (
        "volume-kills",
        Tests("provisionerd it capacity::a_daemon_killed_around_each_publication"),
        "NODEKEEL_VOLUME_KILLS=20",
    ),
    (
        "volume-kills",
        Tests("nodekeel-provisioner it csi::real_mount_kills::a_process_killed"),
        "NODEKEEL_VOLUME_KILLS=20",
    ),
    // Claims, volumes and faults in any order, on an API server in memory.
    ("volume-cases", Tests("nodekeel-provisioner it model::"), "NODEKEEL_CASES=all"),
    (
        "volume-kills",
        Tests("nodekeel-provisioner it _kills::a_process_killed_at_any_moment"),
        "NODEKEEL_STORE_KILLS=all",
    ),
    // The same under a kubelet, with XFS and with ext4; `cargo xtask test` takes a sample. With both soaks, the kills at each
    // point are counted: `cargo xtask soak volume-kills node-volume-kills`.
    ("node-volume-kills", Tests("provisionerd node kills::a_daemon_killed"), "NODEKEEL_NODE_VOLUME_KILLS=6"),
    // A node whose volume a Tang server opens, restarted unattended.
    ("tang-restarts", GuestTests("noded it storage_tang::"), "NODEKEEL_TANG_RESTARTS=20"),
    // noded, its etcd and its services killed and stopped at random for ten minutes.
    ("node-storm", Tests("noded it storm::"), "NODEKEEL_STORM_SECONDS=600"),
    // What is said of each trouble of a node, after 60 s too.
    ("node-agreement", Tests("noded it agreement::tree_status"), "NODEKEEL_AGREEMENT_SECONDS=60"),
    // Ten minutes of strangers at the port of each program.
    ("port-floods", Tests("noded it ports::"), "NODEKEEL_FLOOD_SECONDS=600"),
    ("port-floods", Tests("provisionerd it ports::"), "NODEKEEL_FLOOD_SECONDS=600"),
    // The API server killed for 150 s under provisionerd.
    ("api-outage", Tests("provisionerd it api_outage::"), ""),
    // The power cut between the writes of expansions, and in the lives of volumes of each kind, on XFS and ext4.
    (
        "volume-power-cuts",
        PowerCuts(&["nodekeel-provisioner it power_cut::"], 400),
        "NODEKEEL_POWER_CUTS=all",
    ),
    // Kubernetes' end-to-end tests of CSI drivers: hours, and an interrupted run goes on where it ended.
    ("external-storage", ImageTests("provisionerd node external_storage::"), "NODEKEEL_EXTERNAL_STORAGE=all"),
    // Some of each kind, in 45 minutes.
    (
        "external-storage-slice",
        ImageTests("provisionerd node external_storage::"),
        "NODEKEEL_EXTERNAL_STORAGE=slice",
    ),
    // A pod's volume on a node whose disk, and whose object, are lost for a while.
    ("node-outages", ImageTests("provisionerd node outages::"), ""),
    // Each way out of a quota, in pods on XFS and ext4.
    ("quota-escapes", ImageTests("provisionerd node escapes::"), ""),
    // Block and strict volumes under a kubelet, from claim to deletion.
    ("node-images", ImageTests("provisionerd node images::"), ""),
    // noded killed with a hundred restarts pending, as a plain user and as root, who has cgroups.
    ("node-kills", Tests("noded it node_killed_with_restarts_pending"), "NODEKEEL_NODE_KILLS=100"),
    // A node's control API while a thousand services start at one instant, and while all of them fail.
    ("many-services", Tests("noded it a_node_with_many_services_answers"), "NODEKEEL_SERVICES=1000"),
    ("supervisor-process", Work::ProcessRounds, "NODEKEEL_ROUNDS=1000"),
    // Damaged files of images below each release of containerd; `cargo xtask test` takes one of each kind.
    ("image-damages", Tests("nodekeel-containerd-svc daemon damage::random_damages"), "NODEKEEL_DAMAGES=60"),
    // Disks of every format, with their heads zeroed; `cargo xtask test` takes a sample. Some are formatted by a kernel.
    (
        "fifty-disks",
        Tests("nodekeel-localstorage it fifty_disks::disks_that_somebody"),
        "NODEKEEL_FIFTY_DISKS=all",
    ),
    ("fifty-disks", GuestTests("nodekeel-localstorage it fifty_disks::guest"), ""),
    // The link to a disk flips at random moments of a format; `cargo xtask test` takes a slice.
    (
        "link-flips",
        Tests("nodekeel-localstorage it owner::a_link_that_flips_at_a_random"),
        "NODEKEEL_LINK_FLIPS=all",
    ),
    // Creation, rotation and confirmation of an encrypted volume, killed at each system call, and re-encryption at each
    // write of cryptsetup.
    ("luks-kills", Tests("nodekeel-localstorage it luks::kills::"), "NODEKEEL_LUKS_KILLS=all"),
    ("luks-kills", Tests("nodekeel-localstorage it luks::reencryption::"), "NODEKEEL_LUKS_KILLS=all"),
    // Every system call of the code that writes a node's files, on each file system that a node has, and the
    // whole count of kills of mkfs.xfs.
    ("storage-kills", GuestTests("nodekeel-localstorage it "), "NODEKEEL_KILLS=all"),
    // A node's volume on disks and partitions: encrypted by both modes, grown, found again, its keys changed.
    ("node-storage", GuestTests("noded it storage_"), ""),
    // The power cut, and noded killed, in creation, rotation, growth, header restore and re-encryption of its volume. Each test prints how often
    // each scenario had each outcome: more than 300, since a few cuts are where the test damages the header.
    ("storage-corners", GuestTests("noded it storage_corners::"), "NODEKEEL_STORAGE_CORNERS=320"),
    // The power cut between the writes of volumes, key slots, journals, files, credentials and limits. Each test
    // prints its count, and the seed that repeats it; all of them together have more than a thousand.
    (
        "power-cuts",
        PowerCuts(&["nodekeel-localstorage it power_cut", "nodekeel-fsquota it kernel::power_cut"], 1000),
        "NODEKEEL_POWER_CUTS=all",
    ),
];

/// The variable of a count, and the count: the caller's, or the full one.
pub(crate) type Count = Option<(&'static str, String)>;

fn choose_count(full: &'static str) -> Count {
    let (name, count) = full.split_once('=')?;
    Some((name, env::var(name).unwrap_or_else(|_| count.to_owned())))
}

/// Runs the named ones, or all.
pub(crate) fn run(names: &[String]) -> Result<ExitCode> {
    let is_known = |name: &&String| SOAKS.iter().any(|(known, ..)| known == name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let mut known: Vec<_> = SOAKS.iter().map(|(name, ..)| *name).collect();
        known.dedup();
        bail!("unknown stress run {unknown:?}; known: {}", known.join(", "));
    }
    let is_chosen = |name: &str| names.is_empty() || names.iter().any(|chosen| chosen == name);
    let mut report = Report::new(Log::default());
    let (mut tally, mut is_whole) = (KillTally::default(), KILL_SOAKS.into_iter().all(is_chosen));
    for (name, work, full) in SOAKS.iter().filter(|(name, ..)| is_chosen(name)) {
        let lines = run_soak(name, work, choose_count(full), &mut report);
        lines.with_context(|| format!("run {name}"))?.iter().for_each(|line| tally.read_line(line));
        is_whole &= is_full(full);
    }
    report_kills(&tally, is_whole, &mut report);
    Ok(report.finish())
}

/// Whether the caller has set no other count.
fn is_full(full: &str) -> bool {
    full.split_once('=').is_none_or(|(name, _)| env::var_os(name).is_none())
}

/// Gives what the tests have written, as far as kills are counted in it.
fn run_soak(name: &str, work: &Work, count: Count, report: &mut Report) -> Result<Vec<String>> {
    let number = || count.as_ref().map(|(_, number)| number.as_str()).unwrap_or_default();
    match work {
        Work::Mutants => mutants::run(number(), report)?,
        Work::Fuzz => fuzz::run(report)?,
        Work::Examples => newcomer::examples::run(report)?,
        Work::Newcomer => newcomer::run(number(), report)?,
        Work::ProcessRounds => test::run_process_rounds(count.as_ref(), WITHIN, report)?,
        GuestTests(filter) => {
            let within = if name == "storage-corners" { CORNERS_WITHIN } else { STORAGE_WITHIN };
            drop(kernel_test::run_counted(filter, count.as_ref(), within, report)?);
        }
        PowerCuts(filters, least) => run_power_cuts(filters, *least, count, report)?,
        Tests(filter) => {
            let within = if KILL_SOAKS.contains(&name) { KILLS_WITHIN } else { WITHIN };
            return run_tests(name, filter, count, None, within, report);
        }
        ImageTests(filter) => {
            let (image, _) = oci::build_for_tests(oci::RELEASE_PROFILE, &report.log)?;
            return run_tests(name, filter, count, Some(image), SUITE_WITHIN, report);
        }
    }
    Ok(Vec::new())
}

fn run_tests(
    name: &str,
    filter: &str,
    count: Count,
    image: Option<PathBuf>,
    within: Duration,
    report: &mut Report,
) -> Result<Vec<String>> {
    let words: Vec<&str> = filter.splitn(3, ' ').collect();
    let [package, target, text] = words[..] else { bail!("{filter:?} is not PACKAGE TARGET TEXT") };
    let target = if target == "--lib" { vec![target] } else { vec!["--test", target] };
    let build = [&["test", "--all-features", "-p", package], &*target].concat();
    let binary = binaries::build_one(&build, WITHIN)?;
    let selection = TestSelection::Matching(text.to_owned());
    let TestCommand { mut command, .. } = test_command(&binary, RunAs::Caller, &selection)?;
    command.args(["--nocapture", "--test-threads=1"]);
    let counted = count.as_ref().map(|(name, count)| format!(" ({name}={count})")).unwrap_or_default();
    report.log.headline(&format!("{name}{counted}"));
    command.envs(count).envs(image.map(|image| (oci::IMAGE_FILE, image)));
    let outcome = run_command(command, &report.log, test::events::show_event, within)?;
    test::add_tests(name, &outcome, &selection, report);
    Ok(outcome.lines)
}

fn run_power_cuts(filters: &[&str], least: usize, count: Count, report: &mut Report) -> Result<()> {
    let start = Instant::now();
    let mut cuts = 0;
    for filter in filters {
        let lines = kernel_test::run_counted(filter, count.as_ref(), STORAGE_WITHIN, report)?;
        cuts += lines.iter().filter_map(|line| parse_cuts(line)).sum::<usize>();
    }
    report.log.line(&format!("{cuts} power cuts"));
    let is_whole = count.is_some_and(|(_, number)| number == "all");
    let problem = format!("{cuts} power cuts instead of {least}");
    report.add_check("power cuts", start.elapsed(), (is_whole && cuts < least).then_some(problem));
    Ok(())
}

/// Shows the kills at each point; those of whole runs must be enough.
fn report_kills(tally: &KillTally, is_whole: bool, report: &mut Report) {
    if tally.is_empty() {
        return;
    }
    report.log.headline("kills");
    report.log.line(&tally.to_string());
    let problem = find_shortage(tally).filter(|_| is_whole);
    report.add_check("kills at each point", Duration::ZERO, problem);
}

/// Why there were too few kills.
fn find_shortage(tally: &KillTally) -> Option<String> {
    let [all, in_guests, at_each] = LEAST_KILLS;
    let found = tally.count_at(KillPlace::Guest);
    if found < in_guests {
        return Some(format!("{found} kills in guests instead of {in_guests}"));
    }
    let found = found + tally.count_at(KillPlace::Host);
    if found < all {
        return Some(format!("{found} kills instead of {all}"));
    }
    if tally.point_count() < LEAST_POINTS {
        return Some(format!("kills at {} points instead of {LEAST_POINTS}", tally.point_count()));
    }
    let below: Vec<_> =
        tally.points_below(at_each).map(|(point, count)| format!("{point} ({count})")).collect();
    (!below.is_empty()).then(|| format!("fewer than {at_each} kills: {}", below.join(", ")))
}

/// Reads `power cuts of OPERATION: COUNT, COUNT wrong; …`, behind whatever the test harness has written.
fn parse_cuts(line: &str) -> Option<usize> {
    let (_, line) = line.split_once("power cuts of ")?;
    let (counts, _) = line.split_once(" wrong;")?;
    let (operation, _) = counts.rsplit_once(", ")?;
    operation.rsplit_once(": ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_kills_are_found() {
        let [all, in_guests, at_each] = LEAST_KILLS;
        let mut tally = KillTally::default();
        let kill = |tally: &mut KillTally, point: &str, host: usize, guest: usize| {
            tally.read_line(&format!("kills on the host at {point}: {host}"));
            tally.read_line(&format!("kills in a guest at {point}: {guest}"));
        };
        kill(&mut tally, "Before a", all, in_guests - 1);
        assert!(find_shortage(&tally).unwrap().contains("in guests"));
        kill(&mut tally, "Before b", at_each - 2, 1);
        assert!(find_shortage(&tally).unwrap().contains("2 points instead of"));
        (2..LEAST_POINTS).for_each(|number| kill(&mut tally, &format!("After {number}"), at_each, 0));
        assert_eq!(find_shortage(&tally).unwrap(), "fewer than 20 kills: Before b (19)");
        kill(&mut tally, "Before b", 0, 1);
        assert_eq!(find_shortage(&tally), None);
    }

    #[test]
    fn the_cuts_of_each_operation_are_read() {
        let cuts = |line: &str| parse_cuts(line);
        let line =
            "test a::b ... power cuts of LuksVolume::mount_new, authenticated: 12, 0 wrong; 300 entries";
        assert_eq!(cuts(line), Some(12));
        assert_eq!(
            cuts("power cuts of quota set on XFS: 100, 3 wrong; 7 entries, NODEKEEL_SEED=1"),
            Some(100)
        );
        assert_eq!(cuts("3 of 100 power cuts of quota set on XFS failed:"), None);
        assert_eq!(cuts("test result: ok"), None);
    }
}
