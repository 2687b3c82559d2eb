//! A guest with a private kernel, for tests that this machine's kernel can't or shouldn't run.
//!
//! [`Guest`] boots QEMU with Debian's cloud kernel: it needs no root, installs nothing, and changes nothing
//! on this machine. The root is a read-only image, made for each boot of programs of this machine, with a
//! layer in memory over it; state is kept in memory or on sparse disks, and ends with the guest. All of the
//! kernel's modules are available and are loaded on demand (`mount -t xfs`, `ip link add type veth`).
//!
//! ```no_run
//! use std::{process::Command, time::Duration};
//!
//! let guest = testbed::Guest::builder().with_disk(1 << 30).boot()?;
//! let text = guest.command_output(Command::new("mkfs.xfs").arg("/dev/vdc"), Duration::from_secs(30))?;
//! print!("{text}");
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! A test that runs in a guest finds its disks by [`disk`]. A guest that hangs is killed at a deadline, and a
//! panic is an error; both report the last lines of its console.
//!
//! # Needs
//!
//! QEMU, a static busybox, squashfs-tools, kmod, swtpm and the programs that make file systems: `cargo xtask setup`
//! installs them. The kernel is downloaded once, by `apt-get download` as any user, into the
//! [`cache`](crate::cache); without apt, `NODEKEEL_GUEST_KERNEL` names a directory with `boot/vmlinuz-*` and
//! `lib/modules`. KVM is used where a guest has booted on it (tried once, and the result is kept), else QEMU
//! emulates the processors.
//!
//! # Why QEMU
//!
//! User-mode Linux boots Debian's kernel five to ten seconds sooner and runs file system tests as fast, but has one
//! processor and another kind of disk, and a network to set up in another way. A node needs several processors and
//! forwarded ports, so it needs QEMU anyway.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, ScratchDir, SoftwareTpm, tools};

mod control_port;
pub mod disk;
mod kernel;
mod kvm;
mod qemu;
mod root_tree;

use control_port::ControlPort;
pub use control_port::GuestTask;
use kernel::GuestKernel;
use root_tree::RootTree;

const BOOT_WITHIN: Duration = Duration::from_secs(120);
/// As many as a kernel panic writes.
const LINES_SHOWN: usize = 60;
const START: &str = include_str!("guest/start.sh");
const AGENT: &str = include_str!("guest/agent.sh");
/// Init starts the agent, and reaps the processes that it leaves.
const INITTAB: &str = "::once:/usr/lib/nodekeel/agent\n";
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";
const HOSTS: &str = "127.0.0.1 localhost guest\n10.0.2.2 host\n";
const MACHINE_ID: &str = "6e6f64656b65656c6775657374000001\n";

/// Programs of every guest, beside busybox.
const PROGRAMS: [tools::Tool; 20] = [
    tools::MKFS_XFS,
    tools::MKFS_EXT4,
    tools::MKFS_VFAT,
    tools::MKFS_BTRFS,
    tools::SGDISK,
    tools::LVM,
    tools::MDADM,
    tools::INTEGRITYSETUP,
    tools::CRYPTSETUP,
    tools::DMSETUP,
    tools::XFS_QUOTA,
    tools::XFS_GROWFS,
    tools::XFS_IO,
    tools::TUNE2FS,
    tools::BLKID,
    tools::FLOCK,
    tools::MOUNT,
    tools::UMOUNT,
    tools::SETPRIV,
    tools::UNSHARE,
];

