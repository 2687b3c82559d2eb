//! noded killed by SIGKILL: what its services leave behind ends at the next start, or is adopted.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::fcntl::{FcntlArg, fcntl};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::ScratchDir;

use crate::harness::{
    NO_DAEMONS, NodedProcess, PublicProgram, kill_process, node_command, plain_user, service_config, wait,
    wait_gone,
};

/// A cgroup for one node: another node of root's that starts in its cgroup would end what it leaves there.
struct PrivateCgroup(PathBuf);

impl PrivateCgroup {
    fn create() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let root = mounts.find(|fields| fields[2] == "cgroup2").expect("cgroup v2 is mounted");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(root[1]).join(format!("killed-node-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// noded for the node of a directory, in this cgroup.
    fn node_command(&self, directory: &Path, config: &str) -> Command {
        let noded = node_command("run", directory, config);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0);
        command.arg(noded.get_program()).args(noded.get_args());
        command.env_clear().env("PATH", "/usr/bin:/bin").stdin(std::process::Stdio::null());
        command
    }
}

impl Drop for PrivateCgroup {
    fn drop(&mut self) {
        // It is empty, unless the test has failed.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let _ = fs::remove_dir(&self.0);
    }
}

enum NodeUser {
    /// A user without cgroups.
    Plain(PublicProgram),
    Root(PrivateCgroup),
}

/// A node that is killed and started again.
pub(crate) struct KilledNode {
    user: NodeUser,
    pub(crate) config: String,
}

impl KilledNode {
    pub(crate) fn new(is_plain_user: bool, config: impl Into<String>) -> Self {
        let user = if is_plain_user {
            NodeUser::Plain(PublicProgram::noded())
        } else {
            NodeUser::Root(PrivateCgroup::create())
        };
        Self { user, config: config.into() }
    }

    /// A directory that the node's user can change.
    pub(crate) fn create_scratch(&self) -> ScratchDir {
        let scratch = ScratchDir::new().unwrap();
        if let NodeUser::Plain(_) = self.user {
            chown(scratch.path(), plain_user(), plain_user()).unwrap();
        }
        scratch
    }

    pub(crate) fn start(&self, scratch: ScratchDir) -> NodedProcess {
        let command = match &self.user {
            NodeUser::Plain(program) => program.node_command("run", scratch.path(), &self.config),
            NodeUser::Root(cgroup) => cgroup.node_command(scratch.path(), &self.config),
        };
        NodedProcess::start_command(scratch, command)
    }
}

impl KilledNode {
    /// The cgroups below the node's.
    pub(crate) fn cgroups_left(&self) -> Vec<String> {
        let NodeUser::Root(cgroup) = &self.user else { return Vec::new() };
        let entries = fs::read_dir(&cgroup.0).unwrap().map(|entry| entry.unwrap());
        let dirs = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        dirs.map(|dir| dir.file_name().into_string().unwrap()).collect()
    }
}

/// The keys of a service. Its directory tells whose it is, should a test fail.
fn keys(scratch: &Path) -> String {
    format!("directory = {scratch:?}")
}

/// The pid of the process of a service, once it is ready.
fn service_pid(node: &NodedProcess, dn: &str) -> u64 {
    node.wait_ready(dn);
    node.status(dn)["pid"].as_u64().unwrap()
}

fn check_adoption(is_plain_user: bool) {
    let dn = "root.service.kept";
    let script = "trap 'echo signaled' USR1; echo up; sleep 1000 & while :; do wait $!; done";
    let mut plan = KilledNode::new(is_plain_user, NO_DAEMONS);
    let scratch = plan.create_scratch();
    let (directory, gate) = (keys(scratch.path()), scratch.path().join("gate"));
    // It depends on a service that waits: nothing that is running waits for that.
    let wait = format!("until [ -e {} ]; do sleep 0.1; done", gate.display());
    plan.config += &service_config("gate", &wait, &format!("{directory}\nreadiness = \"exit\""));
    let kept = format!("{directory}\nkeep = true\ndepends_on = [\"gate\"]");
    plan.config += &service_config("kept", script, &kept);
    fs::write(&gate, "").unwrap();
    let node = plan.start(scratch);
    let pid = service_pid(&node, dn);
    node.wait_for_output(dn, "up");
    let scratch = node.kill();
    // It writes while no noded reads.
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGUSR1).unwrap();
    let gate = scratch.path().join("gate");
    fs::remove_file(&gate).unwrap();

    let node = plan.start(scratch);
    let events = node.follow(&["events", "-f"]);
    let adopted = events.find_value(|event| event["dn"] == dn && event["change"] == "adopted");
    assert!(
        adopted["detail"].as_str().unwrap().starts_with(&format!("adopted process {pid}, ")),
        "{adopted}"
    );
    assert_eq!(service_pid(&node, dn), pid);
    assert!(node.status(dn)["process_since"].is_string());
    node.wait_for_output(dn, "signaled");
    fs::write(&gate, "").unwrap();

