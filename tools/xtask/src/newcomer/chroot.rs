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

/// Makes the chroot anew, and runs the commands of the README's `sh` blocks there, up to the first with this word.
pub(super) fn run(last: &str, report: &mut Report) -> Result<()> {
    ensure!(run::is_root(), "a chroot is root's to make: run as root");
    crate::setup::install_packages(&["debootstrap"])?;
    let chroot = Chroot::create(target_directory().join("newcomer/root"), report)?;
    let readme = fs::read_to_string(root().join("README.md")).context("read README.md")?;
    for line in markdown::commands_until(&readme, last)? {
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
        Ok(chroot)
    }

    /// How this machine reaches the package registries.
    fn copy_machine_settings(&self) -> Result<()> {
        for path in ["etc/resolv.conf", "etc/hosts", "etc/apt", "etc/ssl"] {
            // A directory is replaced as a whole; links lead outside the chroot, so their targets are copied.
            let to = self.root.join("etc");
            testbed::command_output(Command::new("cp").arg("-rL").arg(Path::new("/").join(path)).arg(&to))
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

    /// The line in the checkout, by a login shell that has cargo on its path.
    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("unshare");
        let script = format!("export PATH=/{TOOLCHAIN}/bin:$PATH HOME=/root; cd /{CHECKOUT} && {line}");
        command.args(["--mount", "--propagation", "private", "/bin/sh", "-ec", ENTER, "enter"]);
        command.arg(&self.root).arg(script);
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

    /// Removes it, if it exists. Its mounts are in the mount namespaces of its commands alone.
    fn remove(&self) -> Result<()> {
        match fs::remove_dir_all(&self.root) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.root.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Enters the tree `$1` as a root file system, and runs the script `$2`: runc's `pivot_root` and mountinfo need `/` to be a mount.
const ENTER: &str = r#"
mount --bind "$1" "$1"
for each in proc sys dev; do mount --rbind "/$each" "$1/$each"; done
cd "$1"
pivot_root . mnt
exec chroot . /bin/sh -ec "umount -l /mnt; $2"
"#;

/// This machine's, so that its mirrors serve it.
fn debian_release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    codename
        .map(|name| name.trim_matches('"').to_owned())
        .context("/etc/os-release names no VERSION_CODENAME")
}
