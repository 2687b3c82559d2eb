//! The kill points compared with the calls that strace sees: a system call with a side effect without a separate
//! point could not be killed or failed by the other tests.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use nodekeel_localstorage::testing::{RecordingMounter, SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::tree::LayoutTarget;
use nodekeel_localstorage::volume::{DataVolume as _, DiskVolume, ErasePolicy};
use nodekeel_localstorage::{FileMode, OsFileStore};
use rustix::fs::Access;
use testbed::command_output;

use super::scenarios::Scenario;
use super::{ALL, ScenarioFixture};
use crate::fixture::{assigned_task, temp_base, test_command};
use crate::monogon_root::DataPartition;

const WORKER: &str = "matrix::traced::the_traced_worker_marks_each_kill_point";
/// A path that does not exist, with the name of a kill point, `inside` or `outside` behind it: the traced process asks
/// for it.
const MARK: &str = "/nodekeel-kill-point";

/// System calls without an effect that outlives the process, whatever their arguments.
const HARMLESS: &str = "
    access brk clock_gettime close dup dup3 exit faccessat faccessat2 fadvise64 fcntl flock fstat
    fstatfs futex getdents64 getpid getrandom gettid lseek lstat madvise mmap mprotect mremap munmap
    newfstatat pread64 prlimit64 read readlink readlinkat recvfrom rt_sigaction rt_sigprocmask sigaltstack
    stat statx";
/// System calls that start a program, and wait for it. Power cuts cut the work of the program.
const CHILDREN: [&str; 9] =
    ["clone", "clone3", "kill", "pidfd_open", "pipe2", "poll", "socketpair", "vfork", "wait4"];

/// Work that is traced next to the scenarios that are killed at each of their calls.
const TRACED: [Scenario; 3] = [
    Scenario {
        name: "layout",
        work: |dir| {
            let store = Arc::new(OsFileStore::new(dir.try_clone()?));
            let data: DataPartition = LayoutTarget::new(store, "/").create_layout()?;
            let credentials = data.node.credentials;
            Ok(credentials.commit_files(&[(&credentials.certificate, b"a"), (&credentials.key, b"b")])?)
        },
        ..POINTLESS
    },
    Scenario {
        name: "volume",
        prepare: |dir| {
            let [disk, mkfs] = ["disk", "mkfs"].map(|name| dir.path().join(name));
            fs::File::create(disk).and_then(|disk| disk.set_len(64 << 20)).expect("a disk image");
            testbed::write_program(&mkfs, "#!/bin/sh\n").expect("a program");
            fs::create_dir(dir.path().join("data")).expect("a mount point");
        },
        work: |dir| {
            let [disk, mkfs, data] = ["disk", "mkfs", "data"].map(|name| dir.path().join(name));
            let volume = DiskVolume::new(disk, data, Arc::<RecordingMounter>::default()).with_mkfs(mkfs);
            Ok(volume.mount_new(ErasePolicy::Nothing).map(drop)?)
        },
        ..POINTLESS
    },
    POINTLESS,
];

/// Creates a directory without a kill point.
const POINTLESS: Scenario = Scenario {
    name: "pointless",
    write_bytes: usize::MAX,
    prepare: |_| {},
    work: |dir| {
        dir.write("file", b"a", FileMode::PRIVATE_FILE)?;
        Ok(fs::create_dir(dir.path().join("pointless"))?)
    },
    is_sound: |_| {},
    is_done: |_| {},
};

/// Makes a call that strace shows, and that changes nothing.
pub(super) fn show_mark(name: &str) {
    let _ = rustix::fs::access(Path::new(MARK).join(name), Access::EXISTS);
}

/// The system calls of the traced thread between its marks that have a side effect and no kill point.
fn calls_without_point(trace: &str) -> Vec<String> {
    let (mut is_inside, mut point, mut found) = (false, None, Vec::new());
    for line in trace.lines() {
        let Some((call, arguments)) = line.split_once('(') else { continue };
        match mark_in(arguments) {
            Some("inside") => is_inside = true,
            Some("outside") => is_inside = false,
            Some(name) => point = Some(name),
            None if !is_inside || !has_side_effect(call, arguments) => {}
            // A point admits one call.
            None => {
                let is_own = point.take().is_some_and(|point| is_call_of(point, call, arguments));
                if !is_own {
                    found.push(line.to_owned());
                }
            }
        }
    }
    found
}

/// The name in a mark.
fn mark_in(arguments: &str) -> Option<&str> {
    arguments.split_once(MARK)?.1.strip_prefix('/')?.split('"').next()
}

