//! The ways in which a test runs: as whoever calls, as a plain user, as PID 1, without cgroups, in a guest.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use testbed::{Scratch, gotool, tools};

use super::binaries::Binary;
use super::libtest::Ignored;
use crate::kernel_test::need::Need;
use crate::oci;
use crate::run;

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

/// As whom a test binary runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// As the caller.
    AsIs,
    /// As root; in a user namespace where the caller isn't.
    Root,
    /// As a user that owns nothing.
    PlainUser,
    /// As the first process of a PID namespace.
    Pid1,
    /// As the caller, where no cgroups are made: descendants are known by their marks only.
    WithoutCgroups,
}

impl Way {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::AsIs => "",
            Self::Root => ", as root",
            Self::PlainUser => ", as a plain user",
            Self::Pid1 => ", as PID 1",
            Self::WithoutCgroups => ", without cgroups",
        }
    }
}

/// The ways besides the caller's own: together they are root, a plain user and PID 1, with cgroups and without.
pub(crate) fn others(is_root: bool) -> [Way; 3] {
    [if is_root { Way::PlainUser } else { Way::Root }, Way::Pid1, Way::WithoutCgroups]
}

/// Which tests of a binary run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Those that aren't marked as ignored.
    Unmarked,
    /// Those of a module.
    Module(&'static str),
    /// These, marked or not.
    Exactly(Vec<String>),
}

impl Selection {
    pub(crate) fn arguments(&self) -> Vec<String> {
        match self {
            Self::Unmarked => Vec::new(),
            Self::Module(module) => vec![(*module).to_owned()],
            Self::Exactly(tests) => {
                ["--include-ignored", "--exact"].map(String::from).into_iter().chain(tests.clone()).collect()
            }
        }
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmarked => f.write_str("unmarked"),
            Self::Module(module) => write!(f, "{}", module.trim_end_matches("::")),
            Self::Exactly(_) => f.write_str("marked"),
        }
    }
}

/// A test that nobody knows how to run, and why.
pub(crate) type Unknown = (String, String);

/// Ignored tests by what they wait for.
#[derive(Debug, Default)]
pub(crate) struct Sorted {
    /// Those that run on this machine.
    pub(crate) here: BTreeMap<Way, Vec<String>>,
    /// Those that run in a guest.
    pub(crate) kernel: Vec<(Need, String)>,
    pub(crate) unknown: Vec<Unknown>,
}

/// Sorts the ignored tests by what their need asks for. A `soak` waits for its own command.
pub(crate) fn sort(ignored: Vec<Ignored>, is_root: bool) -> Sorted {
    let mut sorted = Sorted::default();
    for Ignored { test, reason } in ignored {
        match asked(&reason, is_root) {
            Ok(Asked::Way(way)) => sorted.here.entry(way).or_default().push(test),
            Ok(Asked::Kernel(need)) => sorted.kernel.push((need, test)),
            Ok(Asked::Soak) => {}
            Err(why) => sorted.unknown.push((test, why)),
        }
    }
    sorted
}

/// What an ignored test waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Way(Way),
    Kernel(Need),
    Soak,
}

/// Reads `needs A, B and C: why`.
fn asked(reason: &str, is_root: bool) -> Result<Asked, String> {
    if reason == "soak" || reason.starts_with("soak:") {
        return Ok(Asked::Soak);
    }
    let stated = reason.strip_prefix("needs ").ok_or(format!("ignored for no known need ({reason:?})"))?;
    let needs = stated.split(':').next().unwrap_or_default();
    if needs.starts_with("kernel") {
        return Need::parse(needs).map(Asked::Kernel);
    }
    let needs = needs.replace(" and ", ", ");
    let mut way = Way::AsIs;
    for need in needs.split(", ") {
        match need.trim() {
            "root" if is_root => {}
            "root" => return Err("needs root".into()),
            "plain user" | "a plain user" => way = Way::PlainUser,
            "PID 1" | "to be PID 1" => way = Way::Pid1,
            // The set-up has built the programs; a node of it runs in a guest, whose tools are installed.
            "kube" | "a node" => {}
            oci::IMAGE_NEED => {}
            program if gotool::ALL.iter().any(|known| known.name == program) => {}
            // The set-up has installed every tool.
            tool if tools::ALL.iter().any(|known| known.name == tool || known.package == tool) => {}
            other => return Err(format!("needs {other:?}, which this command doesn't know")),
        }
    }
    Ok(Asked::Way(way))
}

/// A command, and what it stands on.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) command: Command,
    /// Holds a plain user's copy of the binary and its temporary directory.
    pub(crate) home: Option<Scratch>,
}