/// The parts of a guest; ends with [`GuestBuilder::boot`].
#[derive(Clone, Debug)]
pub struct GuestBuilder {
    memory_bytes: u64,
    cpu_count: u32,
    disks: Vec<EmptyDisk>,
    has_network: bool,
    has_tpm: bool,
    forwards: Vec<PortForward>,
    tree: RootTree,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EmptyDisk {
    bytes: u64,
    /// Whether its logical blocks have 4096 bytes instead of 512.
    is_4kn: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct PortForward {
    host: SocketAddr,
    guest: u16,
}

impl GuestBuilder {
    /// Bytes of memory, in whole MiB; 1 GiB by default. The guest takes only the memory that it touches.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Processors; 2 by default.
    #[must_use]
    pub fn with_cpus(mut self, count: u32) -> Self {
        self.cpu_count = count;
        self
    }

    /// Adds an empty disk of that many bytes. It takes only the space that the guest writes.
    #[must_use]
    pub fn with_disk(mut self, bytes: u64) -> Self {
        self.disks.push(EmptyDisk { bytes, is_4kn: false });
        self
    }

    /// Adds an empty disk of that many bytes whose logical blocks have 4096 bytes.
    #[must_use]
    pub fn with_4kn_disk(mut self, bytes: u64) -> Self {
        self.disks.push(EmptyDisk { bytes, is_4kn: true });
        self
    }

    /// Gives it a network: 10.0.2.15, with this machine's loopback at 10.0.2.2 and its outside world behind.
    #[must_use]
    pub fn with_network(mut self) -> Self {
        self.has_network = true;
        self
    }

    /// Gives it a TPM 2.0, `/dev/tpmrm0`, whose state ends with the guest.
    #[must_use]
    pub fn with_tpm(mut self) -> Self {
        self.has_tpm = true;
        self
    }

    /// Forwards connections to an address of this machine to a TCP port of the guest; implies a network.
    #[must_use]
    pub fn forward_port(mut self, host: SocketAddr, guest: u16) -> Self {
        self.forwards.push(PortForward { host, guest });
        self.with_network()
    }

    /// Puts a file of this machine into the guest's root, with its mode.
    #[must_use]
    pub fn add_file(mut self, at: impl AsRef<Path>, source: impl AsRef<Path>) -> Self {
        self.tree.add_file(at, source.as_ref());
        self
    }

    /// Puts a text into the guest's root.
    #[must_use]
    pub fn add_text(mut self, at: impl AsRef<Path>, mode: u32, content: impl Into<Vec<u8>>) -> Self {
        self.tree.add_text(at, mode, content);
        self
    }

    /// Puts a link into the guest's root.
    #[must_use]
    pub fn add_link(mut self, at: impl AsRef<Path>, target: impl Into<PathBuf>) -> Self {
        self.tree.add_link(at, target);
        self
    }

    /// Puts a program of this machine, with the libraries that it is linked to, into the guest's root.
    #[must_use]
    pub fn add_program(mut self, at: impl AsRef<Path>, source: impl AsRef<Path>) -> Self {
        self.tree.add_program(at, source.as_ref());
        self
    }

    /// Puts a directory of this machine into the guest's root, without hidden entries and those named
    /// `target`.
    ///
    /// # Errors
    /// It can't be read.
    pub fn add_directory(mut self, at: impl AsRef<Path>, source: impl AsRef<Path>) -> Result<Self> {
        let keep = |name: &std::ffi::OsStr| name != "target" && !name.as_encoded_bytes().starts_with(b".");
        self.tree.copy_directory(at.as_ref(), source.as_ref(), &keep)?;
        Ok(self)
    }

    /// Boots it and waits until commands can run in it.
    ///
    /// # Errors
    /// [`tools::MissingTool`] where a program isn't installed, a kernel that can't be downloaded, or why the
    /// guest did not boot, with the last lines of its console.
    pub fn boot(mut self) -> Result<Guest> {
        let kernel = GuestKernel::find_or_build()?;
        let scratch = ScratchDir::new()?;
        self.add_base_files()?;
        self.tree.write_image(&scratch.path().join("root"))?;
        for (number, disk) in self.disks.iter().enumerate() {
            create_disk(&disk_path(scratch.path(), number), disk.bytes)?;
        }
        let tpm = self.has_tpm.then(SoftwareTpm::start_for_guest).transpose()?;
        let mut command =
            qemu::qemu_command(&self, &kernel, kvm::choose_accelerator(&kernel)?, scratch.path())?;
        if let Some(tpm) = &tpm {
            qemu::add_tpm(&mut command, tpm.socket_path());
        }
        let socket = scratch.path().join("control");
        let mut port = None;
        let daemon = Daemon::start(command, scratch, || {
            port = Some(UnixStream::connect(&socket).context("connect to the guest's control port")?);
            Ok(())
        })?;
        let (control, up) = ControlPort::new(port.context("QEMU exited before the guest was up")?)?;
        let guest = Guest { daemon, control, _tpm: tpm };
        up.wait_until_up(BOOT_WITHIN).with_context(|| guest.last_words())?;
        Ok(guest)
    }

    /// Adds the files of every guest.
    fn add_base_files(&mut self) -> Result<()> {
        let busybox = tools::find_tool(tools::BUSYBOX)?;
        self.tree.add_file("/usr/bin/busybox", &busybox);
        for program in PROGRAMS {
            let source = tools::find_tool(program)?;
            self.tree.add_program(Path::new("/usr/sbin").join(program.name), &source);
        }
        // Busybox's shell prefers its applets to programs that come earlier in PATH.
        self.tree.add_program("/bin/sh", &tools::find_tool(tools::SH)?);
        // The kernel calls it by this path.
        self.tree.add_link("/sbin/modprobe", "/usr/bin/busybox");
        let applets = crate::command_output(Command::new(&busybox).arg("--list"))?;
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            self.tree.add_link(Path::new("/usr/bin").join(applet), "/usr/bin/busybox");
        }
        self.tree.add_text("/usr/lib/nodekeel/start", 0o755, START);
        self.tree.add_text("/usr/lib/nodekeel/agent", 0o755, AGENT);
        let files = [
            ("inittab", INITTAB),
            ("passwd", PASSWD),
            ("group", GROUP),
            ("hosts", HOSTS),
            ("hostname", "guest\n"),
            ("machine-id", MACHINE_ID),
        ];
        for (name, content) in files {
            self.tree.add_text(Path::new("/etc").join(name), 0o644, content);
        }
        Ok(())
    }
}

fn disk_path(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("disk{number}"))
}

