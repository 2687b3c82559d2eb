//! Starts noded and nodectl as processes, in scratch directories.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use serde_json::Value;
use testbed::{ScratchDir, command_output, tools, wait_until};

pub(crate) use testbed::noded::{EtcdPorts, NO_DAEMONS, NO_DISKS, etcdctl, service_config, sleep_config};

/// Timeout of every wait: longer than anything takes that does not hang.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A script that ignores SIGTERM, and prints `set` when it does.
pub(crate) const STUBBORN: &str = "trap '' TERM; echo set; while :; do sleep 1000; done";

/// Waits until the function succeeds, and returns its value.
#[track_caller]
pub(crate) fn wait<T>(what: &str, done: impl FnMut() -> anyhow::Result<T>) -> T {
    wait_until(TEST_TIMEOUT, what, done).unwrap()
}

/// A FIFO of this name in a directory: its readers wait until it is written to.
pub(crate) fn make_fifo(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    path
}

/// Kills a process by its pid.
pub(crate) fn kill_process(pid: u64) {
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
}

/// Waits until a process has exited.
pub(crate) fn wait_gone(pid: u64) {
    wait("the exit of a process", || {
        anyhow::ensure!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} is running");
        Ok(())
    });
}

/// The result of a command that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    /// Without the newline at its end.
    pub(crate) stderr: String,
}

impl Ended {
    /// Runs a command to its end.
    pub(crate) fn of(command: &mut Command) -> Self {
        command.output().unwrap().into()
    }

    /// Asserts the exit code, and that the errors contain a text.
    #[track_caller]
    pub(crate) fn assert_fails(&self, code: i32, text: &str) {
        assert!(self.code == Some(code) && self.stderr.contains(text), "{self:#?}\nnot: {code} {text}");
    }

    /// Asserts the same of an error of one line.
    #[track_caller]
    pub(crate) fn assert_fails_in_a_line(&self, code: i32, text: &str) {
        self.assert_fails(code, text);
        assert_eq!(self.stderr.lines().count(), 1, "{self:#?}");
    }

    /// The output of a command that must have succeeded.
    #[track_caller]
    pub(crate) fn output(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.stdout
    }

    /// The output as JSON, with any exit code.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let stderr = text(&output.stderr).trim_end().to_owned();
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr }
    }
}

/// `noded` with these arguments and a clean environment.
pub(crate) fn noded_command(args: &[&str]) -> Command {
    clean_command(Path::new(env!("CARGO_BIN_EXE_noded")), args)
}

/// The arguments of `noded` for the node of a directory, which has `noded.toml` and `data`.
fn node_args(verb: &str, directory: &Path) -> [String; 5] {
    let path = |name| directory.join(name).to_str().unwrap().to_owned();
    [verb.into(), "--config".into(), path("noded.toml"), "--data".into(), path("data")]
}

/// `noded VERB` for the node of a directory with this configuration.
pub(crate) fn node_command(verb: &str, directory: &Path, config: &str) -> Command {
    fs::write(directory.join("noded.toml"), config).unwrap();
    noded_command(&node_args(verb, directory).each_ref().map(String::as_str))
}

/// `noded check` of this configuration in a directory, with more arguments.
pub(crate) fn check(directory: &Path, config: &str, args: &[&str]) -> Ended {
    Ended::of(node_command("check", directory, config).args(args))
}

fn clean_command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command
}

/// The command under `ulimit` with these arguments, with the same pid.
pub(crate) fn with_ulimit(ulimit: &str, command: &Command) -> Command {
    let script = format!("ulimit {ulimit} && exec \"$0\" \"$@\"");
    let mut within = clean_command(Path::new("/bin/sh"), &["-c", &script]);
    within.arg(command.get_program()).args(command.get_args()).stderr(Stdio::piped());
    within
}

/// The path of nodectl: `NODEKEEL_NODECTL`, or built at the first use, since it is in another package.
pub(crate) fn nodectl_path() -> &'static Path {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(path) = std::env::var_os("NODEKEEL_NODECTL") {
            return path.into();
        }
        let noded = Path::new(env!("CARGO_BIN_EXE_noded"));
        let profile = noded.parent().unwrap();
        let target = profile.parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "nodectl", "--target-dir"]).arg(target);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "nodectl does not build");
        noded.with_file_name("nodectl")
    });
    &BUILT
}

