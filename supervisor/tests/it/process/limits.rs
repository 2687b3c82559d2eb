//! Limits of a process and its descendants, in a kernel whose controllers are those of cgroup v2.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nodekeel_supervisor::process::{CgroupParent, KillMode, ProcessExit, ProcessLimits, Signal};

use super::cgroup::{cgroup_of, cgroup_root, runtime};
use super::start::start_failure;
use super::{ProcessFixture, sh};

const MIB: u64 = 1 << 20;
/// Needs four times the memory that the tests permit.
const HOG: &str = "dd if=/dev/zero of=/dev/null bs=134217728 count=1";

pub(super) fn memory_max() -> ProcessLimits {
    ProcessLimits::default().with_memory_max(32 * MIB)
}

#[tokio::test]
async fn a_process_whose_limits_cannot_be_enforced_is_not_started() {
    let fixture = ProcessFixture::with_cgroups(sh("echo ran").limits(memory_max()), CgroupParent::Disabled);
    let (_, exit) = fixture.wait_exit().await;
    let text = "can't limit the process: memory.max needs a cgroup: mount cgroup v2, and run as root or in a delegated cgroup";
    assert_eq!(exit.to_string(), text);
    assert_eq!(fixture.output.text(), "");
    fixture.shutdown().await;
    let error = start_failure(sh("echo ran").limits(memory_max()).kill_mode(KillMode::Process)).await;
    assert!(error.contains("memory.max needs KillMode::Descendants"), "{error}");
}

async fn failure_of(script: &str, limits: ProcessLimits) -> (String, ProcessExit) {
    let fixture = ProcessFixture::run_once(sh(script).limits(limits));
    let failure = fixture.wait_failure().await;
    fixture.shutdown().await;
    failure
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs kernel"]
async fn a_process_beyond_its_memory_is_reported_as_killed_for_it_with_the_limit() {
    let (error, exit) = failure_of(&format!("exec {HOG}"), memory_max()).await;
    assert_eq!(error, "killed by SIGKILL: out of memory, its limit is 32 MiB");
    assert_eq!(exit.oom_kill.map(|oom| oom.memory_max), Some(Some(32 * MIB)));
    let (error, _) = failure_of(&format!("{HOG}; exit 3"), memory_max()).await;
    let text = "exited with code 3, after the kernel had killed 1 of its processes: out of memory, its limit is 32 MiB";
    assert_eq!(error, text);
    // A kill by hand is none for memory.
    let (error, exit) = failure_of("kill -KILL $$", memory_max()).await;
    assert_eq!((error.as_str(), exit.oom_kill, exit.signal), ("killed by SIGKILL", None, Some(Signal::KILL)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs kernel"]
async fn the_kernel_has_the_limits_of_a_process() {
    let limits = memory_max().with_cpu_max_millis(1500).with_pids_max(3).with_io_weight(50);
    // The shell and two others are as many as it may have.
    let script = "echo pid $$; sleep 100 & sleep 100 & (echo one more) ; wait";
    let fixture = ProcessFixture::run_once(sh(script).limits(limits));
    let cgroup = cgroup_of(fixture.output.wait_pid().await);
    let values = [
        ("memory.max", "33554432"),
        ("cpu.max", "150000 100000"),
        ("pids.max", "3"),
        ("io.weight", "default 50"),
    ];
    for (file, value) in values {
        assert_eq!(fs::read_to_string(cgroup.join(file)).expect(file).trim(), value, "{file}");
    }
    fixture.wait_exit().await;
    assert!(!fixture.output.text().contains("one more"), "{}", fixture.output.text());
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs kernel"]
async fn a_limit_that_the_kernel_rejects_is_named() {
    let error = start_failure(sh("true").limits(ProcessLimits::default().with_cpu_max_millis(1))).await;
    assert!(error.starts_with("can't limit the process: can't set cpu.max to 100 100000: "), "{error}");
}

/// Set in a program that starts below a cgroup that is not the root of the hierarchy.
const DELEGATED: &str = "NODEKEEL_TEST_IS_DELEGATED";

/// As in a systemd unit with `Delegate=yes`.
#[test]
#[ignore = "needs kernel"]
fn a_program_in_a_delegated_cgroup_moves_below_it_to_limit_its_children() {
    if std::env::var_os(DELEGATED).is_some() {
        return runtime().block_on(limit_two_children());
    }
    let parent = cgroup_root().join(format!("delegated-{}", std::process::id()));
    fs::create_dir(&parent).expect("a cgroup");
    let test = "process::limits::a_program_in_a_delegated_cgroup_moves_below_it_to_limit_its_children";
    let run = || {
        let script = "echo $$ > $0/cgroup.procs && exec \"$@\"";
        let program = std::env::current_exe().expect("it has a path");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).arg(&parent).arg(program);
        command.args(["--exact", test, "--include-ignored", "--nocapture"]).env(DELEGATED, "1");
        command.stdout(Stdio::piped()).output().expect("it runs")
    };
    let output = String::from_utf8(run().stdout).expect("it is text");
    assert!(output.contains("moved\nmoved\n"), "{output}");
    // A process of another program is not moved.
    let mut other = Command::new("/bin/sleep").arg("1000").spawn().expect("it starts");
    fs::write(parent.join("cgroup.subtree_control"), "-memory").expect("it is written");
    fs::write(parent.join("cgroup.procs"), other.id().to_string()).expect("it is moved");
    let output = String::from_utf8(run().stdout).expect("it is text");
    drop((other.kill(), other.wait()));
    let text = format!("it also contains process {}, of another program", other.id());
    assert!(output.contains(&text), "{output}");
    fs::remove_dir(parent.join("nodekeel-supervisor")).expect("it is empty");
    fs::remove_dir(&parent).expect("it is empty");
}

async fn limit_two_children() {
    for _ in 0..2 {
        let process = sh("echo pid $$; exec sleep 100").limits(memory_max());
        let fixture = ProcessFixture::with_cgroups(process, CgroupParent::Current);
        tokio::select! {
            pid = fixture.output.wait_pid() => print_cgroups(&cgroup_of(pid)),
            (_, exit) = fixture.wait_exit() => println!("\n{exit}"),
        }
        fixture.shutdown().await;
    }
}

fn print_cgroups(child: &Path) {
    let own: PathBuf = cgroup_of(std::process::id().cast_signed());
    assert_eq!(fs::read_to_string(child.join("memory.max")).expect("it is there").trim(), "33554432");
    assert_eq!(own.parent(), child.ancestors().nth(2), "both are below the delegated one");
    println!("moved");
}
