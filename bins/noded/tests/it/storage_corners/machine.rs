//! A machine with a disk and an ESP that outlast it. All else of its node is in memory.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, ensure};
use nodekeel_localstorage::mount::mount_table;
use nodekeel_node::node::NodeHandle;
use nodekeel_node::search_path::SearchPath;
use testbed::{ScratchDir, command_output, write_program};
use tokio::task::block_in_place;

use crate::harness::{Ended, NO_DAEMONS, NodedProcess, node_command, nodectl_path};
use crate::storage_device::{DeviceNode, mebibytes_of_file_system, run_dmsetup};

/// The size of the disk before it grows, and after. Each byte is encrypted, logged and replayed; XFS has less than its usual
/// minimum, which only tests may.
pub(super) const SMALL_MEBIBYTES: u64 = 128;
pub(super) const GROWN_MEBIBYTES: u64 = 160;
const STEP_MEBIBYTES: u64 = 16;
/// The disk of a node that is killed grows again and again.
const MOST_MEBIBYTES: u64 = 960;

const MAPPING: &str = "corner-disk";

/// A machine that is on.
pub(super) struct Machine {
    encryption: &'static str,
    esp: PathBuf,
    base: PathBuf,
    mebibytes: AtomicU64,
    /// What the node has for its disk.
    disk: PathBuf,
    scratch: ScratchDir,
}

