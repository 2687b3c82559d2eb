//! What `/proc` tells of processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use rustix::process::{Pid, PidfdFlags};

use crate::sys;

/// What is needed of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    /// In clock ticks since boot: with the pid, it names a process for good.
    pub(super) start: u64,
}

/// This program's pid.
pub(super) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// That `/proc` is there, and shows the pids by which this program knows its children.
pub(super) fn check() -> io::Result<()> {
    let link = fs::read_link("/proc/self")
        .map_err(|error| io::Error::new(error.kind(), format!("mount proc at /proc: {error}")))?;
    if link.to_str().and_then(|pid| pid.parse().ok()) == Some(own_pid()) {
        return Ok(());
    }
    Err(io::Error::other("/proc shows another PID namespace: mount proc anew (unshare --mount-proc does)"))
}

/// All processes that this program can see, in ascending order.
pub(super) fn pids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::with_capacity(256);
    for entry in fs::read_dir("/proc")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            pids.push(pid);
        }
    }
    pids.sort_unstable();
    Ok(pids)
}

/// The last pid that the kernel has given out.
pub(super) fn newest_pid() -> io::Result<i32> {
    let parse = |text: &[u8]| number(text.trim_ascii_end().rsplit(|&byte| byte == b' ').next()?);
    read("/proc/loadavg", parse)
}

/// The pids that the kernel gives out after `from`, up to `to`. It starts again from below when it has come to the end.
pub(super) fn pids_after(from: i32, to: i32) -> impl Iterator<Item = i32> {
    let (end, again) = if from <= to { (to, 0) } else { (pid_max().unwrap_or(from), to) };
    (from + 1..=end).chain(1..=again)
}

fn pid_max() -> io::Result<i32> {
    read("/proc/sys/kernel/pid_max", |text| number(text.trim_ascii_end()))
}

/// The soft limit of file locks of a process.
///
/// # Errors
/// Where there is no such process, or it is hidden.
pub(super) fn locks_limit(pid: i32) -> io::Result<u64> {
    match sys::locks_limit(pid) {
        // Another user's: only the file is for everybody. It is twenty times slower.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            read(&format!("/proc/{pid}/limits"), parse_locks_limit)
        }
        result => result,
    }
}

/// The same, of a process that this program may signal. Of those that it may not it tells nothing, and that fast: to a
/// plain user most of a machine are such.
///
/// # Errors
/// Where there is no such process, or it may not be signalled.
pub(super) fn locks_limit_to_signal(pid: i32) -> io::Result<u64> {
    match sys::locks_limit(pid) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) && sys::may_signal(pid) => locks_limit(pid),
        result => result,
    }
}

/// The parent of a process; 0 where that is of another PID namespace.
///
/// # Errors
/// Where there is no such process, or it is hidden.
pub(super) fn parent(pid: i32) -> io::Result<i32> {
    let fd = Pid::from_raw(pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    match fd.map(|fd| sys::parent(fd?.as_fd())) {
        Some(Ok(parent)) => Ok(parent),
        // The kernel is older. The file takes ten times as long, and a hundred times on a machine that is busy.
        _ => stat(pid).map(|stat| stat.parent),
    }
}

/// The directory of this program's cgroup.
///
/// # Errors
/// Where no cgroup v2 is mounted in which it can be seen.
pub(super) fn own_cgroup() -> io::Result<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let unseen =
        || io::Error::new(io::ErrorKind::NotFound, "no cgroup v2 is mounted that shows this program's");
    find_cgroup(&own, &mounts).ok_or_else(unseen)
}

/// Joins what `/proc/self/cgroup` and `/proc/self/mountinfo` tell. A cgroup outside of the mount, or of the namespace, is
/// not to be reached.
fn find_cgroup(own: &str, mounts: &str) -> Option<PathBuf> {
    let own = Path::new(own.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let (root, point) = kind.starts_with("cgroup2 ").then(|| {
            let mut fields = mount.split(' ').skip(3);
            Some((fields.next()?, fields.next()?))
        })??;
        let below = own.strip_prefix(unescape(root)).ok()?;
        let is_inside = below.components().all(|part| matches!(part, Component::Normal(_)));
        is_inside.then(|| unescape(point).join(below))
    })
}

