//! Leftovers of a directory's programs: processes that name it, mounts below it, and loop devices over its files.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use crate::wait_until;

/// The environment variable that marks the descendants of a program: its value is the program's directory.
pub const MARK: &str = "NODEKEEL_TESTBED";

/// A process that belongs to a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftoverProcess {
    /// Its id.
    pub pid: i32,
    /// Its command line.
    pub command: String,
}

/// The processes that name the directory in their command line or mark, work in it, run a program of it, or
/// descend from one that does; without the caller and its ancestors, and without zombies.
///
/// # Errors
/// `/proc` can't be read.
pub fn find_processes(directory: &Path) -> Result<Vec<LeftoverProcess>> {
    let all = all_processes()?;
    let parents: HashMap<i32, i32> = all.iter().map(|process| (process.pid, process.parent)).collect();
    let own: Vec<i32> = lineage(std::process::id() as i32, &parents).collect();
    let named: Vec<i32> =
        all.iter().filter(|process| names_directory(process.pid, directory)).map(|p| p.pid).collect();
    let belongs = |pid: i32| {
        !own.contains(&pid)
            && lineage(pid, &parents).take_while(|pid| !own.contains(pid)).any(|pid| named.contains(&pid))
    };
    let found = all.iter().filter(|process| !process.is_zombie && belongs(process.pid));
    Ok(found
        .map(|process| LeftoverProcess { pid: process.pid, command: command_line(process.pid) })
        .collect())
}

/// The mount points at or below the directory, the innermost first.
///
/// # Errors
/// The mount table can't be read.
pub fn find_mounts(directory: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let mut points: Vec<PathBuf> =
        mount_points(&table).into_iter().filter(|point| point.starts_with(directory)).collect();
    // A later line may be mounted on an earlier one.
    points.reverse();
    Ok(points)
}

/// The names of the loop devices over files below the directory, also over removed ones.
///
/// # Errors
/// sysfs can't be read.
pub fn find_loop_devices(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir("/sys/block").context("read /sys/block")? {
        let entry = entry.context("read /sys/block")?;
        // Only an attached loop device has one.
        let file = fs::read(entry.path().join("loop/backing_file")).unwrap_or_default();
        if Path::new(OsStr::from_bytes(&file)).starts_with(directory) {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Kills the directory's processes, unmounts what is mounted below it, and removes it. A missing directory is
/// not an error.
///
/// # Errors
/// The first step that failed; the later ones were tried, too.
pub fn remove_directory(directory: &Path) -> Result<()> {
    let killed = kill_processes(directory);
    let unmounted = unmount_all(directory);
    let removed = match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(()),
    };
    killed.and(unmounted).and(removed)
}

fn kill_processes(directory: &Path) -> Result<()> {
    // These processes are not children of this one, which so gets no notice of their exit, and one may fork
    // while it is killed.
    wait_until(Duration::from_secs(10), "killed processes to end", || {
        let left = find_processes(directory)?;
        for process in &left {
            let pid = Pid::from_raw(process.pid).context("a process has a positive id")?;
            match kill_process(pid, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error).with_context(|| format!("kill {}", process.command)),
            }
        }
        if let Some(process) = left.first() {
            bail!("{} (pid {}) still runs", process.command, process.pid);
        }
        Ok(())
    })
}

fn unmount_all(directory: &Path) -> Result<()> {
    for point in find_mounts(directory)? {
        unmount(&point, UnmountFlags::DETACH).with_context(|| format!("unmount {}", point.display()))?;
    }
    Ok(())
}

struct ProcessEntry {
    pid: i32,
    parent: i32,
    is_zombie: bool,
}

fn all_processes() -> Result<Vec<ProcessEntry>> {
    let entries = fs::read_dir("/proc").context("read /proc")?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A process may have ended since the directory was read.
    Ok(pids
        .filter_map(|pid| parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?))
        .collect())
}

/// *Source:* proc_pid_stat(5): `pid (comm) state ppid …`, where comm may hold blanks and parentheses.
fn parse_stat(pid: i32, stat: &str) -> Option<ProcessEntry> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let is_zombie = matches!(fields.next()?, "Z" | "X");
    Some(ProcessEntry { pid, parent: fields.next()?.parse().ok()?, is_zombie })
}

/// The process, its parent, and so on.
fn lineage(pid: i32, parents: &HashMap<i32, i32>) -> impl Iterator<Item = i32> {
    std::iter::successors(Some(pid), |pid| parents.get(pid).copied().filter(|parent| *parent > 0))
}

fn names_directory(pid: i32, directory: &Path) -> bool {
    let needle = directory.as_os_str().as_bytes();
    let file = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let link =
        |name: &str| fs::read_link(format!("/proc/{pid}/{name}")).is_ok_and(|to| to.starts_with(directory));
    let mark = [MARK.as_bytes(), b"=", needle].concat();
    contains_bytes(&file("cmdline"), needle)
        || file("environ").split(|byte| *byte == 0).any(|variable| variable == mark)
        || link("cwd")
        || link("root")
        || link("exe")
}

fn contains_bytes(text: &[u8], needle: &[u8]) -> bool {
    text.windows(needle.len()).any(|window| window == needle)
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ").trim_end().to_owned()
}

/// *Source:* proc_pid_mountinfo(5): the fifth field, in which blanks, tabs, newlines and backslashes are
/// octal.
fn mount_points(table: &str) -> Vec<PathBuf> {
    let fields = table.lines().filter_map(|line| line.split(' ').nth(4));
    fields.map(|field| unescape(field).into()).collect()
}

fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_stat_line_with_parentheses_in_the_name_is_parsed() {
        let entry = parse_stat(7, "7 (a) b)) Z 3 7 7 0 -1").unwrap();
        assert_eq!((entry.parent, entry.is_zombie), (3, true));
    }

    #[test]
    fn mount_points_are_unescaped() {
        let table = "36 35 98:0 /mnt1 /mnt\\040a rw,noatime master:1 - ext3 /dev/root rw\n";
        assert_eq!(mount_points(table), [PathBuf::from("/mnt a")]);
    }

    #[test]
    fn a_marked_process_and_its_child_are_found_and_removed_with_the_directory() {
        let directory = tempfile::tempdir().unwrap().keep();
        let mut shell = Command::new("sh");
        let mut child = shell.args(["-c", "sleep 1000; :"]).env(MARK, &directory).spawn().unwrap();
        wait_until(Duration::from_secs(10), "the shell's child", || {
            if find_processes(&directory)?.len() == 2 { Ok(()) } else { bail!("not yet") }
        })
        .unwrap();
        remove_directory(&directory).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(!directory.exists());
    }

    #[test]
    fn the_caller_is_never_a_leftover() {
        let found = find_processes(Path::new("/")).unwrap();
        assert!(found.iter().all(|process| process.pid != std::process::id() as i32));
    }
}
