//! What lies on a volume, while it opens and closes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::node::{NodeBuilder, NodeHandle};
use nodekeel_node::part::{Part, PlannedService, VolumeHandle};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::{Node, RestartRequest, StartRequest, State, StopRequest, TreeRequest};
use nodekeel_supervisor::{Context, Failure};
use testbed::ScratchDir;
use tokio::sync::watch;
use tokio::time::timeout;

use super::NotesLayout;
use crate::harness::{NO_DAEMONS, TEST_TIMEOUT, service_config};
use crate::volumes::UNREACHABLE_KUBECONFIG;

/// A volume that opens when the test lets it, and counts its users when it is closed.
#[derive(Debug)]
struct GatedVolume {
    volume: Arc<DirectoryVolume>,
    is_open: Arc<AtomicBool>,
    users: Arc<AtomicUsize>,
}

impl GatedVolume {
    fn check_gate(&self) -> Result<(), VolumeError> {
        let source = std::io::Error::other("the cable is out");
        match self.is_open.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(VolumeError::Device { step: "open", path: "/dev/sdz".into(), source }),
        }
    }
}

impl DataVolume for GatedVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        assert_eq!(erase, ErasePolicy::Nothing);
        self.check_gate()?;
        self.volume.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.check_gate()?;
        self.volume.mount_existing()
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        if self.users.load(Ordering::SeqCst) > 0 {
            // A disk would be busy.
            return Err(VolumeError::InvalidState { state: MountState::Mounted });
        }
        self.volume.unmount()
    }

    fn state(&self) -> MountState {
        self.volume.state()
    }
}

/// A part on the volume: a runnable, and one below it that takes a moment to stop.
struct NotesPart(Arc<AtomicUsize>);

/// Counts a user of the volume while it lives.
struct VolumeUser(Arc<AtomicUsize>);

impl VolumeUser {
    fn new(users: &Arc<AtomicUsize>) -> Self {
        users.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(users))
    }
}

impl Drop for VolumeUser {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Part for NotesPart {
    fn name(&self) -> &str {
        "notes"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let users = Arc::clone(&self.0);
        let build = move |volume: &VolumeHandle| {
            let notes = volume.create_layout::<NotesLayout>()?.notes;
            fs::write(notes.path().join("note"), volume.path().as_os_str().as_encoded_bytes())?;
            let users = Arc::clone(&users);
            Ok(move |ctx: Context| take_notes(VolumeUser::new(&users), ctx))
        };
        let service = PlannedService::on_volume("root.notes", "takes notes", build);
        planner.add(service.layout::<NotesLayout>());
    }
}

async fn take_notes(user: VolumeUser, ctx: Context) -> Result<(), Failure> {
    // The runnable itself has a file of the volume open, as that of a member of a cluster has.
    let kept = VolumeUser::new(&user.0);
    ctx.run_child("slow", move |ctx: Context| {
        let user = VolumeUser::new(&kept.0);
        async move {
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            // Longer than its parent takes.
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            drop(user);
            Err::<(), Failure>(canceled.into())
        }
    })?;
    ctx.signal_ready()?;
    ctx.until_canceled().await
}

struct GatedNode {
    scratch: ScratchDir,
    volume: Arc<DirectoryVolume>,
    node: NodeHandle,
    client: NodeClient,
    is_open: Arc<AtomicBool>,
    users: Arc<AtomicUsize>,
}

impl GatedNode {
    /// A node whose volume opens at its first start, or not yet.
    async fn start(is_open: bool) -> Self {
        Self::start_with(is_open, |builder| builder).await
    }