/// nodectl without a node, in a clean environment.
pub(crate) fn run_nodectl(args: &[&str]) -> Ended {
    Ended::of(&mut clean_command(nodectl_path(), args))
}

/// Uid of commands that must not run as root.
pub(crate) const PLAIN_UID: u32 = 65534;

/// A program in a directory in which every user can run it: the checkout may be in a home directory of its owner alone.
pub(crate) struct PublicProgram {
    /// Removed with it.
    _directory: ScratchDir,
    path: PathBuf,
}

impl PublicProgram {
    pub(crate) fn new(program: &Path) -> Self {
        let directory = ScratchDir::new().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = directory.path().join(program.file_name().unwrap());
        fs::hard_link(program, &path).or_else(|_| fs::copy(program, &path).map(drop)).unwrap();
        Self { _directory: directory, path }
    }

    pub(crate) fn noded() -> Self {
        Self::new(Path::new(env!("CARGO_BIN_EXE_noded")))
    }

    /// `noded VERB` without root's rights, for the node of a directory with this configuration.
    pub(crate) fn node_command(&self, verb: &str, directory: &Path, config: &str) -> Command {
        fs::write(directory.join("noded.toml"), config).unwrap();
        self.command(&node_args(verb, directory).each_ref().map(String::as_str))
    }

    /// The program with these arguments, a clean environment, and without root's rights.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = clean_command(&self.path, args);
        if nix::unistd::geteuid().is_root() {
            command.uid(PLAIN_UID).gid(PLAIN_UID);
        }
        command
    }
}

/// Owner of files that such a command can change.
pub(crate) fn plain_user() -> Option<u32> {
    nix::unistd::geteuid().is_root().then_some(PLAIN_UID)
}

/// A noded process with a private directory.
pub(crate) struct NodedProcess {
    child: Child,
    pub(crate) stderr: Receiver<String>,
    pub(crate) scratch: ScratchDir,
}

impl NodedProcess {
    /// Starts noded, and waits until its control API answers.
    pub(crate) fn start(config: &str) -> Self {
        Self::start_in(ScratchDir::new().unwrap(), config, &[])
    }

    /// The same in a given directory, with more arguments.
    pub(crate) fn start_in(scratch: ScratchDir, config: &str, args: &[&str]) -> Self {
        let mut this = Self::spawn(scratch, config, args, |_| {});
        this.wait_for_line("control socket at");
        this
    }

    /// Starts noded by a changed command, and does not wait.
    pub(crate) fn spawn(
        scratch: ScratchDir,
        config: &str,
        args: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = node_command("run", scratch.path(), config);
        command.args(args).stderr(Stdio::piped());
        change(&mut command);
        Self::spawn_process(scratch, command)
    }

    /// Starts noded by another command, and waits until its control API answers.
    pub(crate) fn start_command(scratch: ScratchDir, command: Command) -> Self {
        let mut this = Self::spawn_command(scratch, command);
        this.wait_for_line("control socket at");
        this
    }

    /// Starts noded by another command, and does not wait.
    pub(crate) fn spawn_command(scratch: ScratchDir, mut command: Command) -> Self {
        command.stderr(Stdio::piped());
        Self::spawn_process(scratch, command)
    }

    fn spawn_process(scratch: ScratchDir, mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        // If stderr is not piped, there is nothing to read.
        let stderr = child.stderr.take().map_or_else(|| channel().1, spawn_line_reader);
        Self { child, stderr, scratch }
    }

