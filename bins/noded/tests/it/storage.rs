//! The data volume: what lies on it waits for it, follows it, and is gone before it is closed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use nodekeel_localstorage::tree::LayoutDir;
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

use crate::harness::{
    NO_DAEMONS, NodedProcess, TEST_TIMEOUT, noded_command, service_config, stderr_and_code,
};

nodekeel_localstorage::layout! {
    /// On the volume: the part of the notes.
    struct NotesLayout {
        /// The notes.
        notes: LayoutDir = "notes", 0o700;
    }
}

/// A volume that opens when the test lets it, and counts its users when it is closed.
#[derive(Debug)]
struct GatedVolume {
    volume: DirectoryVolume,
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
    let users = Arc::clone(&user.0);
    ctx.run_child("slow", move |ctx: Context| {
        let user = VolumeUser::new(&users);
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
        let volume = GatedVolume {
            volume: DirectoryVolume::new(disk),
            is_open: Arc::clone(&is_open),
            users: Arc::clone(&users),
        };
        let config = format!("{NO_DAEMONS}{}", service_config("free", "sleep 1000", ""));
        let builder = NodeHandle::builder("test.toml", config).data(scratch.path().join("data"));
        let node = change(builder.volume(volume).with(NotesPart(Arc::clone(&users)))).start().unwrap();
        timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
        let client = client::connect(node.control_socket()).await.unwrap();
        Self { scratch, node, client, is_open, users }
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

/// A directory that is mounted on another one, as long as it exists.
struct BindMount(PathBuf);

impl BindMount {
    fn new(source: &Path, target: &Path) -> Self {
        mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        Self(target.to_owned())
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
#[ignore = "needs root: it mounts a directory"]
fn a_volume_whose_file_system_is_not_mounted_is_named_and_none_is_created_in_its_place() {
    let scratch = ScratchDir::new().unwrap();
    let (disk, volume) = (scratch.path().join("disk"), scratch.path().join("data/data"));
    fs::create_dir(&disk).unwrap();
    fs::create_dir_all(&volume).unwrap();
    let mounted = BindMount::new(&disk, &volume);
    let mut node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.ask(&["--timeout=60", "start", "--wait", "root.storage"]);
    assert!(disk.join(".data-volume").exists());
    node.signal(Signal::SIGKILL);
    node.wait();
    let scratch = std::mem::replace(&mut node.scratch, ScratchDir::new().unwrap());
    drop((node, mounted));

    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let text = String::from_utf8(node.nodectl(&["status", "root.storage"]).stdout).unwrap();
    let says = format!("the file system that was mounted on {} is not mounted; mount it", volume.display());
    assert!(text.contains(&says), "{text}");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "a volume was created");
    let mounted = BindMount::new(&disk, &volume);
    node.ask(&["--timeout=60", "start", "--wait", "root.storage"]);
    node.stop();
    drop(mounted);
}

#[test]
fn a_node_whose_volume_does_not_open_answers_and_says_what_to_do() {
    let scratch = ScratchDir::new().unwrap();
    let volume = scratch.path().join("data/data");
    fs::create_dir_all(&volume).unwrap();
    fs::write(volume.join("letter"), "dear").unwrap();
    let needs = "depends_on = [\"storage\"]";
    let config = format!("{NO_DAEMONS}{}", service_config("a", "sleep 1000", needs));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let output = node.nodectl(&["status", "root.storage"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(6), "{text}");
    let command = text.split("type: ").nth(1).and_then(|rest| rest.lines().next()).expect(&text).to_owned();
    assert!(
        text.contains("has files, but not the file .data-volume") && text.contains("can't open"),
        "{text}"
    );
    assert_eq!(node.ask_json(&["status", "root.service.a"])["node"]["waiting_on"][0], "root.storage");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 1, "nothing was written");

    let typed = std::process::Command::new("/bin/sh").args(["-c", &command]).status().unwrap();
    assert!(typed.success(), "{command}");
    node.ask(&["--timeout=60", "start", "--wait", "root.service.a"]);
    assert_eq!(fs::read_to_string(volume.join("letter")).unwrap(), "dear");
    node.stop();
}

/// The data directory of an earlier release, with a file in each directory.
fn former_directory() -> ScratchDir {
    let scratch = ScratchDir::new().unwrap();
    for (directory, name) in [
        ("etcd/data", "member"),
        ("cluster/state", "enrolment.pb"),
        ("cluster/volume", ".data-volume"),
        ("volumes", "v"),
    ] {
        let directory = scratch.path().join("data").join(directory);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(name), "kept").unwrap();
    }
    scratch
}

#[test]
fn a_directory_of_an_earlier_release_is_moved_at_the_start_and_only_announced_by_a_check() {
    let scratch = former_directory();
    let (file, data) = (scratch.path().join("check.toml"), scratch.path().join("data"));
    fs::write(&file, NO_DAEMONS).unwrap();
    let args = ["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let output = noded_command(&args).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let says = "; moves cluster/state to esp, cluster/volume to data/cluster, etcd to data/etcd, volumes to data/volumes";
    assert!(output.status.success() && text.contains(says), "{text}");
    assert!(data.join("etcd/data/member").exists() && !data.join("data").exists(), "a check changes nothing");

    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.ask(&["--timeout=60", "start", "--wait", "root.storage"]);
    for path in ["data/etcd/data/member", "esp/enrolment.pb", "data/cluster/.data-volume", "data/volumes/v"] {
        assert_eq!(fs::read_to_string(data.join(path)).unwrap(), "kept", "{path}");
    }
    assert!(!data.join("etcd").exists() && !data.join("cluster").exists());
    let log = node.ask(&["logs", "root.storage"]);
    assert!(log.contains("moved etcd to data/etcd"), "{log}");
    node.stop();
}

#[test]
fn a_directory_that_is_at_both_places_is_named_and_nothing_is_moved() {
    let scratch = former_directory();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    fs::create_dir_all(data.join("data/etcd/data/member")).unwrap();
    fs::write(data.join("data/.data-volume"), "nodekeel data volume, format 1\n").unwrap();
    fs::write(&file, NO_DAEMONS).unwrap();
    for command in ["check", "run"] {
        let args = [command, "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        let (text, code) = stderr_and_code(&noded_command(&args).output().unwrap());
        assert_eq!(code, Some(4), "{text}");
        let says = format!(
            "noded: can't move {0}/etcd to {0}/data/etcd, where this release keeps it: both exist; remove or rename",
            data.display()
        );
        assert!(text.starts_with(&says) && text.lines().count() == 1, "{text}");
        assert!(data.join("cluster/state/enrolment.pb").exists() && !data.join("esp").exists());
    }
}

#[test]
fn an_unknown_kind_of_storage_is_answered_with_the_known_ones() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, "[storage]\nkind = \"floppy\"\n").unwrap();
    let (text, code) = stderr_and_code(
        &noded_command(&["check", "--dev", "--config", file.to_str().unwrap()]).output().unwrap(),
    );
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("noded.toml:2:8: storage.kind: ")
            && text.contains("unknown variant `floppy`, expected `directory`"),
        "{text}"
    );
}
