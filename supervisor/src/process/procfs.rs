//! Reads information about processes from `/proc`.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags};

use crate::sys;

/// The used fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessStat {
    pub(super) parent: i32,
    /// The pid of the leader of its session: none but a descendant can join that.
    pub(super) session: i32,
    /// In clock ticks since boot. With the pid, it identifies a process uniquely.
    pub(super) start: u64,
}

pub(super) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Checks that `/proc` is mounted and belongs to this program's PID namespace.
///
/// # Errors
/// The text names the mount that is missing.
pub(super) fn check_procfs() -> io::Result<()> {
    let link = fs::read_link("/proc/self").map_err(|error| {
        io::Error::new(error.kind(), format!("/proc is not mounted: {error}; mount proc at /proc"))
    })?;
    if link.to_str().and_then(|pid| pid.parse().ok()) == Some(own_pid()) {
        return Ok(());
    }
    Err(io::Error::other(
        "/proc shows another PID namespace: mount proc again, as `unshare --mount-proc` does",
    ))
}

/// All visible processes, in ascending order.
pub(super) fn list_pids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::with_capacity(256);
    for entry in fs::read_dir("/proc")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    Ok(pids)
}

/// The last pid that the kernel has assigned.
pub(super) fn newest_pid() -> io::Result<i32> {
    // The last field of the file, see proc_loadavg(5).
    let parse = |text: &[u8]| parse_number(text.trim_ascii_end().rsplit(|&byte| byte == b' ').next()?);
    read_proc_file("/proc/loadavg", parse)
}

/// The pids that the kernel assigns after `from`, up to `to`. They wrap around at the maximum.
pub(super) fn pids_after(from: i32, to: i32) -> impl Iterator<Item = i32> {
    let (end, again) = if from <= to { (to, 0) } else { (pid_max().unwrap_or(from), to) };
    (from + 1..=end).chain(1..=again)
}

fn pid_max() -> io::Result<i32> {
    read_proc_file("/proc/sys/kernel/pid_max", |text| parse_number(text.trim_ascii_end()))
}

/// The soft limit of file locks of a process.
///
/// # Errors
/// If the process does not exist, or is hidden.
pub(super) fn locks_limit(pid: i32) -> io::Result<u64> {
    match sys::locks_limit(pid) {
        // It runs as another user: only the file is readable for all, which takes twenty times as long.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            read_proc_file(&format!("/proc/{pid}/limits"), parse_locks_limit)
        }
        result => result,
    }
}

/// The soft limit of file locks of a process that this program may signal. For other processes, it fails
/// quickly: to an ordinary user, these are most of the processes on a host.
///
/// # Errors
/// If the process does not exist, or may not be signaled.
pub(super) fn locks_limit_if_signalable(pid: i32) -> io::Result<u64> {
    match sys::locks_limit(pid) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) && sys::can_signal(pid) => locks_limit(pid),
        result => result,
    }
}

/// The parent of a process; 0 if it is in another PID namespace.
///
/// # Errors
/// If the process does not exist, or is hidden.
pub(super) fn parent_pid(pid: i32) -> io::Result<i32> {
    let fd = Pid::from_raw(pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    match fd.map(|fd| sys::parent_pid(fd?.as_fd())) {
        Some(Ok(parent)) => Ok(parent),
        // An older kernel. The file takes ten times as long, and a hundred times on a busy host.
        _ => read_stat(pid).map(|stat| stat.parent),
    }
}

/// The number of parents that are followed: none of a real process has so many.
const MAX_PARENTS: usize = 10_000;

/// Returns whether a process is a child of `ancestor`, or of one of its descendants. `ancestor` must be running, or
/// not reaped, until this returns.
///
/// Nobody can forge it: the kernel gives a process another parent only when its own has exited.
///
/// # Errors
/// The process does not exist; or a parent can't be read, as when no descriptors are left.
pub(super) fn descends_from(pid: i32, ancestor: i32) -> io::Result<bool> {
    let mut child = pid;
    let mut parent = parent_pid(child)?;
    for _ in 0..MAX_PARENTS {
        if parent == ancestor {
            return Ok(true);
        }
        // 0 is in a PID namespace above.
        if parent <= 1 {
            return Ok(false);
        }
        let grandparent = parent_pid(parent);
        let same = parent_pid(child)?;
        if same == parent {
            // So the parent was there while it was looked at.
            (child, parent) = (parent, grandparent?);
        } else {
            parent = same;
        }
    }
    Ok(false)
}

/// The user of a process, if its real, effective and saved user ids are the same: nobody can take one that is not
/// theirs, except by a program that root has made set-user-ID, which leaves the real one.
///
/// # Errors
/// If the process does not exist, or is hidden.
pub(super) fn only_user(pid: i32) -> io::Result<Option<u32>> {
    read_proc_file(&format!("/proc/{pid}/status"), parse_only_user)
}

fn parse_only_user(text: &[u8]) -> Option<Option<u32>> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"Uid:"))?;
    let mut ids = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()).map(parse_number);
    let [real, effective, saved] = [ids.next()??, ids.next()??, ids.next()??];
    Some((real == effective && real == saved).then_some(real))
}

