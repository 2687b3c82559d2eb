//! The machine's Go, or the newer one that it fetches.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{cache, command_output, tools};

/// The Go to fetch where the machine's does not fetch one itself: each Go is a module, too.
pub(super) const TOOLCHAIN: &str = "go1.26.8";
/// Where the instructions of go.dev/dl unpack their archives.
const USUAL: &str = "/usr/local/go/bin/go";
const MISSING: &str = "Go is missing, which builds the Kubernetes tools: run `cargo xtask setup`, which installs \
    Debian's golang-go and fetches a newer one; or unpack an archive of https://go.dev/dl to /usr/local/go";

/// A Go that builds every module of this package.
///
/// From 1.21 on Go fetches the newer one that a module requires. *Source:* go.dev/doc/toolchain.
///
/// # Errors
/// Go is missing, or is older than that and can't fetch a newer one.
pub(super) fn go_command() -> Result<Command> {
    let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.is_file());
    let path = tools::find_tool(tools::GO).ok().or_else(usual).context(MISSING)?;
    // An older Go doesn't know the variable.
    let choice = command_output(Command::new(&path).args(["env", "GOTOOLCHAIN"]))?;
    if choice.trim().is_empty() {
        let mut command = Command::new(fetch_go(&path)?);
        command.env("GOTOOLCHAIN", "local");
        return Ok(command);
    }
    let mut command = Command::new(path);
    // A distribution's default may be to fetch none; the caller's choice stays.
    if env::var_os("GOTOOLCHAIN").is_none() {
        command.env("GOTOOLCHAIN", "auto");
    }
    Ok(command)
}

/// The newer Go, which the old one fetches as a module and checks against the checksum database.
///
/// *Source:* go.dev/doc/toolchain: the module `golang.org/toolchain`, whose files come without their execute
/// bits.
fn fetch_go(old: &Path) -> Result<PathBuf> {
    let module = format!("golang.org/toolchain@v0.0.1-{TOOLCHAIN}.linux-{}", super::go_architecture());
    let entry = cache::make_entry(&format!("{TOOLCHAIN}-{}", super::go_architecture()), |partial| {
        eprintln!("{TOOLCHAIN}: {} is too old and downloads this one, once: some 90 MB", old.display());
        let mut command = Command::new(old);
        command.args(["mod", "download", &module]).current_dir(partial).env("GOWORK", "off");
        command.env("GOMODCACHE", partial).env("GOFLAGS", "-modcacherw");
        command_output(&mut command).with_context(|| format!("fetch {module}"))?;
        let root = partial.join(&module);
        for directory in ["bin", &format!("pkg/tool/linux_{}", super::go_architecture())] {
            make_executable(&root.join(directory))?;
        }
        // The archive, now that it is unpacked.
        fs::remove_dir_all(partial.join("cache")).context("remove the archive")
    })?;
    Ok(entry.join(module).join("bin/go"))
}

fn make_executable(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?.flatten() {
        let path = entry.path();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("chmod {}", path.display()))?;
    }
    Ok(())
}
