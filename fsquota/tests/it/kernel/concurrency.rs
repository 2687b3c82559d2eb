//! Several processes allocate projects at once.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nodekeel_fsquota::{ProjectQuota, QuotaSetter as _};

use super::{both_limits, on_xfs_and_ext4};

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

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_process_killed_while_it_holds_the_lock_blocks_no_other() {
    on_xfs_and_ext4(|fixture| {
        let mut holder = Command::new("flock");
        holder.arg(fixture.mounted.mount_point()).args(["sh", "-c", "echo locked; exec sleep 1000"]);
        let mut holder = holder.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "locked\n");
        let dir = fixture.create_dir("dir");
        std::thread::scope(|scope| {
            let set = scope.spawn(|| fixture.quota.set_limits(dir.as_fd(), both_limits(1 << 20, 10)));
            let group = rustix::process::Pid::from_child(&holder);
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
            set.join().unwrap().unwrap();
        });
        holder.wait().unwrap();
    });
}
