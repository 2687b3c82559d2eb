//! Several processes allocate projects at once.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{AuditOptions, ProjectId, ProjectQuota, QuotaSetter as _};
use testbed::guest::disk::FileSystem;
use testbed::wait_until;

use super::{QuotaFixture, both_limits, on_xfs_and_ext4};

const LOCK_FILE: &str = ".nodekeel-quota.lock";

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn independent_instances_never_allocate_the_same_number() {
    on_xfs_and_ext4(|fixture| {
        let work = |number: usize| {
            // A separate descriptor and a separate cursor, as in another process.
            let quota = ProjectQuota::open(fixture.mounted.mount_point()).unwrap();
            let set = |index: usize| {
                let dir = fixture.create_dir(&format!("{number}-{index}"));
                quota.set_limits(dir.as_fd(), both_limits(1 << 20, 10)).unwrap().project
            };
            (0..25).map(set).collect::<Vec<_>>()
        };
        let work = &work;
        let numbers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || work(number))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), 100);
        assert_eq!(fixture.quota.list_projects().unwrap().len(), 100);
    });
}

/// A program that holds a lock (`flock`), in a separate process group.
struct LockHolder(Child);

impl LockHolder {
    /// Runs `flock` with the arguments, after those of `before`, and waits until it holds the lock.
    fn start(before: &[&str], arguments: &[&str], path: &Path) -> Self {
        let mut words = before.iter().chain(&["flock"]).chain(arguments);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg(path).args(["sh", "-c", "echo locked; exec sleep 1000"]);
        let mut child = command.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "locked\n");
        Self(child)
    }

    fn kill(mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_process_killed_while_it_holds_the_lock_blocks_no_other() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("first", both_limits(1 << 20, 10));
        let holder = LockHolder::start(&[], &[], &fixture.path(LOCK_FILE));
        let dir = fixture.create_dir("dir");
        std::thread::scope(|scope| {
            let set = scope.spawn(|| fixture.set(&dir, both_limits(1 << 20, 10)));
            holder.kill();
            set.join().unwrap().unwrap();
        });
    });
}

/// Fails until this process has opened the lock file.
fn check_open(path: &Path, least: usize) -> io::Result<()> {
    let descriptors = fs::read_dir("/proc/self/fd")?.flatten();
    let is_lock = |descriptor: &fs::DirEntry| fs::read_link(descriptor.path()).is_ok_and(|file| file == path);
    (descriptors.filter(is_lock).count() >= least).then_some(()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_repair_leaves_directories_that_another_program_has_limited_since() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(1 << 20, 100));
        let raw = RawQuotaCalls(&fixture.quota);
        let escaped = ["dir/a", "dir/b", "dir/c"].map(|name| fixture.create_dir(name));
        for dir in &escaped {
            raw.leave_project(dir.as_fd()).unwrap();
        }
        let lock = fs::canonicalize(fixture.path(LOCK_FILE)).unwrap();
        let holder = LockHolder::start(&[], &[], &lock);
        let mut options = AuditOptions::default();
        options.repair = true;
        let (top, other) = (fixture.open_dir(""), ProjectId::new(4_000).unwrap());
        std::thread::scope(|scope| {
            let audit = scope.spawn(|| fixture.quota.audit_tree(top.as_fd(), options));
            // The first of them has been judged: the lock of the repair and that of the allocation are open.
            wait_until(Duration::from_secs(5), "a repair", || Ok(check_open(&lock, 2)?)).unwrap();
            raw.write_limits(other, 1024, 100).unwrap();
            for dir in &escaped {
                raw.tag_directory(dir.as_fd(), other).unwrap();
            }
            holder.kill();
            let report = audit.join().unwrap().unwrap();
            assert_eq!(report.summary.repaired, 0, "{report:?}");
        });
        for dir in &escaped {
            assert_eq!(fixture.quota.find_project(dir.as_fd()).unwrap(), Some(other));
        }
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_tree_that_is_cleared_during_a_repair_loses_its_limits_and_no_entry_keeps_its_project() {
    on_xfs_and_ext4(|fixture| {
        let dir = fixture.create_dir("dir");
        let limited = fixture.set(&dir, both_limits(1 << 20, 300)).unwrap();
        for number in 0..100 {
            File::create(fixture.path(&format!("dir/{number}"))).unwrap();
        }
        let lock = fs::canonicalize(fixture.path(LOCK_FILE)).unwrap();
        let mut options = AuditOptions::default();
        (options.repair, options.entries_per_second) = (true, NonZeroU32::new(100));
        std::thread::scope(|scope| {
            let audit = scope.spawn(|| fixture.quota.audit_tree(dir.as_fd(), options));
            // The repair has started, and takes a second.
            wait_until(Duration::from_secs(5), "a repair", || Ok(check_open(&lock, 1)?)).unwrap();
            let cleared = fixture.quota.clear_limits_recursive(dir.as_fd()).unwrap();
            assert_eq!((cleared.changed, audit.join().unwrap().unwrap().summary.repaired), (100, 0));
        });
        assert_eq!(fixture.quota.find_project(dir.as_fd()).unwrap(), None);
        let listed = fixture.quota.list_projects().unwrap();
        assert!(listed.iter().all(|status| status.project != limited.project), "{listed:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn another_user_can_not_block_changes_of_limits() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("first", both_limits(1 << 20, 10));
        // The user reaches the mount point.
        let above = fixture.mounted.mount_point().parent().unwrap();
        fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
        let user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"];
        let holder = LockHolder::start(&user, &["-s"], fixture.mounted.mount_point());
        let dir = fixture.create_dir("dir");
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let set = fixture.set(&dir, both_limits(1 << 20, 10));
                sender.send(set.map(drop))
            });
            let set = receiver.recv_timeout(Duration::from_secs(5));
            holder.kill();
            set.expect("the user's lock blocks no change").unwrap();
        });
        let opened = Command::new(user[0])
            .args(&user[1..])
            .args(["flock", "-n", "-s"])
            .arg(fixture.path(LOCK_FILE))
            .arg("true")
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&opened.stderr).contains("Permission denied"), "{opened:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_held_lock_is_an_error_after_its_deadline() {
    let fixture = QuotaFixture::new(FileSystem::Xfs);
    fixture.create_limited_dir("first", both_limits(1 << 20, 10));
    let holder = LockHolder::start(&[], &[], &fixture.path(LOCK_FILE));
    let dirs = ["a", "b", "c"].map(|name| fixture.create_dir(name));
    let start = Instant::now();
    std::thread::scope(|scope| {
        let set = |dir| fixture.quota.set_limits(File::as_fd(dir), both_limits(1 << 20, 10));
        let threads: Vec<_> = dirs.iter().map(|dir| scope.spawn(move || set(dir))).collect();
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert!(error.is_retryable() && error.to_string().contains(LOCK_FILE), "{error}");
        }
    });
    assert!(start.elapsed() < Duration::from_secs(20), "those that wait give up together");
    holder.kill();
    fixture.set(&dirs[0], both_limits(1 << 20, 10)).unwrap();
}
