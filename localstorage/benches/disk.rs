//! What encryption costs: creating and opening a volume beside the bare programs, and the throughput of a file on an
//! authenticated volume beside a bare dm-crypt. Both sides have a disk of their own, and take turns.
//!
//! `cargo xtask bench disk` runs it in a guest. Under emulation ciphers cost many times as much: ratios hold, times don't.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::OsMounter;
use nodekeel_localstorage::volume::{
    CryptsetupProgram, DataVolume as _, DiskVolume, ErasePolicy, FileSeal, KeyPolicy, LuksVolume,
    LuksVolumeConfig, VolumeEncryption,
};
use rustix::fs::{FallocateFlags, fallocate};
use testbed::bench::{BenchRow, RowWriter, measure_interleaved, median};
use testbed::guest::disk::GuestDisk;
use testbed::{ScratchDir, command_output};

const MIB: u64 = 1 << 20;
/// XFS has at least 300 MiB.
const DISK_BYTES: u64 = 512 * MIB;
const ROUNDS: usize = 5;
/// A wipe of the disk takes as long as the other rounds together.
const WIPE_ROUNDS: usize = 1;
const FILE_BYTES: usize = 64 * MIB as usize;
const CHUNK_BYTES: usize = MIB as usize;

fn main() -> Result<()> {
    let [ours, bare] = <[GuestDisk; 2]>::try_from(GuestDisk::acquire_many(2)?).expect("two disks");
    let (ours, bare) = (NodekeelSide::new(ours)?, BareSide::new(bare)?);
    let version = command_output(Command::new("cryptsetup").arg("--version"))?;
    let version = version.split_whitespace().nth(1).unwrap_or("unknown");
    let mut rows = RowWriter::new("disk");
    rows.add_rows([bench_reading(&ours)?])?;
    for encryption in [VolumeEncryption::Encrypted, VolumeEncryption::EncryptedAndAuthenticated] {
        let mode = Mode { encryption, wipes: false };
        rows.add_rows(bench_mode(&ours, &bare, mode, version)?)?;
    }
    rows.add_rows([bench_wipe(&ours, &bare, version)?])?;
    rows.add_rows(bench_throughput(&ours, &bare, version)?)?;
    rows.finish().map(drop)
}

#[derive(Clone, Copy)]
struct Mode {
    encryption: VolumeEncryption,
    wipes: bool,
}

impl Mode {
    fn is_authenticated(self) -> bool {
        self.encryption == VolumeEncryption::EncryptedAndAuthenticated
    }

    fn name(self) -> &'static str {
        if self.is_authenticated() { "authenticated" } else { "encrypted" }
    }
}

/// Leaves no data on a disk.
fn make_blank(disk: &Path) -> Result<()> {
    let file = File::options().write(true).open(disk)?;
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, DISK_BYTES)?;
    Ok(file.sync_all()?)
}

/// A volume of this crate.
struct NodekeelSide {
    scratch: ScratchDir,
    disk: GuestDisk,
}

impl NodekeelSide {
    fn new(disk: GuestDisk) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        for name in ["data", "esp", "run"] {
            fs::create_dir(scratch.path().join(name))?;
        }
        Ok(Self { scratch, disk })
    }

    fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    fn volume(&self, mode: Mode) -> Result<LuksVolume> {
        let open = |name| Dir::open(self.scratch.path().join(name));
        let volume = LuksVolume::new(LuksVolumeConfig {
            device: self.disk.device_path().into(),
            target: self.data(),
            encryption: mode.encryption,
            keys: KeyPolicy::Local,
            journal: open("esp")?,
            runtime: open("run")?,
            seal: Arc::new(FileSeal::new(open("esp")?)),
            mounter: Arc::new(OsMounter),
            cryptsetup: Arc::new(CryptsetupProgram::default()),
        });
        Ok(if mode.wipes { volume } else { volume.without_wipe() })
    }

    /// Creates a volume, and unmounts it. In milliseconds, without the unmount.
    fn time_creation(&self, mode: Mode) -> Result<f64> {
        make_blank(self.disk.device_path())?;
        let volume = self.volume(mode)?;
        let start = Instant::now();
        drop(volume.mount_new(ErasePolicy::Nothing)?);
        let taken = millis_since(start);
        volume.unmount()?;
        Ok(taken)
    }

    /// Opens it as a node does that has just started.
    fn time_opening(&self, mode: Mode) -> Result<f64> {
        let volume = self.volume(mode)?;
        let start = Instant::now();
        drop(volume.mount_existing()?);
        let taken = millis_since(start);
        volume.unmount()?;
        Ok(taken)
    }
}

