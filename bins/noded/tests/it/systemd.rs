//! The systemd unit that is shipped.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::libc;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use testbed::ScratchDir;

use crate::harness::{Ended, NO_DAEMONS, TEST_TIMEOUT, nodectl_path, noded_command, service_config, wait};
use crate::killed::lock_script;

const UNIT: &str = include_str!("../../../../deploy/systemd/noded.service");

/// The value of a key.
fn value(key: &str) -> &'static str {
    let line = UNIT.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {key}"))
}

#[test]
fn the_commands_of_the_unit_are_commands_of_the_programs() {
    let run: Vec<_> = value("ExecStart").split(' ').skip(1).collect();
    // The configuration is not there, so that a valid command line fails with its error.
    Ended::of(&mut noded_command(&run)).assert_fails(3, "/etc/nodekeel/noded.toml");
    let reload: Vec<_> = value("ExecReload").split(' ').skip(1).collect();
    let mut nodectl = Command::new(nodectl_path());
    let ended = Ended::of(nodectl.args(reload).env("NODEKEEL_SOCKET", "/nonexistent/control.sock"));
    assert_eq!(ended.code, Some(3), "{ended:#?}");
}

#[test]
#[ignore = "needs systemd"]
fn systemd_accepts_the_unit() {
    let scratch = ScratchDir::new().unwrap();
    let unit = scratch.path().join("noded.service");
    let noded = Path::new(env!("CARGO_BIN_EXE_noded"));
    let installed = UNIT
        .replace("/usr/local/bin/noded", noded.to_str().unwrap())
        .replace("/usr/local/bin/nodectl", nodectl_path().to_str().unwrap());
    fs::write(&unit, installed).unwrap();
    let ended = Ended::of(Command::new("systemd-analyze").arg("verify").arg(&unit));
    // systemd 254 introduced it.
    let is_known = |line: &&str| !line.contains("'DelegateSubgroup'");
    let unexpected: Vec<_> = ended.stderr.lines().filter(is_known).collect();
    assert!(ended.code == Some(0) && unexpected.is_empty(), "{unexpected:#?}");
}

/// The configuration of the unit.
const CONFIG: &str = "/etc/nodekeel/noded.toml";
/// The cgroup of systemd, whose units have cgroups below it.
const SYSTEMD_CGROUP: &str = "/sys/fs/cgroup/systemd";
const UNIT_CGROUP: &str = "/sys/fs/cgroup/systemd/system.slice/noded.service";
/// MiB of memory that the services may use, which tell their cgroups apart.
const LIMITED: u64 = 32;
const KEPT: u64 = 48;

/// systemd as the first process of a PID namespace. What it runs ends with it.
struct Systemd {
    unshare: Child,
    pid: String,
}

