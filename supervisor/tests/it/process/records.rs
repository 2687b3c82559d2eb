//! The processes that a killed program leaves behind: its next start ends or adopts them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{
    CgroupParent, KillMode, Process, ProcessRecords, Readiness, RecordProblem,
};
use nodekeel_supervisor::{Removal, RestartPolicy, RunnableChange, RunnableState, Supervisor};

use crate::logging::LineCollector;

use super::cgroup::{cgroup_of, cgroup_root, runtime};
use super::limits::memory_max;
use super::{KilledProgram, ProcessFixture, configured_cgroups, mark_of, read_mark, sh, wait_gone};

/// Set in the program that is to be killed: its record directory.
const RECORDS: &str = "NODEKEEL_TEST_RECORDS_OF_A_KILLED_PROGRAM";

/// The directory of notification sockets in it: a process that is kept finds its socket there again.
const SOCKETS: &str = "sockets";

/// The record directory of this program, if it is to be killed.
fn records_of_killed() -> Option<std::ffi::OsString> {
    std::env::var_os(RECORDS)
}

/// Processes that expect to be adopted, and are not restarted.
fn start_recorded(
    records: &Path,
    cgroups: CgroupParent,
    processes: Vec<(&'static str, Process)>,
) -> ProcessFixture {
    let dns = processes.iter().map(|(name, _)| format!("root.{name}"));
    let builder = Supervisor::builder().cgroup_parent(cgroups);
    let builder = builder.process_records(ProcessRecords::new(records).expect_kept(dns));
    let sockets = records.join(SOCKETS);
    let _ = fs::create_dir(&sockets);
    let builder = builder.notify_directory(sockets);
    ProcessFixture::start_built(builder, RestartPolicy::Never, None, processes)
}

/// The pid and the start of the process that was adopted, if one was before the DN became ready.
async fn wait_adopted(tree: &ProcessFixture) -> Option<(u32, Instant)> {
    tree.wait_for_state(RunnableState::Ready).await;
    let adopted = |event: nodekeel_supervisor::Event| match event.change {
        RunnableChange::Adopted { process } if &*event.dn == "root.p" => Some((process.pid, process.since)),
        _ => None,
    };
    tree.recorder.events().into_iter().find_map(adopted)
}

/// Runs the children, prints their pids, and waits to be killed.
fn run_until_killed(records: &Path, cgroups: CgroupParent, children: Vec<(&'static str, Process)>) {
    runtime().block_on(async {
        let names: Vec<_> = children.iter().map(|(name, _)| *name).collect();
        let tree = start_recorded(records, cgroups, children);
        for name in names {
            tree.supervisor.wait_ready(&format!("root.{name}")).await.expect("it runs");
            println!("\n{name} {}", tree.output.wait_line(&format!("{name} ")).await);
        }
        std::future::pending::<()>().await;
    });
}

/// Runs `root.p` in a program that is killed once it is ready. Returns the records of that program, and the pid of
/// the process. In the program that is to be killed, it does not return.
fn leave_behind(test: &str, cgroups: &CgroupParent, process: Process) -> (tempfile::TempDir, i32) {
    if let Some(records) = records_of_killed() {
        run_until_killed(Path::new(&records), cgroups.clone(), vec![("p", process)]);
    }
    let records = tempfile::tempdir().expect("a directory");
    let mut program = KilledProgram::start(&format!("records::{test}"), RECORDS, records.path());
    let pid = program.read_pid("p ");
    program.kill();
    (records, pid)
}

fn files_in(dir: &Path) -> Vec<String> {
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).expect("it exists");
        entries.map(|entry| entry.expect("it is readable").file_name().into_string().expect("text")).collect()
    };
    let (files, sockets): (Vec<_>, Vec<_>) = (names(dir), names(&dir.join(SOCKETS)));
    files.into_iter().filter(|name| name != SOCKETS).chain(sockets).collect()
}

