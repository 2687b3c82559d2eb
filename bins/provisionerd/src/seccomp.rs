//! `provisionerd install-seccomp`: the profile of pods that must not leave their limits.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use nodekeel_localstorage::{Dir, FileMode};

use crate::print_stdout;

/// The profile, as containerd and runc read it.
const PROFILE: &str = include_str!("../../../deploy/seccomp/nodekeel-limits.json");

/// The name of the profile in the kubelet's directory, which pods name in `localhostProfile`.
const PROFILE_NAME: &str = "nodekeel-limits.json";

/// The directory that the kubelet reads profiles from. *Source:* Kubernetes, "Restrict a Container's Syscalls
/// with seccomp".
const PROFILE_DIR: &str = "seccomp";

/// Where to install the profile.
#[derive(Debug, Args)]
pub(crate) struct InstallFlags {
    /// The kubelet's root directory
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet: PathBuf,
}

pub(crate) fn run_install(flags: &InstallFlags) -> Result<ExitCode> {
    let directory = flags.kubelet.join(PROFILE_DIR);
    let file = directory.join(PROFILE_NAME);
    let text = match install_profile(&directory)
        .with_context(|| format!("can't install the seccomp profile {}", file.display()))?
    {
        true => format!("installed {}\n", file.display()),
        false => format!("{} is up to date\n", file.display()),
    };
    Ok(print_stdout(&text))
}

/// Writes the profile, so that no container starts with a part of it; returns whether it was another one.
fn install_profile(directory: &Path) -> Result<bool> {
    let dir = Dir::open_or_create(directory, FileMode::new(0o755))?;
    if dir.read(PROFILE_NAME).is_ok_and(|installed| installed == PROFILE.as_bytes()) {
        return Ok(false);
    }
    dir.write(PROFILE_NAME, PROFILE.as_bytes(), FileMode::new(0o644))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_profile_replaces_an_older_one_and_stays_if_it_is_the_same() {
        let kubelet = tempfile::tempdir().expect("a directory");
        let directory = kubelet.path().join(PROFILE_DIR);
        assert!(install_profile(&directory).expect("installed"));
        let file = directory.join(PROFILE_NAME);
        let mode = |path: &Path| path.metadata().expect("it exists").permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(&directory)), (0o644, 0o755), "also read by runtimes of other users");
        assert!(!install_profile(&directory).expect("installed"));
        std::fs::write(&file, "{}").expect("an older one");
        assert!(install_profile(&directory).expect("installed"));
        assert_eq!(std::fs::read_to_string(&file).expect("read"), PROFILE);
    }

    #[test]
    fn a_kubelet_directory_that_cannot_be_used_is_named() {
        let flags = InstallFlags { kubelet: "/proc/nowhere".into() };
        let error = format!("{:#}", run_install(&flags).expect_err("procfs has no such directory"));
        assert!(error.contains("can't install the seccomp profile /proc/nowhere/seccomp"), "{error}");
    }
}
