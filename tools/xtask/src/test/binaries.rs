//! The executables that cargo builds for tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::since::RUNS;
use crate::run::{self, Log};
use crate::workspace::cargo;

/// The variable that names the program nodectl to the tests of noded, which would build it.
const NODECTL: &str = "NODEKEEL_NODECTL";

/// A test binary, a program or an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Executable {
    /// The package, as `nodekeel-supervisor`.
    pub(crate) package: String,
    /// The target's name, as `it`.
    pub(crate) target: String,
    pub(crate) path: PathBuf,
    /// The package's directory, in which cargo runs it.
    pub(crate) directory: PathBuf,
    /// The programs that a test runs: those of its package, and those of [`RUNS`].
    pub(crate) programs: Vec<PathBuf>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Test,
    Program,
}

/// The executables of a build.
#[derive(Debug, Default)]
pub(crate) struct Build {
    pub(crate) tests: Vec<Executable>,
    pub(crate) elapsed: Duration,
    pub(crate) problem: Option<String>,
}

impl Executable {
    /// Its name in reports: `PACKAGE TARGET`.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Runs it as cargo does: in its package's directory.
    pub(crate) fn command(&self) -> Command {
        self.prepare(Command::new(&self.path))
    }

    /// Adds the directory and the variables that cargo gives.
    pub(crate) fn prepare(&self, mut command: Command) -> Command {
        command.current_dir(&self.directory);
        command.env("CARGO_MANIFEST_DIR", &self.directory).env("CARGO_PKG_NAME", &self.package);
        let nodectl = self.programs.iter().find(|program| program.ends_with("nodectl"));
        command.envs(nodectl.map(|path| (NODECTL, path)));
        command
    }
}

/// Builds all programs, tests and examples of these packages with all features; of the workspace where none
/// is given.
pub(crate) fn build(packages: &[String], deadline: Duration) -> Result<Build> {
    // By one command: without tests, dependencies have fewer features, and every member would be built for each set of them.
    let mut command = cargo(&["build", "--bins", "--tests", "--examples", "--keep-going"]);
    match packages {
        [] => command.arg("--workspace"),
        packages => command.args(packages.iter().flat_map(|package| ["--package", package.as_str()])),
    };
    // A test may run the program of another package.
    let others = RUNS.iter().filter(|(package, _)| packages.iter().any(|chosen| chosen == package));
    command.args(others.flat_map(|(_, other)| ["--package", *other]));
    command.args(["--all-features", "--message-format=json-render-diagnostics"]);
    let outcome = run::run_command(command, &Log::default(), run::hide_line, deadline)?;
    let mut build = Build { elapsed: outcome.elapsed, problem: outcome.problem, ..Build::default() };
    let made = outcome.lines.iter().filter_map(|line| parse_artifact(line));
    let (programs, others) = made.partition::<Vec<_>, _>(|made| made.kind == Kind::Program);
    let is_chosen = |made: &Executable| packages.is_empty() || packages.contains(&made.package);
    for mut executable in others.into_iter().filter(is_chosen) {
        let package = &*executable.package;
        let is_run = |other: &str| package == other || RUNS.contains(&(package, other));
        let run = programs.iter().filter(|program| is_run(&program.package));
        executable.programs = run.map(|program| program.path.clone()).collect();
        build.tests.push(executable);
    }
    Ok(build)
}

/// Builds the test or bench that these arguments of cargo select.
pub(crate) fn build_one(arguments: &[&str], deadline: Duration) -> Result<Executable> {
    let mut command = cargo(arguments);
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let outcome = run::run_command(command, &Log::default(), run::hide_line, deadline)?;
    if let Some(problem) = outcome.problem {
        bail!("cargo {}: {problem}", arguments.join(" "));
    }
    let mut built = outcome.lines.iter().filter_map(|line| parse_artifact(line));
    built.find(|executable| executable.kind == Kind::Test).context("no executable was built")
}

/// The executable in a message of cargo, if it is about one.
///
/// *Source:* the cargo book, external tools: the message `compiler-artifact`.
pub(crate) fn parse_artifact(line: &str) -> Option<Executable> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let target = &message["target"];
    let kind = match (message["profile"]["test"].as_bool()?, target["kind"][0].as_str()?) {
        (true, _) => Kind::Test,
        (false, "bin") => Kind::Program,
        (false, _) => return None,
    };
    let directory = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = package_name(message["package_id"].as_str()?)?;
    let target = target["name"].as_str()?.to_owned();
    Some(Executable { package, target, path, directory, programs: Vec::new(), kind })
}

/// *Source:* the cargo book, package id specifications: `URL#NAME@VERSION`, or `URL#VERSION` where the URL
/// ends with the name.
fn package_name(id: &str) -> Option<String> {
    let (url, rest) = id.rsplit_once('#')?;
    let name = rest.split_once('@').map(|(name, _)| name).or_else(|| url.rsplit('/').next());
    name.map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(test: bool, kind: &str, executable: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/supervisor#nodekeel-supervisor@0.1.0",
            "manifest_path":"/w/supervisor/Cargo.toml","target":{{"kind":["{kind}"],"name":"it"}},
            "profile":{{"test":{test}}},"executable":{executable}}}"#
        )
    }

    #[test]
    fn test_binaries_and_programs_are_recognised() {
        let test = parse_artifact(&artifact(true, "test", r#""/w/target/it-1""#)).unwrap();
        assert_eq!((test.name(), test.kind), ("nodekeel-supervisor it".to_owned(), Kind::Test));
        assert_eq!(test.directory, Path::new("/w/supervisor"));
        assert!(parse_artifact(&artifact(false, "example", r#""/w/target/x""#)).is_none());
        assert_eq!(
            parse_artifact(&artifact(false, "bin", r#""/w/target/noded""#)).unwrap().kind,
            Kind::Program
        );
    }
}