    // Its exit is noticed, and the next one is noded's own again.
    kill_process(pid);
    node.wait_for_event(dn, 1, "exited");
    let exit = node.status(dn)["exits"][0].clone();
    assert_eq!(exit["reason"], "exited with an unknown status: it was adopted", "{exit}");
    let second = service_pid(&node, dn);
    assert_ne!(second, pid);
    node.stop();
    wait_gone(second);
}

#[test]
fn a_kept_service_of_a_plain_user_is_adopted_by_the_next_noded() {
    check_adoption(true);
}

#[test]
#[ignore = "needs root: it makes cgroups"]
fn a_kept_service_in_its_cgroup_is_adopted_by_the_next_noded() {
    check_adoption(false);
}

/// A file system in memory, as long as it exists.
struct MemoryDisk(PathBuf);

impl MemoryDisk {
    fn mount(directory: PathBuf) -> Self {
        fs::create_dir(&directory).unwrap();
        let options = Some("mode=755,size=8m,nr_inodes=300");
        mount(Some("none"), &directory, Some("tmpfs"), MsFlags::empty(), options).unwrap();
        Self(directory)
    }

    fn fill_bytes(&self) {
        let mut filler = File::create(self.0.join("filler")).unwrap();
        io::copy(&mut io::repeat(0), &mut filler).expect_err("full");
    }

