//! The data volume: its users wait for it, follow it, and have stopped before it is closed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_node::node::NodeBuilder;
use nodekeel_node::part::{PlannedService, VolumeHandle};
use nodekeel_node::v1::{RestartRequest, StartRequest, State, StopRequest};
use nodekeel_supervisor::{Context, Failure};
use testbed::ScratchDir;
use tokio::sync::watch;

use crate::harness::{TestNode, TestPart, node_builder, service_config};

nodekeel_localstorage::layout! {
    /// On the volume: the part of the notes.
    struct NotesLayout {
        /// The notes.
        notes: LayoutDir = "notes", 0o700;
    }
}

type Hook = Box<dyn Fn() -> Result<(), VolumeError> + Send + Sync>;

/// A directory that calls the test before it is mounted and unmounted.
struct TestVolume {
    volume: Arc<DirectoryVolume>,
    before_mount: Hook,
    before_unmount: Hook,
}

impl fmt::Debug for TestVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.volume.fmt(f)
    }
}

impl DataVolume for TestVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        assert_eq!(erase, ErasePolicy::Nothing);
        (self.before_mount)()?;
        self.volume.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        (self.before_mount)()?;
        self.volume.mount_existing()
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        (self.before_unmount)()?;
        self.volume.unmount()
    }

    fn state(&self) -> MountState {
        self.volume.state()
    }
}

/// A new directory for a volume below the scratch directory.
fn new_disk(scratch: &ScratchDir) -> Dir {
    Dir::open(scratch.path()).unwrap().ensure_dir("disk", FileMode::PRIVATE_DIR).unwrap()
}

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

/// A part on the volume: a runnable, and one below it that takes a moment to stop.
fn notes_part(users: Arc<AtomicUsize>) -> TestPart {
    TestPart::new("notes", move |planner| {
        let users = Arc::clone(&users);
        let build = move |volume: &VolumeHandle| {
            let notes = volume.create_layout::<NotesLayout>()?.notes;
            fs::write(notes.path().join("note"), volume.path().as_os_str().as_encoded_bytes())?;
            let users = Arc::clone(&users);
            Ok(move |ctx: Context| take_notes(VolumeUser::new(&users), ctx))
        };
        let service = PlannedService::on_volume("root.notes", "takes notes", build);
        planner.add(service.layout::<NotesLayout>());
    })
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
    node: TestNode,
    volume: Arc<DirectoryVolume>,
    is_open: Arc<AtomicBool>,
    users: Arc<AtomicUsize>,
}

impl GatedNode {
    /// A node whose volume opens at its first start, or not yet.
    async fn start(is_open: bool) -> Self {
        Self::start_with(is_open, |builder| builder).await
    }

