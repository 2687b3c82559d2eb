//! What a durable replacement costs beside the calls that it can't do without, and a journal's commit beside the one
//! write and sync that it is. Ours and each peer take turns within one run; every figure is the median of the rounds.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use nodekeel_localstorage::journal::Journal;
use nodekeel_localstorage::{Dir, Mode};
use testbed::Scratch;
use testbed::bench::BenchRow;

const ROUNDS: usize = 300;
const CONTENT: [u8; 4096] = [b'x'; 4096];

fn main() -> Result<()> {
    let scratch = Scratch::new()?;
    testbed::bench::write("replace", &[replace(scratch.path())?, commit(scratch.path())?])?;
    Ok(())
}

/// Microseconds for one call.
fn micros(work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Runs both in turns; the medians.
fn in_turns(
    mut ours: impl FnMut() -> Result<()>,
    mut peer: impl FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let (mut our_figures, mut peer_figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        our_figures.push(micros(&mut ours)?);
        peer_figures.push(micros(&mut peer)?);
    }
    Ok((median(our_figures), median(peer_figures)))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn replace(scratch: &Path) -> Result<BenchRow> {
    let (ours, bare) = (scratch.join("ours"), scratch.join("bare"));
    fs::create_dir(&ours)?;
    fs::create_dir(&bare)?;
    let dir = Dir::open(&ours)?;
    let handle = File::open(&bare)?;
    let (temporary, target) = (bare.join("file.tmp"), bare.join("file"));
    let (ours, peer) = in_turns(
        || Ok(dir.write("file", &CONTENT, Mode::PRIVATE_FILE)?),
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
    Ok(BenchRow::new("durable_replace", work, "us", ours).peer(
        "create, write, fsync, rename, fsync",
        "std",
        peer,
    ))
}

fn commit(scratch: &Path) -> Result<BenchRow> {
    let dir = Dir::open(scratch)?;
    let mut journal = Journal::open(&dir, "journal")?;
    let files = ["bare.0", "bare.1"].map(|name| File::create(scratch.join(name)));
    let [first, second] = files;
    let files = [first?, second?];
    let mut round = 0;
    let (ours, peer) = in_turns(
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
