//! Import speed of bundles, compared with `ctr images import` into the same containerd: cold, into an empty store, and warm,
//! where all content exists; and the bytes that are written for those that are kept. Both take turns; every figure is the median
//! of the runs.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ContainerdImages, DiskReserve, ImageStore, Namespace, Preseed};
use testbed::bench::{BenchRow, RowWriter, measure_interleaved, median};
use testbed::{Containerd, ScratchDir, command_output};
use tokio::runtime::Runtime;

const ROUNDS: usize = 3;
const MANY: BundleSet = BundleSet { id: "20", count: 20, bytes: 12 << 20, ratio: 1.5 };
const LARGE: BundleSet = BundleSet { id: "500MB", count: 1, bytes: 500_000_000, ratio: 1.0 };
/// How many bytes may be written for each that is kept.
const WRITTEN_GOAL: f64 = 1.1;
/// What a pass may take that has nothing to do, in milliseconds.
const WARM_GOAL: f64 = 50.0;

/// Bundles with one layer each.
struct BundleSet {
    id: &'static str,
    count: usize,
    /// Size of a layer.
    bytes: usize,
    /// How many times the peer's speed is the goal, where the archives are not compressed.
    ratio: f64,
}

/// How `ctr images import` does it.
struct Peer {
    id: &'static str,
    name: &'static str,
    arguments: &'static [&'static str],
}

const CLIENT: Peer = Peer { id: "client", name: "ctr images import --local", arguments: &["--local"] };
const TRANSFER: Peer = Peer { id: "transfer", name: "ctr images import", arguments: &[] };
/// The release before the transfer service.
const FORMER: Peer = Peer { id: "former", name: "ctr images import", arguments: &[] };

struct ImportBench {
    containerd: Containerd,
    runtime: Runtime,
    images: ContainerdImages,
    namespace: Namespace,
    version: String,
}

fn main() -> Result<()> {
    let mut rows = RowWriter::new("import");
    let scratch = ScratchDir::new()?;
    create_bundles(scratch.path(), "tar", &MANY)?;
    // It accepts no compressed archives.
    let former = ImportBench::of(Containerd::start()?)?;
    rows.add_rows([former.measure_cold(scratch.path(), "tar", &MANY, false, &FORMER)?])?;
    drop(former);
    let newest = ImportBench::of(Containerd::start_newest()?)?;
    rows.add_rows([newest.measure_warm(scratch.path())?])?;
    for set in [&MANY, &LARGE] {
        for end in ["tar", "tar.gz", "tar.zst"] {
            let scratch = ScratchDir::new()?;
            create_bundles(scratch.path(), end, set)?;
            for unpacks in [false, true] {
                rows.add_rows([newest.measure_written(scratch.path(), end, set, unpacks)?])?;
                // The client accepts no compressed archives.
                for peer in
                    [&CLIENT, &TRANSFER].into_iter().filter(|peer| end == "tar" || peer.id == TRANSFER.id)
                {
                    rows.add_rows([newest.measure_cold(scratch.path(), end, set, unpacks, peer)?])?;
                }
            }
        }
    }
    rows.finish().map(drop)
}

/// Creates bundles in `bench/`, each with a different layer of one file: half noise, half text.
fn create_bundles(directory: &Path, end: &str, set: &BundleSet) -> Result<()> {
    let directory = directory.join("bench");
    fs::create_dir(&directory)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for number in 0..set.count {
        let mut content = b"nodekeel ".repeat(set.bytes / 2 / 9);
        while content.len() < set.bytes {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            content.extend_from_slice(&state.to_le_bytes());
        }
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        let mut layer = tar::Builder::new(Vec::new());
        layer.append_data(&mut header, "content", &*content)?;
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
            .with_image(&[&format!("localhost/bench-{number}:1")], &layer.into_inner()?);
        let bytes = match end {
            "tar.gz" => archive.to_gzip(),
            "tar.zst" => archive.to_zstd(),
            _ => archive.to_tar(),
        };
        fs::write(directory.join(format!("{number:02}.{end}")), bytes)?;
    }
    Ok(())
}

impl ImportBench {
    fn of(containerd: Containerd) -> Result<Self> {
        let runtime = Runtime::new().context("start the runtime")?;
        let images = runtime.block_on(ContainerdImages::connect(containerd.socket_path()))?;
        // As in a node.
        let images = images.with_disk(containerd.root_path(), DiskReserve::default());
        let version = runtime.block_on(nodekeel_containerd_svc::daemon_version(containerd.socket_path()))?;
        Ok(Self { containerd, runtime, images, namespace: "bench".parse()?, version })
    }

    /// Imports the bundles, and returns the seconds that it took.
    fn import_bundles(&self, directory: &Path, unpacks: bool) -> Result<f64> {
        let start = Instant::now();
        // A new instance each time, as after a restart.
        let preseed = Preseed::new(directory).with_unpacking(unpacks);
        let report = self.runtime.block_on(preseed.run(&self.images))?;
        let took = start.elapsed().as_secs_f64();
        let bundles = fs::read_dir(directory.join("bench"))?.count();
        ensure!(report.outcomes.len() == bundles && report.retryable_count() == 0, "{report:?}");
        Ok(took)
    }

