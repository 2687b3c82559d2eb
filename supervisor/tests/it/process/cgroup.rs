//! Descendants in cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nodekeel_supervisor::process::{CgroupParent, KillMode};
use nodekeel_supervisor::{ExitReason, Removal, RunnableState};

use crate::logging::LineCollector;

use super::{KilledProgram, ProcessFixture, mark_of, marked_processes, read_mark, sh, wait_gone};

/// Set in the program that is to be killed: the parent of its cgroups.
const KILLED_BELOW: &str = "NODEKEEL_TEST_IS_TO_BE_KILLED_BELOW";
const GRACE: Duration = Duration::from_millis(100);

/// The mounted cgroup v2 hierarchy.
pub(super) fn cgroup_root() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("proc is mounted");
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    mounts.find(|fields| fields[2] == "cgroup2").map(|fields| fields[1].into()).expect("cgroup v2 is mounted")
}

pub(super) fn cgroup_of(pid: i32) -> PathBuf {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it is there");
    let path = text.lines().find_map(|line| line.strip_prefix("0::/")).expect("cgroup v2 is mounted");
    cgroup_root().join(path)
}

/// The cgroups of starts below that of a host, also the next one's.
fn starts_of(host: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(host).expect("it is there").map(|entry| entry.expect("it is read").path());
    paths.filter(|path| path.is_dir()).collect()
}

fn is_run_of_a_host(dir: &Path) -> bool {
    dir.parent().and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().starts_with("nodekeel-"))
}

