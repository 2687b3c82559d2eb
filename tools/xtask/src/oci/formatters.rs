//! The programs that make file systems, for strict volumes: with their libraries, since no static ones are packaged.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
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

/// The list of what each package has, in the directory of the unpacked ones.
const CONTENTS: &str = "contents";

/// A package of Debian.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DebianPackage {
    pub(super) name: String,
    pub(super) version: String,
}

/// The programs and their libraries, by their paths in the image, and the packages that have them. They are Debian's for both
/// processors, not those of this machine, which may differ from the next one's.
#[derive(Debug)]
pub(super) struct Formatters {
    files: BTreeMap<PathBuf, PathBuf>,
    pub(super) packages: BTreeSet<DebianPackage>,
}

impl Formatters {
    pub(super) fn find(platform: Platform, log: &Log) -> Result<Self> {
        let tree = download_packages(platform, log)
            .with_context(|| format!("download mkfs.ext4 and mkfs.xfs for {}", platform.architecture()))?;
        let files = collect_files(platform, &tree)?;
        let packages = find_packages(&tree, files.values())?;
        Ok(Self { files, packages })
    }

    pub(super) fn add_to(self, image: ContainerImage) -> ContainerImage {
        self.files.into_iter().fold(image, |image, (at, source)| image.add_file(at, source))
    }
}

/// The packages that have the programs, and all that these depend on, downloaded once.
fn download_packages(platform: Platform, log: &Log) -> Result<PathBuf> {
    let architecture = platform.architecture();
    cache::make_entry(&format!("formatter-packages-{architecture}"), |directory| {
        log.line(&format!("download mkfs.ext4 and mkfs.xfs for {architecture}"));
        let apt = AptClient::new(directory.join("apt"), architecture)?;
        let install = ["install", "--download-only", "--yes", "--no-install-recommends"];
        apt.run_program("apt-get", &[&install[..], &PROGRAMS.map(|tool| tool.package)].concat())?;
        let contents = directory.join(CONTENTS);
        fs::write(&contents, apt.list_contents()?)
            .with_context(|| format!("write {}", contents.display()))?;
        apt.unpack_into(directory)
    })
}

/// The packages that have these files of their tree.
fn find_packages<'a>(
    tree: &Path,
    files: impl Iterator<Item = &'a PathBuf>,
) -> Result<BTreeSet<DebianPackage>> {
    let contents = tree.join(CONTENTS);
    let contents = fs::read_to_string(&contents).with_context(|| format!("read {}", contents.display()))?;
    let find = |file: &PathBuf| {
        let below = file.strip_prefix(tree).unwrap_or(file);
        let line = contents.lines().find(|line| line.splitn(3, ' ').nth(2).map(Path::new) == Some(below))?;
        let mut words = line.split(' ').map(str::to_owned);
        Some(DebianPackage { name: words.next()?, version: words.next()? })
    };
    files.map(|file| find(file).with_context(|| format!("find the package of {}", file.display()))).collect()
}

/// The programs in a tree of unpacked packages, and the libraries that they need.
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

    #[test]
    #[ignore = "soak: packages of both processors are downloaded"]
    fn the_programs_have_their_libraries_their_loader_and_their_packages() {
        for platform in Platform::ALL {
            let Formatters { files, packages } = Formatters::find(platform, &Log::default()).unwrap();
            for tool in PROGRAMS {
                assert!(files.contains_key(&Path::new(PROGRAM_DIR).join(tool.name)), "{files:?}");
            }
            let has = |part: &str| files.keys().any(|at| at.to_string_lossy().contains(part));
            assert!(has("ld-linux") && has("libc.so.6") && has("libblkid.so.1"), "{files:?}");
            assert!(files.keys().all(|at| at.is_relative()), "{files:?}");
            assert!(files.values().all(|source| source.is_file()), "{files:?}");
            let names: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
            assert!(names.contains(&"libc6") && names.contains(&"xfsprogs"), "{names:?}");
            assert!(!names.iter().any(|name| name.starts_with("python")), "{names:?}");
        }
    }
}