#[test]
fn leftovers_of_a_killed_program_without_cgroups_end_at_its_next_start() {
    let fork = |name| sh(&format!("setsid sh -c 'echo {name} $$; exec sleep 100' & exec sleep 100"));
    if let Some(records) = records_of_killed() {
        let children = vec![("left", fork("left")), ("own", fork("own").kill_mode(KillMode::Process))];
        return run_until_killed(Path::new(&records), CgroupParent::Disabled, children);
    }
    let records = tempfile::tempdir().expect("a directory");
    let test = "leftovers_of_a_killed_program_without_cgroups_end_at_its_next_start";
    let mut program = KilledProgram::start(&format!("records::{test}"), RECORDS, records.path());
    let (left, own) = (program.read_pid("left "), program.read_pid("own "));
    let (lines, _guard) = LineCollector::collect();
    runtime().block_on(async {
        start_recorded(records.path(), CgroupParent::Disabled, vec![]).shutdown().await;
    });
    assert!(read_mark(left).is_some(), "its supervisor is running");
    let of_the_supervisor = lines.lines_of("supervisor");
    assert!(of_the_supervisor[0].starts_with("can't use the process records in"), "{of_the_supervisor:?}");
    program.kill();
    assert!(read_mark(left).is_some(), "no other supervisor has ended it");
    let events = runtime().block_on(async {
        let tree = start_recorded(records.path(), CgroupParent::Disabled, vec![]);
        let recorder = tree.recorder.clone();
        tree.shutdown().await;
        recorder.events()
    });
    wait_gone(left);
    let ended = |event: &&nodekeel_supervisor::Event| &*event.dn == "supervisor";
    let ended: Vec<_> = events.iter().filter(ended).map(|event| event.change.clone()).collect();
    // The main processes die with their supervisor, at any moment: one may have been found as well.
    let of_process =
        |pid: i32| RunnableChange::LeftoverEnded { pid: pid.unsigned_abs(), name: "sleep".into() };
    assert!(ended.contains(&of_process(left)) && !ended.contains(&of_process(own)), "{ended:?}");
    let line = "killed sleep, a leftover process of a killed supervisor";
    assert!(lines.lines_of("supervisor").iter().any(|known| known == line));
    assert!(read_mark(own).is_some(), "it must survive its process");
    super::send_signal("KILL", own);
    assert_eq!(files_in(records.path()), [""; 0]);
}

/// Prints its pid, and a line at each SIGUSR1.
fn kept_process() -> Process {
    let script = "sleep 1000 & child=$!; trap 'echo signaled' USR1; echo p $$; while :; do wait $child; done";
    sh(script).keep(true).grace_period(Duration::from_secs(1))
}

#[test]
fn a_kept_process_is_adopted_with_its_output_and_ends_with_its_runnable() {
    let cgroups = configured_cgroups();
    let before = Instant::now();
    let test = "a_kept_process_is_adopted_with_its_output_and_ends_with_its_runnable";
    let (records, pid) = leave_behind(test, &cgroups, kept_process());
    super::send_signal("USR1", pid);
    let mark = mark_of(pid);
    runtime().block_on(async {
        let tree = start_recorded(records.path(), cgroups.clone(), vec![("p", kept_process())]);
        let (adopted, since) = wait_adopted(&tree).await.expect("it is adopted");
        assert_eq!(adopted, pid.unsigned_abs());
        // The kernel counts in ticks, and its boot time in seconds.
        let margin = Duration::from_secs(2);
        assert!(before - margin <= since && since <= Instant::now() + margin, "{since:?}");
        tree.output.wait_line("signaled").await;
        assert_eq!(super::marked_processes(&mark).len(), 2, "the shell and its sleep, and no second one");
        super::send_signal("KILL", pid);
        tree.wait_for_state(RunnableState::Dead).await;
        // Its zombies are left to init, whose children they are.
        let running = super::marked_processes(&mark).into_iter().filter(|process| !process.contains(") Z "));
        assert_eq!(running.collect::<Vec<_>>(), [""; 0], "its descendants end with it");
        tree.shutdown().await;
    });
    assert_eq!(files_in(records.path()), [""; 0]);
}

#[test]
fn a_kept_process_whose_definition_has_changed_is_started_anew() {
    let cgroups = configured_cgroups();
    let test = "a_kept_process_whose_definition_has_changed_is_started_anew";
    // What changes only how it is supervised does not count.
    let patient = kept_process().grace_period(Duration::from_secs(2));
    let replaced = [kept_process().env("NEW", "1"), kept_process().keep(false)];
    for (process, is_adopted) in [(patient, true)].into_iter().chain(replaced.map(|new| (new, false))) {
        let (records, pid) = leave_behind(test, &cgroups, kept_process());
        runtime().block_on(async {
            let tree = start_recorded(records.path(), cgroups.clone(), vec![("p", process)]);
            let adopted = wait_adopted(&tree).await;
            assert_eq!(adopted.map(|(adopted, _)| adopted), is_adopted.then_some(pid.unsigned_abs()));
            // Init reaps it, at any moment after its exit.
            let is_running = read_mark(pid).is_some() && !super::describe(pid).contains(") Z ");
            assert_eq!(is_running, is_adopted);
            tree.shutdown().await;
        });
        wait_gone(pid);
        assert_eq!(files_in(records.path()), [""; 0]);
    }
}

