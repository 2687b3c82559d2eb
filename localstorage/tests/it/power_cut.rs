//! Power cuts: after each of many, what was reported as durable is there, nothing is wrong, no data was formatted,
//! and the operation resumes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use nodekeel_localstorage::mount::{MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::{Dir, FileMode};
use tempfile::TempDir;
use testbed::PowerCut;
use testbed::power_cut::{CutMoments, CutPlan};

use crate::fixture::write_mkfs;

mod disk_volume;
mod files;
mod luks;

const MIB: u64 = 1 << 20;
/// The size of the smallest XFS.
const XFS_BYTES: u64 = 320 * MIB;
/// A file of a node's data.
const WITNESS: (&str, &[u8]) = ("witness", &[7; 30_000]);

fn plan(operation: &str, [sample_count, whole_count]: [usize; 2], torn_bytes: u64) -> CutPlan<'_> {
    CutPlan { operation, from: "prepared", moments: CutMoments::Any, sample_count, whole_count, torn_bytes }
}

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

/// What a machine has beside its disk, which a power cut takes: mount points, and directories in memory.
struct Memory {
    temporary: TempDir,
}

impl Memory {
    fn new() -> Result<Self> {
        let temporary = tempfile::tempdir()?;
        for name in ["data", "esp", "run"] {
            fs::create_dir(temporary.path().join(name))?;
        }
        // It counts the formats.
        let formats = temporary.path().join("formats");
        write_mkfs(temporary.path(), &format!("echo >>{}", formats.display()));
        Ok(Self { temporary })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temporary.path().canonicalize().unwrap_or_default().join(name)
    }

    /// How often mkfs.xfs ran.
    fn formats(&self) -> usize {
        fs::read(self.path("formats")).map_or(0, |lines| lines.len())
    }
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
