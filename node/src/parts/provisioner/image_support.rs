//! Needs of block and strict volumes on the machine. A node without them serves all other volumes, and rejects claims for
//! these with the reason.

use std::fmt;
use std::path::{Path, PathBuf};

use nodekeel_provisioner::ImageFormat;

use crate::search_path::{ProgramNotFound, SearchPath};

/// The programs that make file systems, and loop devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageSupport {
    directories: Vec<PathBuf>,
    /// The file systems of strict volumes that can be made.
    formats: Vec<ImageFormat>,
    missing: Vec<ProgramNotFound>,
    /// The control device of loop devices, if it does not exist.
    missing_device: Option<PathBuf>,
}

impl ImageSupport {
    pub(super) fn find(search: &SearchPath, loop_control: &Path) -> Self {
        let (mut formats, mut missing) = (Vec::new(), Vec::new());
        for format in ImageFormat::ALL {
            match format.mkfs_program().map(|program| search.find_program(Path::new(program))) {
                None => {}
                Some(Ok(_)) => formats.push(format),
                Some(Err(not_found)) => missing.push(not_found),
            }
        }
        let missing_device = (!loop_control.exists()).then(|| loop_control.to_owned());
        Self { directories: search.directories().to_owned(), formats, missing, missing_device }
    }

    /// The directories where the programs are searched.
    pub(super) fn program_directories(&self) -> &[PathBuf] {
        &self.directories
    }
}

impl fmt::Display for ImageSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.missing_device {
            return write!(
                f,
                "without block and strict volumes: {} does not exist (load the module loop)",
                device.display()
            );
        }
        f.write_str("with block volumes")?;
        for format in &self.formats {
            write!(f, ", strict volumes of {format}")?;
        }
        for not_found in &self.missing {
            write!(f, "; {not_found}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_a_machine_lacks_for_block_and_strict_volumes_is_named() {
        let scratch = tempfile::tempdir().expect("a directory");
        let [programs, control] = ["programs", "loop-control"].map(|name| scratch.path().join(name));
        fs::create_dir(&programs).expect("a directory");
        let search = SearchPath::new([programs.clone()]);
        let support = || ImageSupport::find(&search, &control).to_string();
        let text = support();
        assert!(
            text.starts_with("without block and strict volumes: ") && text.contains("loop-control does not")
        );
        fs::write(&control, "").expect("written");
        for program in ["mkfs.ext4", "mkfs.xfs"] {
            assert!(support().contains(&format!("; {program} is not installed (searched ")), "{}", support());
            fs::write(programs.join(program), "").expect("written");
            fs::set_permissions(programs.join(program), fs::Permissions::from_mode(0o755)).expect("set");
        }
        assert_eq!(support(), "with block volumes, strict volumes of ext4, strict volumes of xfs");
        assert_eq!(ImageSupport::find(&search, &control).program_directories(), [programs]);
    }
}
