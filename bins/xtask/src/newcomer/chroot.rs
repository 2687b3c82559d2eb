//! The README's commands in a bare Debian.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::markdown;
use crate::report::Report;
use crate::run;
use crate::workspace::{root, target_directory};

const COMMAND_WITHIN: Duration = Duration::from_secs(90 * 60);
/// Where the toolchain is copied to, in place of an installation by rustup.
const TOOLCHAIN: &str = "opt/rust";
/// Where the chroot sees the checkout.
const CHECKOUT: &str = "root/nodekeel";

/// Makes the chroot anew, and runs each command of the README's `sh` blocks there.
pub(super) fn run(report: &mut Report) -> Result<()> {
    ensure!(run::is_root(), "a chroot is root's to make: run as root");
    crate::setup::install_packages(&["debootstrap"])?;
    let chroot = Chroot::create(target_directory().join("newcomer/root"), report)?;
    let readme = fs::read_to_string(root().join("README.md")).context("read README.md")?;
    for line in markdown::shell_commands(&readme) {
        report.run_check(&format!("newcomer: {line}"), chroot.command(&line), COMMAND_WITHIN);
    }
    chroot.remove()
}

struct Chroot {
    root: PathBuf,
}

impl Chroot {
    fn create(root: PathBuf, report: &mut Report) -> Result<Self> {
        let chroot = Self { root };
        chroot.remove()?;
        let mut debootstrap = Command::new("debootstrap");
        debootstrap.args(["--variant=minbase", &debian_release()?]).arg(&chroot.root);
        report.run_check("newcomer: debootstrap", debootstrap, COMMAND_WITHIN);
        chroot.copy_machine_settings()?;
        chroot.copy_toolchain()?;
        chroot.clone_checkout()?;
        chroot.mount_kernel_file_systems()?;
        Ok(chroot)
    }

    /// How this machine reaches the package registries.
    fn copy_machine_settings(&self) -> Result<()> {
        for file in ["/etc/resolv.conf", "/etc/hosts", "/etc/apt/.", "/etc/ssl/."] {
            let to = self.root.join(file.trim_start_matches('/'));
            fs::create_dir_all(to.parent().unwrap_or(&self.root)).context("prepare /etc")?;
            testbed::command_output(Command::new("cp").args(["-rL", file]).arg(&to))
                .context("copy the settings")?;
        }
        Ok(())
    }

    fn copy_toolchain(&self) -> Result<()> {
        let sysroot = testbed::command_output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let to = self.root.join(TOOLCHAIN);
        fs::create_dir_all(to.parent().unwrap_or(&to)).context("prepare /opt")?;
        testbed::command_output(Command::new("cp").arg("-r").arg(sysroot.trim()).arg(&to))
            .context("copy the toolchain")?;
        Ok(())
    }

    /// The committed tree, as `git clone` gives it.
    fn clone_checkout(&self) -> Result<()> {
        let mut clone = Command::new("git");
        clone.args(["clone", "--quiet", "--no-hardlinks"]).arg(root()).arg(self.root.join(CHECKOUT));
        testbed::command_output(&mut clone).context("clone the checkout").map(drop)
    }

    fn mount_kernel_file_systems(&self) -> Result<()> {
        for directory in KERNEL_FILE_SYSTEMS {
            let to = self.root.join(directory);
            let mut mount = Command::new("mount");
            mount.args(["--rbind", "--make-rslave"]).arg(Path::new("/").join(directory)).arg(&to);
            testbed::command_output(&mut mount)
                .with_context(|| format!("mount /{directory} in the chroot"))?;
        }
        Ok(())
    }

    /// The line in the checkout, by a login shell that has cargo on its path.
    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("chroot");
        let script = format!("export PATH=/{TOOLCHAIN}/bin:$PATH HOME=/root; cd /{CHECKOUT} && {line}");
        command.arg(&self.root).args(["/bin/sh", "-ec", &script]);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        for name in [
            "CARGO",
            "CARGO_HOME",
            "CARGO_TARGET_DIR",
            "RUSTUP_HOME",
            "RUSTUP_TOOLCHAIN",
            "GOROOT",
            "GOFLAGS",
        ] {
            command.env_remove(name);
        }
        command
    }

    /// Removes it, if it exists. Nothing is removed while anything is mounted below it: that would be this machine's.
    fn remove(&self) -> Result<()> {
        for directory in KERNEL_FILE_SYSTEMS {
            // Whether it worked is checked below, for all of them.
            let _ = testbed::command_output(Command::new("umount").arg("-lR").arg(self.root.join(directory)));
        }
        let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
        ensure!(
            !has_mount_below(&table, &self.root),
            "unmount what is below {}, then try again",
            self.root.display()
        );
        match fs::remove_dir_all(&self.root) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.root.display()))
            }
            _ => Ok(()),
        }
    }
}

/// *Source:* proc_pid_mountinfo(5): the fifth field is the mount point.
fn has_mount_below(table: &str, root: &Path) -> bool {
    let mut targets = table.lines().filter_map(|line| line.split(' ').nth(4));
    targets.any(|target| Path::new(target).starts_with(root))
}

const KERNEL_FILE_SYSTEMS: [&str; 3] = ["proc", "sys", "dev"];

/// This machine's, so that its mirrors serve it.
fn debian_release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    codename
        .map(|name| name.trim_matches('"').to_owned())
        .context("/etc/os-release names no VERSION_CODENAME")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_below_the_chroot_is_found_and_one_beside_it_is_not() {
        let table =
            "22 1 0:21 / /w/chroot/proc rw - proc proc rw\n23 1 0:22 / /w/chrootless rw - tmpfs a rw\n";
        assert!(has_mount_below(table, Path::new("/w/chroot")));
        assert!(!has_mount_below(table, Path::new("/w/chroo")) && !has_mount_below(table, Path::new("/x")));
    }
}
