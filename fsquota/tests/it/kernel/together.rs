//! Several allocate at once.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nodekeel_fsquota::{ProjectQuota, QuotaSetter as _};

use super::{at, on_both};

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn those_who_opened_it_each_for_themselves_never_give_the_same_number() {
    on_both(|place| {
        let work = |number: usize| {
            // Its own descriptor and its own memory of what is taken, as another process has.
            let quota = ProjectQuota::open(place.mounted.path()).unwrap();
            let set = |index: usize| {
                let dir = place.make(&format!("{number}-{index}"));
                quota.set(dir.as_fd(), at(1 << 20, 10)).unwrap().project
            };
            (0..25).map(set).collect::<Vec<_>>()
        };
        let work = &work;
        let given: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || work(number))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(given.iter().collect::<HashSet<_>>().len(), 100);
        assert_eq!(place.quota.list().unwrap().len(), 100);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_process_killed_with_the_lock_holds_nobody_up() {
    on_both(|place| {
        let mut holder = Command::new("flock");
        holder.arg(place.mounted.path()).args(["sh", "-c", "echo locked; exec sleep 1000"]);
        let mut holder = holder.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "locked\n");
        let dir = place.make("dir");
        std::thread::scope(|scope| {
            let set = scope.spawn(|| place.quota.set(dir.as_fd(), at(1 << 20, 10)));
            let group = rustix::process::Pid::from_child(&holder);
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
            set.join().unwrap().unwrap();
        });
        holder.wait().unwrap();
    });
}