impl Machine {
    /// Turns a machine on whose disk is so large, and the start of a base.
    pub(super) fn start(encryption: &'static str, [esp, base]: [&Path; 2], mebibytes: u64) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        write_mkfs(scratch.path())?;
        run_dmsetup(&["create", MAPPING, "--noudevsync", "--table", &table(base, mebibytes)]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", MAPPING]);
        let disk = format!("/dev/dm-{}", minor.trim()).into();
        let [esp, base] = [esp, base].map(Path::to_owned);
        Ok(Self { encryption, esp, base, mebibytes: AtomicU64::new(mebibytes), disk, scratch })
    }

    fn config(&self) -> String {
        format!(
            "{NO_DAEMONS}[storage]\nkind = \"disk\"\ndevice = {:?}\nesp = \"partition\"\nesp_device = {:?}\n\
             encryption = {:?}\nkeys = \"local\"\n",
            self.disk, self.esp, self.encryption
        )
    }

    fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn volume(&self) -> PathBuf {
        // The mount table has no links.
        self.scratch.path().canonicalize().unwrap_or_default().join("data/data")
    }

    /// A file of the node's data.
    pub(super) fn witness(&self) -> PathBuf {
        self.volume().join("witness")
    }

    /// Starts a node in this process.
    pub(super) async fn start_node(&self) -> Result<DeviceNode> {
        let search = SearchPath::with_default_directories(Some(self.path("bin").as_os_str()), None);
        let builder = NodeHandle::builder("test.toml", self.config()).search_path(search);
        Ok(DeviceNode::of(builder.data(self.data()).start()?).await)
    }

    /// Starts noded, and does not wait.
    pub(super) fn spawn_noded(&self) -> NodedProcess {
        let mut command = node_command("run", self.scratch.path(), &self.config());
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/bin", self.path("bin").display()));
        NodedProcess::spawn_command(ScratchDir::new().unwrap(), command)
    }

    fn nodectl_command(&self) -> Command {
        let mut command = Command::new(nodectl_path());
        command.arg("--socket").arg(self.data().join("run/control.sock"));
        command
    }

    pub(super) fn spawn_nodectl(&self, arguments: &[&str]) -> Result<Child> {
        let mut command = self.nodectl_command();
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().context("start nodectl")
    }

    /// Runs nodectl with a line of input.
    pub(super) fn nodectl(&self, arguments: &[&str], input: &str) -> Result<Ended> {
        block_in_place(|| run(self.nodectl_command().args(arguments), input))
    }

    /// Runs a command line of another program.
    pub(super) fn shell(&self, line: &str) -> Result<Ended> {
        block_in_place(|| run(Command::new("sh").args(["-c", line]), ""))
    }

    /// Waits until the volume is open.
    pub(super) fn wait_ready(&self) -> Result<()> {
        let ended = self.nodectl(&["start", "--wait", "root.storage"], "")?;
        ensure!(ended.code == Some(0), "{ended:?}");
        Ok(())
    }

    /// Backs up the header of the open volume, to a file that the operator keeps.
    pub(super) fn back_up_header(&self) -> Result<PathBuf> {
        let path = (0..).map(|number| self.path(&format!("header-{number}"))).find(|path| !path.exists());
        let path = path.context("a free name")?;
        let ended = self.nodectl(&["storage", "header", "backup", path.to_str().context("a path")?], "")?;
        ensure!(ended.code == Some(0), "{ended:?}");
        Ok(path)
    }

    /// Overwrites the start of the disk, whose volume is closed.
    pub(super) fn damage_header(&self, bytes: &[u8]) -> Result<()> {
        let disk = File::options().write(true).open(&self.disk)?;
        disk.write_all_at(bytes, 0)?;
        Ok(disk.sync_all()?)
    }

    pub(super) fn grow(&self, mebibytes: u64) {
        run_dmsetup(&["reload", MAPPING, "--table", &table(&self.base, mebibytes)]);
        run_dmsetup(&["resume", MAPPING, "--noudevsync"]);
        self.mebibytes.store(mebibytes, Ordering::Relaxed);
    }

    /// Lets the disk grow by a step.
    pub(super) fn grow_a_little(&self) -> Result<()> {
        let grown = self.mebibytes.load(Ordering::Relaxed) + STEP_MEBIBYTES;
        ensure!(grown <= MOST_MEBIBYTES, "the disk is as large as it gets");
        self.grow(grown);
        Ok(())
    }

    /// Writes a file to the volume, durably.
    pub(super) fn write_file(&self, name: &str, text: &str) -> Result<()> {
        let mut file = File::create(self.volume().join(name)).with_context(|| format!("create {name}"))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        Ok(File::open(self.volume())?.sync_all()?)
    }

    /// The UUID of the file system that is mounted on the volume. *Source:* xfs_format.h, `sb_uuid`.
    pub(super) fn file_system_id(&self) -> Result<[u8; 16]> {
        let (target, table) = (self.volume(), mount_table()?);
        let entry = table.iter().find(|entry| entry.target == target).context("the volume is not mounted")?;
        let mut id = [0; 16];
        File::open(&entry.source)?.read_exact_at(&mut id, 32)?;
        Ok(id)
    }

    /// A volume that can grow has all of its disk, but for its header and the log of its file system.
    pub(super) fn check_size(&self) -> Result<()> {
        const REST_MEBIBYTES: u64 = 16 + 16 + 8;
        let found = mebibytes_of_file_system(&self.volume());
        let is_whole = found + REST_MEBIBYTES >= self.mebibytes.load(Ordering::Relaxed);
        ensure!(is_whole || self.encryption != "encrypted", "it has {found} MiB: {}", self.config());
        Ok(())
    }

    /// The number of runs of mkfs.xfs on this machine.
    pub(super) fn count_formats(&self) -> usize {
        fs::read(self.path("formats")).map_or(0, |lines| lines.len())
    }

    pub(super) fn is_open(&self) -> bool {
        let target = self.volume();
        let is_mounted = mount_table().is_ok_and(|table| table.iter().any(|entry| entry.target == target));
        is_mounted || run_dmsetup(&["ls"]).contains("nodekeel-data")
    }
}

/// Turned off: its disks are free.
impl Drop for Machine {
    fn drop(&mut self) {
        for place in ["data", "esp", "run/storage"] {
            let _ = Command::new("umount").arg(self.data().join(place)).output();
        }
        for (program, arguments) in
            [("cryptsetup", ["close", "nodekeel-data"]), ("dmsetup", ["remove", MAPPING])]
        {
            let _ = Command::new(program).args(arguments).env("DM_DISABLE_UDEV", "1").output();
        }
    }
}

fn run(command: &mut Command, input: &str) -> Result<Ended> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("start a command")?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    // One that reads nothing may have exited.
    let _ = writeln!(stdin, "{input}");
    drop(stdin);
    Ok(child.wait_with_output()?.into())
}

fn table(base: &Path, mebibytes: u64) -> String {
    format!("0 {} linear {} 0", mebibytes * 2048, base.display())
}

/// Writes a mkfs.xfs that counts its runs, and makes small file systems with a small log.
///
/// *Source:* mkfs/xfs_mkfs.c of xfsprogs 6.1: with these variables, it makes file systems that only tests have.
fn write_mkfs(scratch: &Path) -> Result<()> {
    let bin = scratch.join("bin");
    fs::create_dir(&bin)?;
    let (variables, formats) = ("TEST_DIR=/ TEST_DEV=/ QA_CHECK_FS=1", scratch.join("formats"));
    let script = format!(
        "#!/bin/sh\necho >>{}\n{variables} exec /usr/sbin/mkfs.xfs -l size=16m \"$@\"\n",
        formats.display()
    );
    write_program(&bin.join("mkfs.xfs"), &script)?;
    symlink("/usr/sbin/xfs_growfs", bin.join("xfs_growfs"))?;
    command_output(Command::new("test").arg("-x").arg("/usr/sbin/mkfs.xfs")).map(drop)
}
