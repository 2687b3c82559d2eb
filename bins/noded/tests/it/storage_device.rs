//! The data volume on real disks, in a guest: created, opened again after stops and kills, refused, and grown.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::Signal;
use nodekeel_localstorage::mount::mount_table;
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::node::NodeHandle;
use nodekeel_node::v1::{
    AddRecoveryPassphraseRequest, EraseStorageRequest, HealthRequest, RestartRequest, StorageRequest,
    StorageResponse, TreeRequest, UnlockStorageRequest,
};
use nodekeel_supervisor::RunnableState;
use testbed::guest::disk::{FileSystem, GuestDisk};
use testbed::{ScratchDir, command_output, wait_until};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, noded_command};

/// Nodes of one host need different names of their mappings, and noded has one name.
static ONE_NODE: Mutex<()> = Mutex::const_new(());

const NOT_ENCRYPTED: &str = "encryption = \"none\"\n";
const LOCAL: &str = "encryption = \"encrypted\"\nkeys = \"local\"\n";

/// Held while a test has a node with a device.
pub(crate) async fn only_node() -> MutexGuard<'static, ()> {
    ONE_NODE.lock().await
}

/// A disk of a guest whose size a test chooses, and the directory of a node.
pub(crate) struct DeviceFixture {
    scratch: ScratchDir,
    disk: GuestDisk,
    /// The part of the disk that the node gets.
    part: PathBuf,
    name: String,
    _turn: MutexGuard<'static, ()>,
}

impl DeviceFixture {
    /// A blank disk of this many MiB.
    pub(crate) async fn new(mebibytes: u64) -> Self {
        let turn = only_node().await;
        let disk = GuestDisk::acquire().unwrap();
        wipe_device(disk.device_path());
        let name = format!("node-{}", disk.device_path().file_name().unwrap().display());
        run_dmsetup(&["create", &name, "--noudevsync", "--table", &table(&disk, mebibytes)]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", &name]);
        let part = format!("/dev/dm-{}", minor.trim()).into();
        Self { scratch: ScratchDir::new().unwrap(), disk, part, name, _turn: turn }
    }

    fn grow(&self, mebibytes: u64) {
        run_dmsetup(&["reload", &self.name, "--table", &table(&self.disk, mebibytes)]);
        run_dmsetup(&["resume", &self.name, "--noudevsync"]);
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    fn volume(&self) -> PathBuf {
        self.data().canonicalize().unwrap().join("data")
    }

    pub(crate) fn config(&self, keys: &str) -> String {
        format!("{NO_DAEMONS}[storage]\nkind = \"disk\"\ndevice = {:?}\n{keys}", self.part)
    }

    /// What `noded check` says of root.storage.
    fn check(&self, keys: &str) -> String {
        let file = self.scratch.path().join("check.toml");
        fs::write(&file, self.config(keys)).unwrap();
        let (file, data) = (file.to_str().unwrap().to_owned(), self.data());
        let mut command = noded_command(&["check", "--config", &file, "--data", data.to_str().unwrap()]);
        let text = command_output(&mut command).unwrap();
        text.lines().find(|line| line.starts_with("root.storage")).unwrap().to_owned()
    }

    async fn start(&self, keys: &str) -> DeviceNode {
        DeviceNode::start(&self.config(keys), &self.data()).await
    }

    /// Whether a file system is mounted on `data/`, or its mapping is open.
    pub(crate) fn is_open(&self) -> bool {
        let target = self.volume();
        let is_mounted = mount_table().unwrap().iter().any(|entry| entry.target == target);
        is_mounted || run_dmsetup(&["ls"]).contains("nodekeel-data")
    }

    /// Every byte of the disk, as a checksum.
    fn checksum(&self) -> String {
        command_output(Command::new("md5sum").arg(&self.part)).unwrap()
    }
}

impl Drop for DeviceFixture {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.data().join("data")).output();
        for (program, arguments) in
            [("cryptsetup", ["close", "nodekeel-data"]), ("dmsetup", ["remove", &self.name])]
        {
            let _ = Command::new(program).args(arguments).env("DM_DISABLE_UDEV", "1").output();
        }
    }
}

/// Fills a device with zeros.
pub(crate) fn wipe_device(path: &Path) {
    let mut device = File::options().write(true).open(path).unwrap();
    let bytes = device.seek(SeekFrom::End(0)).unwrap();
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&device, flags, 0, bytes.cast_signed()).unwrap();
    device.sync_all().unwrap();
}