/// Reads files of `/proc` as this module does; for a fuzz target.
#[cfg(feature = "testing")]
pub(crate) fn parse_any(text: &[u8]) {
    let _ = (parse_stat(text), parse_locks_limit(text), parse_only_user(text));
    if let Ok(text) = std::str::from_utf8(text) {
        let _ = find_cgroup(text, Path::new("/nonexistent"), 1);
    }
}

/// The mounts of cgroup v2: alone, or next to cgroup v1.
///
/// *Source:* systemd, `src/basic/cgroup-util.c`; runc, `libcontainer/cgroups`.
const CGROUP_MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// The directory of this program's cgroup.
///
/// # Errors
/// If no mounted cgroup v2 shows it.
pub(super) fn own_cgroup_dir() -> io::Result<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let unseen =
        || io::Error::new(io::ErrorKind::NotFound, "no mounted cgroup v2 shows this program's cgroup");
    let found = CGROUP_MOUNTS.iter().find_map(|mount| find_cgroup(&own, Path::new(mount), own_pid()));
    found.ok_or_else(unseen)
}

/// The directory of a process' cgroup below a mount, from the content of its `/proc/PID/cgroup`: the one that lists the
/// process. A container may see only a part of the hierarchy, whose names above it the path still has. `None` for a
/// cgroup outside of the mount or of the namespace, which can't be reached.
fn find_cgroup(own: &str, mount: &Path, pid: i32) -> Option<PathBuf> {
    let path = Path::new(own.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let names: Vec<_> = path.components().collect();
    if !names.iter().all(|name| matches!(name, Component::Normal(_))) {
        return None;
    }
    let mut candidates =
        (0..=names.len()).map(|above| mount.join(names[above..].iter().collect::<PathBuf>()));
    let pid = pid.to_string();
    candidates.find(|dir| {
        let listed = fs::read_to_string(dir.join("cgroup.procs"));
        listed.is_ok_and(|listed| listed.lines().any(|line| line == pid))
    })
}

/// The time since the kernel was booted, as the start times of processes count it.
pub(super) fn time_since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.try_into().unwrap_or_default())
}

/// The parent and the start time of a process.
///
/// # Errors
/// If the process does not exist, or is hidden.
pub(super) fn read_stat(pid: i32) -> io::Result<ProcessStat> {
    read_proc_file(&format!("/proc/{pid}/stat"), parse_stat)
}

/// Returns whether a thread of this process waits for something that no signal interrupts: state D of
/// proc_pid_stat(5). False if that can't be read.
pub(super) fn waits_in_kernel(pid: u32) -> bool {
    let is_waiting = |thread: &fs::DirEntry| {
        let path = thread.path().join("stat");
        let state = read_proc_file(&path.to_string_lossy(), |text| {
            let after_name = text.iter().rposition(|&byte| byte == b')')? + 1;
            text[after_name..].trim_ascii_start().first().copied()
        });
        state.is_ok_and(|state| state == b'D')
    };
    fs::read_dir(format!("/proc/{pid}/task"))
        .is_ok_and(|threads| threads.flatten().any(|thread| is_waiting(&thread)))
}

/// Reads a small file with one system call; the functions for files of any size use several.
fn read_proc_file<T>(path: &str, parse: impl Fn(&[u8]) -> Option<T>) -> io::Result<T> {
    let mut text = [0; 4096];
    let length = File::open(path)?.read(&mut text)?;
    let malformed =
        || io::Error::new(io::ErrorKind::InvalidData, format!("{path} is not as proc(5) describes it"));
    parse(&text[..length]).ok_or_else(malformed)
}

fn parse_locks_limit(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max file locks"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        soft => soft.parse().ok(),
    }
}

/// The second field, the program's name, may contain any byte but NUL: the fields are counted from its last
/// parenthesis.
fn parse_stat(text: &[u8]) -> Option<ProcessStat> {
    let after_name = text.iter().rposition(|&byte| byte == b')')? + 1;
    let mut fields = text[after_name..].split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    // The parent is field 4, the session field 6 and the start time field 22, see proc_pid_stat(5); the first one here
    // is field 3.
    let parent = parse_number(fields.nth(1)?)?;
    let session = parse_number(fields.nth(1)?)?;
    let start = parse_number(fields.nth(15)?)?;
    Some(ProcessStat { parent, session, start })
}

