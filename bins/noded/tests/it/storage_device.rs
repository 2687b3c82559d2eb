//! A node with its data volume on a disk of a guest.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use nodekeel_localstorage::mount::mount_table;
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::node::NodeHandle;
use nodekeel_node::v1::{HealthRequest, RestartRequest, StorageRequest, StorageResponse, TreeRequest};
use nodekeel_supervisor::RunnableState;
use testbed::guest::disk::GuestDisk;
use testbed::{ScratchDir, command_output};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

use crate::harness::{NO_DAEMONS, TEST_TIMEOUT, check, wait};

/// An operator knows that something is wrong within 5 s; in an emulated guest, beside other work, it takes several times as long.
pub(crate) const TOLD_WITHIN: Duration = Duration::from_secs(30);

/// Nodes of one host need different names of their mappings, and noded has one name.
static ONE_NODE: Mutex<()> = Mutex::const_new(());

/// Held while a test has a node with a device.
pub(crate) async fn only_node() -> MutexGuard<'static, ()> {
    ONE_NODE.lock().await
}

/// A disk of a guest whose size a test chooses, and the directory of a node.
pub(crate) struct DeviceFixture {
    pub(crate) scratch: ScratchDir,
    disk: GuestDisk,
    /// The part of the disk that the node gets.
    pub(crate) part: PathBuf,
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

    /// Gives the node another part of this many MiB, at the end of the disk, for the next configuration; returns the former one.
    /// A write behind its first 200 MiB takes a second.
    pub(crate) fn replace_part(&mut self, mebibytes: u64) -> PathBuf {
        let (disk, start, slow) = (self.disk.device_path().display(), 512 * 2048, 200 * 2048);
        let (behind, rest) = (start + slow, mebibytes * 2048 - slow);
        let table = self.scratch.path().join("table");
        let lines = format!(
            "0 {slow} linear {disk} {start}\n{slow} {rest} delay {disk} {behind} 0 {disk} {behind} 1000\n"
        );
        std::fs::write(&table, lines).unwrap();
        let name = self.other_name();
        run_dmsetup(&["create", &name, "--noudevsync", table.to_str().unwrap()]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", &name]);
        std::mem::replace(&mut self.part, format!("/dev/dm-{}", minor.trim()).into())
    }

    /// Makes the other part of this many MiB as fast as its disk.
    pub(crate) fn hasten_part(&self, mebibytes: u64) {
        let disk = self.disk.device_path().display();
        let table = format!("0 {} linear {disk} {}", mebibytes * 2048, 512 * 2048);
        run_dmsetup(&["reload", &self.other_name(), "--table", &table]);
        run_dmsetup(&["resume", &self.other_name(), "--noudevsync"]);
    }

    fn other_name(&self) -> String {
        format!("{}-other", self.name)
    }

    pub(crate) fn grow(&self, mebibytes: u64) {
        run_dmsetup(&["reload", &self.name, "--table", &table(&self.disk, mebibytes)]);
        run_dmsetup(&["resume", &self.name, "--noudevsync"]);
    }

    /// Lets each read and write of these sectors fail.
    pub(crate) fn break_sectors(&self, ranges: &[Range<u64>]) {
        let size = 384 * 2048;
        let mut lines = String::new();
        let mut at = 0;
        for range in ranges.iter().chain([&(size..size)]) {
            let disk = self.disk.device_path().display();
            for (part, target) in
                [(at..range.start, format!("linear {disk} {at}")), (range.clone(), "error".to_owned())]
            {
                if !part.is_empty() {
                    lines += &format!("{} {} {target}\n", part.start, part.end - part.start);
                }
            }
            at = range.end;
        }
        let table = self.scratch.path().join("table");
        std::fs::write(&table, lines).unwrap();
        run_dmsetup(&["reload", &self.name, table.to_str().unwrap()]);
        run_dmsetup(&["resume", &self.name, "--noflush", "--noudevsync"]);
    }

    /// Removes the disk below the part that the node has.
    pub(crate) fn pull_disk(&self) {
        let name = self.disk.device_path().file_name().unwrap();
        // That of the bus, above that of virtio.
        let device = Path::new("/sys/block").join(name).join("device").canonicalize().unwrap();
        std::fs::write(device.parent().unwrap().join("remove"), "1").unwrap();
    }

    /// Attaches the disk that was pulled, and puts the part on it.
    pub(crate) fn attach_disk(&self) {
        // The kernel gives its name again once nothing refers to what was pulled.
        self.break_sectors(std::slice::from_ref(&(0..384 * 2048)));
        find_disk(self.disk.device_path()).unwrap();
        self.break_sectors(&[]);
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    pub(crate) fn volume(&self) -> PathBuf {
        self.data().canonicalize().unwrap().join("data")
    }

    pub(crate) fn config(&self, keys: &str) -> String {
        format!("{NO_DAEMONS}[storage]\nkind = \"disk\"\ndevice = {:?}\n{keys}", self.part)
    }

    /// The line of `noded check` about root.storage.
    pub(crate) fn check(&self, keys: &str) -> String {
        let text = check(self.scratch.path(), &self.config(keys), &[]).output();
        text.lines().find(|line| line.starts_with("root.storage")).unwrap().to_owned()
    }

    pub(crate) async fn start(&self, keys: &str) -> DeviceNode {
        DeviceNode::start(&self.config(keys), &self.data()).await
    }

    /// True if a file system is mounted on `data/`, or its mapping is open.
    pub(crate) fn is_open(&self) -> bool {
        let target = self.volume();
        let is_mounted = mount_table().unwrap().iter().any(|entry| entry.target == target);
        is_mounted || self.has_mapping("nodekeel-data")
    }

    pub(crate) fn has_mapping(&self, name: &str) -> bool {
        run_dmsetup(&["ls"]).lines().any(|line| line.split_whitespace().next() == Some(name))
    }

    /// Maps the first sectors of the disk under another name.
    pub(crate) fn map(&self, name: &str, identifier: &str) {
        let table = format!("0 8 linear {} 0", self.part.display());
        run_dmsetup(&["create", name, "--noudevsync", "--uuid", identifier, "--table", &table]);
    }

    /// Every byte of the disk, as a checksum.
    pub(crate) fn checksum(&self) -> String {
        command_output(Command::new("md5sum").arg(&self.part)).unwrap()
    }
}

impl Drop for DeviceFixture {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.data().join("data")).output();
        let other = self.other_name();
        for (program, arguments) in [
            ("cryptsetup", ["close", "nodekeel-data"]),
            ("cryptsetup", ["close", "nodekeel-data-former"]),
            ("dmsetup", ["remove", &self.name]),
            ("dmsetup", ["remove", &other]),
        ] {
            let _ = Command::new(program).args(arguments).env("DM_DISABLE_UDEV", "1").output();
        }
        if !self.disk.device_path().exists() {
            // The tests that need it say that it is missing.
            let _ = find_disk(self.disk.device_path());
        }
    }
}