fn table(disk: &GuestDisk, mebibytes: u64) -> String {
    format!("0 {} linear {} 0", mebibytes * 2048, disk.device_path().display())
}

fn run_dmsetup(arguments: &[&str]) -> String {
    command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1")).unwrap()
}

pub(crate) fn mebibytes_of_file_system(path: &Path) -> u64 {
    let stat = nix::sys::statvfs::statvfs(path).unwrap();
    (stat.blocks() * stat.fragment_size()) >> 20
}

/// A node in this process.
pub(crate) struct DeviceNode {
    pub(crate) node: NodeHandle,
    pub(crate) client: NodeClient,
}

impl DeviceNode {
    pub(crate) async fn start(config: &str, data: &Path) -> Self {
        Self::of(NodeHandle::builder("test.toml", config).data(data).start().unwrap()).await
    }

    pub(crate) async fn of(node: NodeHandle) -> Self {
        timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
        let client = client::connect(node.control_socket()).await.unwrap();
        Self { node, client }
    }

    pub(crate) async fn wait_ready(&self, dn: &str) {
        // The guest's processors may be emulated.
        let is_ready = timeout(5 * TEST_TIMEOUT, self.node.wait_ready(dn)).await;
        is_ready.unwrap_or_else(|_| panic!("{dn} is not ready: {:#?}", self.node.snapshot()));
    }

    pub(crate) async fn wait_open(&self) {
        self.wait_ready("root.storage").await;
    }

    /// The status of the volume once it satisfies the predicate.
    pub(crate) async fn wait_status(&mut self, is: impl Fn(&StorageResponse) -> bool) -> StorageResponse {
        let mut changes = self.client.watch_tree(TreeRequest {}).await.unwrap().into_inner();
        let found = async {
            loop {
                let status = self.client.storage(StorageRequest {}).await.unwrap().into_inner();
                if is(&status) {
                    return status;
                }
                // Its status changes with the tree, or a moment later.
                let _ = timeout(std::time::Duration::from_millis(200), changes.message()).await;
            }
        };
        timeout(5 * TEST_TIMEOUT, found).await.expect("the status changes")
    }

    /// Problem and hint of root.storage.
    pub(crate) async fn storage_health(&mut self) -> (String, String) {
        let health = self.client.health(HealthRequest::default()).await.unwrap().into_inner();
        let condition = health.conditions.into_iter().find(|condition| condition.object == "root.storage");
        condition.map(|condition| (condition.problem, condition.hint)).unwrap_or_default()
    }

    /// Restarts root.storage, and waits until the volume is open again.
    async fn reopen(&mut self) {
        self.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
        let is_again = || {
            let again =
                self.node.snapshot().into_iter().find(|status| &*status.dn == "root.storage").unwrap();
            anyhow::ensure!(again.generation == 2 && again.state == RunnableState::Ready, "{again:?}");
            Ok(())
        };
        tokio::task::block_in_place(|| wait_until(TEST_TIMEOUT, "root.storage", is_again)).unwrap();
    }

    pub(crate) async fn stop(self) {
        assert!(self.node.shutdown().await.stragglers.is_empty());
    }
}

/// Creates the volume with a file, and stops the node.
async fn create_volume(fixture: &DeviceFixture, keys: &str) {
    let node = fixture.start(keys).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    node.stop().await;
    assert!(!fixture.is_open(), "a stop unmounts the volume, and closes its mapping");
}