/// As systemd does when it starts a unit again while processes are left in its cgroup.
fn disable_memory_limits(parent: &Path) {
    let entries = fs::read_dir(parent).expect("it exists").map(|entry| entry.expect("it is readable").path());
    // Those below first: the kernel disables no controller that a cgroup below passes on.
    for dir in entries.filter(|path| path.is_dir()).chain([parent.to_owned()]) {
        fs::write(dir.join("cgroup.subtree_control"), "-memory").expect("it is written");
    }
}

#[test]
#[ignore = "needs kernel"]
fn a_kept_process_whose_limits_were_disabled_is_limited_again() {
    let cgroup_for = |records: &Path| {
        let name = records.file_name().expect("it has a name").to_string_lossy();
        cgroup_root().join(format!("limited-{name}"))
    };
    let process = || kept_process().limits(memory_max());
    if let Some(records) = records_of_killed() {
        let records = Path::new(&records);
        return run_until_killed(records, CgroupParent::Path(cgroup_for(records)), vec![("p", process())]);
    }
    let records = tempfile::tempdir().expect("a directory");
    let parent = cgroup_for(records.path());
    fs::write(cgroup_root().join("cgroup.subtree_control"), "+memory").expect("it is written");
    fs::create_dir(&parent).expect("a cgroup");
    let test = "a_kept_process_whose_limits_were_disabled_is_limited_again";
    let mut program = KilledProgram::start(&format!("records::{test}"), RECORDS, records.path());
    let pid = program.read_pid("p ");
    program.kill();
    let limit = cgroup_of(pid).join("memory.max");
    disable_memory_limits(&parent);
    assert!(!limit.exists(), "the test disables it");
    runtime().block_on(async {
        let tree = start_recorded(records.path(), CgroupParent::Path(parent.clone()), vec![("p", process())]);
        let (adopted, _) = wait_adopted(&tree).await.expect("it is adopted");
        assert_eq!(adopted, pid.unsigned_abs());
        assert_eq!(fs::read_to_string(&limit).expect("it is there").trim(), "33554432");
        tree.shutdown().await;
    });
    wait_gone(pid);
    drop(fs::remove_dir(&parent));
}

#[test]
fn a_kept_process_that_was_ready_need_not_report_it_again() {
    let cgroups = configured_cgroups();
    let script = r#"use Socket; $| = 1;
        sub report { socket(my $s, AF_UNIX, SOCK_DGRAM, 0); my $to = $ENV{NOTIFY_SOCKET}; $to =~ s/^@/\0/;
            send($s, $_[0], 0, pack_sockaddr_un($to)) or print "no listener: $!\n" }
        $SIG{USR1} = sub { report("STOPPING=1") };
        report("READY=1"); print "p $$\n"; sleep 1 while 1"#;
    let process = || {
        let process = super::perl(script).ready_when(Readiness::on_notify()).keep(true);
        process.grace_period(Duration::from_millis(500))
    };
    let test = "a_kept_process_that_was_ready_need_not_report_it_again";
    let (records, pid) = leave_behind(test, &cgroups, process());
    runtime().block_on(async {
        let tree = start_recorded(records.path(), cgroups.clone(), vec![("p", process())]);
        assert!(wait_adopted(&tree).await.is_some());
        // Its messages arrive at the socket that it knows.
        super::send_signal("USR1", pid);
        tree.wait_for_state(RunnableState::Dead).await;
        tree.shutdown().await;
    });
    wait_gone(pid);
}

