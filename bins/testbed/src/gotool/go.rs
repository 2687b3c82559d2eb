//! The Go that is on the machine, and whether it can build what is asked for.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{output, tools};

/// From here on Go fetches the newer Go that a module asks for by itself.
///
/// *Source:* go.dev/doc/toolchain.
const FETCHES_ITSELF: Version = Version(1, 21, 0);
/// Where the archives of go.dev/dl are unpacked by their instructions, and Debian's backports lie.
const USUAL: [&str; 2] = ["/usr/local/go/bin/go", "/usr/lib/go/bin/go"];

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

/// A Go that can build for a module, and what `GOTOOLCHAIN` has to be for that.
#[derive(Debug)]
pub(super) struct Go {
    pub(super) path: PathBuf,
    /// Whether it fetches a newer one first.
    pub(super) fetches: bool,
}

/// Finds a Go that can build what needs `needed`.
pub(super) fn find(needed: Version) -> Result<Go, Unfit> {
    let path = locate().ok_or_else(|| Unfit(missing(needed)))?;
    let told = output(Command::new(&path).args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local"));
    let told = told.map_err(|error| Unfit(format!("{error:#}")))?;
    // A development version, which has no number: it is as new as can be.
    let fetches = Version::parse(&told).is_some_and(|has| has < needed);
    if fetches {
        may_fetch(&path, &told, needed)?;
    }
    Ok(Go { path, fetches })
}

fn locate() -> Option<PathBuf> {
    let go = tools::Tool { name: "go", package: "golang-go" };
    let usual = || USUAL.iter().map(PathBuf::from).find(|path| path.is_file());
    tools::find(go).ok().or_else(usual)
}

fn may_fetch(path: &Path, told: &str, needed: Version) -> Result<(), Unfit> {
    let (path, told) = (path.display(), told.trim());
    let has = Version::parse(told).unwrap_or(FETCHES_ITSELF);
    if has < FETCHES_ITSELF {
        return Err(Unfit(format!("{path} is {told}, which is too old: {}", remedy(needed))));
    }
    match std::env::var("GOTOOLCHAIN") {
        Ok(choice) if choice == "local" => Err(Unfit(format!(
            "{path} is {told} and Go {needed} is needed; it would fetch that itself, but GOTOOLCHAIN=local forbids it: \
             unset GOTOOLCHAIN"
        ))),
        _ => Ok(()),
    }
}

fn missing(needed: Version) -> String {
    format!("there is no Go, which builds the Kubernetes tools: {}", remedy(needed))
}

fn remedy(needed: Version) -> String {
    format!(
        "install Go {FETCHES_ITSELF} or newer (`apt-get install golang-go` from Debian 13 on; before, unpack the \
         archive of https://go.dev/dl to /usr/local/go); it fetches Go {needed} by itself. Or set NODEKEEL_KUBE_BIN \
         to a directory with the programs"
    )
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
    fn a_go_that_cannot_fetch_is_refused_with_what_to_do() {
        let needed = Version(1, 26, 0);
        let unfit = may_fetch(Path::new("/usr/bin/go"), "go1.19.8", needed).unwrap_err();
        assert!(unfit.to_string().contains("go1.19.8") && unfit.to_string().contains("go.dev/dl"), "{unfit}");
        assert!(missing(needed).contains("NODEKEEL_KUBE_BIN"));
    }
}