/// Spaces and the like are octal in the table of mounts.
fn unescape(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code =
            after.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// # Errors
/// Where there is no such process, or it is hidden.
pub(super) fn stat(pid: i32) -> io::Result<Stat> {
    read(&format!("/proc/{pid}/stat"), parse_stat)
}

/// Reads a small file at once: what is there for any file size asks the kernel several times.
fn read<T>(path: &str, parse: impl Fn(&[u8]) -> Option<T>) -> io::Result<T> {
    let mut text = [0; 4096];
    let length = File::open(path)?.read(&mut text)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("{path} is not what proc(5) says"));
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

/// The second field, the program's name, may hold anything but a NUL: the fields are counted from its last bracket.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let after_name = text.iter().rposition(|&byte| byte == b')')? + 1;
    let mut fields = text[after_name..].split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let parent = number(fields.nth(1)?)?;
    let start = number(fields.nth(17)?)?;
    Some(Stat { parent, start })
}

fn number<T: FromStr>(field: &[u8]) -> Option<T> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_name_may_look_like_fields() {
        let stat = b"77 (a) S 1 (b c) S 42 77 77 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 987654 3000 100 1\n";
        assert_eq!(parse_stat(stat), Some(Stat { parent: 42, start: 987_654 }));
        assert_eq!(parse_stat(b"77 (short) S 42"), None);
    }

    #[test]
    fn pids_go_on_from_below() {
        assert_eq!(pids_after(7, 9).collect::<Vec<_>>(), [8, 9]);
        assert_eq!(pids_after(9, 9).count(), 0);
        let max = pid_max().expect("it is there");
        assert_eq!(pids_after(max - 1, 2).collect::<Vec<_>>(), [max, 1, 2]);
        assert!(newest_pid().is_ok_and(|pid| pid > 0 && pid <= max));
    }

    #[test]
    fn both_ways_to_a_parent_agree() {
        let own = std::os::unix::process::parent_id();
        assert_eq!(parent(own_pid()).ok().map(i32::unsigned_abs), Some(own));
        assert_eq!(stat(own_pid()).ok().map(|stat| stat.parent.unsigned_abs()), Some(own));
        assert!(parent(i32::MAX).is_err());
    }

    #[test]
    fn a_cgroup_is_found_where_its_hierarchy_is_mounted() {
        let hybrid = "30 23 0:27 / /proc rw - proc proc rw\n\
            40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        let found = |own, mounts| find_cgroup(own, mounts).map(|path| path.display().to_string());
        let expected = Some("/sys/fs/cgroup/unified/a.slice/b".to_owned());
        assert_eq!(found("9:name=systemd:/x\n0::/a.slice/b\n", hybrid), expected);
        assert_eq!(found("9:name=systemd:/x\n", hybrid), None, "v1 only");
        assert_eq!(found("0::/../other\n", hybrid), None, "of another namespace");
        let part = "50 1 0:38 /a.slice /mnt/c\\040g rw - cgroup2 none rw\n";
        assert_eq!(found("0::/a.slice/b\n", part).as_deref(), Some("/mnt/c g/b"));
        assert_eq!(found("0::/b\n", part), None, "outside of what is mounted");
        assert_eq!(unescape("\\777\\04"), PathBuf::from("\\777\\04"), "no octal byte");
    }

    #[test]
    fn both_ways_to_a_limit_agree() {
        let text = fs::read("/proc/self/limits").expect("proc is mounted");
        assert_eq!(parse_locks_limit(&text), sys::locks_limit(own_pid()).ok());
        assert_eq!(
            parse_locks_limit(b"Max file locks            2305843009213693953  unlimited  locks"),
            Some(1 << 61 | 1)
        );
    }
}
