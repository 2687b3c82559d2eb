//! A containerd under a supervisor, in a private directory.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{
    ConfigVersion, Containerd, ContainerdConfig, ContainerdImages, ContainerdSettings, CriSettings,
    DirectoryLayout, Image, ImageStore as _, Namespace, Preseed, PreseedReport,
};
use nodekeel_logtree::{LogQuery, LogStore, WriterOptions, render};
use nodekeel_supervisor::{
    Backoff, ChildPolicy, Context, Failure, OutputOrigin, RunFuture, Runnable, RunnableState, RunnableStatus,
    Supervisor, WaitReason,
};
use testbed::guest::disk;
use testbed::{ScratchDir, gotool, tools, write_program};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// A release of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    Debian,
    Newest,
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

pub(crate) fn namespace() -> Namespace {
    "k8s.io".parse().unwrap()
}

/// A private directory, and the containerd that is to run in it: a test changes it before it starts.
pub(crate) struct Setup {
    pub(crate) release: Release,
    pub(crate) containerd: Containerd,
    pub(crate) layout: DirectoryLayout,
    pub(crate) journal: LogStore,
    pub(crate) scratch: Arc<ScratchDir>,
}

impl Setup {
    pub(crate) fn new(release: Release) -> Self {
        Self::in_directory(release, Arc::new(ScratchDir::new().unwrap()))
    }

    pub(crate) fn in_directory(release: Release, scratch: Arc<ScratchDir>) -> Self {
        Self::of_program(release.programs().join("containerd"), release.path(), release, scratch)
    }

    /// A script in the place of containerd.
    pub(crate) fn fake(script: &str) -> Self {
        let scratch = Arc::new(ScratchDir::new().unwrap());
        let program = scratch.path().join("containerd");
        write_program(&program, &format!("#!/bin/sh\n{script}\n")).unwrap();
        let mut setup = Self::of_program(program, "/usr/bin:/bin".into(), Release::Debian, scratch);
        setup.containerd.grace_period = Duration::from_millis(200);
        setup
    }

    fn of_program(program: PathBuf, path: String, release: Release, scratch: Arc<ScratchDir>) -> Self {
        let layout = DirectoryLayout::new(scratch.path().join("data"), scratch.path().join("run")).unwrap();
        let journal = LogStore::default();
        let containerd = Containerd::new(program, layout.clone(), path, journal.clone());
        Self { release, containerd, layout, journal, scratch }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The bundle with this name.
    pub(crate) fn bundle_path(&self, file: &str) -> PathBuf {
        self.path("preseed/k8s.io").join(file)
    }

    pub(crate) fn put_bundle(&self, file: &str, bytes: &[u8]) {
        let path = self.bundle_path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Writes a bundle with one image.
    pub(crate) fn put_image(&self, file: &str, name: &str, layer: &[u8]) {
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&[name], layer);
        self.put_bundle(file, &archive.to_tar());
    }

    /// The bundles, which no runnable imports by itself.
    pub(crate) fn preseed(&self) -> Preseed {
        Preseed::new(self.path("preseed"))
    }

    /// Lets the containerd import the bundles.
    pub(crate) fn enable_preseed(&mut self) -> Preseed {
        let preseed = self.preseed();
        self.containerd.preseed = Some(preseed.clone());
        preseed
    }

    pub(crate) fn cri(&self) -> CriSettings {
        CriSettings { cni_conf: self.path("cni"), ..CriSettings::default() }
    }

    pub(crate) fn enable_cri(&mut self, version: ConfigVersion, cri: CriSettings) {
        self.containerd.config = ContainerdConfig::Settings(ContainerdSettings {
            version: Some(version),
            cri: Some(cri),
            ..ContainerdSettings::default()
        });
    }

    /// Starts a script in the place of containerd, which is the variable `$real` in it.
    pub(crate) fn replace_program(&mut self, script: &str) {
        let program = self.path("containerd");
        let real = self.release.programs().join("containerd");
        write_program(&program, &format!("#!/bin/sh\nreal={}\n{script}\n", real.display())).unwrap();
        self.containerd.binary = program;
    }

    /// A FIFO on which a script waits for a line.
    pub(crate) fn create_gate(&self) -> PathBuf {
        let gate = self.path("gate");
        rustix::fs::mkfifoat(rustix::fs::CWD, &gate, rustix::fs::Mode::RWXU).unwrap();
        gate
    }

    /// Starts the daemon.
    pub(crate) fn launch(self) -> TestDaemon {
        let output = self.journal.clone();
        let sink = move |origin: OutputOrigin<'_>| {
            output.line_writer(&origin.dn.parse().unwrap(), WriterOptions::new(origin.stream.as_str()))
        };
        let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        let root = ScratchHolder(self.containerd.clone(), Arc::clone(&self.scratch));
        let supervisor = Supervisor::builder().default_policy(policy).output_sink(sink).start(root);
        TestDaemon { supervisor, setup: self }
    }

