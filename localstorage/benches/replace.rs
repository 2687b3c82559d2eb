//! The cost of a durable replacement compared with its indispensable system calls, and of a journal commit
//! compared with one write and one sync. The crate and its peer alternate within one run; every figure is the
//! median of all rounds.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use nodekeel_localstorage::step_journal::StepJournal;
use nodekeel_localstorage::{Dir, FileMode};
use testbed::ScratchDir;
use testbed::bench::BenchRow;

const ROUNDS: usize = 300;
const CONTENT: [u8; 4096] = [b'x'; 4096];

fn main() -> Result<()> {
    let scratch = ScratchDir::new()?;
    testbed::bench::write_rows("replace", &[bench_replace(scratch.path())?, bench_commit(scratch.path())?])?;
    Ok(())
}

/// Measures one call in microseconds.
fn measure_micros(work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Alternates both; returns the medians.
fn measure_alternating(
    mut ours: impl FnMut() -> Result<()>,
    mut peer: impl FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let (mut our_figures, mut peer_figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        our_figures.push(measure_micros(&mut ours)?);
        peer_figures.push(measure_micros(&mut peer)?);
    }
    Ok((median(our_figures), median(peer_figures)))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn bench_replace(scratch: &Path) -> Result<BenchRow> {
    let (ours, bare) = (scratch.join("ours"), scratch.join("bare"));
    fs::create_dir(&ours)?;
    fs::create_dir(&bare)?;
    let dir = Dir::open(&ours)?;
    let handle = File::open(&bare)?;
    let (temporary, target) = (bare.join("file.tmp"), bare.join("file"));
    let (ours, peer) = measure_alternating(
        || Ok(dir.write("file", &CONTENT, FileMode::PRIVATE_FILE)?),
        || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.write_all(&CONTENT)?;
            file.sync_all()?;
            fs::rename(&temporary, &target)?;
            Ok(handle.sync_all()?)
        },
    )?;
    let work = "replace a file of 4 KiB, durably";
    Ok(BenchRow::new("durable_replace", work, "us", ours)
        .peer("create, write, fsync, rename, fsync", "std", peer)
        .goal_at_most(1.1 * peer))
}

fn bench_commit(scratch: &Path) -> Result<BenchRow> {
    let dir = Dir::open(scratch)?;
    let mut journal = StepJournal::open(&dir, "journal")?;
    let files = ["bare.0", "bare.1"].map(|name| File::create(scratch.join(name)));
    let [first, second] = files;
    let files = [first?, second?];
    let mut round = 0;
    let (ours, peer) = measure_alternating(
        || Ok(journal.commit(&CONTENT)?),
        || {
            round += 1;
            files[round % 2].write_all_at(&CONTENT, 0)?;
            Ok(files[round % 2].sync_all()?)
        },
    )?;
    let work = "commit a journal's record of 4 KiB";
    Ok(BenchRow::new("journal_commit", work, "us", ours).peer("write in place, fsync", "std", peer))
}
