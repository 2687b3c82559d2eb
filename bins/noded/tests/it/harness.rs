//! Starts noded as a process, or a node in this process, in a scratch directory.

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
use nix::unistd::Pid;
use nodekeel_logtree::LogStore;
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::config::NodedConfig;
use nodekeel_node::node::{Deps, NodeHandle};
use nodekeel_node::plan::NodePlan;
use nodekeel_node::search_path::SearchPath;
use testbed::ScratchDir;

/// Timeout of every wait: longer than anything takes that does not hang.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A configuration without daemons, and without the kernel's log, which not every machine lets a test read.
pub(crate) const NO_DAEMONS: &str =
    "services.etcd.enable = false\nservices.containerd.enable = false\nkernel.log = false\n";

/// The configuration of a service that runs a shell script.
pub(crate) fn service_config(name: &str, script: &str, keys: &str) -> String {
    format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/sh\", \"-c\", {script:?}]\n{keys}\n")
}

/// `noded` with these arguments and a clean environment.
pub(crate) fn noded_command(args: &[&str]) -> Command {
    clean_command(Path::new(env!("CARGO_BIN_EXE_noded")), args)
}

fn clean_command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command
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

/// Uid of commands that must not run as root.
pub(crate) const PLAIN_UID: u32 = 65534;

/// A program where every user can run it: the checkout may lie in a home directory that is its owner's alone.
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

/// Stderr and exit code of a command.
pub(crate) fn stderr_and_code(output: &Output) -> (String, Option<i32>) {
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
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

    pub(crate) fn spawn(
        scratch: ScratchDir,
        config: &str,
        args: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let file = scratch.path().join("noded.toml");
        fs::write(&file, config).unwrap();
        let data = scratch.path().join("data");
        let mut command =
            noded_command(&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        change(command.args(args).stderr(Stdio::piped()));
        Self::spawn_command(scratch, command)
    }

    /// Starts noded by another command.
    pub(crate) fn spawn_command(scratch: ScratchDir, mut command: Command) -> Self {
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

    /// `nodectl` for this node.
    pub(crate) fn nodectl(&self, args: &[&str]) -> Output {
        self.nodectl_command(args).output().unwrap()
    }

    pub(crate) fn nodectl_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(nodectl_path());
        command.env_clear().env("NODEKEEL_SOCKET", self.socket()).args(args).stdin(Stdio::null());
        command
    }

    /// The output of nodectl, which must succeed, or print the status of what is not healthy.
    pub(crate) fn ask(&self, args: &[&str]) -> String {
        let output = self.nodectl(args);
        let is_status = args.contains(&"status") && output.status.code() == Some(6);
        assert!(output.status.success() || is_status, "nodectl {args:?}: {:?}", stderr_and_code(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The same as JSON.
    pub(crate) fn ask_json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ask(&[&["-o", "json"], args].concat())).unwrap()
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
        let wanted = |event: &serde_json::Value| {
            event["dn"] == dn && event["generation"] == generation && event["change"] == change
        };
        if let Err(seen) = self.follow(&["events", "-f"]).search_values(wanted) {
            let logged = self.nodectl(&["logs", dn, "--children", "-n", "100"]).stdout;
            panic!("not among {seen:#?}; logged: {}", String::from_utf8_lossy(&logged));
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
    pub(crate) fn wait(&mut self) -> (ExitStatus, Vec<String>) {
        let mut lines = Vec::new();
        while let Ok(line) = self.stderr.recv_timeout(TEST_TIMEOUT) {
            lines.push(line);
        }
        (self.child.wait().unwrap(), lines)
    }

    /// Stops noded, which must succeed.
    pub(crate) fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let (status, lines) = self.wait();
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{lines:#?}");
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
    pub(crate) fn find_value(&self, wanted: impl FnMut(&serde_json::Value) -> bool) -> serde_json::Value {
        self.search_values(wanted).unwrap_or_else(|seen| panic!("not among {seen:#?}"))
    }

    /// The same, or all values that arrived.
    fn search_values(
        &self,
        mut wanted: impl FnMut(&serde_json::Value) -> bool,
    ) -> Result<serde_json::Value, Vec<String>> {
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

/// What an HTTP server answers to a GET: the status line, and the body.
pub(crate) fn http_get(mut stream: impl std::io::Read + std::io::Write, path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// A node in this process, with a log store that the test can write to.
pub(crate) struct LocalNode {
    pub(crate) node: NodeHandle,
    pub(crate) log_store: LogStore,
    pub(crate) client: NodeClient,
    _scratch: ScratchDir,
}

impl LocalNode {
    pub(crate) async fn start(config: &str) -> Self {
        Self::start_with(config, |_| {}).await
    }

    pub(crate) async fn start_with(config: &str, change: impl FnOnce(&mut Deps)) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let mut config = NodedConfig::parse_toml(Path::new("test.toml"), config).unwrap();
        config.node.data = scratch.path().join("data");
        let journal = LogStore::default();
        let mut deps = Deps::new(journal.clone());
        change(&mut deps);
        let plan =
            NodePlan::from_config(config, SearchPath::with_default_directories(None, None), false).unwrap();
        let node = NodeHandle::start(plan, deps).unwrap();
        node.wait_ready("root").await;
        let client = client::connect(node.control_socket()).await.unwrap();
        Self { node, log_store: journal, client, _scratch: scratch }
    }
}