fn assert_witness(fixture: &DeviceFixture) {
    assert_eq!(fs::read_to_string(fixture.volume().join("witness")).unwrap(), "data");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_node_keeps_its_data_on_a_disk_through_stops_and_kills() {
    for (keys, found) in [
        (NOT_ENCRYPTED, "has a data volume that is not encrypted"),
        (LOCAL, "has a data volume that is encrypted, with local keys, of node node"),
    ] {
        let fixture = DeviceFixture::new(384).await;
        let text = fixture.check(keys);
        assert!(text.contains("which is blank, and noded creates the volume"), "{text}");
        assert!(!fixture.data().exists(), "a check creates nothing");
        create_volume(&fixture, keys).await;
        let before = fixture.checksum();
        let text = fixture.check(keys);
        assert!(text.contains(found), "{text}");
        assert!(before == fixture.checksum(), "a check writes nothing");

        // A noded that is killed leaves the volume open; the next one uses it so.
        let file = fixture.scratch.path().join("killed.toml");
        fs::write(&file, fixture.config(keys)).unwrap();
        let (file, data) = (file.to_str().unwrap().to_owned(), fixture.data());
        let mut command = noded_command(&["run", "--config", &file, "--data", data.to_str().unwrap()]);
        command.stderr(std::process::Stdio::piped());
        let mut noded = NodedProcess::spawn_command(ScratchDir::new().unwrap(), command);
        noded.wait_for_line("control socket at");
        let witness = fixture.volume().join("witness");
        wait_until(TEST_TIMEOUT, "the volume", || Ok(fs::metadata(&witness).map(drop)?)).unwrap();
        noded.signal(Signal::SIGKILL);
        noded.wait();
        assert!(fixture.is_open());
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        let health = node.client.health(HealthRequest::default()).await.unwrap().into_inner();
        let warns =
            health.conditions.iter().any(|found| found.problem.contains("has no recovery passphrase"));
        assert_eq!(warns, keys == LOCAL, "{health:?}");
        let copies = fixture.data().canonicalize().unwrap().join("run/storage");
        let mounts = mount_table().unwrap();
        let in_memory = mounts.iter().any(|entry| entry.target == copies && entry.info.fstype == "tmpfs");
        assert_eq!(in_memory, keys == LOCAL, "copies of headers are in memory: {mounts:?}");
        let options = command_output(Command::new("cat").arg("/proc/self/mounts")).unwrap();
        let target = format!(" {} xfs ", fixture.volume().display());
        let mounted = options.lines().find(|line| line.contains(&target)).unwrap();
        for option in ["nosuid", "noexec", "prjquota"] {
            assert!(mounted.contains(option), "{mounted}");
        }
        node.stop().await;
        assert!(!fixture.is_open());
    }
}

/// Restarts root.storage while a pod has its volume mounted.
async fn check_volume_in_use(keys: &str) {
    let fixture = DeviceFixture::new(384).await;
    create_volume(&fixture, keys).await;
    let mut node = fixture.start(keys).await;
    node.wait_open().await;
    // The kubelet mounts the volume of a pod below its own directory.
    let pod = fixture.scratch.path().join("pod");
    fs::create_dir(&pod).unwrap();
    command_output(Command::new("mount").arg("--bind").args([&fixture.volume(), &pod])).unwrap();
    node.reopen().await;
    let is_mounted = fs::read_to_string(fixture.volume().join("witness"));
    command_output(Command::new("umount").arg(&pod)).unwrap();
    assert_eq!(is_mounted.unwrap(), "data", "{keys}");
    node.stop().await;
    assert!(!fixture.is_open(), "{keys}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs kernel with a disk of 1 GiB"]
async fn a_volume_that_a_pod_keeps_in_use_is_opened_again_and_not_the_directory_below_it() {
    check_volume_in_use(LOCAL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_without_encryption_that_a_pod_keeps_in_use_is_opened_again() {
    check_volume_in_use(NOT_ENCRYPTED).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs kernel with a disk of 1 GiB"]
async fn a_foreign_disk_is_left_as_it_is_until_its_token_is_given() {
    let fixture = DeviceFixture::new(384).await;
    FileSystem::PlainExt4.format_device(&fixture.part).unwrap();
    let before = fixture.checksum();
    let text = fixture.check(LOCAL);
    assert!(text.contains("which has ext at byte 1080, and noded creates no volume there"), "{text}");
    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| !status.erase_token.is_empty()).await;
    assert!(
        status.detail.contains("the disk has ext at byte 1080, and noded wrote nothing to it"),
        "{status:?}"
    );
    let (problem, hint) = node.storage_health().await;
    assert!(problem.contains("ext at byte 1080"), "{problem}");
    assert!(hint.contains(&format!("nodectl storage erase {}", status.erase_token)), "{hint}");
    let refused = node.client.erase_storage(EraseStorageRequest { token: "ext-0".into() }).await;
    assert!(refused.unwrap_err().message().contains("token"), "another token erases nothing");
    node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    node.wait_status(|status| !status.erase_token.is_empty()).await;
    assert!(before == fixture.checksum(), "the disk has changed");

    node.client.erase_storage(EraseStorageRequest { token: status.erase_token }).await.unwrap();
    node.wait_open().await;
    node.stop().await;
    assert!(fixture.check(LOCAL).contains("has a data volume that is encrypted"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_node_that_has_had_a_volume_takes_no_other_disk_for_it() {
    let fixture = DeviceFixture::new(384).await;
    create_volume(&fixture, NOT_ENCRYPTED).await;
    // The volume of another node, then a blank disk, then a volume with another encryption.
    for (other, says) in [
        (Some(NOT_ENCRYPTED), "has had a volume"),
        (None, "the disk is blank, but this node has had a volume"),
        (Some(LOCAL), "but storage.encryption is \"none\""),
    ] {
        wipe_device(&fixture.part);
        let own = fixture.scratch.path().join("own");
        fs::rename(fixture.data(), &own).unwrap();
        if let Some(keys) = other {
            create_volume(&fixture, keys).await;
            // The directory for copies of headers stays mounted.
            let _ = Command::new("umount").arg(fixture.data().join("run/storage")).output();
            fs::remove_dir_all(fixture.data()).unwrap();
        }
        fs::rename(&own, fixture.data()).unwrap();
        let before = fixture.checksum();
        let mut node = fixture.start(NOT_ENCRYPTED).await;
        let status = node.wait_status(|status| !status.detail.is_empty()).await;
        assert!(status.detail.contains(says), "{status:?}");
        node.stop().await;
        assert!(before == fixture.checksum(), "the disk has changed");
    }
    // A directory in its place would be an empty node.
    let mut node = DeviceNode::start(NO_DAEMONS, &fixture.data()).await;
    let status = node.wait_status(|status| !status.detail.is_empty()).await;
    assert!(status.detail.contains("this node has had one on a disk"), "{status:?}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_grows_with_its_disk_and_an_authenticated_one_says_that_it_can_not() {
    for keys in [NOT_ENCRYPTED, LOCAL] {
        let fixture = DeviceFixture::new(384).await;
        create_volume(&fixture, keys).await;
        fixture.grow(768);
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        assert!(mebibytes_of_file_system(&fixture.volume()) > 600, "{keys}");
        assert_eq!(node.storage_health().await, Default::default());
        node.stop().await;
    }
    let fixture = DeviceFixture::new(384).await;
    let keys = "encryption = \"encrypted-and-authenticated\"\nkeys = \"local\"\nwipe = false\n";
    create_volume(&fixture, keys).await;
    fixture.grow(768);
    // It says so at every start.
    for _ in 0..2 {
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        assert!(mebibytes_of_file_system(&fixture.volume()) < 384);
        let (problem, _) = node.storage_health().await;
        assert!(problem.contains("can't grow a volume that is encrypted and authenticated"), "{problem}");
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_whose_key_is_gone_waits_for_the_recovery_passphrase() {
    let fixture = DeviceFixture::new(384).await;
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let added = node.client.add_recovery_passphrase(AddRecoveryPassphraseRequest::default()).await.unwrap();
    let passphrase = added.into_inner().passphrase;
    node.stop().await;
    let entries = fs::read_dir(fixture.data().join("esp")).unwrap().map(|entry| entry.unwrap().path());
    let keys: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == "key")).collect();
    assert_eq!(keys.len(), 1, "{keys:?}");
    fs::rename(&keys[0], fixture.scratch.path().join("key")).unwrap();
    let before = fixture.checksum();

    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| status.state == "locked").await;
    assert!(status.detail.contains("the node unlock key of volume"), "{status:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(problem.starts_with("is locked: ") && hint == "`nodectl storage unlock`", "{problem}; {hint}");
    let mut wrong = passphrase.clone().unwrap();
    wrong.text = "00000-00000-00000-00000-00000-00000-00GKG".into();
    let request = UnlockStorageRequest { passphrase: Some(wrong) };
    let rejected = node.client.unlock_storage(request).await.unwrap_err();
    assert!(rejected.message().contains("does not open"), "{rejected:?}");
    assert!(before == fixture.checksum(), "a wrong passphrase changes nothing");
    node.client.unlock_storage(UnlockStorageRequest { passphrase }).await.unwrap();
    node.wait_open().await;
    assert_witness(&fixture);
    // Until noded exits, it needs no operator again.
    node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    node.wait_status(|status| status.state == "open").await;
    node.stop().await;

    fs::rename(fixture.scratch.path().join("key"), &keys[0]).unwrap();
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    node.stop().await;
}
