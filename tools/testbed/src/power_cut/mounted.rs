//! A file system on a recorded disk.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::guest::disk::unmount_when_free;
use crate::{ScratchDir, command_output};

/// A file system in a private directory, mounted until this is dropped. Open files in it are closed before.
#[derive(Debug)]
pub struct MountedDisk {
    scratch: ScratchDir,
}

impl MountedDisk {
    /// Mounts the device as a file system of this type, with these options.
    ///
    /// # Errors
    /// Those of mount(8).
    pub fn mount(type_name: &str, options: &str, device: &Path) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let mut mount = Command::new("mount");
        command_output(mount.args(["-t", type_name, "-o", options]).arg(device).arg(scratch.path()))?;
        Ok(Self { scratch })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        let _ = unmount_when_free(self.scratch.path());
    }
}