    async fn start_with(is_open: bool, change: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        let (scratch, builder) = node_builder(&service_config("free", "sleep 1000", ""));
        let volume = Arc::new(DirectoryVolume::new(new_disk(&scratch)));
        let (is_open, users) = (Arc::new(AtomicBool::new(is_open)), Arc::<AtomicUsize>::default());
        let (gate, count) = (Arc::clone(&is_open), Arc::clone(&users));
        let gated = TestVolume {
            volume: Arc::clone(&volume),
            before_mount: Box::new(move || {
                let source = std::io::Error::other("the cable is out");
                let error = VolumeError::Device { step: "open", path: "/dev/sdz".into(), source };
                if gate.load(Ordering::SeqCst) { Ok(()) } else { Err(error) }
            }),
            before_unmount: Box::new(move || {
                // A disk would be busy.
                let error = VolumeError::InvalidState { state: MountState::Mounted };
                if count.load(Ordering::SeqCst) == 0 { Ok(()) } else { Err(error) }
            }),
        };
        let builder = builder.volume(gated).with(notes_part(Arc::clone(&users)));
        Self { node: TestNode::start_in(scratch, change(builder)).await, volume, is_open, users }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_on_a_volume_waits_until_it_opens_and_the_rest_runs_meanwhile() {
    let mut gated = GatedNode::start(false).await;
    gated.node.wait_ready("root.service.free").await;
    let failed = gated.node.wait_for("root.storage", |node| !node.exits.is_empty()).await;
    let says = "can't open the data volume: can't open disk /dev/sdz: the cable is out";
    assert!(failed.exits[0].reason.contains(says), "{:?}", failed.exits);
    let waiting = gated.node.status("root.notes").await;
    assert_eq!(waiting.waiting_on, ["root.storage"], "{waiting:?}");
    assert!(!gated.node.scratch.path().join("disk/notes").exists());

    gated.is_open.store(true, Ordering::SeqCst);
    gated.node.wait_ready("root.notes").await;
    let note = fs::read_to_string(gated.node.scratch.path().join("disk/notes/note")).unwrap();
    assert_eq!(Path::new(&note), gated.node.scratch.path().join("disk"));
    assert_eq!(gated.node.status("root.notes").await.generation, 1, "nothing has failed on the volume");
    gated.node.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_on_a_volume_stops_before_it_closes_and_starts_when_it_is_open_again() {
    let mut gated = GatedNode::start(true).await;
    gated.node.wait_ready("root.notes").await;

    gated.node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    let again = gated.node.wait_run("root.notes", 2).await;
    assert_eq!(again.failures, 0);
    assert_eq!(gated.node.status("root.notes.slow").await.generation, 2);
    let storage = gated.node.status("root.storage").await;
    assert!(
        storage.failures == 0 && storage.exits.iter().all(|exit| exit.state() != State::Dead),
        "{storage:?}"
    );
    assert_eq!(gated.node.status("root.service.free").await.generation, 1);

    gated.node.client.stop(StopRequest { dn: "root.storage".into() }).await.unwrap();
    gated.node.wait_for("root.storage", |node| node.state() == State::Stopped).await;
    assert_eq!(gated.users.load(Ordering::SeqCst), 0);
    let lost = gated.node.wait_for("root.notes", |node| node.waiting_on == ["root.storage"]).await;
    assert_eq!(lost.state(), State::New);

    gated.node.client.start(StartRequest { dn: "root.storage".into() }).await.unwrap();
    gated.node.wait_run("root.notes", 3).await;
    let report = gated.node.node.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    assert_eq!(gated.volume.state(), MountState::Unmounted, "a shutdown closes it, too");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_has_stopped_on_a_volume_stays_stopped_when_the_volume_closes() {
    let (may_stop, gate) = watch::channel(false);
    let lazy = TestPart::new("lazy", move |planner| {
        let may_stop = gate.clone();
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
    });
    let mut gated = GatedNode::start_with(true, |builder| builder.with(lazy)).await;
    gated.node.wait_ready("root.lazy").await;
    gated.node.wait_ready("root.notes").await;
    gated.node.client.stop(StopRequest { dn: "root.lazy".into() }).await.unwrap();
    gated.node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    // The volume is closing: its other user has stopped.
    gated.node.wait_for("root.notes", |node| node.waiting_on == ["root.storage"]).await;
    may_stop.send(true).unwrap();
    gated.node.wait_run("root.notes", 2).await;
    let lazy = gated.node.status("root.lazy").await;
    assert_eq!((lazy.state(), lazy.generation), (State::Stopped, 1), "{lazy:?}");
    gated.node.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_containers_keep_busy_is_used_on_when_root_storage_restarts() {
    let mut gated = GatedNode::start(true).await;
    gated.node.wait_ready("root.notes").await;
    let container = VolumeUser::new(&gated.users);

    for generation in [2, 3] {
        gated.node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
        gated.node.wait_run("root.notes", generation).await;
    }
    drop(container);
    gated.node.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provisioner_has_nothing_open_on_the_volume_when_it_is_closed() {
    let scratch = ScratchDir::new().unwrap();
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, testbed::UNREACHABLE_KUBECONFIG).unwrap();
    let disk = new_disk(&scratch);
    let (volumes, open) =
        (disk.path().canonicalize().unwrap().join("volumes"), Arc::<Mutex<Vec<Vec<PathBuf>>>>::default());
    let noted = Arc::clone(&open);
    let volume = TestVolume {
        volume: Arc::new(DirectoryVolume::new(disk)),
        before_mount: Box::new(|| Ok(())),
        before_unmount: Box::new(move || {
            let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
            let files = files.filter_map(|file| fs::read_link(file.path()).ok());
            noted.lock().unwrap().push(files.filter(|file| file.starts_with(&volumes)).collect());
            Ok(())
        }),
    };
    let config = format!("[provisioner]\nkubeconfig = {kubeconfig:?}\ncsi = false\nquota = \"none\"\n");
    let mut node = TestNode::start_with(&config, |builder| builder.volume(volume)).await;
    node.wait_for("root.provisioner.controller", |_| true).await;
    open.lock().unwrap().clear();
    node.node.shutdown().await;
    assert_eq!(*open.lock().unwrap(), [Vec::<PathBuf>::new()]);
}
