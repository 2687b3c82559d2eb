//! A containerd under a supervisor, in a private directory.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{Containerd, ContainerdImages, DirectoryLayout, Namespace, Preseed};
use nodekeel_logtree::{LogQuery, LogStore, WriterOptions, render};
use nodekeel_supervisor::{
    Backoff, ChildPolicy, Context, Failure, OutputOrigin, RunFuture, Runnable, RunnableState, RunnableStatus,
    Supervisor,
};
use testbed::guest::disk;
use testbed::{ScratchDir, gotool, tools};

/// A release of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    Debian,
    Newest,
}

pub(crate) fn run_async(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
}

impl Release {
    /// The directory of its executables.
    pub(crate) fn programs(self) -> PathBuf {
        match self {
            Self::Debian => tools::find_tool(tools::CONTAINERD).unwrap().parent().unwrap().to_owned(),
            Self::Newest if disk::is_inside() => PathBuf::from("/usr/bin"),
            Self::Newest => gotool::CONTAINERD.program_directory().unwrap(),
        }
    }

    /// The `PATH` with its shim and runc.
    pub(crate) fn path(self) -> String {
        if disk::is_inside() {
            return self.programs().display().to_string();
        }
        let runc = tools::find_tool(tools::RUNC).unwrap();
        format!("{}:{}", self.programs().display(), runc.parent().unwrap().display())
    }
}

/// A running containerd. Dropping the scratch directory removes its processes and mounts.
pub(crate) struct TestDaemon {
    pub(crate) release: Release,
    pub(crate) layout: DirectoryLayout,
    pub(crate) journal: LogStore,
    pub(crate) supervisor: Supervisor,
    pub(crate) scratch: Arc<ScratchDir>,
}

pub(crate) fn namespace() -> Namespace {
    "k8s.io".parse().unwrap()
}

/// The directory of bundles.
pub(crate) fn bundle_dir(scratch: &ScratchDir) -> PathBuf {
    scratch.path().join("preseed")
}

/// Writes a bundle.
pub(crate) fn put_bundle(scratch: &ScratchDir, file: &str, bytes: &[u8]) {
    let directory = bundle_dir(scratch).join("k8s.io");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join(file), bytes).unwrap();
}

struct ScratchHolder(Containerd, Arc<ScratchDir>);

impl Runnable for ScratchHolder {
    fn run(&self, ctx: Context) -> RunFuture {
        let (containerd, held) = (self.0.clone(), Arc::clone(&self.1));
        Box::pin(async move {
            if containerd.preseed.is_some() {
                ctx.run_child("dependent", run_dependent)?;
            }
            ctx.run_child("containerd", containerd)?;
            ctx.signal_ready()?;
            let cancelled = ctx.canceled().await;
            drop(held);
            Err(Failure::from(cancelled))
        })
    }
}