fn has_side_effect(call: &str, arguments: &str) -> bool {
    match call {
        "open" | "openat" | "openat2" => arguments.contains("O_CREAT") || arguments.contains("O_TRUNC"),
        "ioctl" => !["FS_IOC_GETFLAGS", "FIONBIO"].iter().any(|request| arguments.contains(request)),
        _ => !HARMLESS.split_whitespace().chain(CHILDREN).any(|other| other == call),
    }
}

/// Whether a call is the one that its kill point announces.
fn is_call_of(point: &str, call: &str, arguments: &str) -> bool {
    match point {
        "creat" => matches!(call, "openat" | "openat2"),
        "pwrite" => call == "pwrite64",
        "renameat2" => matches!(call, "rename" | "renameat" | "renameat2"),
        "chmod" => matches!(call, "chmod" | "fchmodat"),
        "FS_IOC_SETFLAGS" => call == "ioctl" && arguments.contains(point),
        _ => call == point,
    }
}

/// The child process: does the work of a scenario, with a mark at each kill point.
#[test]
fn the_traced_worker_marks_each_kill_point() {
    let Some(task) = assigned_task() else { return };
    let (name, path) = task.split_once(' ').expect("a scenario and a path");
    let dir = ScenarioFixture::open_work_dir(Path::new(path));
    let mark_point = |point: &'static str| {
        show_mark(point);
        SyscallAction::Proceed
    };
    show_mark("inside");
    let done = with_failpoint_hook(mark_point, || (find_scenario(name).work)(&dir));
    show_mark("outside");
    done.unwrap();
}

fn find_scenario(name: &str) -> &'static Scenario {
    ALL.iter().chain(&TRACED).find(|scenario| scenario.name == name).expect("the scenario exists")
}

/// Traces the work of a scenario, and gives the calls that no kill point precedes.
fn trace_scenario(scenario: &Scenario) -> Result<Vec<String>> {
    let (fixture, traces) = (ScenarioFixture::new(scenario, &temp_base()), tempfile::tempdir()?);
    let worker = test_command(WORKER, &format!("{} {}", scenario.name, fixture.path().display()));
    let mut strace = Command::new("strace");
    // A file for each thread, so that no line is cut by one of another thread.
    strace
        .arg("-ff")
        .arg("-o")
        .arg(traces.path().join("trace"))
        .arg(worker.get_program())
        .args(worker.get_args());
    strace.envs(worker.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command_output(&mut strace)?;
    for entry in fs::read_dir(traces.path())? {
        let trace = String::from_utf8_lossy(&fs::read(entry?.path())?).into_owned();
        if trace.contains(MARK) {
            (scenario.is_done)(&fixture.dir);
            return Ok(calls_without_point(&trace));
        }
    }
    anyhow::bail!("no thread of {} has made a mark", scenario.name)
}

#[test]
#[ignore = "needs strace"]
fn every_system_call_with_a_side_effect_has_a_kill_point() {
    for scenario in ALL.iter().chain(&TRACED).filter(|scenario| scenario.name != POINTLESS.name) {
        let found = trace_scenario(scenario).with_context(|| scenario.name).unwrap();
        assert_eq!(found, [""; 0], "{}: give these a failpoint, in syscalls.rs", scenario.name);
    }
}

#[test]
#[ignore = "needs strace"]
fn a_call_without_a_kill_point_is_found() {
    let found = trace_scenario(&POINTLESS).unwrap();
    assert!(found.len() == 1 && found[0].starts_with("mkdir"), "{found:?}");
}

#[test]
fn a_point_admits_the_one_call_that_it_names() {
    let mark =
        |name: &str| format!("access(\"{MARK}/{name}\", F_OK) = -1 ENOENT (No such file or directory)");
    let [inside, outside] = ["inside", "outside"].map(mark);
    let [sync, creat, rename] = ["fsync", "creat", "renameat2"].map(mark);
    let creation = "openat2(3, \"a\", {flags=O_RDWR|O_CREAT|O_EXCL, mode=0600}, 24) = 4";
    for (lines, expected) in [
        (vec!["unlink(\"a\") = 0", &inside, &outside, "unlink(\"a\") = 0"], vec![]),
        (
            vec![
                &inside,
                &creat,
                creation,
                &sync,
                "fsync(4) = 0",
                &rename,
                "renameat(3, \"a\", 3, \"b\") = 0",
            ],
            vec![],
        ),
        (vec![&inside, &sync, "fsync(4) = 0", "fsync(4) = 0"], vec!["fsync(4) = 0"]),
        (vec![&inside, &sync, "unlink(\"a\") = 0"], vec!["unlink(\"a\") = 0"]),
        (vec![&inside, creation], vec![creation]),
        (vec![&inside, "openat(3, \"a\", O_RDONLY) = 4", "read(4, \"\", 1) = 0"], vec![]),
    ] {
        assert_eq!(calls_without_point(&lines.join("\n")), expected, "{lines:?}");
    }
}
