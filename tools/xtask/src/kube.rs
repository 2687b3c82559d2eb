//! `cargo xtask kube up|down|env`: a control plane in the background, for manual use.
//!
//! One process, the holder, runs it: this program again, with which all its daemons end, however it ends. It
//! listens on a socket in the cache. A client that connects makes it shut down, and its connection closes
//! when nothing is left.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Subcommand;
use rustix::fs::{FlockOperation, flock};
use testbed::{BUSYBOX_IMAGE, GuestNode, Kube, KubePrograms, ScratchDir, cache, gotool};

#[derive(Debug, Subcommand)]
pub(crate) enum KubeTask {
    /// Start a control plane on loopback
    Up {
        /// Join a real node, in a guest
        #[arg(long)]
        node: bool,
    },
    /// Stop it and remove its data
    Down,
    /// Print its environment: eval "$(cargo xtask kube env)"
    Env,
    /// Run it until a client connects (internal)
    #[command(hide = true)]
    Hold {
        #[arg(long)]
        node: bool,
    },
}

/// The holder's line when every daemon answers.
const READY: &str = "ready";

pub(crate) fn run(task: &KubeTask) -> Result<()> {
    let state = HolderState(cache::cache_directory()?.join("kube"));
    match task {
        KubeTask::Up { node } => start_up(&state, *node),
        KubeTask::Down => shut_down(&state),
        KubeTask::Env => print_env(&state),
        KubeTask::Hold { node } => hold_control_plane(&state, *node),
    }
}

/// The directory of the running control plane's files.
#[derive(Debug)]
struct HolderState(PathBuf);

impl HolderState {
    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    fn kubeconfig(&self) -> PathBuf {
        self.0.join("kubeconfig")
    }

    fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// Creates and locks the directory; `None` where a holder has locked it.
    fn try_lock(&self) -> Result<Option<File>> {
        let directory = &self.0;
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(|| format!("create {}", directory.display()))?;
        let file = File::open(directory).with_context(|| format!("open {}", directory.display()))?;
        Ok(flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file))
    }

    fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.0).with_context(|| format!("remove {}", self.0.display()))
    }
}

fn start_up(state: &HolderState, node: bool) -> Result<()> {
    let free = state.try_lock()?.is_some();
    ensure!(
        free,
        "the control plane is already running: use it by `cargo xtask kube env`, stop it by `cargo xtask kube down`"
    );
    // In the foreground, where the progress of a first build is shown.
    KubePrograms::locate()?;
    if node {
        gotool::CONTAINERD.program_directory()?;
    }
    println!("starting etcd, kube-apiserver, kube-controller-manager and kube-scheduler");
    let mut holder = start_holder(state, node)?;
    let output = holder.stdout.take().context("its output is piped")?;
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        if line == READY {
            println!(
                "the control plane is running; to use it in this shell: eval \"$(cargo xtask kube env)\""
            );
            return Ok(());
        }
        println!("{line}");
    }
    let status = holder.wait().context("reap the holder")?;
    let log = fs::read_to_string(state.log()).unwrap_or_default();
    state.remove()?;
    bail!("start the control plane ({status}):\n{log}")
}

fn start_holder(state: &HolderState, node: bool) -> Result<Child> {
    let log = File::create(state.log()).with_context(|| format!("create {}", state.log().display()))?;
    let own = std::env::current_exe().context("find this program")?;
    let mut holder = Command::new(own);
    holder
        .args(["kube", "hold"])
        .args(node.then_some("--node"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    // Neither Ctrl-C nor the terminal's hangup is meant for it.
    holder.process_group(0).spawn().context("start the holder")
}

fn hold_control_plane(state: &HolderState, with_node: bool) -> Result<()> {
    let _claim = state.try_lock()?.context("lock the control plane: another process holds it")?;
    for stale in [state.socket(), state.kubeconfig()] {
        match fs::remove_file(&stale) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", stale.display()));
            }
            _ => {}
        }
    }
    let start = Instant::now();
    let kube = if with_node { Kube::builder().with_service_accounts().start()? } else { Kube::start()? };
    print_line(&format!("{} answers after {:.1} s", kube.api_url(), start.elapsed().as_secs_f64()));
    let node = if with_node { Some(join_node(&kube)?) } else { None };
    symlink(kube.kubeconfig_file("admin")?, state.kubeconfig()).context("link the kubeconfig")?;
    let listener = UnixListener::bind(state.socket()).context("listen for a client")?;
    print_line(READY);
    let (_asks, _) = listener.accept().context("wait for the shutdown")?;
    drop((node, kube));
    state.remove()
    // The connection closes with this process: the client then knows that nothing is left.
}

fn join_node(kube: &Kube) -> Result<GuestNode> {
    print_line("booting a node in a guest");
    let start = Instant::now();
    let node = GuestNode::builder().join(kube)?;
    let seconds = start.elapsed().as_secs_f64();
    print_line(&format!(
        "the node {:?} is ready after {seconds:.1} s; it has the image {BUSYBOX_IMAGE}",
        node.name()
    ));
    Ok(node)
}

/// The process that reads the output may have exited.
fn print_line(line: &str) {
    let mut output = std::io::stdout();
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

fn shut_down(state: &HolderState) -> Result<()> {
    match UnixStream::connect(state.socket()) {
        Ok(mut holder) => {
            holder.read_to_end(&mut Vec::new()).context("wait for the shutdown")?;
            ensure!(!state.0.exists(), "{} is left behind: {}", state.0.display(), read_log(state));
            println!("the control plane is stopped; nothing is left");
            Ok(())
        }
        Err(_) if state.try_lock()?.is_none() => {
            bail!("the control plane is starting or stopping: try again")
        }
        Err(_) => {
            state.remove()?;
            // Any new scratch directory removes the files of a killed holder.
            ScratchDir::new()?.close()?;
            println!("the control plane is not running");
            Ok(())
        }
    }
}

fn read_log(state: &HolderState) -> String {
    fs::read_to_string(state.log()).unwrap_or_default()
}

fn print_env(state: &HolderState) -> Result<()> {
    let kubeconfig = state.kubeconfig();
    let is_up = state.0.exists() && state.try_lock()?.is_none() && kubeconfig.exists();
    ensure!(is_up, "the control plane is not running: start it by `cargo xtask kube up`");
    println!("export KUBECONFIG={}", kubeconfig.display());
    let programs = KubePrograms::locate()?;
    if let Some(directory) = programs.program_path("kubectl").parent() {
        println!("export PATH=\"$PATH:{}\"", directory.display());
    }
    Ok(())
}