/// The command that runs the selected tests in this way.
///
/// # Errors
/// When the way is not to be had here.
pub(crate) fn command(binary: &Binary, way: Way, selection: &Selection) -> Result<Prepared> {
    if way == Way::PlainUser && run::is_root() {
        return as_nobody(binary, selection);
    }
    let mut line = wrapper(way, run::is_root())?;
    line.push(binary.path.clone().into());
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).args(selection.arguments());
    if way == Way::WithoutCgroups {
        command.env("NODEKEEL_CGROUPS", "none");
    }
    Ok(Prepared { command: binary.prepared(command), home: None })
}

/// What stands before the test binary.
fn wrapper(way: Way, is_root: bool) -> Result<Vec<OsString>> {
    let mut line: Vec<OsString> = Vec::new();
    if way == Way::Pid1 || (way == Way::Root && !is_root) {
        line.push(tools::find(tools::UNSHARE)?.into());
    }
    if !line.is_empty() && !is_root {
        line.extend(["--user", "--map-root-user"].map(OsString::from));
    }
    if way == Way::Pid1 {
        line.extend(["--pid", "--fork", "--mount-proc", "--kill-child"].map(OsString::from));
    }
    Ok(line)
}

/// A plain user may be shut out of the target directory and of the temporary one: it gets its own.
fn as_nobody(binary: &Binary, selection: &Selection) -> Result<Prepared> {
    let setpriv = tools::find(tools::SETPRIV)?;
    let home = Scratch::new()?;
    allow(home.path(), 0o711)?;
    let temporary = home.path().join("t");
    fs::create_dir(&temporary).with_context(|| format!("create {}", temporary.display()))?;
    chown(&temporary, Some(NOBODY), Some(NOBODY))
        .with_context(|| format!("give away {}", temporary.display()))?;
    let copy = copy_into(home.path(), &binary.path)?;
    let mut command = Command::new(setpriv);
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".into()]);
    command.arg(copy).args(selection.arguments());
    command.env("HOME", &temporary).env("TMPDIR", &temporary).env("USER", "nobody");
    Ok(Prepared { command: binary.prepared(command), home: Some(home) })
}

fn copy_into(directory: &Path, program: &Path) -> Result<PathBuf> {
    let copy = directory.join("test");
    fs::copy(program, &copy).with_context(|| format!("copy {}", program.display()))?;
    allow(&copy, 0o755)?;
    Ok(copy)
}

fn allow(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("chmod {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_choose_the_way() {
        let way = |reason: &str| asked(reason, true);
        assert_eq!(way("needs root and containerd"), Ok(Asked::Way(Way::AsIs)));
        assert_eq!(way("needs etcd, containerd and root: it kills both"), Ok(Asked::Way(Way::AsIs)));
        assert_eq!(way("needs kube and a node"), Ok(Asked::Way(Way::AsIs)));
        assert_eq!(way("needs kube, a node and provisionerd's image"), Ok(Asked::Way(Way::AsIs)));
        assert_eq!(way("needs plain user: root passes every check"), Ok(Asked::Way(Way::PlainUser)));
        assert_eq!(way("needs to be PID 1"), Ok(Asked::Way(Way::Pid1)));
        assert_eq!(way("soak: 1,000 rounds"), Ok(Asked::Soak));
        let need = Need { network: true, ..Need::default() };
        assert_eq!(way("needs kernel with network: it asks the machine"), Ok(Asked::Kernel(need)));
    }

    #[test]
    fn what_cannot_be_met_or_is_not_stated_is_told() {
        assert!(asked("needs root", false).is_err());
        assert!(asked("flaky", true).is_err());
        assert!(asked("", true).is_err());
        assert!(asked("needs a moon rocket", true).unwrap_err().contains("a moon rocket"));
        assert!(asked("needs kernel with a moon rocket", true).unwrap_err().contains("a moon rocket"));
    }

    #[test]
    fn a_plain_user_becomes_root_and_pid_1_in_a_namespace_of_its_own() {
        let line = wrapper(Way::Pid1, false).unwrap();
        assert!(line.contains(&"--map-root-user".into()) && line.contains(&"--pid".into()));
        assert!(!wrapper(Way::Pid1, true).unwrap().contains(&"--user".into()));
        assert_eq!(wrapper(Way::AsIs, false).unwrap(), Vec::<OsString>::new());
    }

    #[test]
    fn exact_selections_include_marked_tests() {
        let arguments = Selection::Exactly(vec!["a::b".into()]).arguments();
        assert_eq!(arguments, ["--include-ignored", "--exact", "a::b"]);
    }
}
