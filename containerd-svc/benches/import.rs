//! How fast bundles are imported, beside `ctr images import` into the same containerd: cold, where nothing of it is there,
//! and warm, where all of it is. Both take turns; every figure is the median of the rounds.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{ContainerdImages, ImageStore, Namespace, Preseed};
use testbed::bench::{BenchRow, interleave, median};
use testbed::{Containerd, Scratch, output};
use tokio::runtime::Runtime;

const ROUNDS: usize = 5;
const BUNDLES: usize = 20;
/// Of each bundle's layer.
const BYTES: usize = 12 << 20;

struct Bench {
    containerd: Containerd,
    runtime: Runtime,
    images: ContainerdImages,
    namespace: Namespace,
    version: String,
}

fn main() -> Result<()> {
    let containerd = Containerd::start()?;
    let runtime = Runtime::new().context("start the runtime")?;
    let images = runtime.block_on(ContainerdImages::connect(containerd.socket()))?;
    let version = runtime.block_on(nodekeel_containerd_svc::version(containerd.socket()))?;
    let bench = Bench { containerd, runtime, images, namespace: "bench".parse()?, version };
    let mut rows = Vec::new();
    for (end, goal) in [("tar", Some(280.0)), ("tar.gz", None), ("tar.zst", None)] {
        let scratch = Scratch::new()?;
        bundles(scratch.path(), end)?;
        rows.push(bench.cold(scratch.path(), end, goal)?);
        if end == "tar" {
            rows.push(bench.warm(scratch.path())?);
        }
    }
    testbed::bench::write("import", &rows)?;
    Ok(())
}

/// Bundles in `bench/`, each with a layer of its own: half of it noise, half of it text.
fn bundles(directory: &Path, end: &str) -> Result<()> {
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
        let archive =
            Archive::new(Shape::LayoutLast).image(&[&format!("localhost/bench-{number}:1")], &layer);
        let bytes = match end {
            "tar.gz" => archive.gzip(),
            "tar.zst" => archive.zstd(),
            _ => archive.tar(),
        };
        fs::write(directory.join(format!("{number:02}.{end}")), bytes)?;
    }
    Ok(())
}

impl Bench {
    fn ours(&self, directory: &Path) -> Result<f64> {
        let begun = Instant::now();
        // A new one each time: as after a restart.
        let report = self.runtime.block_on(Preseed::new(directory).run(&self.images))?;
        let took = begun.elapsed().as_secs_f64();
        ensure!(report.outcomes.len() == BUNDLES && report.retryable() == 0, "{report:?}");
        Ok(took)
    }

    /// `ctr` takes one archive at a time; its own start counts, as it does for whoever uses it.
    fn ctr(&self, directory: &Path) -> Result<f64> {
        let begun = Instant::now();
        let mut files: Vec<_> =
            fs::read_dir(directory.join("bench"))?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            let mut ctr = self.containerd.ctr();
            output(ctr.args(["--namespace", "bench", "images", "import", "--no-unpack"]).arg(file))?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    fn forget(&self) -> Result<()> {
        let listed = self.runtime.block_on(self.images.images(&self.namespace))?;
        if !listed.is_empty() {
            let mut ctr = self.containerd.ctr();
            ctr.args(["--namespace", "bench", "images", "rm", "--sync"])
                .args(listed.iter().map(|image| &image.name));
            output(&mut ctr)?;
        }
        Ok(())
    }

    fn cold(&self, directory: &Path, end: &str, goal: Option<f64>) -> Result<BenchRow> {
        let megabytes = (BUNDLES * BYTES) as f64 / 1e6;
        let speed = |seconds: f64| megabytes / seconds;
        let ours = || self.forget().and_then(|()| self.ours(directory)).map(speed);
        let ctr = || self.forget().and_then(|()| self.ctr(directory)).map(speed);
        let work =
            format!("{BUNDLES} bundles of 12 MiB (.{end}) into an empty containerd, bytes of their layers");
        let row = |ours: &[f64]| BenchRow::new(format!("cold-{end}"), work, "MB/s", median(ours));
        // 1.6's ctr takes no compressed archive.
        let row = match end {
            "tar" => {
                let samples = interleave(ROUNDS, ours, ctr)?;
                row(&samples.ours).peer("ctr images import", &self.version, median(&samples.peer))
            }
            _ => row(&(0..ROUNDS).map(|_| ours()).collect::<Result<Vec<_>>>()?),
        };
        Ok(match goal {
            Some(goal) => row.at_least(goal),
            None => row,
        })
    }

    fn warm(&self, directory: &Path) -> Result<BenchRow> {
        self.forget()?;
        self.ours(directory)?;
        let milliseconds = |seconds: f64| seconds * 1e3;
        let samples = interleave(
            ROUNDS,
            || self.ours(directory).map(milliseconds),
            || {
                let took = self.ctr(directory)?;
                // Its import has taken our labels off the images; they are put back, unmeasured.
                self.ours(directory)?;
                Ok(milliseconds(took))
            },
        )?;
        let work = format!("the same {BUNDLES} bundles again, all of them there already");
        let row = BenchRow::new("warm", work, "ms", median(&samples.ours));
        Ok(row.peer("ctr images import", &self.version, median(&samples.peer)).at_most(50.0))
    }
}
