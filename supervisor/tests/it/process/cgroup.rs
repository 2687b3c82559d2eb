//! Where cgroups can be had, the kernel knows who descends from whom.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nodekeel_supervisor::process::{Cgroups, KillMode};
use nodekeel_supervisor::{Exit, State};

use super::{Bed, mark_of, marked, read_mark, sh, until_gone};

/// Set in the program that is to be killed: where its cgroups are to be.
const TO_BE_KILLED_BELOW: &str = "NODEKEEL_TEST_IS_TO_BE_KILLED_BELOW";
const GRACE: Duration = Duration::from_millis(100);

/// The mounted hierarchy of version 2.
fn hierarchy() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("proc is mounted");
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    mounts.find(|fields| fields[2] == "cgroup2").map(|fields| fields[1].into()).expect("cgroup v2 is mounted")
}

fn cgroup_of(pid: i32) -> PathBuf {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it is there");
    let path = text.lines().find_map(|line| line.strip_prefix("0::/")).expect("cgroup v2 is mounted");
    hierarchy().join(path)
}

fn is_hosts(dir: &Path) -> bool {
    dir.parent().and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().starts_with("nodekeel-"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn each_start_has_a_cgroup_that_goes_with_it() {
    let bed = Bed::once(sh("echo pid $$; setsid sleep 100 & echo child $!; wait").grace(GRACE));
    let cgroup = cgroup_of(bed.output.pid().await);
    let child = bed.output.line("child ").await.parse().expect("a pid");
    assert!(is_hosts(&cgroup), "{}", cgroup.display());
    assert_eq!(cgroup_of(child), cgroup);
    bed.supervisor.stop("root.p").expect("it is there");
    assert_eq!(bed.ended().await, (State::Canceled, Exit::Cancelled));
    until_no(&cgroup);
    bed.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn cgroups_of_descendants_go_too() {
    let script = r#"own=$HIERARCHY$(sed -n 's/^0:://p' /proc/self/cgroup); mkdir -p $own/a/b; sh -c "echo \$\$ > $own/a/b/cgroup.procs; trap '' TERM; echo pid \$\$; sleep 100" & wait"#;
    let bed = Bed::once(sh(script).env("HIERARCHY", hierarchy()).grace(GRACE));
    let below = cgroup_of(bed.output.pid().await);
    assert!(below.ends_with("a/b"), "{}", below.display());
    bed.supervisor.stop("root.p").expect("it is there");
    bed.until(State::Canceled).await;
    until_no(below.ancestors().nth(2).expect("its start's"));
    bed.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn who_has_left_its_cgroup_goes_all_the_same() {
    let script = r#"sh -c 'echo $$ > $PROCS; trap "" TERM; echo pid $$; exec sleep 100' & exec sleep 100"#;
    let procs = hierarchy().join("cgroup.procs");
    let bed = Bed::once(sh(script).env("PROCS", procs).grace(GRACE));
    let pid = bed.output.pid().await;
    let mark = mark_of(pid);
    assert_eq!(cgroup_of(pid), hierarchy());
    bed.supervisor.stop("root.p").expect("it is there");
    bed.until(State::Canceled).await;
    assert_eq!(marked(&mark), [""; 0], "nobody is left, not even a zombie");
    bed.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root: it makes cgroups"]
async fn where_there_are_to_be_none_there_are_none() {
    let own = cgroup_of(std::process::id().cast_signed());
    let bed = Bed::once(sh("echo pid $$; exec sleep 100").kill(KillMode::Process));
    assert_eq!(cgroup_of(bed.output.pid().await), own, "its children are to outlive it");
    bed.shutdown().await;
    let bed = Bed::below(sh("echo pid $$; exec sleep 100"), Cgroups::None);
    assert_eq!(cgroup_of(bed.output.pid().await), own);
    bed.shutdown().await;
    let bed = Bed::below(sh("echo pid $$; exec sleep 100"), Cgroups::Below("/no/such".into()));
    assert_eq!(cgroup_of(bed.output.pid().await), own);
    bed.shutdown().await;
}

/// Who looks for what was left meets directories that are only just being made.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn hosts_that_start_at_once_each_have_theirs() {
    let hosts = || {
        runtime().block_on(async {
            for _ in 0..20 {
                let bed = Bed::once(sh("echo pid $$; exec sleep 100").grace(GRACE));
                let cgroup = cgroup_of(bed.output.pid().await);
                assert!(is_hosts(&cgroup), "{}", cgroup.display());
                bed.shutdown().await;
            }
        });
    };
    std::thread::scope(|threads| (0..8).for_each(|_| _ = threads.spawn(hosts)));
}

/// Names that look like a host's are not enough.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn a_cgroup_that_no_host_has_made_is_left_alone_whatever_its_name() {
    let parent = cgroup_of(std::process::id().cast_signed()).join(format!("others-{}", std::process::id()));
    let others =
        ["nodekeel-precious", "nodekeel-1-1", "nodekeel-1-1-8", "nodekeel-01-1-0", "nodekeel-1-1-0-0"];
    let others = others.map(|name| parent.join(name));
    others.iter().for_each(|dir| fs::create_dir_all(dir).expect("a cgroup"));
    let mut sleep = Command::new("/bin/sleep").arg("100").spawn().expect("it starts");
    fs::write(others[0].join("cgroup.procs"), sleep.id().to_string()).expect("it is moved");
    start_one(&parent);
    let ended = sleep.try_wait().expect("it is asked");
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

/// What a killed supervisor's processes have forked dies at the next start, and what was to outlive them lives.
#[test]
#[ignore = "needs root: it makes cgroups"]
fn what_a_killed_supervisor_has_left_ends_at_the_next_start() {
    if let Some(parent) = std::env::var_os(TO_BE_KILLED_BELOW) {
        return to_be_killed(Path::new(&parent));
    }
    // Other tests start hosts too, and one of theirs would end what is left.
    let parent = cgroup_of(std::process::id().cast_signed()).join(format!("killed-{}", std::process::id()));
    fs::create_dir(&parent).expect("a cgroup");
    let test = "process::cgroup::what_a_killed_supervisor_has_left_ends_at_the_next_start";
    let mut program = Command::new(std::env::current_exe().expect("it has a path"))
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(TO_BE_KILLED_BELOW, &parent)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(program.stdout.take().expect("it is piped")).lines();
    let mut told = |start: &str| -> i32 {
        let found = lines.find_map(|line| line.ok()?.strip_prefix(start)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("no {start}"))
    };
    let (left, kept) = (told("left "), told("kept "));
    // Another that starts meanwhile leaves alone what belongs to one that lives.
    start_one(&parent);
    assert!(read_mark(left).is_some(), "its supervisor lives");
    program.kill().expect("it runs");
    program.wait().expect("it has ended");
    assert!(read_mark(left).is_some(), "nobody else has ended it");
    start_one(&parent);
    until_gone(left);
    assert!(read_mark(kept).is_some(), "it was to outlive its process");
    Command::new("/bin/kill").args(["-KILL", &kept.to_string()]).status().expect("kill runs");
    let removed = || fs::remove_dir(&parent).map_err(anyhow::Error::from);
    testbed::wait_until(Duration::from_secs(5), "nothing to be left in it", removed).expect("it is removed");
}

/// Starts processes that fork, tells who that is, and waits for its end.
fn to_be_killed(parent: &Path) {
    runtime().block_on(async {
        let fork = "setsid sh -c 'echo pid $$; exec sleep 100' & exec sleep 100";
        let below = |process| Bed::below(process, Cgroups::Below(parent.into()));
        let (left, kept) = (below(sh(fork)), below(sh(fork).kill(KillMode::Process)));
        println!("\nleft {}\nkept {}", left.output.pid().await, kept.output.pid().await);
        std::future::pending::<()>().await;
    });
}

fn start_one(parent: &Path) {
    runtime().block_on(async {
        let bed = Bed::below(sh("echo pid $$; exec sleep 100"), Cgroups::Below(parent.into()));
        bed.output.pid().await;
        bed.shutdown().await;
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Waits until a directory is gone: the tree is told of an end a moment before.
fn until_no(dir: &Path) {
    let gone = || if dir.exists() { Err(anyhow::anyhow!("{} is there", dir.display())) } else { Ok(()) };
    testbed::wait_until(Duration::from_secs(5), "the cgroup to be removed", gone).expect("it is removed");
}
