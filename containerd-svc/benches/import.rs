//! Import speed of bundles, compared with `ctr images import` into the same containerd: cold, into an empty
//! store, and warm, where all content exists. Both take turns; every figure is the median of the runs.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ContainerdImages, ImageStore, Namespace, Preseed};
use testbed::bench::{BenchRow, measure_interleaved, median};
use testbed::{Containerd, ScratchDir, command_output};
use tokio::runtime::Runtime;

const ROUNDS: usize = 5;
const BUNDLES: usize = 20;
/// Size of each bundle's layer.
const BYTES: usize = 12 << 20;

struct ImportBench {
    containerd: Containerd,
    runtime: Runtime,
    images: ContainerdImages,
    namespace: Namespace,
    version: String,
}

fn main() -> Result<()> {
    let containerd = Containerd::start()?;
    let runtime = Runtime::new().context("start the runtime")?;
    let images = runtime.block_on(ContainerdImages::connect(containerd.socket_path()))?;
    let version = runtime.block_on(nodekeel_containerd_svc::daemon_version(containerd.socket_path()))?;
    let bench = ImportBench { containerd, runtime, images, namespace: "bench".parse()?, version };
    let mut rows = Vec::new();
    for (end, goal) in [("tar", Some(280.0)), ("tar.gz", None), ("tar.zst", None)] {
        let scratch = ScratchDir::new()?;
        create_bundles(scratch.path(), end)?;
        rows.push(bench.measure_cold(scratch.path(), end, goal)?);
        if end == "tar" {
            rows.push(bench.measure_warm(scratch.path())?);
        }
    }
    testbed::bench::write_rows("import", &rows)?;
    Ok(())
}

/// Creates bundles in `bench/`, each with a different layer: half noise, half text.
fn create_bundles(directory: &Path, end: &str) -> Result<()> {
    let directory = directory.join("bench");
    fs::create_dir(&directory)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for number in 0..BUNDLES {
        let mut layer = b"nodekeel ".repeat(BYTES / 2 / 9);
        while layer.len() < BYTES {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            layer.extend_from_slice(&state.to_le_bytes());
        }
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
            .with_image(&[&format!("localhost/bench-{number}:1")], &layer);
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
    fn import_bundles(&self, directory: &Path) -> Result<f64> {
        let start = Instant::now();
        // A new instance each time, as after a restart.
        let report = self.runtime.block_on(Preseed::new(directory).run(&self.images))?;
        let took = start.elapsed().as_secs_f64();
        ensure!(report.outcomes.len() == BUNDLES && report.retryable_count() == 0, "{report:?}");
        Ok(took)
    }

    /// `ctr` imports one archive per process; the time includes starting it.
    fn import_with_ctr(&self, directory: &Path) -> Result<f64> {
        let start = Instant::now();
        let mut files: Vec<_> =
            fs::read_dir(directory.join("bench"))?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            let mut ctr = self.containerd.ctr_command();
            command_output(ctr.args(["--namespace", "bench", "images", "import", "--no-unpack"]).arg(file))?;
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

    fn measure_cold(&self, directory: &Path, end: &str, goal: Option<f64>) -> Result<BenchRow> {
        let megabytes = (BUNDLES * BYTES) as f64 / 1e6;
        let speed = |seconds: f64| megabytes / seconds;
        let ours = || self.remove_images().and_then(|()| self.import_bundles(directory)).map(speed);
        let ctr = || self.remove_images().and_then(|()| self.import_with_ctr(directory)).map(speed);
        let work =
            format!("{BUNDLES} bundles of 12 MiB (.{end}) into an empty containerd, bytes of their layers");
        let row = |ours: &[f64]| BenchRow::new(format!("cold-{end}"), work, "MB/s", median(ours));
        // ctr 1.6 accepts no compressed archives.
        let row = match end {
            "tar" => {
                let samples = measure_interleaved(ROUNDS, ours, ctr)?;
                row(&samples.ours).peer("ctr images import", &self.version, median(&samples.peer))
            }
            _ => row(&(0..ROUNDS).map(|_| ours()).collect::<Result<Vec<_>>>()?),
        };
        Ok(match goal {
            Some(goal) => row.goal_at_least(goal),
            None => row,
        })
    }

    fn measure_warm(&self, directory: &Path) -> Result<BenchRow> {
        self.remove_images()?;
        self.import_bundles(directory)?;
        let milliseconds = |seconds: f64| seconds * 1e3;
        let samples = measure_interleaved(
            ROUNDS,
            || self.import_bundles(directory).map(milliseconds),
            || {
                let took = self.import_with_ctr(directory)?;
                // Its import removed our labels from the images; this restores them, unmeasured.
                self.import_bundles(directory)?;
                Ok(milliseconds(took))
            },
        )?;
        let work = format!("the same {BUNDLES} bundles again, all of them there already");
        let row = BenchRow::new("warm", work, "ms", median(&samples.ours));
        Ok(row.peer("ctr images import", &self.version, median(&samples.peer)).goal_at_most(50.0))
    }
}
