//! `cargo xtask setup`: the packages that tests, benches and the demo need.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use testbed::{gotool, tools};

use crate::run;
use crate::workspace::cargo;

/// Subcommands that `cargo xtask check` runs, which not every toolchain has.
const COMPONENTS: [&str; 2] = ["clippy", "fmt"];
/// Debian's packages run it before they start a daemon; exit code 101 forbids that.
///
/// *Source:* /usr/share/doc/init-system-helpers/README.policy-rc.d.gz.
const POLICY: &str = "/usr/sbin/policy-rc.d";
const POLICY_TEXT: &str =
    "#!/bin/sh\n# Written by nodekeel's setup, which removes it at its end.\nexit 101\n";

/// Prints how to install what is missing; the exit code is 1 where something is.
pub(crate) fn check() -> Result<ExitCode> {
    let (packages, components) = (missing_packages(), missing_components());
    if !packages.is_empty() {
        println!("to install the missing Debian packages: {}", install_command(&packages));
    }
    if !components.is_empty() {
        let components = components.join(" ");
        println!("to install what cargo xtask check needs: rustup component add {components}");
    }
    let is_complete = packages.is_empty() && components.is_empty();
    Ok(if is_complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs the missing Debian packages.
///
/// # Errors
/// The caller isn't root, or apt-get is missing; with the command to run instead.
pub(crate) fn install() -> Result<()> {
    let packages = missing_packages();
    if packages.is_empty() {
        println!("setup: nothing is missing");
        return Ok(());
    }
    install_packages(&packages)?;
    let missing = missing_packages();
    ensure!(missing.is_empty(), "still missing after apt-get install: {}", missing.join(" "));
    Ok(())
}

/// Installs Debian packages.
///
/// # Errors
/// The caller isn't root, or apt-get is missing; with the command to run instead.
pub(crate) fn install_packages(packages: &[&str]) -> Result<()> {
    let apt = tools::Tool { name: "apt-get", package: "apt" };
    let by_hand = install_command(packages);
    let Ok(apt) = tools::find_tool(apt) else {
        bail!(
            "{} missing, and this machine has no apt-get; on Debian, run: {by_hand}",
            format_list(packages)
        );
    };
    ensure!(
        run::is_root(),
        "{} missing, and only root may install packages; run as root: {by_hand}",
        format_list(packages)
    );
    println!("setup: installing {}", packages.join(" "));
    let _policy = forbid_daemons()?;
    if are_lists_empty() {
        apt_get(&apt, &["update"])?;
    }
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(packages);
    if apt_get(&apt, &arguments).is_err() {
        // The package lists may be older than the archive.
        apt_get(&apt, &["update"])?;
        apt_get(&apt, &arguments).with_context(|| format!("install by hand: {by_hand}"))?;
    }
    Ok(())
}

/// Builds the programs that Debian lacks where the cache lacks them, with the progress on standard error.
///
/// # Errors
/// One of them can't be built.
pub(crate) fn build_go_tools() -> Result<()> {
    gotool::ALL.iter().try_for_each(|tools| tools.program_directory().map(drop))
}

/// Installs a subcommand of cargo where the machine lacks it.
///
/// # Errors
/// It can't be built.
pub(crate) fn install_cargo_tool(name: &str, version: &str, options: &[&str]) -> Result<()> {
    if has_cargo_tool(name) {
        return Ok(());
    }
    // These tools run for seconds: what counts is how long their own build takes.
    let quick = ["--config", "profile.release.opt-level=1", "--config", "profile.release.lto=false"];
    let mut install = cargo(&["install", "--locked", version]);
    install.args(options).args(quick);
    println!("setup: cargo install {version}");
    let status = install.status().context("execute cargo")?;
    ensure!(status.success(), "cargo install {version} failed ({status})");
    Ok(())
}

fn has_cargo_tool(name: &str) -> bool {
    let mut version = cargo(&[name, "--version"]);
    version.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

fn missing_components() -> Vec<&'static str> {
    COMPONENTS.into_iter().filter(|component| !has_cargo_tool(component)).map(component_name).collect()
}

/// The component of rustup that has a subcommand of cargo.
fn component_name(subcommand: &'static str) -> &'static str {
    if subcommand == "fmt" { "rustfmt" } else { subcommand }
}

fn missing_packages() -> Vec<&'static str> {
    let missing = tools::ALL.iter().filter(|tool| tools::find_tool(**tool).is_err());
    let files = tools::FILES.into_iter().filter(|file| !Path::new(file.path).exists());
    let mut packages: Vec<_> =
        missing.map(|tool| tool.package).chain(files.map(|file| file.package)).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn format_list(packages: &[&str]) -> String {
    let verb = if packages.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", packages.join(", "))
}

fn install_command(packages: &[&str]) -> String {
    format!("apt-get update && apt-get install --no-install-recommends {}", packages.join(" "))
}

fn are_lists_empty() -> bool {
    let Ok(entries) = fs::read_dir("/var/lib/apt/lists") else { return true };
    !entries.flatten().any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

fn apt_get(apt: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(apt);
    // Where no policy is read, a run level of 1 keeps invoke-rc.d from starting daemons.
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    let status = command.status().context("execute apt-get")?;
    ensure!(status.success(), "apt-get {} failed ({status})", arguments.join(" "));
    Ok(())
}

/// Keeps Debian's packages from starting daemons on this machine until it is dropped.
#[derive(Debug)]
struct DaemonPolicy(PathBuf);

impl Drop for DaemonPolicy {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("setup: remove {}: {error}", self.0.display());
        }
    }
}

fn forbid_daemons() -> Result<Option<DaemonPolicy>> {
    forbid_daemons_by(Path::new(POLICY))
}

/// `None` where the machine has another policy, which stays unchanged.
fn forbid_daemons_by(path: &Path) -> Result<Option<DaemonPolicy>> {
    let is_ours = fs::read_to_string(path).is_ok_and(|text| text == POLICY_TEXT);
    if path.exists() && !is_ours {
        return Ok(None);
    }
    let place = || path.display();
    fs::write(path, POLICY_TEXT).with_context(|| format!("write {}", place()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("chmod {}", place()))?;
    Ok(Some(DaemonPolicy(path.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn daemons_are_forbidden_only_while_packages_are_installed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy-rc.d");
        let policy = forbid_daemons_by(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o755);
        // Not executed itself: a child that another test forks may still have it open for writing.
        assert_eq!(Command::new("sh").arg(&path).status().unwrap().code(), Some(101));
        drop(policy);
        assert!(!path.exists());
    }

    #[test]
    fn a_killed_runs_policy_is_replaced_and_a_foreign_one_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy-rc.d");
        fs::write(&path, POLICY_TEXT).unwrap();
        assert!(forbid_daemons_by(&path).unwrap().is_some());
        assert!(!path.exists());
        fs::write(&path, "#!/bin/sh\nexit 0\n").unwrap();
        assert!(forbid_daemons_by(&path).unwrap().is_none());
        assert!(path.exists());
    }
}
