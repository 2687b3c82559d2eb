//! The programs that make file systems, for strict volumes: with their libraries, since no static ones are packaged.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use testbed::tools::{self, Tool};
use testbed::{ContainerImage, cache, command_output, guest};

use super::Platform;
use crate::run::Log;

/// Where provisionerd looks for them.
const PROGRAM_DIR: &str = "usr/sbin";

const PROGRAMS: [Tool; 2] = [tools::MKFS_EXT4, tools::MKFS_XFS];

const READELF: Tool = Tool { name: "readelf", package: "binutils" };
const DPKG: Tool = Tool { name: "dpkg", package: "dpkg" };
const APT_GET: Tool = Tool { name: "apt-get", package: "apt" };

/// Adds them to an image: those of this machine, or, for another processor, those of its Debian.
pub(super) fn add_formatters(image: ContainerImage, platform: Platform, log: &Log) -> Result<ContainerImage> {
    let files = if Platform::native()? == platform { native_files() } else { packaged_files(platform, log) };
    let files = files.with_context(|| {
        format!("find mkfs.ext4 and mkfs.xfs for {}; or choose another --platform", platform.architecture())
    })?;
    Ok(files.into_iter().fold(image, |image, (at, source)| image.add_file(at, source)))
}

/// The programs of this machine and their libraries, by their paths in the image.
fn native_files() -> Result<BTreeMap<PathBuf, PathBuf>> {
    let mut files = BTreeMap::new();
    let mut programs = Vec::new();
    for tool in PROGRAMS {
        let found = tools::find_tool(tool)?;
        // Where a library lies, it is a link to a version of it.
        let real = found.canonicalize().with_context(|| format!("find {}", found.display()))?;
        programs.push(real.clone());
        files.insert(Path::new(PROGRAM_DIR).join(tool.name), real);
    }
    for (at, source) in guest::find_libraries(&programs)? {
        files.insert(at.strip_prefix("/").unwrap_or(&at).to_owned(), source);
    }
    Ok(files)
}

/// The programs of another processor and their libraries, downloaded once.
fn packaged_files(platform: Platform, log: &Log) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let name = format!("formatters-{}", platform.architecture());
    let tree = cache::make_entry(&name, |directory| {
        log.line(&format!("download mkfs.ext4 and mkfs.xfs for {}", platform.architecture()));
        let work = directory.join("apt");
        download_packages(platform, &work)?;
        unpack_packages(&work, directory)?;
        fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))
    })?;
    collect_files(platform, &tree)
}

/// Downloads the packages that have the programs, and all that these depend on, and installs nothing.
fn download_packages(platform: Platform, work: &Path) -> Result<()> {
    for below in ["state/lists/partial", "cache/archives/partial"] {
        let directory = work.join(below);
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    }
    // No package is installed for that processor, as far as this apt knows.
    let status = work.join("status");
    fs::write(&status, "").with_context(|| format!("write {}", status.display()))?;
    let apt = tools::find_tool(APT_GET)?;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&apt);
        command.arg(format!("-oAPT::Architecture={}", platform.architecture()));
        command.arg(format!("-oDir::State={}", work.join("state").display()));
        command.arg(format!("-oDir::State::status={}", status.display()));
        command.arg(format!("-oDir::Cache={}", work.join("cache").display()));
        // Otherwise root's apt downloads as a user that can't enter this directory.
        command.arg("-oAPT::Sandbox::User=root").args(arguments).env("LC_ALL", "C");
        command_output(&mut command).map(drop)
    };
    run(&["update"])?;
    let packages = PROGRAMS.map(|tool| tool.package);
    let install = ["install", "--download-only", "--yes", "--no-install-recommends"];
    run(&[&install[..], &packages[..]].concat())
}

fn unpack_packages(work: &Path, into: &Path) -> Result<()> {
    let (dpkg, archives) = (tools::find_tool(DPKG)?, work.join("cache/archives"));
    let list = || format!("list {}", archives.display());
    for entry in fs::read_dir(&archives).with_context(list)? {
        let package = entry.with_context(list)?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            command_output(Command::new(&dpkg).arg("-x").arg(&package).arg(into))?;
        }
    }
    Ok(())
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
            let found = find(&[&libraries, Path::new("lib")], name)?;
            files.insert(at, found);
        }
    }
    Ok(files)
}

/// What an ELF file needs to be run.
#[derive(Debug, Default, PartialEq, Eq)]
struct ElfNeeds {
    libraries: Vec<String>,
    loader: Option<String>,
}

impl ElfNeeds {
    fn read(file: &Path) -> Result<Self> {
        let mut command = Command::new(tools::find_tool(READELF)?);
        command.args(["--wide", "--dynamic", "--program-headers"]).arg(file).env("LC_ALL", "C");
        let text = command_output(&mut command)?;
        ensure!(text.contains("Dynamic section"), "{} is not a dynamic program", file.display());
        Ok(Self::parse(&text))
    }

    /// *Source:* readelf(1): `(NEEDED) … Shared library: [NAME]` and `[Requesting program interpreter: PATH]`.
    fn parse(text: &str) -> Self {
        let mut needs = Self::default();
        for line in text.lines() {
            let between = |start: &str| {
                let rest = line.split_once(start)?.1;
                rest.split_once(']').map(|(name, _)| name.trim().to_owned())
            };
            if line.contains("(NEEDED)") {
                needs.libraries.extend(between("["));
            }
            needs.loader = needs.loader.or_else(|| between("[Requesting program interpreter:"));
        }
        needs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_readelf_is_parsed() {
        let text = "      [Requesting program interpreter: /lib/ld-linux-aarch64.so.1]\n\
                    0x0000000000000001 (NEEDED)             Shared library: [libblkid.so.1]\n\
                    0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n\
                    0x000000000000001d (RUNPATH)            Library runpath: [/usr/lib]\n";
        let libraries = ["libblkid.so.1", "libc.so.6"].map(str::to_owned).to_vec();
        let loader = Some("/lib/ld-linux-aarch64.so.1".to_owned());
        assert_eq!(ElfNeeds::parse(text), ElfNeeds { libraries, loader });
    }

    #[track_caller]
    fn check_files(files: &BTreeMap<PathBuf, PathBuf>) {
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
        check_files(&native_files().unwrap());
    }

    #[test]
    #[ignore = "soak"]
    fn the_programs_of_the_other_processor_are_downloaded_with_their_libraries_and_loader() {
        let native = Platform::native().unwrap();
        let other = Platform::ALL.into_iter().find(|platform| *platform != native).unwrap();
        check_files(&packaged_files(other, &Log::default()).unwrap());
    }
}