    /// `ctr` imports one archive per process; the time includes starting it.
    fn import_with_ctr(&self, directory: &Path, unpacks: bool, peer: &Peer) -> Result<f64> {
        let start = Instant::now();
        let mut files: Vec<_> =
            fs::read_dir(directory.join("bench"))?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            let mut ctr = self.containerd.ctr_command();
            ctr.args(["--namespace", "bench", "images", "import"]).args(peer.arguments);
            if !unpacks {
                ctr.arg("--no-unpack");
            }
            command_output(ctr.arg(file))?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    fn remove_images(&self) -> Result<()> {
        let listed = self.runtime.block_on(self.images.list_images(&self.namespace))?;
        if !listed.is_empty() {
            let mut ctr = self.containerd.ctr_command();
            ctr.args(["--namespace", "bench", "images", "rm", "--sync"])
                .args(listed.iter().map(|image| &image.name));
            command_output(&mut ctr)?;
        }
        Ok(())
    }

    fn measure_cold(
        &self,
        directory: &Path,
        end: &str,
        set: &BundleSet,
        unpacks: bool,
        peer: &Peer,
    ) -> Result<BenchRow> {
        let megabytes = (set.count * set.bytes) as f64 / 1e6;
        let speed = |seconds: f64| megabytes / seconds;
        let samples = measure_interleaved(
            ROUNDS,
            || self.remove_images().and_then(|()| self.import_bundles(directory, unpacks)).map(speed),
            || self.remove_images().and_then(|()| self.import_with_ctr(directory, unpacks, peer)).map(speed),
        )?;
        let (ours, theirs) = (median(&samples.ours), median(&samples.peer));
        let ratio = if end == "tar" { set.ratio } else { 1.0 };
        let id = format!("cold-{}-{end}{}-{}", set.id, suffix(unpacks), peer.id);
        let row = BenchRow::new(id, work(set, end, unpacks), "MB/s", ours);
        Ok(row.peer(peer.name, &self.version, theirs).goal_at_least(theirs * ratio))
    }

    /// What containerd and this process write, for each byte that is there afterwards.
    fn measure_written(
        &self,
        directory: &Path,
        end: &str,
        set: &BundleSet,
        unpacks: bool,
    ) -> Result<BenchRow> {
        let measure = |import: &dyn Fn() -> Result<f64>| -> Result<f64> {
            self.remove_images()?;
            let (written, kept) = (self.written_bytes()?, self.kept_bytes()?);
            import()?;
            Ok((self.written_bytes()? - written) as f64 / (self.kept_bytes()? - kept) as f64)
        };
        let ours = measure(&|| self.import_bundles(directory, unpacks))?;
        let theirs = measure(&|| self.import_with_ctr(directory, unpacks, &TRANSFER))?;
        let id = format!("written-{}-{end}{}", set.id, suffix(unpacks));
        let row = BenchRow::new(id, work(set, end, unpacks), "bytes written per byte kept", ours);
        Ok(row.peer(TRANSFER.name, &self.version, theirs).goal_at_most(WRITTEN_GOAL))
    }

    /// The bytes that containerd and this process have written to disks.
    fn written_bytes(&self) -> Result<u64> {
        let daemon = self.containerd.daemon().process_id().to_string();
        let written = |process: &str| -> Result<u64> {
            let text = fs::read_to_string(format!("/proc/{process}/io"))?;
            let value = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
            value.context("write_bytes in /proc/PID/io")?.parse().context("parse write_bytes")
        };
        Ok(written("self")? + written(&daemon)?)
    }

    /// The bytes below containerd's root.
    fn kept_bytes(&self) -> Result<u64> {
        let mut du = std::process::Command::new("du");
        let output =
            command_output(du.args(["--summarize", "--block-size=1"]).arg(self.containerd.root_path()))?;
        output.split_whitespace().next().unwrap_or_default().parse().context("parse the output of du")
    }

    fn measure_warm(&self, directory: &Path) -> Result<BenchRow> {
        self.remove_images()?;
        self.import_bundles(directory, false)?;
        let milliseconds = |seconds: f64| seconds * 1e3;
        let samples = measure_interleaved(
            ROUNDS,
            || self.import_bundles(directory, false).map(milliseconds),
            || {
                let took = self.import_with_ctr(directory, false, &CLIENT)?;
                // Its import removed our labels from the images; this restores them, unmeasured.
                self.import_bundles(directory, false)?;
                Ok(milliseconds(took))
            },
        )?;
        let work = format!("the same {} bundles again, all of them there already", MANY.count);
        let row = BenchRow::new("warm", work, "ms", median(&samples.ours));
        Ok(row.peer(CLIENT.name, &self.version, median(&samples.peer)).goal_at_most(WARM_GOAL))
    }
}

fn suffix(unpacks: bool) -> &'static str {
    if unpacks { "-unpacked" } else { "" }
}

fn work(set: &BundleSet, end: &str, unpacks: bool) -> String {
    let (count, bytes) = (set.count, set.bytes);
    let unpacked = if unpacks { ", and unpacked" } else { "" };
    format!("{count} x {bytes} bytes (.{end}) into an empty containerd{unpacked}")
}
