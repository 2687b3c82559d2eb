//! The time to remove a million files beside `rm -rf`, on the disk of the scratch directory. The crate and its peer take
//! turns, each with a separate tree that was written just before. Where writing the trees takes minutes, they are fewer: the
//! row says how many.
//!
//! `cargo bench -p nodekeel-localstorage --bench remove -- 100000` takes another number of files.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use nodekeel_localstorage::Dir;
use testbed::bench::BenchRow;
use testbed::{ScratchDir, command_output};

const FILES: usize = 1_000_000;
/// In turns of this many files.
const FILES_IN_TREE: usize = 50_000;
/// No turn begins later. Some file systems take half a millisecond to create a file, and the bench ends in three minutes.
const LAST_START: Duration = Duration::from_secs(100);
const FILES_IN_DIRECTORY: usize = 1_000;

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let count = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let files = count.map_or(Ok(FILES), |count| count.parse())?;
    let scratch = ScratchDir::new()?;
    let dir = Dir::open(scratch.path())?;
    let (tree, mut ours, mut peer, mut removed) = (scratch.path().join("tree"), 0.0, 0.0, 0);
    let start = Instant::now();
    while removed < files && start.elapsed() < LAST_START {
        let count = FILES_IN_TREE.min(files - removed);
        ours += measure_removal(&tree, count, || {
            dir.remove_tree("tree")?;
            Ok(())
        })?;
        peer += measure_removal(&tree, count, || {
            command_output(Command::new("rm").arg("-rf").arg(&tree)).map(drop)
        })?;
        removed += count;
    }
    let version = command_output(Command::new("rm").arg("--version"))?;
    let version = version.lines().next().unwrap_or_default().to_owned();
    let row = BenchRow::new("remove_tree", format!("remove {removed} empty files"), "s", ours);
    let row = row.peer("rm -rf", version.trim_start_matches("rm "), peer).goal_at_most(1.2 * peer);
    testbed::bench::write_rows("remove", &[row])?;
    Ok(())
}

/// Writes a tree, and measures in seconds how long its removal takes.
fn measure_removal(tree: &Path, count: usize, remove: impl FnOnce() -> Result<()>) -> Result<f64> {
    for number in 0..count {
        let directory = tree.join((number / FILES_IN_DIRECTORY).to_string());
        if number % FILES_IN_DIRECTORY == 0 {
            fs::create_dir_all(&directory)?;
        }
        File::create(directory.join(number.to_string()))?;
    }
    rustix::fs::syncfs(File::open(tree)?)?;
    let start = Instant::now();
    remove()?;
    let took = start.elapsed();
    anyhow::ensure!(!tree.exists(), "the tree was not removed");
    Ok(took.as_secs_f64())
}
