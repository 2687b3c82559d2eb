//! The machine's Go, and the newer one that it fetches.

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{cache, command_output, tools};

/// From this version on Go fetches the newer Go that a module requires by itself.
///
/// *Source:* go.dev/doc/toolchain.
const FETCHES_ITSELF: GoVersion = GoVersion(1, 21, 0);
/// The version to fetch where the machine's Go is older than that: each Go is a module, too.
const TOOLCHAIN: &str = "go1.26.8";
/// Where the instructions of go.dev/dl unpack their archives.
const USUAL: &str = "/usr/local/go/bin/go";

/// A version of Go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GoVersion(u32, u32, u32);

impl GoVersion {
    /// Reads `1.26`, `1.26.0`, `go1.26.8` and `go1.27rc1 X:some`.
    pub(super) fn parse_version(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches("go").split(' ').next()?;
        let mut numbers = text.split('.').map(leading_number);
        Some(Self(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    #[cfg(test)]
    pub(super) fn version_parts(self) -> (u32, u32, u32) {
        (self.0, self.1, self.2)
    }
}

fn leading_number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

impl fmt::Display for GoVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Why the machine's Go can't build the tools, with the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfitGo(String);

impl fmt::Display for UnfitGo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnfitGo {}

/// What a Go needs before it can build a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GoStep {
    /// It is new enough.
    Ready,
    /// It fetches a newer one by itself.
    FetchesItself,
    /// It has to be called to fetch a newer one.
    Fetch,
}

/// A Go that can build a module, and the `GOTOOLCHAIN` that it needs for that.
#[derive(Debug)]
pub(super) struct GoToolchain {
    pub(super) path: PathBuf,
    pub(super) toolchain: Option<&'static str>,
}

/// Finds or fetches a Go of at least this version.
///
/// # Errors
/// [`UnfitGo`] where Go is missing or may not fetch a newer one; why the fetch failed.
pub(super) fn find_go(needed: GoVersion) -> Result<GoToolchain> {
    let path = locate_go().ok_or_else(|| UnfitGo(missing_go_text()))?;
    let found = command_output(Command::new(&path).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local"))?;
    match choose_step(found.trim(), needed, std::env::var("GOTOOLCHAIN").ok().as_deref())? {
        GoStep::Ready => Ok(GoToolchain { path, toolchain: None }),
        GoStep::FetchesItself => Ok(GoToolchain { path, toolchain: Some("auto") }),
        GoStep::Fetch => Ok(GoToolchain { path: fetch_go(&path)?, toolchain: Some("local") }),
    }
}

fn locate_go() -> Option<PathBuf> {
    let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.is_file());
    tools::find_tool(tools::GO).ok().or_else(usual)
}

fn choose_step(found: &str, needed: GoVersion, choice: Option<&str>) -> Result<GoStep, UnfitGo> {
    match GoVersion::parse_version(found) {
        Some(has) if has < needed => match choice {
            Some("local") => Err(UnfitGo(format!(
                "found {found}, but Go {needed} is needed, and GOTOOLCHAIN=local forbids fetching it: unset \
                 GOTOOLCHAIN"
            ))),
            _ if has < FETCHES_ITSELF => Ok(GoStep::Fetch),
            _ => Ok(GoStep::FetchesItself),
        },
        // A development version has no number, and is the newest.
        _ => Ok(GoStep::Ready),
    }
}

fn missing_go_text() -> String {
    "Go is missing, which builds the Kubernetes tools: run `cargo xtask setup`, which installs Debian's golang-go and \
     fetches a newer one; or unpack an archive of https://go.dev/dl to /usr/local/go; or set NODEKEEL_KUBE_BIN to a \
     directory with the programs"
        .into()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        let read = |text| GoVersion::parse_version(text).map(GoVersion::version_parts);
        assert_eq!(read("go1.26.8\n"), Some((1, 26, 8)));
        assert_eq!(read("1.26"), Some((1, 26, 0)));
        assert_eq!(read("go1.27rc1 X:nosynchash"), Some((1, 27, 0)));
        assert_eq!(read("devel +abc"), None);
        assert!(GoVersion::parse_version("go1.9").unwrap() < GoVersion::parse_version("go1.26.0").unwrap());
    }

    #[test]
    fn an_old_go_gets_a_newer_one_unless_that_is_forbidden() {
        let step = |found, choice| choose_step(found, GoVersion(1, 26, 0), choice);
        assert_eq!(step("go1.26.8", Some("local")), Ok(GoStep::Ready));
        assert_eq!(step("devel +abc", None), Ok(GoStep::Ready));
        assert_eq!(step("go1.24.4", None), Ok(GoStep::FetchesItself));
        assert_eq!(step("go1.19.8", None), Ok(GoStep::Fetch));
        let unfit = step("go1.24.4", Some("local")).unwrap_err();
        assert!(unfit.to_string().contains("unset GOTOOLCHAIN"), "{unfit}");
    }

    #[test]
    fn the_fetched_go_is_new_enough_for_every_module() {
        let fetched = GoVersion::parse_version(TOOLCHAIN).unwrap();
        assert!(super::super::ALL.iter().all(|tools| tools.go_version() <= fetched));
    }
}