    async fn start_with(is_open: bool, change: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        let scratch = ScratchDir::new().unwrap();
        let disk = Dir::open(scratch.path()).unwrap().ensure_dir("disk", FileMode::PRIVATE_DIR).unwrap();
        let (is_open, users) = (Arc::new(AtomicBool::new(is_open)), Arc::<AtomicUsize>::default());
        let disk = Arc::new(DirectoryVolume::new(disk));
        let volume = GatedVolume {
            volume: Arc::clone(&disk),
            is_open: Arc::clone(&is_open),
            users: Arc::clone(&users),
        };
        let config = format!("{NO_DAEMONS}{}", service_config("free", "sleep 1000", ""));
        let builder = NodeHandle::builder("test.toml", config).data(scratch.path().join("data"));
        let node = change(builder.volume(volume).with(NotesPart(Arc::clone(&users)))).start().unwrap();
        timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
        let client = client::connect(node.control_socket()).await.unwrap();
        Self { scratch, volume: disk, node, client, is_open, users }
    }

    async fn status(&mut self, dn: &str) -> Node {
        let tree = self.client.tree(TreeRequest {}).await.unwrap().into_inner();
        tree.nodes.into_iter().find(|node| node.dn == dn).unwrap_or_else(|| panic!("no {dn}"))
    }

    /// Waits until the status of a DN satisfies the predicate.
    async fn wait_for(&mut self, dn: &str, is: impl Fn(&Node) -> bool) -> Node {
        let mut changes = self.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
        let found = async {
            while let Some(tree) = changes.message().await.unwrap() {
                if let Some(node) = tree.nodes.into_iter().find(|node| node.dn == dn && is(node)) {
                    return node;
                }
            }
            panic!("the node has stopped");
        };
        timeout(TEST_TIMEOUT, found).await.unwrap()
    }