/// The kernel shows whose they are by their parents, or by their session; not by the mark that they took along.
#[test]
#[ignore = "needs root: descendants of another user"]
fn descendants_of_another_user_end_without_cgroups_where_it_is_proven_and_are_named_elsewhere() {
    // It has its user when it prints its pid.
    const OTHER: &str = "other() { name=$1; shift; exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\" \
        sh -c \"echo $name \\$\\$; exec sleep 1000\"; }";
    let kept = || {
        let below = "other child & (other orphan &); (other lost setsid -f); echo p $$; wait";
        sh(&format!("{OTHER}\n{below}")).keep(true)
    };
    let test = "descendants_of_another_user_end_without_cgroups_where_it_is_proven_and_are_named_elsewhere";
    let names = ["child ", "orphan ", "lost ", "p ", "left ", "q "];
    if let Some(records) = records_of_killed() {
        return runtime().block_on(async {
            let ended = sh(&format!("{OTHER}\nother left & echo q $$; wait"));
            let children = vec![("p", kept()), ("q", ended)];
            let tree = start_recorded(Path::new(&records), CgroupParent::Disabled, children);
            for name in names {
                println!("\n{name}{}", tree.output.wait_line(name).await);
            }
            std::future::pending::<()>().await;
        });
    }
    let records = tempfile::tempdir().expect("a directory");
    let mut program = KilledProgram::start(&format!("records::{test}"), RECORDS, records.path());
    let [child, orphan, lost, main, left, parent] = names.map(|name| program.read_pid(name));
    program.kill();
    // It dies with the program, a moment later.
    wait_gone(parent);
    let (lines, _guard) = LineCollector::collect();
    // The collector sees the lines of this thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let tree = start_recorded(records.path(), CgroupParent::Disabled, vec![("p", kept())]);
        wait_adopted(&tree).await.expect("it is adopted");
        tree.stop().await;
        tree.shutdown().await;
    });
    [child, orphan, main].into_iter().for_each(wait_gone);
    for (name, pid) in [("lost", lost), ("left", left)] {
        assert!(read_mark(pid).is_some(), "nothing but its mark shows whose {name} is");
        super::send_signal("KILL", pid);
    }
    let is_named = |dn, start: &str| lines.lines_of(dn).iter().any(|line| line.starts_with(start));
    let at_the_stop = format!("processes [{lost}] may be descendants of the kept process {main}");
    assert!(is_named("root.p", &at_the_stop), "{:?}", lines.lines_of("root.p"));
    let at_the_start = format!("sleep, process {left}, may be a leftover of a killed supervisor");
    assert!(is_named("supervisor", &at_the_start), "{:?}", lines.lines_of("supervisor"));
}

/// The FIFO without which it can't be taken over.
fn stdout_of_kept(records: &Path) -> std::path::PathBuf {
    let mut files = files_in(records).into_iter();
    records.join(files.find(|file| file.ends_with(".stdout")).expect("it has output"))
}

#[test]
fn a_kept_process_that_can_not_be_taken_over_ends_when_its_runnable_is_stopped_or_removed() {
    let cgroups = configured_cgroups();
    let test = "a_kept_process_that_can_not_be_taken_over_ends_when_its_runnable_is_stopped_or_removed";
    // With the first policy it runs, or waits for its backoff; with the second it has failed for good.
    for (restart, is_removed) in [RestartPolicy::Always, RestartPolicy::Never]
        .into_iter()
        .flat_map(|restart| [(restart, false), (restart, true)])
    {
        let (records, pid) = leave_behind(test, &cgroups, kept_process());
        fs::remove_file(stdout_of_kept(records.path())).expect("it is there");
        runtime().block_on(async {
            let builder = Supervisor::builder().cgroup_parent(cgroups.clone());
            let builder =
                builder.process_records(ProcessRecords::new(records.path()).expect_kept(["root.p"]));
            let tree = ProcessFixture::start_built(builder, restart, None, vec![("p", kept_process())]);
            let failed = tree.wait_for_state(RunnableState::Dead).await;
            let RunnableChange::Exited { exit, .. } = failed.change else { panic!("{failed:?}") };
            assert!(exit.to_string().contains("it runs on, and no other one is started"), "{exit}");
            if is_removed {
                tree.supervisor.remove_runnable("root.p", Removal::ForGood).await.expect("it is there");
            } else {
                tree.supervisor.stop_runnable("root.p").expect("it is there");
            }
            wait_gone(pid);
            tree.shutdown().await;
        });
        assert_eq!(files_in(records.path()), [""; 0]);
    }
}