/// Lets the kernel look for the disks that were pulled.
fn find_disk(path: &Path) -> anyhow::Result<()> {
    std::fs::write("/sys/bus/pci/rescan", "1")?;
    tokio::task::block_in_place(|| {
        testbed::wait_until(TEST_TIMEOUT, "the disk", || Ok(std::fs::metadata(path).map(drop)?))
    })
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

pub(crate) fn run_dmsetup(arguments: &[&str]) -> String {
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
        let mut last = StorageResponse::default();
        let found = async {
            loop {
                last = self.client.storage(StorageRequest {}).await.unwrap().into_inner();
                if is(&last) {
                    return;
                }
                // Its status changes with the tree, or a moment later.
                let _ = timeout(std::time::Duration::from_millis(200), changes.message()).await;
            }
        };
        let is_found = timeout(5 * TEST_TIMEOUT, found).await.is_ok();
        assert!(is_found, "the status stays {last:?}");
        last
    }

    /// Problem and hint of root.storage.
    pub(crate) async fn storage_health(&mut self) -> (String, String) {
        let health = self.client.health(HealthRequest::default()).await.unwrap().into_inner();
        let condition = health.conditions.into_iter().find(|condition| condition.object == "root.storage");
        condition.map(|condition| (condition.problem, condition.hint)).unwrap_or_default()
    }

    /// Restarts root.storage, and waits until the volume is open again.
    pub(crate) async fn reopen(&mut self) {
        self.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
        let is_again = || {
            let again =
                self.node.snapshot().into_iter().find(|status| &*status.dn == "root.storage").unwrap();
            anyhow::ensure!(again.generation == 2 && again.state == RunnableState::Ready, "{again:?}");
            Ok(())
        };
        tokio::task::block_in_place(|| wait("root.storage", is_again));
    }

    pub(crate) async fn stop(self) {
        assert!(self.node.shutdown().await.stragglers.is_empty());
    }
}
