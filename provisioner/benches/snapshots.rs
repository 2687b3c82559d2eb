//! How long a snapshot of a volume of 10 GiB takes, in one file, in 128 and in 10,240, beside a clone of each file by a bare
//! system call.
//!
//! `cargo xtask bench snapshots` runs it in a guest, on XFS with limits. Elsewhere pass a directory of a mounted XFS of 32 GiB:
//! `cargo bench -p nodekeel-provisioner --bench snapshots -- /mnt`; where its limits are not enforced, they are kept in memory.
//! Under emulation a system call costs many times as much: ratios hold, times don't.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, ProjectQuota, QuotaLimits, QuotaSetter};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{DirStore, SnapshotId, SnapshotStore as _, VolumeId, VolumeStore as _};
use testbed::bench::{BenchRow, RowWriter, measure_interleaved, median};
use testbed::guest::disk::{FileSystem, GuestDisk};
use tokio::runtime::Runtime;

const MIB: u64 = 1 << 20;
const VOLUME_BYTES: u64 = 10 << 30;
/// Files of a volume. The time of a snapshot grows with their number, and not with their size.
const FILES: [u64; 3] = [1, 128, 10_240];
/// Up to so many files, a snapshot should take at most [`GOAL_MILLIS`].
const GOAL_FILES: u64 = 128;
const GOAL_MILLIS: f64 = 50.0;
const ROUNDS: usize = 11;
const FILES_OF_DIRECTORY: u64 = 1000;

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let directory = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let mut rows = RowWriter::new("snapshots");
    match directory {
        Some(directory) => measure(Path::new(&directory), &mut rows)?,
        None => {
            let mounted = GuestDisk::acquire()?.format_and_mount(FileSystem::Xfs, "prjquota")?;
            measure(mounted.mount_point(), &mut rows)?;
        }
    }
    rows.finish().map(drop)
}

fn measure(directory: &Path, rows: &mut RowWriter) -> Result<()> {
    for (number, files) in (1..).zip(FILES) {
        let bench = SnapshotBench::prepare(directory, number, files)?;
        rows.add_rows([bench.measure_row()?])?;
        bench.remove()?;
    }
    Ok(())
}

fn open_quota(directory: &Path) -> Arc<dyn QuotaSetter> {
    match ProjectQuota::open(directory) {
        Ok(quota) => Arc::new(quota),
        Err(error) => {
            println!("limits are kept in memory: {error}");
            Arc::new(MemQuota::new())
        }
    }
}

/// A store with one volume.
struct SnapshotBench {
    runtime: Runtime,
    base: PathBuf,
    store: DirStore,
    volume: VolumeId,
    snapshot: SnapshotId,
    files: u64,
}

impl SnapshotBench {
    fn prepare(directory: &Path, number: u32, files: u64) -> Result<Self> {
        let (runtime, base) = (Runtime::new()?, directory.join(format!("snapshots-{files}")));
        fs::create_dir(&base).with_context(|| format!("create {}", base.display()))?;
        let store = DirStore::new(Dir::open(&base)?, open_quota(directory))?;
        let uid = sample_uid(number);
        let (volume, snapshot) = (VolumeId::from_uid(&uid)?, SnapshotId::from_uid(&uid)?);
        let limits = QuotaLimits { bytes: Some(Bytes(VOLUME_BYTES + (1 << 30))), inodes: None };
        runtime.block_on(async {
            store.create_identity().await?;
            store.create(&volume, limits).await?;
            anyhow::Ok(())
        })?;
        let bench = Self { runtime, base, store, volume, snapshot, files };
        let start = Instant::now();
        bench.fill_volume()?;
        println!("{files} files written in {:?}", start.elapsed());
        Ok(bench)
    }

    fn volume_path(&self) -> PathBuf {
        self.base.join("volumes").join(self.volume.as_str())
    }

    fn fill_volume(&self) -> Result<()> {
        let block = vec![7; MIB as usize];
        for number in 0..self.files {
            let directory = self.volume_path().join((number / FILES_OF_DIRECTORY).to_string());
            fs::create_dir_all(&directory)?;
            let mut file = File::create(directory.join(number.to_string()))?;
            (0..VOLUME_BYTES / self.files / MIB).try_for_each(|_| file.write_all(&block))?;
        }
        // A snapshot of a file writes its dirty pages first, which is not measured here.
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.base)?)?)
    }

    fn measure_row(&self) -> Result<BenchRow> {
        let samples = measure_interleaved(ROUNDS, || self.time_snapshot(), || self.time_bare_clones())?;
        let files = self.files;
        let work = format!("snapshot of a volume of 10 GiB in {files} files, on XFS");
        let row = BenchRow::new(format!("snapshot_10gib_{files}"), work, "ms", median(&samples.ours)).peer(
            "create, FICLONE",
            "std",
            median(&samples.peer),
        );
        Ok(if files <= GOAL_FILES { row.goal_at_most(GOAL_MILLIS) } else { row })
    }

    /// Milliseconds.
    fn time_snapshot(&self) -> Result<f64> {
        let start = Instant::now();
        let info = self.runtime.block_on(self.store.create_snapshot(&self.snapshot, &self.volume))?;
        let took = millis_since(start);
        ensure!(info.restore_size.0 >= VOLUME_BYTES, "the snapshot has {}", info.restore_size);
        self.runtime.block_on(async {
            self.store.remove_snapshot(&self.snapshot).await?;
            self.store.wait_until_erased().await;
            anyhow::Ok(())
        })?;
        self.sync()?;
        Ok(took)
    }

    /// Milliseconds of what can't be left out: a durable new file with the blocks of each, without attributes and limits.
    fn time_bare_clones(&self) -> Result<f64> {
        let (from, to) = (self.volume_path(), self.base.join("bare"));
        let start = Instant::now();
        for number in 0..self.files {
            let below = format!("{}/{number}", number / FILES_OF_DIRECTORY);
            if number % FILES_OF_DIRECTORY == 0 {
                fs::create_dir_all(to.join(&below).parent().context("a file has a parent")?)?;
            }
            rustix::fs::ioctl_ficlone(File::create(to.join(&below))?, File::open(from.join(&below))?)?;
        }
        File::open(&to)?.sync_all()?;
        let took = millis_since(start);
        fs::remove_dir_all(&to)?;
        self.sync()?;
        Ok(took)
    }

    /// Makes room for the next volume.
    fn remove(self) -> Result<()> {
        self.runtime.block_on(async {
            self.store.remove(&self.volume).await?;
            self.store.wait_until_erased().await;
            anyhow::Ok(())
        })?;
        drop(self.store);
        fs::remove_dir_all(&self.base).with_context(|| format!("remove {}", self.base.display()))
    }
}

fn millis_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