    /// Reads stderr until a line contains this text, and returns all lines.
    pub(crate) fn wait_for_line(&mut self, text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let line = self
                .stderr
                .recv_timeout(TEST_TIMEOUT)
                .unwrap_or_else(|_| panic!("no {text:?} in {lines:#?}"));
            lines.push(line);
            if lines.last().unwrap().contains(text) {
                return lines;
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.data().join("run/control.sock")
    }

    /// Writes another configuration, for the next reload.
    pub(crate) fn write_config(&self, config: &str) {
        fs::write(self.scratch.path().join("noded.toml"), config).unwrap();
    }

    /// `nodectl` for this node.
    pub(crate) fn nodectl(&self, args: &[&str]) -> Ended {
        Ended::of(&mut self.nodectl_command(args))
    }

    pub(crate) fn nodectl_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(nodectl_path());
        command.env_clear().env("NODEKEEL_SOCKET", self.socket()).args(args).stdin(Stdio::null());
        // A node answers late on a machine that is busy, and no test is about that but those that say so.
        if !args.contains(&"--timeout") {
            command.args(["--timeout", "60"]);
        }
        command
    }

    /// The output of nodectl, which must succeed, or print the status of what is not healthy.
    pub(crate) fn ask(&self, args: &[&str]) -> String {
        let ended = self.nodectl(args);
        let is_status = args.contains(&"status") && ended.code == Some(6);
        assert!(ended.code == Some(0) || is_status, "nodectl {args:?}: {ended:#?}");
        ended.stdout
    }

