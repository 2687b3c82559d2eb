//! The programs that make file systems, for strict volumes: with their libraries, since no static ones are packaged.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use testbed::tools::{self, Tool};
use testbed::{AptClient, ContainerImage, cache, command_output};

use super::Platform;
use crate::run::Log;

/// Where provisionerd looks for them.
const PROGRAM_DIR: &str = "usr/sbin";

const PROGRAMS: [Tool; 2] = [tools::MKFS_EXT4, tools::MKFS_XFS];

const READELF: Tool = Tool { name: "readelf", package: "binutils" };

/// Adds them to an image: those of this machine, or, for another processor, those of its Debian.
pub(super) fn add_formatters(image: ContainerImage, platform: Platform, log: &Log) -> Result<ContainerImage> {
    let files = find_files(platform, log).with_context(|| {
        format!("find mkfs.ext4 and mkfs.xfs for {}; or choose another --platform", platform.architecture())
    })?;
    Ok(files.into_iter().fold(image, |image, (at, source)| image.add_file(at, source)))
}

/// The programs and their libraries, by their paths in the image.
fn find_files(platform: Platform, log: &Log) -> Result<BTreeMap<PathBuf, PathBuf>> {
    match Platform::native()? == platform {
        true => collect_files(platform, Path::new("/")),
        false => collect_files(platform, &download_packages(platform, log)?),
    }
}

/// The packages that have the programs, and all that these depend on, downloaded once.
fn download_packages(platform: Platform, log: &Log) -> Result<PathBuf> {
    let architecture = platform.architecture();
    cache::make_entry(&format!("formatters-{architecture}"), |directory| {
        log.line(&format!("download mkfs.ext4 and mkfs.xfs for {architecture}"));
        let apt = AptClient::new(directory.join("apt"), architecture)?;
        let install = ["install", "--download-only", "--yes", "--no-install-recommends"];
        apt.run_program("apt-get", &[&install[..], &PROGRAMS.map(|tool| tool.package)].concat())?;
        apt.unpack_into(directory)
    })
}

/// The programs in a tree of unpacked or installed packages, and the libraries that they need.
fn collect_files(platform: Platform, tree: &Path) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let libraries = PathBuf::from(format!("lib/{}-linux-gnu", platform.processor()));
    let find = |below: &[&Path], name: &str| {
        let places = below.iter().flat_map(|below| [tree.join(below), tree.join("usr").join(below)]);
        let found = places.map(|place| place.join(name)).find(|path| path.exists());
        found.with_context(|| format!("find {name} in {}", tree.display()))
    };
    let mut files = BTreeMap::new();
    let mut pending = Vec::new();
    for tool in PROGRAMS {
        let program = find(&[Path::new("sbin")], tool.name)?;
        files.insert(Path::new(PROGRAM_DIR).join(tool.name), program.clone());
        pending.push(program);
    }
    while let Some(file) = pending.pop() {
        let needs = ElfNeeds::read(&file)?;
        for name in needs.libraries {
            if let Entry::Vacant(vacant) = files.entry(libraries.join(&name)) {
                let found = find(&[&libraries, Path::new("lib")], &name)?;
                pending.push(vacant.insert(found).clone());
            }
        }
        if let Some(loader) = needs.loader {
            let at = Path::new(loader.trim_start_matches('/')).to_owned();
            let name = at.file_name().and_then(|name| name.to_str()).context("the loader has a name")?;
            let found = find(&[&libraries, Path::new("lib"), Path::new("lib64")], name)?;
            files.insert(at, found);
        }
    }
    Ok(files)
}

/// What an ELF file needs to be run; nothing where it is static.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ElfNeeds {
    libraries: Vec<String>,
    pub(super) loader: Option<String>,
}

impl ElfNeeds {
    /// *Source:* readelf(1): `(NEEDED) … Shared library: [NAME]` and `[Requesting program interpreter: PATH]`.
    pub(super) fn read(file: &Path) -> Result<Self> {
        let mut command = Command::new(tools::find_tool(READELF)?);
        command.args(["--wide", "--dynamic", "--program-headers"]).arg(file).env("LC_ALL", "C");
        let mut needs = Self::default();
        for line in command_output(&mut command)?.lines() {
            let between = |start: &str| {
                let rest = line.split_once(start)?.1;
                rest.split_once(']').map(|(name, _)| name.trim().to_owned())
            };
            if line.contains("(NEEDED)") {
                needs.libraries.extend(between("["));
            }
            needs.loader = needs.loader.or_else(|| between("[Requesting program interpreter:"));
        }
        Ok(needs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_needs_a_loader_and_libraries() {
        // Test binaries are linked dynamically.
        let this = ElfNeeds::read(&std::env::current_exe().unwrap()).unwrap();
        assert!(this.loader.unwrap().contains("ld-linux"));
        assert!(this.libraries.contains(&"libc.so.6".to_owned()));
        assert!(ElfNeeds::read(Path::new("/etc/passwd")).is_err());
    }

    #[track_caller]
    fn check_files(platform: Platform) {
        let files = find_files(platform, &Log::default()).unwrap();
        for tool in PROGRAMS {
            assert!(files.contains_key(&Path::new(PROGRAM_DIR).join(tool.name)), "{files:?}");
        }
        let has = |part: &str| files.keys().any(|at| at.to_string_lossy().contains(part));
        assert!(has("ld-linux") && has("libc.so.6") && has("libblkid.so.1"), "{files:?}");
        assert!(files.keys().all(|at| at.is_relative()), "{files:?}");
        assert!(files.values().all(|source| source.is_file()), "{files:?}");
    }

    #[test]
    #[ignore = "needs xfsprogs and e2fsprogs"]
    fn the_programs_of_this_machine_have_their_libraries_and_loader() {
        check_files(Platform::native().unwrap());
    }

    #[test]
    #[ignore = "soak"]
    fn the_programs_of_the_other_processor_are_downloaded_with_their_libraries_and_loader() {
        let native = Platform::native().unwrap();
        check_files(Platform::ALL.into_iter().find(|platform| *platform != native).unwrap());
    }
}