fn create_disk(path: &Path, bytes: u64) -> Result<()> {
    ensure!(bytes > 0, "a disk has a size");
    let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    file.set_len(bytes).with_context(|| format!("size {}", path.display()))
}

/// A running guest; dropping this ends it like a power cut.
#[derive(Debug)]
pub struct Guest {
    control: Arc<ControlPort>,
    daemon: Daemon,
    /// Dropped after QEMU, which uses it.
    _tpm: Option<SoftwareTpm>,
}

impl Guest {
    /// A guest with 1 GiB of memory, two processors, no disk, no network and no TPM.
    pub fn builder() -> GuestBuilder {
        GuestBuilder {
            memory_bytes: 1 << 30,
            cpu_count: 2,
            disks: Vec::new(),
            has_network: false,
            has_tpm: false,
            forwards: Vec::new(),
            tree: RootTree::skeleton(),
        }
    }

    /// Runs a command in the guest and gives its exit code: 128 + N where signal N ended it. Program,
    /// arguments, directory and the variables set on the command apply; `on_line` gets each line of both
    /// outputs. A program without a slash is looked up in the guest's `PATH`.
    ///
    /// # Errors
    /// The deadline has passed and the command is killed, or the guest ends before the command; both with the
    /// last lines of the console.
    pub fn run_command(
        &self,
        command: &Command,
        deadline: Duration,
        on_line: impl FnMut(&str),
    ) -> Result<i32> {
        let name = command.get_program().display();
        let task = self.start_command(command)?;
        let ran = task.wait_for_exit(deadline, on_line);
        if ran.is_err() {
            // It may have ended with the guest; of two errors, the first one says more.
            let _ = task.send_signal("KILL");
        }
        ran.with_context(|| format!("run {name} in the guest; {}", self.last_words()))
    }

    /// Runs a command in the guest to its end and gives its output.
    ///
    /// # Errors
    /// As [`Guest::run_command`], and where the command fails.
    pub fn command_output(&self, command: &Command, deadline: Duration) -> Result<String> {
        let mut text = String::new();
        let code = self.run_command(command, deadline, |line| text.extend([line, "\n"]))?;
        ensure!(
            code == 0,
            "{} failed in the guest ({code}): {}",
            command.get_program().display(),
            text.trim()
        );
        Ok(text)
    }

    /// Starts a command in the guest; several run concurrently.
    ///
    /// # Errors
    /// The guest has ended.
    pub fn start_command(&self, command: &Command) -> Result<GuestTask> {
        self.control.start_task(command).with_context(|| self.last_words())
    }

    /// The daemon: QEMU.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    fn last_words(&self) -> String {
        format!("the guest's console, {}", self.daemon.last_output(LINES_SHOWN))
    }
}

#[cfg(test)]
#[path = "guest_test.rs"]
mod tests;