    /// The same as JSON.
    pub(crate) fn ask_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ask(&[&["-o", "json"], args].concat())).unwrap()
    }

    /// All events up to now.
    pub(crate) fn events(&self) -> Vec<Value> {
        let lines = self.ask(&["-o", "json", "events"]);
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits for the start of a runnable, which the operator asks for. nodectl itself waits as long as the runnable does,
    /// once it exists.
    pub(crate) fn wait_ready(&self, dn: &str) {
        self.wait_status(dn, |_| true);
        let mut command = self.nodectl_command(&["start", "--wait", dn]);
        let mut waits = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if testbed::wait_exit(&mut waits, TEST_TIMEOUT).unwrap().is_none() {
            waits.kill().unwrap();
            panic!("{dn} is not ready: {}", self.status(dn));
        }
        Ended::from(waits.wait_with_output().unwrap()).output();
    }

    /// The status of a runnable.
    pub(crate) fn status(&self, dn: &str) -> Value {
        self.ask_json(&["status", dn])["node"].clone()
    }

    /// The status of a runnable, once it exists and satisfies the predicate.
    pub(crate) fn wait_status(&self, dn: &str, is: impl Fn(&Value) -> bool) -> Value {
        wait(dn, || {
            let ended = self.nodectl(&["-o", "json", "status", dn]);
            let status: Value = serde_json::from_str(&ended.stdout)?;
            anyhow::ensure!(is(&status["node"]), "{status}");
            Ok(status["node"].clone())
        })
    }

    /// Waits until the output of a runnable has this line.
    pub(crate) fn wait_for_output(&self, dn: &str, text: &str) {
        self.follow(&["logs", "-f", "--raw", dn]).find_value(|entry| entry["text"] == text);
    }

    /// Waits until the services have printed this line so often.
    pub(crate) fn wait_for_outputs(&self, text: &str, count: usize) {
        let mut seen = 0;
        self.follow(&["logs", "-f", "--raw", "--children", "root.service"]).find_value(|entry| {
            seen += usize::from(entry["text"] == text);
            seen == count
        });
    }

    /// `ctr` of the node's containerd.
    pub(crate) fn ctr(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut ctr = Command::new(tools::find_tool(tools::CTR)?);
        ctr.arg("-a").arg(self.data().join("run/containerd/containerd.sock"));
        command_output(ctr.args(["-n", "k8s.io"]).args(args))
    }

    /// Runs nodectl while the result exists.
    pub(crate) fn follow(&self, args: &[&str]) -> NodectlStream {
        let mut command = self.nodectl_command(&[&["-o", "json"], args].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = spawn_line_reader(child.stdout.take().unwrap());
        NodectlStream { child, lines }
    }

    /// Waits for an event of an incarnation; panics with the log of the DN if the event is missing.
    pub(crate) fn wait_for_event(&self, dn: &str, generation: u64, change: &str) {
        let wanted = |event: &Value| {
            event["dn"] == dn && event["generation"] == generation && event["change"] == change
        };
        if let Err(seen) = self.follow(&["events", "-f"]).search_values(wanted) {
            let logged = self.nodectl(&["logs", dn, "--children", "-n", "100"]).stdout;
            panic!("not among {seen:#?}; logged: {logged}");
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// The exit status, if noded has exited.
    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for the exit, and returns the status and the remaining lines.
    pub(crate) fn wait_end(&mut self) -> (ExitStatus, Vec<String>) {
        let mut lines = Vec::new();
        while let Ok(line) = self.stderr.recv_timeout(TEST_TIMEOUT) {
            lines.push(line);
        }
        (self.child.wait().unwrap(), lines)
    }

    /// Stops noded, which must succeed, and returns the remaining lines.
    pub(crate) fn stop(mut self) -> Vec<String> {
        self.stop_by(Signal::SIGTERM)
    }

    /// Stops noded by a signal, which must succeed, and returns the remaining lines.
    pub(crate) fn stop_by(&mut self, signal: Signal) -> Vec<String> {
        self.signal(signal);
        let (status, lines) = self.wait_end();
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{lines:#?}");
        lines
    }

    /// Waits until noded has exited, and returns its exit code.
    pub(crate) fn wait_exit(&mut self) -> Option<i32> {
        wait("the exit of noded", || self.try_wait().ok_or_else(|| anyhow::anyhow!("still running"))).code()
    }

    /// Repeats SIGTERM until noded has exited, and returns its exit code.
    pub(crate) fn force_exit(&mut self) -> Option<i32> {
        let forced = || {
            self.signal(Signal::SIGTERM);
            self.try_wait().ok_or_else(|| anyhow::anyhow!("still running"))
        };
        wait("the forced exit of noded", forced).code()
    }

    /// Stops noded, and returns its directory.
    pub(crate) fn stop_and_keep(mut self) -> ScratchDir {
        self.stop_by(Signal::SIGTERM);
        self.take_scratch()
    }

    /// Kills noded as a power cut would, and returns its directory.
    pub(crate) fn kill(mut self) -> ScratchDir {
        self.signal(Signal::SIGKILL);
        self.wait_end();
        self.take_scratch()
    }

    /// The directory of a noded that has exited.
    pub(crate) fn take_scratch(&mut self) -> ScratchDir {
        std::mem::replace(&mut self.scratch, ScratchDir::new().unwrap())
    }
}

impl Drop for NodedProcess {
    /// A failed test leaves services behind, whose child processes must be killed too.
    fn drop(&mut self) {
        let running = matches!(self.child.try_wait(), Ok(None));
        let below =
            if running { testbed::leftovers::find_processes(self.scratch.path()) } else { Ok(Vec::new()) };
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in below.unwrap_or_default() {
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
    }
}

/// A nodectl that streams JSON, as `logs -f`.
pub(crate) struct NodectlStream {
    child: Child,
    lines: Receiver<String>,
}

impl NodectlStream {
    /// The first value that satisfies the predicate; panics if none arrives.
    pub(crate) fn find_value(&self, wanted: impl FnMut(&Value) -> bool) -> Value {
        self.search_values(wanted).unwrap_or_else(|seen| panic!("not among {seen:#?}"))
    }

    /// The same, or all values that arrived.
    fn search_values(&self, mut wanted: impl FnMut(&Value) -> bool) -> Result<Value, Vec<String>> {
        let mut seen = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(TEST_TIMEOUT) {
            let value = serde_json::from_str(&line).unwrap();
            if wanted(&value) {
                return Ok(value);
            }
            seen.push(line);
        }
        Err(seen)
    }
}

impl Drop for NodectlStream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the lines of a stream in a thread.
fn spawn_line_reader(stream: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = channel();
    let mut read = BufReader::new(stream).lines().map_while(Result::ok);
    std::thread::spawn(move || read.try_for_each(|line| send.send(line)));
    lines
}

/// The answer of an HTTP server to a GET: the status line, and the body.
pub(crate) fn http_get(mut stream: impl std::io::Read + std::io::Write, path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}
