//! A containerd under a supervisor, in a directory of its own.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{Containerd, ContainerdImages, Namespace, Place, Preseed};
use nodekeel_logtree::{Journal, Query, WriterOptions, render};
use nodekeel_supervisor::{
    Backoff, Context, Failure, NodeStatus, Origin, Policy, RunFuture, Runnable, State, Supervisor,
};
use testbed::guest::inside;
use testbed::{Scratch, gotool, tools};

/// Which containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    Debian,
    Newest,
}

pub(crate) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
}

impl Release {
    /// The directory of its programs.
    pub(crate) fn programs(self) -> PathBuf {
        match self {
            Self::Debian => tools::find(tools::CONTAINERD).unwrap().parent().unwrap().to_owned(),
            Self::Newest if inside::is_inside() => PathBuf::from("/usr/bin"),
            Self::Newest => gotool::CONTAINERD.directory().unwrap(),
        }
    }

    /// The `PATH` in which it finds its shim and runc.
    pub(crate) fn path(self) -> String {
        if inside::is_inside() {
            return self.programs().display().to_string();
        }
        let runc = tools::find(tools::RUNC).unwrap();
        format!("{}:{}", self.programs().display(), runc.parent().unwrap().display())
    }
}

/// A running containerd. Its processes and mounts are gone with the scratch directory.
pub(crate) struct Daemon {
    pub(crate) release: Release,
    pub(crate) place: Place,
    pub(crate) journal: Journal,
    pub(crate) supervisor: Supervisor,
    pub(crate) scratch: Arc<Scratch>,
}

pub(crate) fn namespace() -> Namespace {
    "k8s.io".parse().unwrap()
}

/// Where the bundles lie.
pub(crate) fn bundles(scratch: &Scratch) -> PathBuf {
    scratch.path().join("preseed")
}

/// Writes a bundle.
pub(crate) fn put(scratch: &Scratch, file: &str, bytes: &[u8]) {
    let directory = bundles(scratch).join("k8s.io");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join(file), bytes).unwrap();
}

struct Held(Containerd, Arc<Scratch>);

impl Runnable for Held {
    fn run(&self, ctx: Context) -> RunFuture {
        let (containerd, held) = (self.0.clone(), Arc::clone(&self.1));
        Box::pin(async move {
            ctx.run("containerd", containerd)?;
            ctx.ready()?;
            let cancelled = ctx.cancelled().await;
            drop(held);
            Err(Failure::from(cancelled))
        })
    }
}

impl Daemon {
    /// Starts one without bundles, and waits until it is ready.
    pub(crate) async fn start(release: Release) -> Self {
        Self::start_with(release, Arc::new(Scratch::new().unwrap()), |_| {}).await
    }

    /// Starts one in a directory, with changes; waits until it is ready.
    pub(crate) async fn start_with(
        release: Release,
        scratch: Arc<Scratch>,
        change: impl FnOnce(&mut Containerd),
    ) -> Self {
        let daemon = Self::launch(release, scratch, change);
        daemon.until("root.containerd", 1, State::Ready).await;
        daemon
    }

    /// Starts one in a directory, with changes.
    pub(crate) fn launch(
        release: Release,
        scratch: Arc<Scratch>,
        change: impl FnOnce(&mut Containerd),
    ) -> Self {
        let place = Place::new(scratch.path().join("data"), scratch.path().join("run")).unwrap();
        let journal = Journal::default();
        let binary = release.programs().join("containerd");
        let mut containerd = Containerd::new(binary, place.clone(), release.path(), journal.clone());
        change(&mut containerd);
        let output = journal.clone();
        let sink = move |origin: Origin<'_>| {
            output.writer(&origin.dn.parse().unwrap(), WriterOptions::new(origin.stream.as_str()))
        };
        let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
        let root = Held(containerd, Arc::clone(&scratch));
        let supervisor = Supervisor::builder().policy(policy).output(sink).start(root);
        Self { release, place, journal, supervisor, scratch }
    }

    /// Waits until a runnable has this state in at least this run of it.
    pub(crate) async fn until(&self, dn: &str, generation: u64, state: State) {
        let reached = |node: &NodeStatus| node.generation >= generation && node.state == state;
        if until(&self.supervisor, dn, reached).await.is_err() {
            panic!("{dn} is not {state:?}: {:#?}\n{}", self.supervisor.snapshot(), self.log("root"));
        }
    }

    pub(crate) async fn images(&self) -> ContainerdImages {
        ContainerdImages::connect(&self.place.socket()).await.unwrap()
    }

    pub(crate) fn preseed(&self) -> Preseed {
        Preseed::new(bundles(&self.scratch))
    }

    /// A `ctr` of the same release.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> String {
        let mut ctr = Command::new(self.release.programs().join("ctr"));
        ctr.arg("--address").arg(self.place.socket()).args(["--namespace", "k8s.io"]).args(arguments);
        testbed::output(&mut ctr).unwrap()
    }

    /// Runs a program of an image's in a container to its end, and gives what it prints.
    pub(crate) fn say(&self, image: &str, text: &str) -> String {
        self.ctr(&["run", "--rm", image, &unique(), "/bin/busybox", "echo", text])
    }

    /// The log of a runnable and those below it.
    pub(crate) fn log(&self, dn: &str) -> String {
        let mut reader = self.journal.read(Query::new(dn.parse().unwrap()).children()).unwrap();
        reader.backlog().iter().map(|entry| render::full(entry) + "\n").collect()
    }

    /// The pid of the daemon itself.
    pub(crate) fn pid(&self) -> i32 {
        let config = self.place.config().display().to_string();
        let named = |entry: &fs::DirEntry| {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            let is_containerd = words.next().is_some_and(|program| program.ends_with(b"/containerd"));
            is_containerd && words.any(|word| word == config.as_bytes())
        };
        let mut entries = fs::read_dir("/proc").unwrap().flatten();
        let process = entries.find(named).expect("it runs");
        process.file_name().to_str().unwrap().parse().unwrap()
    }

    /// Kills the daemon, and nothing else.
    pub(crate) fn kill(&self) {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    pub(crate) async fn stop(self) -> Arc<Scratch> {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.scratch
    }
}

/// Waits until a runnable is as it should be, and gives how it was then.
pub(crate) async fn until(
    supervisor: &Supervisor,
    dn: &str,
    is: impl Fn(&NodeStatus) -> bool,
) -> Result<NodeStatus, tokio::time::error::Elapsed> {
    let mut changes = supervisor.watch();
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

/// A name for a container: runc's directory of them is one for the whole machine.
pub(crate) fn unique() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("nodekeel-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A static busybox as a layer, which prints and sleeps.
pub(crate) fn busybox_layer() -> Vec<u8> {
    layer(&[("bin/busybox", &fs::read(tools::find(tools::BUSYBOX).unwrap()).unwrap())])
}

/// Programs as a layer.
fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, path, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// The image [`IMAGE`](crate::cri::IMAGE), which a pod can live in, since it waits by itself.
pub(crate) fn pod_image() -> Archive {
    let busybox = fs::read(tools::find(tools::BUSYBOX).unwrap()).unwrap();
    let entry = b"#!/bin/busybox sh\nexec /bin/busybox sleep 100000\n";
    let layer = layer(&[("bin/busybox", &busybox), ("entry", entry)]);
    Archive::new(Shape::Layout).image(&[crate::cri::IMAGE], &layer)
}

/// A layer of so many bytes that no compression makes small.
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