/// Is ready once the images have been there.
async fn run_dependent(ctx: Context) -> Result<(), Failure> {
    ctx.wait_ready("root.containerd.preseed").await?;
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

impl TestDaemon {
    /// Starts a daemon without bundles, and waits until it is ready.
    pub(crate) async fn start(release: Release) -> Self {
        Self::start_with(release, Arc::new(ScratchDir::new().unwrap()), |_| {}).await
    }

    /// Starts a daemon in a directory, with changes; waits until it is ready.
    pub(crate) async fn start_with(
        release: Release,
        scratch: Arc<ScratchDir>,
        change: impl FnOnce(&mut Containerd),
    ) -> Self {
        let daemon = Self::launch(release, scratch, change);
        daemon.wait_state("root.containerd", 1, RunnableState::Ready).await;
        daemon
    }

    /// Starts a daemon in a directory, with changes.
    pub(crate) fn launch(
        release: Release,
        scratch: Arc<ScratchDir>,
        change: impl FnOnce(&mut Containerd),
    ) -> Self {
        let layout = DirectoryLayout::new(scratch.path().join("data"), scratch.path().join("run")).unwrap();
        let journal = LogStore::default();
        let binary = release.programs().join("containerd");
        let mut containerd = Containerd::new(binary, layout.clone(), release.path(), journal.clone());
        change(&mut containerd);
        let output = journal.clone();
        let sink = move |origin: OutputOrigin<'_>| {
            output.line_writer(&origin.dn.parse().unwrap(), WriterOptions::new(origin.stream.as_str()))
        };
        let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        let root = ScratchHolder(containerd, Arc::clone(&scratch));
        let supervisor = Supervisor::builder().default_policy(policy).output_sink(sink).start(root);
        Self { release, layout, journal, supervisor, scratch }
    }

    /// Waits until a runnable has this state in this or a later incarnation.
    pub(crate) async fn wait_state(&self, dn: &str, generation: u64, state: RunnableState) {
        let reached = |node: &RunnableStatus| node.generation >= generation && node.state == state;
        if wait_node(&self.supervisor, dn, reached).await.is_err() {
            panic!("{dn} is not {state:?}: {:#?}\n{}", self.supervisor.snapshot(), self.log("root"));
        }
    }

    /// Waits until a pass of the preseed has imported all bundles: after a failure it tries again by itself.
    pub(crate) async fn wait_imported(&self, preseed: &Preseed) {
        let is_complete =
            |_: &RunnableStatus| preseed.bundle_counts().is_some_and(|counts| counts.failed == 0);
        if wait_node(&self.supervisor, "root.containerd.preseed", is_complete).await.is_err() {
            panic!("{:?}: {}", preseed.bundle_counts(), self.log("root"));
        }
    }

    pub(crate) async fn images(&self) -> ContainerdImages {
        ContainerdImages::connect(&self.layout.socket_path()).await.unwrap()
    }

    pub(crate) fn preseed(&self) -> Preseed {
        Preseed::new(bundle_dir(&self.scratch))
    }

    /// A `ctr` of the same release.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> String {
        let mut ctr = Command::new(self.release.programs().join("ctr"));
        ctr.arg("--address").arg(self.layout.socket_path()).args(["--namespace", "k8s.io"]).args(arguments);
        testbed::command_output(&mut ctr).unwrap()
    }

    /// Runs `echo` in a container of an image and returns its output.
    pub(crate) fn run_echo(&self, image: &str, text: &str) -> String {
        self.ctr(&["run", "--rm", image, &unique_name(), "/bin/busybox", "echo", text])
    }

    /// The log of a runnable and its children.
    pub(crate) fn log(&self, dn: &str) -> String {
        let mut reader =
            self.journal.open_reader(LogQuery::of_dn(dn.parse().unwrap()).include_descendants()).unwrap();
        reader.read_backlog().iter().map(|entry| render::full_text(entry) + "\n").collect()
    }

    /// The pid of the daemon itself.
    pub(crate) fn pid(&self) -> i32 {
        let config = self.layout.config_path().display().to_string();
        let named = |entry: &fs::DirEntry| {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            let is_containerd = words.next().is_some_and(|program| program.ends_with(b"/containerd"));
            is_containerd && words.any(|word| word == config.as_bytes())
        };
        let mut entries = fs::read_dir("/proc").unwrap().flatten();
        let process = entries.find(named).expect("a containerd process");
        process.file_name().to_str().unwrap().parse().unwrap()
    }

    /// Kills only the daemon process.
    pub(crate) fn kill(&self) {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    pub(crate) async fn stop(self) -> Arc<ScratchDir> {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.scratch
    }
}

/// Waits until the status of a runnable meets a condition, and returns the status.
pub(crate) async fn wait_node(
    supervisor: &Supervisor,
    dn: &str,
    is: impl Fn(&RunnableStatus) -> bool,
) -> Result<RunnableStatus, tokio::time::error::Elapsed> {
    let mut changes = supervisor.watch_changes();
    let reached = async {
        loop {
            changes.borrow_and_update();
            let node = supervisor.snapshot().into_iter().find(|node| *node.dn == *dn);
            if let Some(node) = node.filter(&is) {
                return node;
            }
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(120), reached).await
}

/// A unique container name: all containers of the machine share runc's directory.
pub(crate) fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("nodekeel-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A layer with a static busybox.
pub(crate) fn busybox_layer() -> Vec<u8> {
    create_layer(&[("bin/busybox", &fs::read(tools::find_tool(tools::BUSYBOX).unwrap()).unwrap())])
}

/// A layer with these executables.
fn create_layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// The image [`POD_IMAGE`](crate::cri::IMAGE), whose entry point sleeps, so it can be a pod sandbox.
pub(crate) fn pod_image() -> ArchiveBuilder {
    let busybox = fs::read(tools::find_tool(tools::BUSYBOX).unwrap()).unwrap();
    let entry = b"#!/bin/busybox sh\nexec /bin/busybox sleep 100000\n";
    let layer = create_layer(&[("bin/busybox", &busybox), ("entry", entry)]);
    ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[crate::cri::POD_IMAGE], &layer)
}

/// A layer of incompressible bytes.
pub(crate) fn noise_layer(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = Vec::with_capacity(bytes);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(noise.len() as u64);
    tar.append_data(&mut header, Path::new("noise"), noise.as_slice()).unwrap();
    tar.into_inner().unwrap()
}