    fn fill_inodes(&self) {
        let create = |number| File::create(self.0.join(format!("filler-{number}"))).map(drop);
        (0..).try_for_each(create).expect_err("full");
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
#[ignore = "needs root: it makes cgroups, and fills a small file system"]
fn a_node_that_is_killed_on_a_full_disk_starts_again_and_adopts_its_kept_service() {
    let dn = "root.service.kept";
    type Fill = fn(&MemoryDisk);
    let bytes: (Fill, _) = (MemoryDisk::fill_bytes, "its disk is almost full: ");
    let inodes: (Fill, _) = (MemoryDisk::fill_inodes, "its disk is almost out of inodes: ");
    for (fill, says) in [bytes, inodes] {
        let mut plan = KilledNode::new(false, NO_DAEMONS);
        let scratch = plan.create_scratch();
        let disk = MemoryDisk::mount(scratch.path().join("data"));
        plan.config += &service_config("kept", "exec sleep 1000", "keep = true");
        let node = plan.start(scratch);
        let pid = service_pid(&node, dn);
        fill(&disk);
        let node = plan.start(node.kill());
        assert_eq!(service_pid(&node, dn), pid);
        let ended = node.nodectl(&["health"]);
        let says = format!("{}: {says}", disk.0.display());
        assert!(ended.code == Some(6) && ended.stdout.contains(&says), "{ended:#?}");
        let scratch = node.stop_and_keep();

        // As PID 1, whose exit is a panic of the kernel.
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        let noded = node_command("run", scratch.path(), &plan.config);
        command.arg(noded.get_program()).args(noded.get_args());
        let node = NodedProcess::start_command(scratch, command);
        assert_eq!(node.ask_json(&["version"])["pid"], 1);
        let scratch = node.kill();
        drop(disk);
        drop(scratch);
    }
}

/// Blocks of output of [`a_kept_service_that_fills_its_output_waits_and_loses_nothing`]: more than the kernel keeps.
const BLOCKS: usize = 24;
const LINES_PER_BLOCK: usize = 64;
const BYTES_PER_BLOCK: usize = LINES_PER_BLOCK * 1024;

#[test]
fn a_kept_service_that_fills_its_output_waits_and_loses_nothing() {
    let dn = "root.service.kept";
    let mut plan =
        KilledNode::new(true, format!("log = {{ bytes = 33554432, bytes_per_dn = 16777216 }}\n{NO_DAEMONS}"));
    let scratch = plan.create_scratch();
    let (gate, progress) = (scratch.path().join("gate"), scratch.path().join("progress"));
    let script = format!(
        "echo up; until [ -e {gate} ]; do sleep 0.1; done; line=$(head -c 1023 /dev/zero | tr '\\0' x); \
         for block in $(seq {BLOCKS}); do \
           for line_of_block in $(seq {LINES_PER_BLOCK}); do echo $line; done; echo $block >{progress}; \
         done; echo end; exec sleep 1000",
        gate = gate.display(),
        progress = progress.display()
    );
    plan.config += &service_config("kept", &script, &format!("{}\nkeep = true", keys(scratch.path())));
    let node = plan.start(scratch);
    let pid = service_pid(&node, dn);
    node.wait_for_output(dn, "up");
    let scratch = node.kill();
    let mut fifos =
        fs::read_dir(scratch.path().join("data/run/processes")).unwrap().map(|entry| entry.unwrap().path());
    let stdout = fifos.find(|path| path.extension().is_some_and(|suffix| suffix == "stdout")).unwrap();
    // Neither blocks nor reads.
    let stdout = File::options().read(true).write(true).open(stdout).unwrap();
    let capacity = usize::try_from(fcntl(&stdout, FcntlArg::F_GETPIPE_SZ).unwrap()).unwrap();
    let written =
        || fs::read_to_string(&progress).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0_usize);
    fs::write(&gate, "").unwrap();
    wait("a full pipe", || {
        let bytes = written() * BYTES_PER_BLOCK;
        anyhow::ensure!(bytes + BYTES_PER_BLOCK > capacity, "{bytes} of {capacity}");
        Ok(())
    });
    drop(stdout);
    let (kept, before) = (capacity.div_ceil(BYTES_PER_BLOCK), written());
    assert!(before <= kept && kept < BLOCKS, "{before} blocks are written, and the pipe holds {kept}");

    let node = plan.start(scratch);
    assert_eq!(service_pid(&node, dn), pid);
    let mut lines = 0;
    node.follow(&["logs", "-f", "--raw", dn]).find_value(|entry| {
        assert_ne!(entry["kind"], "dropped", "{entry}");
        lines += usize::from(entry["text"].as_str().is_some_and(|text| text.starts_with("xxx")));
        entry["text"] == "end"
    });
    assert_eq!(lines, BLOCKS * LINES_PER_BLOCK);
    node.stop();
}

/// Numbers of services that restart again and again, that have forked and run, and that are kept.
const RESTARTING: usize = 100;
const FORKING: usize = 20;
const KEPT: usize = 5;

/// Each holds a lock with everything that it forks, and reports a lock that is held already: two of one service.
pub(crate) fn lock_script(scratch: &Path, name: &str, then: &str) -> String {
    let lock = scratch.join(format!("{name}.lock")).display().to_string();
    let doubled = scratch.join("doubled").display().to_string();
    format!("exec 9>{lock}; flock -n 9 || echo {name} >> {doubled}; {then}")
}

fn count_rounds() -> usize {
    std::env::var("NODEKEEL_NODE_KILLS").map_or(3, |rounds| rounds.parse().unwrap())
}

/// Kills a node again and again while all its restarts are pending.
fn kill_repeatedly(is_plain_user: bool) {
    let mut plan = KilledNode::new(is_plain_user, NO_DAEMONS);
    let mut scratch = plan.create_scratch();
    let keys = keys(scratch.path());
    let restarting = |number: usize| {
        let name = format!("r{number}");
        let script = lock_script(scratch.path(), &name, "setsid sleep 1000 & exit 1");
        service_config(&name, &script, &format!("{keys}\nbackoff = {{ initial = \"1s\", max = \"1s\" }}"))
    };
    let kept = |number: usize| {
        let name = format!("k{number}");
        let script = lock_script(scratch.path(), &name, "echo up; exec sleep 1000");
        service_config(&name, &script, &format!("{keys}\nkeep = true"))
    };
    let forking = |number: usize| {
        let name = format!("f{number}");
        let script = lock_script(scratch.path(), &name, "setsid sleep 1000 & echo forked; wait");
        service_config(&name, &script, &keys)
    };
    let services = (0..RESTARTING).map(restarting).chain((0..FORKING).map(forking));
    let services = services.chain((0..KEPT).map(kept));
    plan.config.extend(services);
    let mut pids = Vec::new();
    for round in 0..=count_rounds() {
        let mut node = plan.start(scratch);
        let current: Vec<_> =
            (0..KEPT).map(|number| service_pid(&node, &format!("root.service.k{number}"))).collect();
        if round == 0 {
            pids = current;
        } else {
            assert_eq!(current, pids, "round {round}: kept services are the same processes");
            let ended = node.ask(&["-o", "json", "events"]).matches("leftover-ended").count();
            assert!(ended >= FORKING, "round {round}: {ended} processes of the former node were ended");
        }
        let mut pending = std::collections::BTreeSet::new();
        node.follow(&["events", "-f"]).find_value(|event| {
            if event["change"] == "scheduled" {
                pending.insert(event["dn"].as_str().unwrap().to_owned());
            }
            pending.len() == RESTARTING
        });
        node.wait_for_outputs("forked", FORKING);
        let doubled = fs::read_to_string(node.scratch.path().join("doubled")).unwrap_or_default();
        assert_eq!(doubled, "", "round {round}: two of one service were running");
        if round == count_rounds() {
            return check_nothing_left(&mut node);
        }
        scratch = node.kill();
    }
}

/// Stops the node: all locks are free then.
pub(crate) fn check_nothing_left(node: &mut NodedProcess) {
    node.stop_by(Signal::SIGTERM);
    let locks = fs::read_dir(node.scratch.path()).unwrap().map(|entry| entry.unwrap().path());
    for lock in locks.filter(|path| path.extension().is_some_and(|extension| extension == "lock")) {
        wait("a lock to be free", || Ok(File::open(&lock)?.try_lock()?));
    }
}

#[test]
fn a_plain_users_node_killed_with_restarts_pending_leaves_nothing_and_doubles_nothing() {
    kill_repeatedly(true);
}

#[test]
#[ignore = "needs root: it makes cgroups"]
fn a_node_killed_with_restarts_pending_leaves_nothing_and_doubles_nothing() {
    kill_repeatedly(false);
}
