//! Power cuts: after each of many, what was reported as durable is there, nothing is wrong, no data was formatted,
//! and the operation resumes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use nodekeel_localstorage::mount::{MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::{Dir, FileMode};
use testbed::PowerCut;

use crate::fixture::{NodeDirs, write_mkfs};

mod disk_volume;
mod files;
mod luks;

const MIB: u64 = 1 << 20;
/// The size of the smallest XFS.
const XFS_BYTES: u64 = 320 * MIB;
/// A file of a node's data.
const WITNESS: (&str, &[u8]) = ("witness", &[7; 30_000]);

/// A file system, mounted until this is dropped.
struct MountedPart {
    target: PathBuf,
}

impl MountedPart {
    fn mount(spec: &MountSpec, device: &Path, target: PathBuf) -> Result<Self> {
        OsMounter.mount(spec, Some(device), &target)?;
        Ok(Self { target })
    }

    fn dir(&self) -> Result<Dir> {
        Ok(Dir::open(&self.target)?)
    }
}

impl Drop for MountedPart {
    fn drop(&mut self) {
        let _ = OsMounter.unmount(&self.target);
    }
}

/// The directories of a machine after its start, and a mkfs.xfs that counts its runs.
fn start_memory() -> NodeDirs {
    let memory = NodeDirs::new();
    write_mkfs(&memory.path(""), &format!("echo >>{}", memory.path("formats").display()));
    memory
}

/// The number of runs of mkfs.xfs since the start.
fn format_count(memory: &NodeDirs) -> usize {
    fs::read(memory.path("formats")).map_or(0, |lines| lines.len())
}

fn write_witness(top: &Dir) -> Result<()> {
    Ok(top.write(WITNESS.0, WITNESS.1, FileMode::PRIVATE_FILE)?)
}

/// Checks the witness, where the cut came after its write.
fn check_witness(top: &Dir, cut: &PowerCut) -> Result<()> {
    if cut.has_mark("witness") {
        ensure!(top.read(WITNESS.0)? == WITNESS.1, "the witness has changed");
    }
    Ok(())
}