/// The bare programs, called as an administrator would.
struct BareSide {
    scratch: ScratchDir,
    disk: GuestDisk,
}

impl BareSide {
    fn new(disk: GuestDisk) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        fs::create_dir(scratch.path().join("data"))?;
        Ok(Self { scratch, disk })
    }

    fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    fn time_creation(&self, mode: Mode) -> Result<f64> {
        make_blank(self.disk.device_path())?;
        let start = Instant::now();
        self.format(mode)?;
        self.open()?;
        run("mkfs.xfs", &["-q", "-K", "-f", "/dev/mapper/bare"], b"")?;
        self.mount()?;
        let taken = millis_since(start);
        self.close()?;
        Ok(taken)
    }

    fn time_opening(&self) -> Result<f64> {
        let start = Instant::now();
        self.open()?;
        self.mount()?;
        let taken = millis_since(start);
        self.close()?;
        Ok(taken)
    }

    fn format(&self, mode: Mode) -> Result<()> {
        let mut arguments = vec!["luksFormat", "--batch-mode", "--type=luks2", "--cipher=aes-xts-plain64"];
        arguments.extend(["--key-size=512", "--sector-size=4096", "--key-file=-"]);
        arguments.extend(["--pbkdf=pbkdf2", "--hash=sha256", "--pbkdf-force-iterations=1000"]);
        if mode.is_authenticated() {
            arguments.push("--integrity=hmac-sha256");
            arguments.extend((!mode.wipes).then_some("--integrity-no-wipe"));
        }
        let device = self.disk.device_path().to_string_lossy();
        run("cryptsetup", &[&arguments[..], &[&device]].concat(), b"a key")
    }

    fn open(&self) -> Result<()> {
        let device = self.disk.device_path().to_string_lossy();
        run("cryptsetup", &["open", "--key-file=-", &device, "bare"], b"a key")
    }

    fn mount(&self) -> Result<()> {
        let target = self.data();
        run("mount", &["-t", "xfs", "-o", "prjquota", "/dev/mapper/bare", &target.to_string_lossy()], b"")
    }

    fn close(&self) -> Result<()> {
        run("umount", &[&self.data().to_string_lossy()], b"")?;
        run("cryptsetup", &["close", "bare"], b"")
    }
}

fn run(program: &str, arguments: &[&str], input: &[u8]) -> Result<()> {
    let mut command = Command::new(program);
    command.args(arguments).env("DM_DISABLE_UDEV", "1").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("execute {program}"))?;
    child.stdin.take().context("the input is piped")?.write_all(input)?;
    let status = child.wait()?;
    ensure!(status.success(), "{program} {} failed ({status})", arguments.join(" "));
    Ok(())
}

fn millis_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Every byte of a blank disk is read before it is formatted.
fn bench_reading(ours: &NodekeelSide) -> Result<BenchRow> {
    let disk = ours.disk.device_path();
    make_blank(disk)?;
    let read = measure_interleaved(
        ROUNDS,
        || {
            let volume = DiskVolume::new(disk, ours.data(), Arc::new(OsMounter));
            let start = Instant::now();
            volume.read_disk()?;
            Ok(millis_since(start))
        },
        || {
            let mut dd = Command::new("dd");
            dd.arg(format!("if={}", disk.display()));
            dd.args(["of=/dev/null", "bs=4M", "iflag=direct", "status=none"]);
            let start = Instant::now();
            command_output(&mut dd)?;
            Ok(millis_since(start))
        },
    )?;
    let row = BenchRow::new("read_blank", "read a blank disk of 512 MiB", "ms", median(&read.ours));
    Ok(row.peer("dd iflag=direct", "coreutils", median(&read.peer)))
}