    /// Starts the daemon, and waits until it is ready.
    pub(crate) async fn start(self) -> TestDaemon {
        let daemon = self.launch();
        daemon.wait_ready("root.containerd", 1).await;
        daemon
    }
}

pub(crate) const PRESEED: &str = "root.containerd.preseed";

/// A running containerd. Dropping the scratch directory removes its processes and mounts.
pub(crate) struct TestDaemon {
    pub(crate) supervisor: Supervisor,
    setup: Setup,
}

impl std::ops::Deref for TestDaemon {
    type Target = Setup;

    fn deref(&self) -> &Setup {
        &self.setup
    }
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
    ctx.wait_ready(PRESEED).await?;
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

impl TestDaemon {
    /// Waits until a runnable is ready in this or a later incarnation.
    pub(crate) async fn wait_ready(&self, dn: &str, generation: u64) {
        let is_ready =
            |node: &RunnableStatus| node.generation >= generation && node.state == RunnableState::Ready;
        if self.wait_node(dn, is_ready).await.is_err() {
            panic!("{dn} is not ready: {:#?}\n{}", self.supervisor.snapshot(), self.log("root"));
        }
    }

    /// Waits until the status of a runnable meets a condition, and returns the status.
    pub(crate) async fn wait_for(
        &self,
        dn: &str,
        condition: impl Fn(&RunnableStatus) -> bool,
    ) -> RunnableStatus {
        self.wait_node(dn, condition).await.unwrap()
    }

    /// Waits for three consecutive failures of the daemon; readiness would have reset the count.
    pub(crate) async fn wait_failed(&self) -> RunnableStatus {
        let node = self.wait_for("root.containerd", |node| node.failures >= 3).await;
        assert!(node.exits.iter().all(|exit| exit.state == RunnableState::Dead), "{node:?}");
        node
    }

    /// Waits until the preseed waits with a reason that names the image and its pause.
    pub(crate) async fn wait_preseed_pauses(&self, image: &str) {
        let is_waiting = |node: &RunnableStatus| {
            let WaitReason::Condition(reason) = &node.waiting_for else { return false };
            reason.contains(image) && reason.contains("10 minutes")
        };
        let waiting = self.wait_for(PRESEED, is_waiting).await;
        assert_eq!((waiting.generation, waiting.exits.len()), (1, 0), "{waiting:?}");
    }

    /// The status of a runnable now.
    pub(crate) fn status(&self, dn: &str) -> Option<RunnableStatus> {
        self.supervisor.snapshot().into_iter().find(|node| *node.dn == *dn)
    }

    /// Waits until a pass of the preseed has imported all bundles: after a failure it tries again by itself.
    pub(crate) async fn wait_imported(&self, preseed: &Preseed) {
        let mut problems = preseed.watch_problem();
        let imported = problems.wait_for(|problem| {
            problem.is_none() && preseed.bundle_counts().is_some_and(|counts| counts.failed == 0)
        });
        if timeout(Duration::from_secs(120), imported).await.is_err() {
            panic!("{:?}: {}", preseed.bundle_counts(), self.log("root"));
        }
    }