/// What could not be read of a kept process, or bound for it, tells nothing about it.
#[test]
fn a_kept_process_that_can_not_be_taken_over_runs_on_until_it_can() {
    let cgroups = configured_cgroups();
    let process = || kept_process().watchdog(Duration::from_secs(3600));
    let test = "a_kept_process_that_can_not_be_taken_over_runs_on_until_it_can";
    let (records, pid) = leave_behind(test, &cgroups, process());
    let (stdout, aside) = (stdout_of_kept(records.path()), records.path().join("aside"));
    fs::rename(&stdout, &aside).expect("it is there");
    runtime().block_on(async {
        let builder = Supervisor::builder().cgroup_parent(cgroups.clone());
        let records_of = ProcessRecords::new(records.path()).expect_kept(["root.p"]);
        let builder = builder.process_records(records_of).notify_directory("/no/such");
        let tree = ProcessFixture::start_built(builder, RestartPolicy::Always, None, vec![("p", process())]);
        let failed = tree.wait_for_state(RunnableState::Dead).await;
        let RunnableChange::Exited { exit, .. } = failed.change else { panic!("{failed:?}") };
        assert!(exit.to_string().starts_with("can't take over the process that is still running"), "{exit}");
        assert!(read_mark(pid).is_some(), "it runs on");
        fs::rename(&aside, &stdout).expect("it is there");
        // Without its socket, too.
        let (adopted, _) = wait_adopted(&tree).await.expect("it is adopted");
        assert_eq!(adopted, pid.unsigned_abs());
        tree.shutdown().await;
    });
    wait_gone(pid);
}

/// Root's program, as every other, believes no directory that somebody else can write to.
#[tokio::test]
#[ignore = "needs root"]
async fn records_of_another_user_are_not_believed() {
    let records = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::chown(records.path(), Some(65534), None).expect("root may");
    let tree = start_recorded(records.path(), CgroupParent::Disabled, Vec::new());
    let problems = tree.supervisor.record_problems();
    let [RecordProblem::Directory { reason, .. }] = &problems[..] else { panic!("{problems:?}") };
    assert!(reason.starts_with("it belongs to user 65534"), "{reason}");
    tree.shutdown().await;
    std::os::unix::fs::chown(records.path(), Some(0), None).expect("root may");
    let record = records.path().join("host-7-5");
    fs::write(&record, "scribble").expect("written");
    std::os::unix::fs::chown(&record, Some(65534), None).expect("root may");
    let tree = start_recorded(records.path(), CgroupParent::Disabled, Vec::new());
    let problems = tree.supervisor.record_problems();
    let [RecordProblem::Record { reason, .. }] = &problems[..] else { panic!("{problems:?}") };
    assert!(reason.contains("belongs to user 65534"), "{reason}");
    tree.shutdown().await;
}

/// Nothing adopts it: the runnable that could has left the program.
#[test]
fn a_kept_process_that_no_runnable_expects_ends_at_the_next_start() {
    let cgroups = configured_cgroups();
    let test = "a_kept_process_that_no_runnable_expects_ends_at_the_next_start";
    let (records, pid) = leave_behind(test, &cgroups, kept_process());
    let events = runtime().block_on(async {
        let tree = start_recorded(records.path(), cgroups.clone(), vec![]);
        let recorder = tree.recorder.clone();
        tree.shutdown().await;
        recorder.events()
    });
    wait_gone(pid);
    let is_named = |event: &nodekeel_supervisor::Event| matches!(event.change, RunnableChange::LeftoverEnded { pid: ended, .. } if ended == pid.unsigned_abs());
    assert!(events.iter().any(is_named), "{pid} is not named: {events:?}");
    assert_eq!(files_in(records.path()), [""; 0]);
}

#[tokio::test]
async fn a_process_is_not_kept_without_records() {
    let fixture = ProcessFixture::run_once(sh("exit 0").keep(true));
    let (error, _) = match fixture.wait_exit().await {
        (RunnableState::Dead, nodekeel_supervisor::ExitReason::Failed { error, process }) => (error, process),
        other => panic!("{other:?}"),
    };
    let why =
        "can't record the process to keep it: this supervisor has no process records, or could not use them";
    assert_eq!(error, why);
    fixture.shutdown().await;
}

#[tokio::test]
async fn records_that_can_not_be_used_are_reported_with_their_path() {
    let scratch = tempfile::tempdir().expect("a directory");
    let damaged = scratch.path().join("host-7-5");
    fs::write(&damaged, "scribble").expect("written");
    let tree = start_recorded(scratch.path(), CgroupParent::Disabled, Vec::new());
    let [RecordProblem::Record { path, reason }] = &tree.supervisor.record_problems()[..] else {
        panic!("{:?}", tree.supervisor.record_problems())
    };
    assert_eq!((path, reason.is_empty()), (&damaged, false));
    assert_eq!(fs::read(&damaged).expect("it stays"), b"scribble");
    // The first one holds the lock.
    let second = start_recorded(scratch.path(), CgroupParent::Disabled, Vec::new());
    let problems = second.supervisor.record_problems();
    assert!(
        matches!(&problems[..], [RecordProblem::Directory { path, .. }] if path == scratch.path()),
        "{problems:?}"
    );
    second.shutdown().await;
    tree.shutdown().await;
}
