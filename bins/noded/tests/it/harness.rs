//! Starts noded as a process, or a node in this one, in a scratch directory.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_logtree::Journal;
use nodekeel_node::client::{self, Client};
use nodekeel_node::config::Config;
use nodekeel_node::node::{Deps, Node};
use nodekeel_node::plan::Plan;
use nodekeel_node::search::Search;
use testbed::Scratch;

/// Longer than anything here takes, unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// A configuration without the daemons.
pub(crate) const BARE: &str = "services.etcd.enable = false\nservices.containerd.enable = false\n";

/// A service that runs until it is told to stop.
pub(crate) fn service(name: &str, script: &str, keys: &str) -> String {
    format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/sh\", \"-c\", {script:?}]\n{keys}\n")
}

/// `noded` with these arguments and an environment of its own.
pub(crate) fn noded(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_noded"));
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command
}

/// The path of nodectl, which is built at its first use: it is another package's.
pub(crate) fn nodectl_path() -> &'static Path {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
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

/// As whom a test acts that must not be root.
pub(crate) const NOBODY: u32 = 65534;

/// Runs the command without root's rights.
pub(crate) fn as_plain_user(command: &mut Command) -> &mut Command {
    if nix::unistd::geteuid().is_root() { command.uid(NOBODY).gid(NOBODY) } else { command }
}

/// Whose files such a command can change.
pub(crate) fn plain_user() -> Option<u32> {
    nix::unistd::geteuid().is_root().then_some(NOBODY)
}

/// What a command printed to stderr, and its exit code.
pub(crate) fn failed(output: &Output) -> (String, Option<i32>) {
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

/// A noded of its own.
pub(crate) struct Noded {
    child: Child,
    pub(crate) stderr: Receiver<String>,
    pub(crate) scratch: Scratch,
}

impl Noded {
    /// Runs it, and waits until its control API answers.
    pub(crate) fn start(config: &str) -> Self {
        Self::start_in(Scratch::new().unwrap(), config, &[])
    }

    /// The same in a directory that is given, with more arguments.
    pub(crate) fn start_in(scratch: Scratch, config: &str, args: &[&str]) -> Self {
        let mut this = Self::spawn(scratch, config, args, |_| {});
        this.wait_for_line("control socket at");
        this
    }

    pub(crate) fn spawn(
        scratch: Scratch,
        config: &str,
        args: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let file = scratch.path().join("noded.toml");
        fs::write(&file, config).unwrap();
        let data = scratch.path().join("data");
        let mut command =
            noded(&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        change(command.args(args).stderr(Stdio::piped()));
        let mut child = command.spawn().unwrap();
        // Where it is not piped, there is nothing to read.
        let stderr = child.stderr.take().map_or_else(|| channel().1, lines);
        Self { child, stderr, scratch }
    }

    /// Reads stderr until a line holds this text, and gives all of it.
    pub(crate) fn wait_for_line(&mut self, text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let line = self.stderr.recv_timeout(HANG).unwrap_or_else(|_| panic!("no {text:?} in {lines:#?}"));
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

    /// What nodectl printed, which has to succeed.
    pub(crate) fn ask(&self, args: &[&str]) -> String {
        let output = self.nodectl(args);
        assert!(output.status.success(), "nodectl {args:?}: {:?}", failed(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The same as JSON.
    pub(crate) fn ask_json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ask(&[&["-o", "json"], args].concat())).unwrap()
    }

    /// Runs nodectl for as long as the result lives.
    pub(crate) fn follow(&self, args: &[&str]) -> Follow {
        let mut command = self.nodectl_command(&[&["-o", "json"], args].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = lines(child.stdout.take().unwrap());
        Follow { child, lines }
    }

    /// Waits for an event of a DN's run; where it does not come, what that DN has logged is told.
    pub(crate) fn wait_for_event(&self, dn: &str, generation: u64, change: &str) {
        let wanted = |event: &serde_json::Value| {
            event["dn"] == dn && event["generation"] == generation && event["change"] == change
        };
        if let Err(seen) = self.follow(&["events", "-f"]).look_for(wanted) {
            let logged = self.nodectl(&["logs", dn, "--children", "-n", "100"]).stdout;
            panic!("not among {seen:#?}; logged: {}", String::from_utf8_lossy(&logged));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Whether it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Its end, and what it still said.
    pub(crate) fn wait(&mut self) -> (ExitStatus, Vec<String>) {
        let mut lines = Vec::new();
        while let Ok(line) = self.stderr.recv_timeout(HANG) {
            lines.push(line);
        }
        (self.child.wait().unwrap(), lines)
    }

    /// Stops it, which has to go well.
    pub(crate) fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let (status, lines) = self.wait();
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{lines:#?}");
    }
}

impl Drop for Noded {
    /// A test that fails leaves services behind, and what they have started does not go with them.
    fn drop(&mut self) {
        let running = matches!(self.child.try_wait(), Ok(None));
        let below = if running { testbed::leftovers::processes(self.scratch.path()) } else { Ok(Vec::new()) };
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in below.unwrap_or_default() {
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
    }
}

/// A nodectl that goes on, as `logs -f`: what it prints, as JSON.
pub(crate) struct Follow {
    child: Child,
    lines: Receiver<String>,
}

impl Follow {
    /// The first value for which this holds; it has to come.
    pub(crate) fn find(&self, wanted: impl FnMut(&serde_json::Value) -> bool) -> serde_json::Value {
        self.look_for(wanted).unwrap_or_else(|seen| panic!("not among {seen:#?}"))
    }

    /// The same, or all that came where it did not.
    fn look_for(
        &self,
        mut wanted: impl FnMut(&serde_json::Value) -> bool,
    ) -> Result<serde_json::Value, Vec<String>> {
        let mut seen = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(HANG) {
            let value = serde_json::from_str(&line).unwrap();
            if wanted(&value) {
                return Ok(value);
            }
            seen.push(line);
        }
        Err(seen)
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a stream as they come.
fn lines(stream: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = channel();
    let mut read = BufReader::new(stream).lines().map_while(Result::ok);
    std::thread::spawn(move || read.try_for_each(|line| send.send(line)));
    lines
}

/// A node in this process, whose journal the test can write to.
pub(crate) struct Local {
    pub(crate) node: Node,
    pub(crate) journal: Journal,
    pub(crate) client: Client,
    _scratch: Scratch,
}

impl Local {
    pub(crate) async fn start(config: &str) -> Self {
        Self::start_with(config, |_| {}).await
    }

    pub(crate) async fn start_with(config: &str, change: impl FnOnce(&mut Deps)) -> Self {
        let scratch = Scratch::new().unwrap();
        let mut config = Config::parse(Path::new("test.toml"), config).unwrap();
        config.node.data = scratch.path().join("data");
        let journal = Journal::default();
        let mut deps = Deps::new(journal.clone());
        change(&mut deps);
        let plan = Plan::make(config, Search::from_lists(None, None), false).unwrap();
        let node = Node::start(plan, deps).unwrap();
        node.ready("root").await;
        let client = client::connect(node.socket()).await.unwrap();
        Self { node, journal, client, _scratch: scratch }
    }
}