    async fn wait_ready(&self, dn: &str) {
        timeout(TEST_TIMEOUT, self.node.wait_ready(dn)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_on_a_volume_waits_until_it_opens_and_the_rest_runs_meanwhile() {
    let mut gated = GatedNode::start(false).await;
    gated.wait_ready("root.service.free").await;
    let failed = gated.wait_for("root.storage", |node| !node.exits.is_empty()).await;
    let says = "can't open the data volume: can't open disk /dev/sdz: the cable is out";
    assert!(failed.exits[0].reason.contains(says), "{:?}", failed.exits);
    let waiting = gated.status("root.notes").await;
    assert_eq!(waiting.waiting_on, ["root.storage"], "{waiting:?}");
    assert!(!gated.scratch.path().join("disk/notes").exists());

    gated.is_open.store(true, Ordering::SeqCst);
    gated.wait_ready("root.notes").await;
    let note = fs::read_to_string(gated.scratch.path().join("disk/notes/note")).unwrap();
    assert_eq!(Path::new(&note), gated.scratch.path().join("disk"));
    assert_eq!(gated.status("root.notes").await.generation, 1, "nothing has failed on the volume");
    gated.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_on_a_volume_stops_before_it_closes_and_starts_when_it_is_open_again() {
    let mut gated = GatedNode::start(true).await;
    gated.wait_ready("root.notes").await;

    gated.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    let again =
        gated.wait_for("root.notes", |node| node.generation == 2 && node.state() == State::Ready).await;
    assert_eq!(again.failures, 0);
    assert_eq!(gated.status("root.notes.slow").await.generation, 2);
    let storage = gated.status("root.storage").await;
    assert!(
        storage.failures == 0 && storage.exits.iter().all(|exit| exit.state() != State::Dead),
        "{storage:?}"
    );
    assert_eq!(gated.status("root.service.free").await.generation, 1);

    gated.client.stop(StopRequest { dn: "root.storage".into() }).await.unwrap();
    gated.wait_for("root.storage", |node| node.state() == State::Stopped).await;
    assert_eq!(gated.users.load(Ordering::SeqCst), 0);
    let lost = gated.wait_for("root.notes", |node| node.waiting_on == ["root.storage"]).await;
    assert_eq!(lost.state(), State::New);

    gated.client.start(StartRequest { dn: "root.storage".into() }).await.unwrap();
    gated.wait_for("root.notes", |node| node.generation == 3 && node.state() == State::Ready).await;
    let report = gated.node.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    assert_eq!(gated.volume.state(), MountState::Unmounted, "a shutdown closes it, too");
}

/// A part on the volume that stops when the test lets it.
struct LazyPart(watch::Receiver<bool>);

impl Part for LazyPart {
    fn name(&self) -> &str {
        "lazy"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let may_stop = self.0.clone();
        let build = move |_: &VolumeHandle| {
            let may_stop = may_stop.clone();
            Ok(move |ctx: Context| {
                let mut may_stop = may_stop.clone();
                async move {
                    ctx.signal_ready()?;
                    let canceled = ctx.canceled().await;
                    let _ = may_stop.wait_for(|may_stop| *may_stop).await;
                    Err::<(), Failure>(canceled.into())
                }
            })
        };
        planner.add(PlannedService::on_volume("root.lazy", "takes its time", build));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_has_stopped_on_a_volume_stays_stopped_when_the_volume_closes() {
    let (may_stop, gate) = watch::channel(false);
    let mut gated = GatedNode::start_with(true, |builder| builder.with(LazyPart(gate))).await;
    gated.wait_ready("root.lazy").await;
    gated.wait_ready("root.notes").await;
    gated.client.stop(StopRequest { dn: "root.lazy".into() }).await.unwrap();
    gated.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    // The volume is closing: its other user has stopped.
    gated.wait_for("root.notes", |node| node.waiting_on == ["root.storage"]).await;
    may_stop.send(true).unwrap();
    gated.wait_for("root.notes", |node| node.generation == 2 && node.state() == State::Ready).await;
    let lazy = gated.status("root.lazy").await;
    assert_eq!((lazy.state(), lazy.generation), (State::Stopped, 1), "{lazy:?}");
    gated.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_containers_keep_busy_is_used_on_when_root_storage_restarts() {
    let mut gated = GatedNode::start(true).await;
    gated.wait_ready("root.notes").await;
    let container = VolumeUser::new(&gated.users);

    for generation in [2, 3] {
        gated.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
        gated
            .wait_for("root.notes", |node| node.generation == generation && node.state() == State::Ready)
            .await;
    }
    drop(container);
    gated.node.shutdown().await;
}

/// A volume that notes what the provisioner has open on it when it is closed.
#[derive(Debug)]
struct WatchedVolume {
    volume: DirectoryVolume,
    volumes: PathBuf,
    open: Arc<Mutex<Vec<Vec<PathBuf>>>>,
}

impl DataVolume for WatchedVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.volume.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.volume.mount_existing()
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let files = files.filter_map(|file| fs::read_link(file.path()).ok());
        self.open.lock().unwrap().push(files.filter(|file| file.starts_with(&self.volumes)).collect());
        self.volume.unmount()
    }

    fn state(&self) -> MountState {
        self.volume.state()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provisioner_has_nothing_open_on_the_volume_when_it_is_closed() {
    let scratch = ScratchDir::new().unwrap();
    let disk = Dir::open(scratch.path()).unwrap().ensure_dir("disk", FileMode::PRIVATE_DIR).unwrap();
    let (volumes, open) = (disk.path().canonicalize().unwrap().join("volumes"), Arc::<Mutex<_>>::default());
    let volume = WatchedVolume { volume: DirectoryVolume::new(disk), volumes, open: Arc::clone(&open) };
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, UNREACHABLE_KUBECONFIG).unwrap();
    let keys = format!("kubeconfig = {kubeconfig:?}\ncsi = false\nquota = \"none\"\n");
    let config = format!("{NO_DAEMONS}[provisioner]\n{keys}");
    let builder = NodeHandle::builder("test.toml", config).data(scratch.path().join("data"));
    let node = builder.volume(volume).start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
    let mut client = client::connect(node.control_socket()).await.unwrap();
    let mut changes = client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
    let runs = async {
        while let Some(tree) = changes.message().await.unwrap() {
            if tree.nodes.iter().any(|node| node.dn == "root.provisioner.controller") {
                return;
            }
        }
        panic!("the node has stopped");
    };
    timeout(TEST_TIMEOUT, runs).await.unwrap();
    drop((changes, client));
    open.lock().unwrap().clear();
    node.shutdown().await;
    assert_eq!(*open.lock().unwrap(), [Vec::<PathBuf>::new()]);
}
