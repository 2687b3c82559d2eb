//! Starts a test binary: as which user, in which namespaces, with which of its tests.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use testbed::{ScratchDir, tools};

use super::binaries::Executable;
use super::events;
use crate::run;

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

/// As whom a test binary runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RunAs {
    Caller,
    /// Root; in a user namespace where the caller isn't root.
    Root,
    /// A user that owns nothing.
    PlainUser,
    /// The first process of a PID namespace.
    Pid1,
    /// The caller, on a machine where no cgroups can be made.
    WithoutCgroups,
}

impl RunAs {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Caller => "",
            Self::Root => ", as root",
            Self::PlainUser => ", as a plain user",
            Self::Pid1 => ", as PID 1",
            Self::WithoutCgroups => ", without cgroups",
        }
    }

    /// All but the caller's: with that one they are root, a plain user and PID 1, with cgroups and without.
    pub(crate) fn others(is_root: bool) -> [Self; 3] {
        [if is_root { Self::PlainUser } else { Self::Root }, Self::Pid1, Self::WithoutCgroups]
    }
}

/// Which tests of a binary run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TestSelection {
    /// Those that aren't ignored.
    Unignored,
    /// Those that aren't ignored and not in this module.
    Outside(&'static str),
    /// Those that aren't ignored and in this module.
    Inside(&'static str),
    /// All with this text in their names, ignored or not.
    Matching(String),
    /// These, ignored or not.
    Exactly(Vec<String>),
}

impl TestSelection {
    /// The harness's arguments, with those for its events.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let chosen: Vec<&str> = match self {
            Self::Unignored => Vec::new(),
            Self::Outside(module) => vec!["--skip", module],
            Self::Inside(module) => vec![module],
            Self::Matching(text) => vec!["--include-ignored", text],
            Self::Exactly(tests) => {
                ["--include-ignored", "--exact"].into_iter().chain(tests.iter().map(String::as_str)).collect()
            }
        };
        events::ARGUMENTS.into_iter().chain(chosen).map(str::to_owned).collect()
    }
}

impl fmt::Display for TestSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unignored => f.write_str("plain"),
            Self::Outside(module) => write!(f, "plain but {}", module.trim_end_matches("::")),
            Self::Inside(module) => f.write_str(module.trim_end_matches("::")),
            Self::Matching(text) => f.write_str(text),
            Self::Exactly(_) => f.write_str("ignored"),
        }
    }
}

/// A command, and the directory that it uses until it has ended.
#[derive(Debug)]
pub(crate) struct TestCommand {
    pub(crate) command: Command,
    pub(crate) home: Option<ScratchDir>,
}

/// The command that runs these tests of a binary.
///
/// # Errors
/// A program that changes users or namespaces is missing.
pub(crate) fn test_command(
    binary: &Executable,
    run_as: RunAs,
    selection: &TestSelection,
) -> Result<TestCommand> {
    let (program, home) = match run_as {
        RunAs::PlainUser if run::is_root() => plain_user_program(&binary.path)?,
        _ => (wrap(&binary.path, run_as, run::is_root())?, None),
    };
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).args(selection.arguments()).envs([events::UNSTABLE]);
    if run_as == RunAs::WithoutCgroups {
        command.env("NODEKEEL_CGROUPS", "none");
    }
    if let Some(home) = &home {
        let temporary = temporary_directory(home);
        command.env("HOME", &temporary).env("TMPDIR", &temporary).env("USER", "nobody");
    }
    Ok(TestCommand { command: binary.prepare(command), home })
}

/// The program behind the words that change its namespaces.
fn wrap(program: &Path, run_as: RunAs, is_root: bool) -> Result<Vec<OsString>> {
    let mut words: Vec<OsString> = Vec::new();
    if run_as == RunAs::Pid1 || (run_as == RunAs::Root && !is_root) {
        words.push(tools::find_tool(tools::UNSHARE)?.into());
        if !is_root {
            words.extend(["--user", "--map-root-user"].map(OsString::from));
        }
    }
    if run_as == RunAs::Pid1 {
        words.extend(["--pid", "--fork", "--mount-proc", "--kill-child"].map(OsString::from));
    }
    words.push(program.into());
    Ok(words)
}

/// A copy of the program behind the words that change the user. A plain user may not be able to enter the
/// target directory or to write the temporary one, so it gets a private one.
fn plain_user_program(program: &Path) -> Result<(Vec<OsString>, Option<ScratchDir>)> {
    let home = ScratchDir::new()?;
    let (copy, temporary) = (home.path().join("test"), temporary_directory(&home));
    fs::copy(program, &copy).with_context(|| format!("copy {}", program.display()))?;
    fs::create_dir(&temporary).with_context(|| format!("create {}", temporary.display()))?;
    chown(&temporary, Some(NOBODY), Some(NOBODY))
        .with_context(|| format!("change the owner of {}", temporary.display()))?;
    for (path, mode) in [(home.path(), 0o711), (&copy, 0o755)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .with_context(|| format!("chmod {}", path.display()))?;
    }
    let mut words: Vec<OsString> = vec![tools::find_tool(tools::SETPRIV)?.into()];
    words.extend([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")].map(OsString::from));
    words.extend(["--clear-groups".into(), copy.into()]);
    Ok((words, Some(home)))
}

fn temporary_directory(home: &ScratchDir) -> PathBuf {
    home.path().join("t")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_user_becomes_root_and_pid_1_in_new_namespaces() {
        let words = |run_as, is_root| wrap(Path::new("/test"), run_as, is_root).unwrap();
        let as_user = words(RunAs::Pid1, false);
        assert!(as_user.contains(&"--map-root-user".into()) && as_user.contains(&"--pid".into()));
        assert!(!words(RunAs::Pid1, true).contains(&"--user".into()));
        assert_eq!(words(RunAs::Caller, false), ["/test"]);
        assert_eq!(words(RunAs::Root, true), ["/test"]);
    }
}