/// Files with the names of a cgroup's stand for the cgroup of a killed supervisor.
#[tokio::test]
async fn what_a_killed_supervisor_has_left_is_logged_under_the_supervisor_and_not_a_service() {
    let parent = tempfile::tempdir().expect("a directory");
    let left = parent.path().join("nodekeel-1-1-0");
    fs::create_dir(&left).expect("it is new");
    fs::write(parent.path().join("cgroup.procs"), "").expect("it is writable");
    fs::write(left.join("cgroup.kill"), "").expect("it is writable");
    fs::write(left.join("cgroup.events"), "populated 1\n").expect("it is writable");
    let (lines, _guard) = LineCollector::collect();
    let fixture = ProcessFixture::with_cgroups(sh("echo ran"), CgroupParent::Path(parent.path().to_owned()));
    fixture.wait_exit().await;
    assert_eq!(lines.lines_of("root.p"), [""; 0], "the service has nothing to do with it");
    let of_the_supervisor = lines.lines_of("supervisor");
    for line in [
        "ending leftover processes of a killed supervisor",
        "leftover processes do not exit after SIGKILL",
        "descendants are identified by their parents: cgroups are not available",
    ] {
        assert!(of_the_supervisor.iter().any(|of| of == line), "{line}: {of_the_supervisor:?}");
    }
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn each_start_has_a_cgroup_that_is_removed_with_it() {
    let fixture = ProcessFixture::run_once(
        sh("echo pid $$; setsid sleep 100 & echo child $!; wait").grace_period(GRACE),
    );
    let cgroup = cgroup_of(fixture.output.wait_pid().await);
    let child = fixture.output.wait_line("child ").await.parse().expect("a pid");
    assert!(is_run_of_a_host(&cgroup), "{}", cgroup.display());
    assert_eq!(cgroup_of(child), cgroup);
    fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
    let exit = fixture.wait_exit().await.1;
    assert!(matches!(exit, ExitReason::Canceled { process: Some(_) }), "{exit:?}");
    wait_removed(&cgroup);
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn a_restart_finds_its_cgroup_made_and_none_is_left_by_a_supervisor_that_is_dropped() {
    let fixture = ProcessFixture::restart_always(sh("echo pid $$; exec sleep 100"));
    let first = fixture.output.wait_pid().await;
    fixture.wait_for_state(RunnableState::Ready).await;
    let host = cgroup_of(first).parent().expect("it is below a host's").to_owned();
    let mut next = starts_of(&host);
    next.retain(|start| *start != cgroup_of(first));
    super::send_signal("KILL", first);
    fixture.output.wait_count("pid ", 2).await;
    let pids = fixture.output.text();
    let second = pids.lines().filter_map(|line| line.strip_prefix("pid ")).nth(1).expect("two pids");
    assert_eq!(next, [cgroup_of(second.parse().expect("a pid"))]);
    drop(fixture);
    wait_removed(&host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn a_cgroup_made_ahead_serves_the_whole_supervisor_and_is_removed_when_that_stops() {
    let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100").grace_period(GRACE));
    let first = cgroup_of(fixture.output.wait_pid().await);
    fixture.wait_for_state(RunnableState::Ready).await;
    let host = first.parent().expect("it is below a host's").to_owned();
    assert_eq!(starts_of(&host).len(), 2, "its own one, and the next start's");
    fixture.supervisor.remove_runnable("root.p", Removal::ForGood).await.expect("the DN exists");
    wait_removed(&first);
    assert_eq!(starts_of(&host).len(), 1, "the next start's");
    fixture.shutdown().await;
    wait_removed(&host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn cgroups_made_by_descendants_are_removed_too() {
    let script = r#"own=$HIERARCHY$(sed -n 's/^0:://p' /proc/self/cgroup); mkdir -p $own/a/b; sh -c "echo \$\$ > $own/a/b/cgroup.procs; trap '' TERM; echo pid \$\$; sleep 100" & wait"#;
    let fixture = ProcessFixture::run_once(sh(script).env("HIERARCHY", cgroup_root()).grace_period(GRACE));
    let below = cgroup_of(fixture.output.wait_pid().await);
    assert!(below.ends_with("a/b"), "{}", below.display());
    fixture.stop().await;
    wait_removed(below.ancestors().nth(2).expect("its start's"));
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn a_descendant_that_left_its_cgroup_is_ended_too() {
    let script = r#"sh -c 'echo $$ > $PROCS; trap "" TERM; echo pid $$; exec sleep 100' & exec sleep 100"#;
    let procs = cgroup_root().join("cgroup.procs");
    let fixture = ProcessFixture::run_once(sh(script).env("PROCS", procs).grace_period(GRACE));
    let pid = fixture.output.wait_pid().await;
    let mark = mark_of(pid);
    assert_eq!(cgroup_of(pid), cgroup_root());
    fixture.stop().await;
    assert_eq!(marked_processes(&mark), [""; 0], "no process is left, not even a zombie");
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn no_cgroup_is_created_where_none_is_configured_or_possible() {
    let own = cgroup_of(std::process::id().cast_signed());
    let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100").kill_mode(KillMode::Process));
    assert_eq!(cgroup_of(fixture.output.wait_pid().await), own, "its children must survive it");
    fixture.shutdown().await;
    let fixture = ProcessFixture::with_cgroups(sh("echo pid $$; exec sleep 100"), CgroupParent::Disabled);
    assert_eq!(cgroup_of(fixture.output.wait_pid().await), own);
    fixture.shutdown().await;
    let fixture = ProcessFixture::with_cgroups(
        sh("echo pid $$; exec sleep 100"),
        CgroupParent::Path("/no/such".into()),
    );
    assert_eq!(cgroup_of(fixture.output.wait_pid().await), own);
    fixture.shutdown().await;
}

/// The cleanup of leftovers meets directories that are just being created.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn hosts_that_start_concurrently_each_get_a_cgroup() {
    let hosts = || {
        runtime().block_on(async {
            for _ in 0..20 {
                let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100").grace_period(GRACE));
                let cgroup = cgroup_of(fixture.output.wait_pid().await);
                assert!(is_run_of_a_host(&cgroup), "{}", cgroup.display());
                fixture.shutdown().await;
            }
        });
    };
    std::thread::scope(|threads| (0..8).for_each(|_| _ = threads.spawn(hosts)));
}

/// A name that resembles a host's is not enough.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn a_cgroup_of_another_program_is_untouched_whatever_its_name() {
    let parent = cgroup_of(std::process::id().cast_signed()).join(format!("others-{}", std::process::id()));
    let others =
        ["nodekeel-precious", "nodekeel-1-1", "nodekeel-1-1-8", "nodekeel-01-1-0", "nodekeel-1-1-0-0"];
    let others = others.map(|name| parent.join(name));
    others.iter().for_each(|dir| fs::create_dir_all(dir).expect("a cgroup"));
    let mut sleep = Command::new("/bin/sleep").arg("100").spawn().expect("it starts");
    fs::write(others[0].join("cgroup.procs"), sleep.id().to_string()).expect("it is moved");
    start_and_stop_one(&parent);
    let ended = sleep.try_wait().expect("its status is available");
    let gone: Vec<_> = others.iter().filter(|dir| !dir.exists()).collect();
    drop((sleep.kill(), sleep.wait()));
    let removed = || {
        others.iter().chain([&parent]).try_for_each(|dir| match fs::remove_dir(dir) {
            Err(error) if dir.exists() => Err(anyhow::Error::from(error)),
            _ => Ok(()),
        })
    };
    testbed::wait_until(Duration::from_secs(5), "nothing to be left in them", removed)
        .expect("they are removed");
    assert_eq!((ended, gone), (None, vec![]));
}

/// Processes that a killed supervisor's processes have forked are ended at the next start; those that
/// `KillMode::Process` leaves keep running.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn leftovers_of_a_killed_supervisor_end_at_the_next_start() {
    if let Some(parent) = std::env::var_os(KILLED_BELOW) {
        return run_until_killed(Path::new(&parent));
    }
    // Other tests start hosts too, and one of theirs would end the leftovers.
    let parent = cgroup_of(std::process::id().cast_signed()).join(format!("killed-{}", std::process::id()));
    fs::create_dir(&parent).expect("a cgroup");
    let test = "cgroup::leftovers_of_a_killed_supervisor_end_at_the_next_start";
    let mut program = KilledProgram::start(test, KILLED_BELOW, &parent);
    let (left, kept) = (program.read_pid("left "), program.read_pid("kept "));
    // A supervisor that starts in between does not touch the processes of a running one.
    start_and_stop_one(&parent);
    assert!(read_mark(left).is_some(), "its supervisor is running");
    program.kill();
    assert!(read_mark(left).is_some(), "no other supervisor has ended it");
    start_and_stop_one(&parent);
    wait_gone(left);
    assert!(read_mark(kept).is_some(), "it must survive its process");
    super::send_signal("KILL", kept);
    let removed = || fs::remove_dir(&parent).map_err(anyhow::Error::from);
    testbed::wait_until(Duration::from_secs(5), "nothing to be left in it", removed).expect("it is removed");
}

/// Starts processes that fork, prints the pids of the forked ones, and waits to be killed.
fn run_until_killed(parent: &Path) {
    runtime().block_on(async {
        let fork = "setsid sh -c 'echo pid $$; exec sleep 100' & exec sleep 100";
        let below = |process| ProcessFixture::with_cgroups(process, CgroupParent::Path(parent.into()));
        let (left, kept) = (below(sh(fork)), below(sh(fork).kill_mode(KillMode::Process)));
        println!("\nleft {}\nkept {}", left.output.wait_pid().await, kept.output.wait_pid().await);
        std::future::pending::<()>().await;
    });
}

fn start_and_stop_one(parent: &Path) {
    runtime().block_on(async {
        let fixture = ProcessFixture::with_cgroups(
            sh("echo pid $$; exec sleep 100"),
            CgroupParent::Path(parent.into()),
        );
        fixture.output.wait_pid().await;
        fixture.shutdown().await;
    });
}

pub(super) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // The threads for blocking calls, such as of a hook, end soon: a test counts the others.
    let builder = builder.worker_threads(2).thread_keep_alive(Duration::from_millis(100)).enable_all();
    builder.build().expect("a runtime")
}

/// Waits until a directory is removed: the tree reports an exit a moment earlier.
fn wait_removed(dir: &Path) {
    let gone = || if dir.exists() { Err(anyhow::anyhow!("{} is there", dir.display())) } else { Ok(()) };
    testbed::wait_until(Duration::from_secs(5), "the cgroup to be removed", gone).expect("it is removed");
}
