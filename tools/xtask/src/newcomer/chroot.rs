//! The README's commands in a bare Debian.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::markdown;
use crate::report::Report;
use crate::run;
use crate::workspace::{root, target_directory};

const COMMAND_WITHIN: Duration = Duration::from_secs(90 * 60);
const CREATE: &str = include_str!("create.sh");
const ENTER: &str = include_str!("enter.sh");
/// What the caller's toolchains set.
const VARIABLES: [&str; 7] =
    ["CARGO", "CARGO_HOME", "CARGO_TARGET_DIR", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "GOROOT", "GOFLAGS"];

/// Makes the chroot anew, and runs the commands of the README's `sh` blocks there, up to the first with this word.
pub(super) fn run(last: &str, report: &mut Report) -> Result<()> {
    ensure!(run::is_root(), "a chroot is root's to make: run as root");
    crate::setup::install_packages(&["debootstrap"])?;
    let chroot = target_directory().join("newcomer/root");
    let checkout = root();
    report.run_check("newcomer: debootstrap", shell(CREATE, &chroot, &checkout), COMMAND_WITHIN);
    let readme = fs::read_to_string(checkout.join("README.md")).context("read README.md")?;
    for line in markdown::commands_until(&readme, last)? {
        let mut command = shell(ENTER, &chroot, Path::new(&line));
        for name in VARIABLES {
            command.env_remove(name);
        }
        report.run_check(&format!("newcomer: {line}"), command, COMMAND_WITHIN);
    }
    fs::remove_dir_all(&chroot).with_context(|| format!("remove {}", chroot.display()))
}

/// A script with two arguments.
fn shell(script: &str, chroot: &Path, second: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-euc", script, "sh"]).arg(chroot).arg(second);
    command
}
