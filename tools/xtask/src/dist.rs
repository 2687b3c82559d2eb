//! `cargo xtask dist`: what a release consists of: a tarball, and a Debian package of the same files.
//!
//! ```text
//! usr/bin/              noded, nodectl, provisionerd, dirquota
//! usr/lib/systemd/…     noded.service
//! usr/share/            man pages, completions of bash, zsh and fish, the licenses of all that is linked
//! etc/nodekeel/         noded.toml: every key with its default
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde::Deserialize;

use crate::docs::{self, PROGRAMS};
use crate::oci::RELEASE_PROFILE;
use crate::setup;
use crate::workspace::{cargo, root, target_directory};

/// The newest that is known to build with this workspace's toolchain.
const CARGO_DEB: &str = "cargo-deb@3.8.0";
/// Where the programs of a checkout are installed, as the shipped unit has it; and those of a package.
const BIN_DIRS: (&str, &str) = ("/usr/local/bin/", "/usr/bin/");

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Cargo's profile; another one is for tests
    #[arg(long, default_value = RELEASE_PROFILE)]
    profile: String,
    /// Take the programs as they were built last, for tests
    #[arg(long, hide = true)]
    no_build: bool,
}

/// Builds the programs, and writes `target/dist/nodekeel_VERSION_ARCH.deb` and `nodekeel-VERSION-ARCH.tar.gz`.
///
/// # Errors
/// A program can't be built, or a file not written.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    setup::install()?;
    setup::install_cargo_tool("deb", CARGO_DEB, &[])?;
    if !arguments.no_build {
        let packages: Vec<&str> = PROGRAMS.iter().flat_map(|(_, package)| ["-p", package]).collect();
        let build = ["build", "--bins", "--profile", &arguments.profile];
        run_command(&mut cargo(&[&build, &packages[..]].concat()))?;
    }
    // `package.metadata.deb` names this directory.
    let dist = root().join("target/dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("remove {}", dist.display()))?;
    }
    let profile = if arguments.profile == "dev" { "debug" } else { &arguments.profile };
    stage(&target_directory().join(profile), &dist)?;
    let deb = dist.join(format!("nodekeel_{}_{}.deb", env!("CARGO_PKG_VERSION"), debian_architecture()?));
    // Quiet: it warns that the staged files are none of cargo's.
    let mut package =
        cargo(&["deb", "--quiet", "-p", "noded", "--no-build", "--no-strip", "--compress-system"]);
    if arguments.profile != RELEASE_PROFILE {
        package.arg("--fast");
    }
    run_command(package.arg("--output").arg(&deb))?;
    let tarball =
        dist.join(format!("nodekeel-{}-{}.tar.gz", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH));
    // The unit is installed by cargo-deb from its own directory.
    let unit = dist.join("root/usr/lib/systemd/system");
    fs::create_dir_all(&unit).with_context(|| format!("create {}", unit.display()))?;
    copy(&dist.join("systemd/noded.service"), &unit.join("noded.service"), 0o644)?;
    let owner = ["--owner=root:0", "--group=root:0", "--sort=name"];
    let mut tar = Command::new("tar");
    tar.args(owner).arg("-C").arg(dist.join("root")).arg("-czf").arg(&tarball).args(["usr", "etc"]);
    run_command(&mut tar)?;
    println!("{}\n{}", deb.display(), tarball.display());
    Ok(())
}

/// Lays out the files of a release below `dist/root`, from the programs that were built.
fn stage(built: &Path, dist: &Path) -> Result<()> {
    let staged = dist.join("root");
    for (program, _) in PROGRAMS {
        let path = staged.join("usr/bin").join(program);
        copy(&built.join(program), &path, 0o755)?;
        run_command(Command::new("strip").arg(&path))?;
    }
    let share = staged.join("usr/share");
    docs::write_man_pages(built, &share.join("man/man1"))?;
    for (shell, directory) in [
        ("bash", "bash-completion/completions"),
        ("zsh", "zsh/vendor-completions"),
        ("fish", "fish/vendor_completions.d"),
    ] {
        docs::write_completions(built, shell, &share.join(directory))?;
    }
    let doc = share.join("doc/nodekeel");
    copy(&root().join("LICENSE"), &doc.join("LICENSE"), 0o644)?;
    write(&doc.join("THIRD-PARTY"), &third_party_licenses()?)?;
    let config = testbed::command_output(Command::new(built.join("noded")).arg("config"))?;
    write(&staged.join("etc/nodekeel/noded.toml"), &config)?;
    let unit = root().join("deploy/systemd/noded.service");
    let unit = fs::read_to_string(&unit).with_context(|| format!("read {}", unit.display()))?;
    write(&dist.join("systemd/noded.service"), &unit.replace(BIN_DIRS.0, BIN_DIRS.1))?;
    // cargo-deb writes those of the unit next to them.
    fs::create_dir_all(dist.join("scripts")).context("create the directory of maintainer scripts")
}

/// *Source:* `cargo metadata`, format 1.
#[derive(Deserialize)]
struct Graph {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    manifest_path: PathBuf,
    source: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `dev`, `build`, or nothing for a normal one.
    kind: Option<String>,
}

/// The name and the license of each crate that the programs contain, and the texts of the licenses.
fn third_party_licenses() -> Result<String> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut metadata = cargo(&["metadata", "--format-version", "1", "--filter-platform", &platform]);
    let graph: Graph =
        serde_json::from_str(&testbed::command_output(&mut metadata)?).context("parse cargo metadata")?;
    let mut linked = BTreeSet::new();
    let is_program = |package: &&Package| PROGRAMS.iter().any(|(_, name)| package.name == *name);
    let mut left: Vec<&str> =
        graph.packages.iter().filter(is_program).map(|package| package.id.as_str()).collect();
    while let Some(id) = left.pop() {
        if !linked.insert(id) {
            continue;
        }
        let is_linked =
            |dependency: &&Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
        let node = graph.resolve.nodes.iter().find(|node| node.id == id);
        let dependencies = node.into_iter().flat_map(|node| node.deps.iter().filter(is_linked));
        left.extend(dependencies.map(|dependency| dependency.pkg.as_str()));
    }
    let foreign = graph
        .packages
        .iter()
        .filter(|package| linked.contains(package.id.as_str()) && package.source.is_some());
    let mut list = String::from("The programs contain these crates.\n\n");
    // Most crates have the same texts.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in foreign {
        let name = format!("{} {}", package.name, package.version);
        list += &format!("{name}: {}\n", package.license.as_deref().unwrap_or("see its license file"));
        for text in license_texts(package)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    for (text, names) in texts {
        list += &format!("\n{}\n{}\n\n{text}", "-".repeat(78), names.join(", "));
    }
    Ok(list)
}

/// The files of a crate that are its license, or what the license asks to pass on.
fn license_texts(package: &Package) -> Result<Vec<String>> {
    let directory = package.manifest_path.parent().unwrap_or(&package.manifest_path);
    let mut texts = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry.with_context(|| format!("list {}", directory.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        let is_license =
            ["LICENSE", "LICENCE", "COPYING", "NOTICE"].iter().any(|start| name.starts_with(start));
        if is_license && path.is_file() {
            let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            texts.push(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    Ok(texts)
}

fn debian_architecture() -> Result<String> {
    Ok(testbed::command_output(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))
        .with_context(|| format!("chmod {}", to.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

fn run_command(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_owned();
    let status = command.status().with_context(|| format!("execute {}", program.display()))?;
    ensure!(status.success(), "{} {:?} failed ({status})", program.display(), command.get_args());
    Ok(())
}
