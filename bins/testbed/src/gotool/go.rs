//! The Go that is on the machine, and the newer one that it fetches.

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{cache, output, tools};

/// From here on Go fetches the newer Go that a module asks for by itself.
///
/// *Source:* go.dev/doc/toolchain.
const FETCHES_ITSELF: Version = Version(1, 21, 0);
/// What is fetched where the machine's Go is older than that: every Go is a module of this name, too.
const TOOLCHAIN: &str = "go1.26.8";
/// Where the archives of go.dev/dl are unpacked by their instructions.
const USUAL: &str = "/usr/local/go/bin/go";

/// A version of Go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32, u32, u32);

impl Version {
    /// Reads `1.26`, `1.26.0`, `go1.26.8` and `go1.27rc1 X:some`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches("go").split(' ').next()?;
        let mut numbers = text.split('.').map(leading_number);
        Some(Self(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    #[cfg(test)]
    pub(super) fn parts(self) -> (u32, u32, u32) {
        (self.0, self.1, self.2)
    }
}

fn leading_number(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().ok()
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Why the machine's Go can't build the tools, with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit(String);

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

/// What has to happen before a Go can build for a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It is new enough.
    None,
    /// It fetches a newer one by itself.
    Automatic,
    /// It is told to fetch a newer one.
    Fetch,
}

/// A Go that can build for a module, and the `GOTOOLCHAIN` that it needs for that.
#[derive(Debug)]
pub(super) struct Go {
    pub(super) path: PathBuf,
    pub(super) toolchain: Option<&'static str>,
}

/// Finds a Go that can build what needs `needed`, or has it fetched.
///
/// # Errors
/// [`Unfit`] where there is none, or it may not fetch a newer one; why the fetching failed.
pub(super) fn find(needed: Version) -> Result<Go> {
    let path = locate().ok_or_else(|| Unfit(missing()))?;
    let told = output(Command::new(&path).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local"))?;
    match step(told.trim(), needed, std::env::var("GOTOOLCHAIN").ok().as_deref())? {
        Step::None => Ok(Go { path, toolchain: None }),
        Step::Automatic => Ok(Go { path, toolchain: Some("auto") }),
        Step::Fetch => Ok(Go { path: fetched(&path)?, toolchain: Some("local") }),
    }
}

fn locate() -> Option<PathBuf> {
    let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.is_file());
    tools::find(tools::GO).ok().or_else(usual)
}

fn step(told: &str, needed: Version, choice: Option<&str>) -> Result<Step, Unfit> {
    match Version::parse(told) {
        Some(has) if has < needed => match choice {
            Some("local") => Err(Unfit(format!(
                "{told} is here and Go {needed} is needed; the newer one would be fetched, but GOTOOLCHAIN=local \
                 forbids it: unset GOTOOLCHAIN"
            ))),
            _ if has < FETCHES_ITSELF => Ok(Step::Fetch),
            _ => Ok(Step::Automatic),
        },
        // A development version has no number: it is as new as can be.
        _ => Ok(Step::None),
    }
}

fn missing() -> String {
    "there is no Go, which builds the Kubernetes tools: `cargo xtask setup` installs Debian's golang-go, which fetches a \
     newer one; or unpack an archive of https://go.dev/dl to /usr/local/go; or set NODEKEEL_KUBE_BIN to a directory \
     with the programs"
        .into()
}

/// The newer Go, which the old one fetches as a module and checks against the checksum database.
///
/// *Source:* go.dev/doc/toolchain: the module `golang.org/toolchain`, whose files come without their execute bits.
fn fetched(old: &Path) -> Result<PathBuf> {
    let module = format!("golang.org/toolchain@v0.0.1-{TOOLCHAIN}.linux-{}", super::architecture());
    let entry = cache::entry(&format!("{TOOLCHAIN}-{}", super::architecture()), |partial| {
        eprintln!("{TOOLCHAIN}: {} is too old; it fetches this one, once: some 90 MB", old.display());
        let mut command = Command::new(old);
        command.args(["mod", "download", &module]).current_dir(partial).env("GOWORK", "off");
        command.env("GOMODCACHE", partial).env("GOFLAGS", "-modcacherw");
        output(&mut command).with_context(|| format!("fetch {module}"))?;
        let root = partial.join(&module);
        for directory in ["bin", &format!("pkg/tool/linux_{}", super::architecture())] {
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
        let read = |text| Version::parse(text).map(Version::parts);
        assert_eq!(read("go1.26.8\n"), Some((1, 26, 8)));
        assert_eq!(read("1.26"), Some((1, 26, 0)));
        assert_eq!(read("go1.27rc1 X:nosynchash"), Some((1, 27, 0)));
        assert_eq!(read("devel +abc"), None);
        assert!(Version::parse("go1.9").unwrap() < Version::parse("go1.26.0").unwrap());
    }

    #[test]
    fn an_old_go_gets_a_newer_one_unless_that_is_forbidden() {
        let step = |told, choice| step(told, Version(1, 26, 0), choice);
        assert_eq!(step("go1.26.8", Some("local")), Ok(Step::None));
        assert_eq!(step("devel +abc", None), Ok(Step::None));
        assert_eq!(step("go1.24.4", None), Ok(Step::Automatic));
        assert_eq!(step("go1.19.8", None), Ok(Step::Fetch));
        let unfit = step("go1.24.4", Some("local")).unwrap_err();
        assert!(unfit.to_string().contains("unset GOTOOLCHAIN"), "{unfit}");
    }

    #[test]
    fn what_is_fetched_is_new_enough_for_every_module() {
        let fetched = Version::parse(TOOLCHAIN).unwrap();
        assert!(super::super::ALL.iter().all(|tools| tools.go_version() <= fetched));
    }
}