    /// Waits until the preseed has a problem with this text, and returns all of it.
    pub(crate) async fn wait_problem(&self, preseed: &Preseed, text: &str) -> String {
        let mut problems = preseed.watch_problem();
        let named =
            problems.wait_for(|problem| problem.as_ref().is_some_and(|problem| problem.contains(text)));
        match timeout(Duration::from_secs(120), named).await {
            Ok(found) => found.unwrap().clone().unwrap(),
            Err(_) => panic!("{:?} does not contain {text}: {}", preseed.problem(), self.log("root")),
        }
    }

    pub(crate) async fn images(&self) -> ContainerdImages {
        ContainerdImages::connect(&self.layout.socket_path()).await.unwrap()
    }

    /// Imports the bundles.
    pub(crate) async fn import_bundles(&self) -> PreseedReport {
        self.preseed().run(&self.images().await).await.unwrap()
    }

    pub(crate) async fn list_images(&self) -> Vec<Image> {
        self.images().await.list_images(&namespace()).await.unwrap()
    }

    /// The names of all images, sorted.
    pub(crate) async fn image_names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.list_images().await.into_iter().map(|image| image.name).collect();
        names.sort();
        names
    }

    /// A `ctr` of the same release.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> String {
        let mut ctr = Command::new(self.release.programs().join("ctr"));
        ctr.arg("--address").arg(self.layout.socket_path()).args(["--namespace", "k8s.io"]).args(arguments);
        testbed::command_output(&mut ctr).unwrap()
    }

    /// Runs `echo` in a container of an image and returns its output.
    pub(crate) fn run_echo(&self, image: &str, text: &str) -> String {
        let run = || self.ctr(&["run", "--rm", image, &unique_name(), "/bin/busybox", "echo", text]);
        // ctr 1.6 sometimes ends before it has copied the output.
        (0..3).map(|_| run()).find(|output| !output.is_empty()).unwrap_or_default()
    }

    /// The log of a runnable and its children.
    pub(crate) fn log(&self, dn: &str) -> String {
        let mut reader =
            self.journal.open_reader(LogQuery::of_dn(dn.parse().unwrap()).include_descendants()).unwrap();
        reader.read_backlog().iter().map(|entry| render::full_text(entry) + "\n").collect()
    }

    /// The pid of the daemon itself.
    pub(crate) fn pid(&self) -> i32 {
        let config = self.layout.data().config.path().display().to_string();
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

    async fn wait_node(
        &self,
        dn: &str,
        is: impl Fn(&RunnableStatus) -> bool,
    ) -> Result<RunnableStatus, Elapsed> {
        let mut changes = self.supervisor.watch_changes();
        let reached = async {
            loop {
                changes.borrow_and_update();
                if let Some(node) = self.status(dn).filter(&is) {
                    return node;
                }
                changes.changed().await.unwrap();
            }
        };
        timeout(Duration::from_secs(120), reached).await
    }

    pub(crate) async fn stop(self) -> Arc<ScratchDir> {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.setup.scratch
    }
}

/// A unique container name: all containers of the machine share runc's directory.
pub(crate) fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("nodekeel-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A layer with a static busybox.
pub(crate) fn busybox_layer() -> Vec<u8> {
    let busybox = fs::read(tools::find_tool(tools::BUSYBOX).unwrap()).unwrap();
    create_layer(&[("bin/busybox", &busybox)])
}

/// A layer with these executables.
pub(crate) fn create_layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// The image [`POD_IMAGE`](crate::cri::POD_IMAGE), whose entry point sleeps, so it can be a pod sandbox.
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
    create_layer(&[("noise", &noise)])
}