impl Systemd {
    /// Boots it, and waits until it reports that it has.
    fn boot() -> Self {
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu +io +memory +pids").unwrap();
        fs::create_dir(SYSTEMD_CGROUP).unwrap();
        let name = "nodekeel-test-systemd";
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        manager.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        // Others see neither its /run, by which programs find out that systemd runs, nor its mounts.
        let script = "mount -t proc proc /proc && mount -t tmpfs -o mode=0755 tmpfs /run && \
                      echo 0 >$0/cgroup.procs && exec /usr/lib/systemd/systemd --unit=basic.target";
        let mut command = Command::new("unshare");
        // It follows when other tests unmount what is mounted now.
        command.args(["--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]);
        command.args(["/bin/sh", "-c", script, SYSTEMD_CGROUP]).stdin(Stdio::null());
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin").env("container", "test");
        command.env("NOTIFY_SOCKET", format!("@{name}"));
        let mut systemd = Self { unshare: command.spawn().unwrap(), pid: String::new() };
        wait_for_ready(&manager);
        let children = format!("/proc/{0}/task/{0}/children", systemd.unshare.id());
        systemd.pid = fs::read_to_string(children).unwrap().trim().to_owned();
        systemd
    }

    /// A command in its namespaces: systemctl and nodectl identify their peers by pids.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.pid, "-m", "-p"]).args(args).stdin(Stdio::null());
        command
    }

    /// The output of a command, which must succeed.
    fn run(&self, args: &[&str]) -> String {
        let ended = Ended::of(&mut self.command(args));
        assert_eq!(ended.code, Some(0), "{args:?}: {ended:#?}; {}", self.state());
        ended.stdout
    }

    fn fails(&self, args: &[&str]) -> bool {
        Ended::of(&mut self.command(args)).code != Some(0)
    }

    /// The state of noded: lines of `KEY=VALUE`.
    fn state(&self) -> String {
        let keys = "--property=ActiveState,SubState,MainPID,NRestarts,Result,ExecMainStatus";
        Ended::of(&mut self.command(&["systemctl", "show", "noded", keys])).stdout
    }

    fn check_state(&self, lines: &[&str]) -> anyhow::Result<()> {
        let state = self.state();
        let missing = lines.iter().find(|wanted| !state.lines().any(|line| line == **wanted));
        missing.map_or(Ok(()), |missing| Err(anyhow::anyhow!("no {missing} in {state}")))
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        drop((self.unshare.kill(), self.unshare.wait()));
    }
}

fn wait_for_ready(socket: &UnixDatagram) {
    let mut message = [0; 4096];
    loop {
        let length = socket.recv(&mut message).expect("systemd boots");
        if message[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1") {
            return;
        }
    }
}

/// The programs, the unit as it is shipped, and a pipe in the place of the configuration.
fn install() {
    for directory in ["/usr/local/bin", "/etc/systemd/system", "/etc/nodekeel", "/var/lib"] {
        fs::create_dir_all(directory).unwrap();
    }
    symlink(env!("CARGO_BIN_EXE_noded"), "/usr/local/bin/noded").unwrap();
    symlink(nodectl_path(), "/usr/local/bin/nodectl").unwrap();
    fs::write("/etc/systemd/system/noded.service", UNIT).unwrap();
    mkfifo(CONFIG, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
}

/// Two services with limits: one forks and depends on the other one, which is kept. Each records its stop.
fn config(scratch: &Path) -> String {
    let service = |name: &str, mib: u64, fork: &str, more: &str| {
        let stops = stops_file(scratch);
        let script = format!(
            "trap 'trap : TERM; echo {name} >>{}; exit' TERM; {fork} sleep 1000 & while :; do wait; done",
            stops.display()
        );
        let limits = format!("limits = {{ memory_max = \"{mib}MiB\" }}");
        let path = "environment = { PATH = \"/usr/sbin:/usr/bin\" }";
        let keys = format!("{path}\ndirectory = {scratch:?}\n{limits}\n{more}");
        service_config(name, &lock_script(scratch, name, &script), &keys)
    };
    let limited = service("limited", LIMITED, "setsid sleep 1000 &", "depends_on = [\"kept\"]");
    format!("{NO_DAEMONS}{limited}{}", service("kept", KEPT, "", "keep = true"))
}

fn stops_file(scratch: &Path) -> PathBuf {
    scratch.join("stops")
}

fn replace_config(text: &str) {
    let new = format!("{CONFIG}.new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, CONFIG).unwrap();
}

fn cgroups_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(cgroups_below(&entry.path())?);
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Waits for a service with this limit: so many processes of `sleep` in one cgroup, none of them a former one. Returns
/// their pids.
fn wait_for_sleepers(mib: u64, count: usize, former: &[String]) -> Vec<String> {
    let limit = format!("{}\n", mib << 20);
    let is_sleep =
        |pid: &String| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
    let find = || {
        let mut cgroups = cgroups_below(Path::new(UNIT_CGROUP))?;
        cgroups.retain(|dir| fs::read_to_string(dir.join("memory.max")).is_ok_and(|max| max == limit));
        let [cgroup] = &cgroups[..] else { anyhow::bail!("{mib} MiB: {cgroups:?}") };
        let pids = fs::read_to_string(cgroup.join("cgroup.procs"))?;
        let pids: Vec<_> = pids.lines().map(str::to_owned).filter(is_sleep).collect();
        let is_former = pids.iter().any(|pid| former.contains(pid));
        anyhow::ensure!(pids.len() == count && !is_former, "{pids:?} in {}", cgroup.display());
        anyhow::Ok(pids)
    };
    wait("the service in its cgroup", find)
}

#[test]
#[ignore = "needs kernel with systemd"]
fn systemd_waits_for_noded_reloads_it_restarts_it_and_stops_it_with_all_of_its_services() {
    let scratch = ScratchDir::new().unwrap();
    install();
    let systemd = Systemd::boot();
    let config = config(scratch.path());

    // A start waits until noded is ready, which it is not until the test writes its configuration.
    let mut start = systemd.command(&["systemctl", "enable", "--now", "noded"]).spawn().unwrap();
    let open = || anyhow::Ok(File::options().write(true).custom_flags(libc::O_NONBLOCK).open(CONFIG)?);
    let mut pipe = wait("noded to read its configuration", open);
    systemd.check_state(&["ActiveState=activating", "SubState=start"]).unwrap();
    assert_eq!(start.try_wait().unwrap(), None, "systemctl waits");
    replace_config(&config);
    pipe.write_all(config.as_bytes()).unwrap();
    drop(pipe);
    assert!(start.wait().unwrap().success(), "{}", systemd.state());
    systemd.check_state(&["ActiveState=active", "SubState=running", "NRestarts=0"]).unwrap();
    systemd.run(&["systemctl", "is-active", "noded"]);
    systemd.run(&["nodectl", "--timeout", "60", "tree"]);

    // A reload fails if noded refuses the file, and the process stays.
    let reload = ["systemctl", "reload", "noded"];
    let start_added = ["nodectl", "start", "--wait", "root.service.added"];
    let process = || systemd.run(&["systemctl", "show", "noded", "--property=ActiveState,MainPID,NRestarts"]);
    let before = process();
    replace_config(&format!("{config}{}", service_config("added", "exec /bin/sleep 1000", "")));
    systemd.run(&reload);
    systemd.run(&start_added);
    replace_config("nonsense = 1");
    assert!(systemd.fails(&reload), "a file that noded refuses");
    systemd.run(&start_added);
    replace_config(&config);
    systemd.run(&reload);
    assert!(systemd.fails(&start_added), "it is gone");
    assert_eq!(process(), before);

    // A killed noded is started again, and adopts the kept service with its limit.
    let (limited, kept) = (wait_for_sleepers(LIMITED, 2, &[]), wait_for_sleepers(KEPT, 1, &[]));
    systemd.run(&["systemctl", "kill", "--kill-whom=main", "--signal=KILL", "noded"]);
    let is_restarted = || systemd.check_state(&["ActiveState=active", "SubState=running", "NRestarts=1"]);
    wait("systemd to restart noded", is_restarted);
    assert_eq!(wait_for_sleepers(KEPT, 1, &[]), kept, "the same process, with its limit");
    wait_for_sleepers(LIMITED, 2, &limited);
    assert!(!scratch.path().join("doubled").exists(), "no service was running twice");

    // A stop ends the services, dependents first, and leaves no process.
    systemd.run(&["systemctl", "stop", "noded"]);
    systemd.check_state(&["ActiveState=inactive", "Result=success", "ExecMainStatus=0"]).unwrap();
    assert_eq!(fs::read_to_string(stops_file(scratch.path())).unwrap(), "limited\nkept\n");
    let events = fs::read_to_string(Path::new(UNIT_CGROUP).join("cgroup.events"));
    // systemd removes the cgroup once it is empty.
    assert!(!events.is_ok_and(|events| events.contains("populated 1")), "no process is left");
    let left = testbed::leftovers::find_processes(scratch.path()).unwrap();
    assert!(left.is_empty(), "{left:?}");
}