fn parse_number<T: FromStr>(field: &[u8]) -> Option<T> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_may_contain_spaces_and_parentheses() {
        let stat = b"77 (a) S 1 (b c) S 42 76 75 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 987654 3000 100 1\n";
        assert_eq!(parse_stat(stat), Some(ProcessStat { parent: 42, session: 75, start: 987_654 }));
        assert_eq!(parse_stat(b"77 (short) S 42"), None);
    }

    #[test]
    fn only_the_parents_of_a_process_are_its_ancestors() {
        let (own, parent) = (own_pid(), read_stat(own_pid()).expect("it is running").parent);
        let shell = "sleep 1000 & echo $!; wait";
        let mut child = std::process::Command::new("/bin/sh");
        let mut child =
            child.args(["-c", shell]).stdout(std::process::Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        let stdout = io::BufReader::new(child.stdout.take().expect("it is piped"));
        io::BufRead::read_line(&mut { stdout }, &mut line).expect("it is text");
        let pids = [i32::try_from(child.id()).expect("a pid"), line.trim().parse().expect("a pid")];
        for pid in pids {
            assert!(descends_from(pid, own).is_ok_and(|is| is), "{pid}");
            assert!(!descends_from(own, pid).is_ok_and(|is| is), "{pid}");
        }
        assert!(parent <= 1 || descends_from(own, parent).is_ok_and(|is| is));
        assert!(descends_from(pids[1], pids[0]).is_ok_and(|is| is));
        assert!(descends_from(i32::MAX, own).is_err());
        for pid in pids {
            sys::send_signal_to_pid(pid, libc::SIGKILL).expect("it is running");
        }
        child.wait().expect("it has ended");
    }

    #[test]
    fn a_process_has_a_user_if_all_its_ids_are_the_same() {
        assert_eq!(parse_only_user(b"Name:\tx\nUid:\t7\t7\t7\t7\nGid:\t1\n"), Some(Some(7)));
        assert_eq!(parse_only_user(b"Uid:\t1000\t0\t0\t0\n"), Some(None), "set-user-ID");
        assert_eq!(parse_only_user(b"Uid:\t7\t7\n"), None);
        assert_eq!(only_user(own_pid()).ok(), Some(Some(rustix::process::geteuid().as_raw())));
    }

    #[test]
    fn pids_wrap_around_at_pid_max() {
        assert_eq!(pids_after(7, 9).collect::<Vec<_>>(), [8, 9]);
        assert_eq!(pids_after(9, 9).count(), 0);
        let max = pid_max().expect("the file exists");
        assert_eq!(pids_after(max - 1, 2).collect::<Vec<_>>(), [max, 1, 2]);
        assert!(newest_pid().is_ok_and(|pid| pid > 0 && pid <= max));
    }

    #[test]
    fn pidfd_and_stat_report_the_same_parent() {
        let own = std::os::unix::process::parent_id();
        assert_eq!(parent_pid(own_pid()).ok().map(i32::unsigned_abs), Some(own));
        assert_eq!(read_stat(own_pid()).ok().map(|stat| stat.parent.unsigned_abs()), Some(own));
        assert!(parent_pid(i32::MAX).is_err());
    }

    #[test]
    fn a_cgroup_is_found_where_the_mount_lists_the_process() {
        let mount = tempfile::tempdir().expect("a directory");
        let at = |path: &str| mount.path().join(path);
        let found = |own: &str| find_cgroup(own, mount.path(), 42);
        assert_eq!(found("0::/a.slice/b\n"), None, "nothing is mounted");
        fs::create_dir_all(at("a.slice/b")).expect("it is created");
        for (path, pids) in [("", "1\n"), ("a.slice", "7\n420\n"), ("a.slice/b", "7\n42\n")] {
            fs::write(at(path).join("cgroup.procs"), pids).expect("it is written");
        }
        assert_eq!(found("9:name=systemd:/x\n0::/a.slice/b\n"), Some(at("a.slice/b")));
        assert_eq!(found("0::/host.slice/a.slice/b\n"), Some(at("a.slice/b")), "a part is mounted");
        assert_eq!(found("0::/other\n"), None, "outside of what is mounted");
        assert_eq!(found("9:name=systemd:/x\n"), None, "v1 only");
        assert_eq!(found("0::/../a.slice/b\n"), None, "of another namespace");
        fs::write(at("cgroup.procs"), "42\n").expect("it is written");
        assert_eq!(found("0::/\n"), Some(at("")), "the root");
    }

    #[test]
    fn prlimit_and_procfs_report_the_same_limit() {
        let text = fs::read("/proc/self/limits").expect("proc is mounted");
        assert_eq!(parse_locks_limit(&text), sys::locks_limit(own_pid()).ok());
        assert_eq!(
            parse_locks_limit(b"Max file locks            2305843009213693953  unlimited  locks"),
            Some(1 << 61 | 1)
        );
    }
}