fn bench_mode(ours: &NodekeelSide, bare: &BareSide, mode: Mode, version: &str) -> Result<[BenchRow; 2]> {
    let name = mode.name();
    let created = measure_interleaved(ROUNDS, || ours.time_creation(mode), || bare.time_creation(mode))?;
    let opened = measure_interleaved(ROUNDS, || ours.time_opening(mode), || bare.time_opening())?;
    Ok([
        BenchRow::new(
            format!("create_{name}"),
            format!("prove blank, encrypt ({name}, without a wipe), check, make XFS, mount 512 MiB"),
            "ms",
            median(&created.ours),
        )
        .peer("cryptsetup luksFormat, open, mkfs.xfs, mount", version, median(&created.peer)),
        BenchRow::new(
            format!("open_{name}"),
            format!("check the header, find the slot, open ({name}), mount"),
            "ms",
            median(&opened.ours),
        )
        .peer("cryptsetup open, mount", version, median(&opened.peer)),
    ])
}

fn bench_wipe(ours: &NodekeelSide, bare: &BareSide, version: &str) -> Result<BenchRow> {
    let mode = Mode { encryption: VolumeEncryption::EncryptedAndAuthenticated, wipes: true };
    let made = measure_interleaved(WIPE_ROUNDS, || ours.time_creation(mode), || bare.time_creation(mode))?;
    let work = "the same as create_authenticated, with a wipe";
    Ok(BenchRow::new("create_authenticated_wiped", work, "ms", median(&made.ours)).peer(
        "cryptsetup luksFormat with a wipe, open, mkfs.xfs, mount",
        version,
        median(&made.peer),
    ))
}

/// The price of authentication: the volume was wiped, as by default.
fn bench_throughput(ours: &NodekeelSide, bare: &BareSide, version: &str) -> Result<[BenchRow; 2]> {
    let authenticated = Mode { encryption: VolumeEncryption::EncryptedAndAuthenticated, wipes: true };
    let encrypted = Mode { encryption: VolumeEncryption::Encrypted, wipes: false };
    bare.time_creation(encrypted)?;
    bare.open()?;
    bare.mount()?;
    let volume = ours.volume(authenticated)?;
    drop(volume.mount_existing()?);
    let [our_file, bare_file] = [ours.data(), bare.data()].map(|directory| directory.join("file"));
    let written = measure_interleaved(ROUNDS, || write_rate(&our_file), || write_rate(&bare_file))?;
    let read = measure_interleaved(ROUNDS, || read_rate(&our_file), || read_rate(&bare_file))?;
    volume.unmount()?;
    bare.close()?;
    let row = |id: &str, work: &str, ours: &[f64], peer: &[f64]| {
        BenchRow::new(id, work, "MiB/s", median(ours)).peer("XFS on bare dm-crypt", version, median(peer))
    };
    Ok([
        row(
            "write_authenticated",
            "write a file of 64 MiB and sync it, authenticated",
            &written.ours,
            &written.peer,
        ),
        row(
            "read_authenticated",
            "read a file of 64 MiB that is not cached, authenticated",
            &read.ours,
            &read.peer,
        ),
    ])
}

fn write_rate(path: &Path) -> Result<f64> {
    let chunk = vec![7; CHUNK_BYTES];
    let start = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..FILE_BYTES / CHUNK_BYTES {
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    Ok(rate_since(start))
}

fn read_rate(path: &Path) -> Result<f64> {
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let start = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut chunk)? > 0 {}
    Ok(rate_since(start))
}

fn rate_since(start: Instant) -> f64 {
    (FILE_BYTES as u64 / MIB) as f64 / start.elapsed().as_secs_f64()
}
