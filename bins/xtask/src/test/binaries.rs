//! The executables that cargo builds for tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::run::{self, Echo};

/// One executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Binary {
    /// The package, as `nodekeel-supervisor`.
    pub(crate) package: String,
    /// The target's name, as `it`.
    pub(crate) target: String,
    /// Where it is.
    pub(crate) path: PathBuf,
    /// The package's directory, in which cargo runs it.
    pub(crate) directory: PathBuf,
    /// The programs of the package, which a test knows by their paths.
    pub(crate) programs: Vec<PathBuf>,
    /// Files that its tests know by variables.
    pub(crate) files: Vec<(&'static str, PathBuf)>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Test,
    Program,
    Example,
}

/// What the build has made.
#[derive(Debug, Default)]
pub(crate) struct Built {
    /// The test binaries.
    pub(crate) binaries: Vec<Binary>,
    /// The examples of the package `examples`; those of the libraries are parts of their benches.
    pub(crate) examples: Vec<Binary>,
    pub(crate) took: Duration,
    pub(crate) problem: Option<String>,
}

impl Binary {
    /// What people call it.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Runs it as cargo does: in its package's directory.
    pub(crate) fn command(&self) -> Command {
        self.prepared(Command::new(&self.path))
    }

    /// The command in the directory and with the variables that cargo gives, and those of its files.
    pub(crate) fn prepared(&self, mut command: Command) -> Command {
        command.current_dir(&self.directory).envs(self.files.iter().cloned());
        command.env("CARGO_MANIFEST_DIR", &self.directory).env("CARGO_PKG_NAME", &self.package);
        command
    }
}

/// Builds every program, test and example of these packages once, with all features; of the workspace, where none is
/// given.
pub(crate) fn build(packages: &[String], deadline: Duration) -> Result<Built> {
    let chosen: Vec<&str> = match packages {
        [] => vec!["--workspace"],
        packages => packages.iter().flat_map(|package| ["--package", package]).collect(),
    };
    let start = |arguments: &[&str]| {
        let mut command = run::cargo(arguments);
        command.args(&chosen).args(["--all-features", "--message-format=json-render-diagnostics"]);
        run::stream(command, Echo::Hidden, deadline)
    };
    // A test may run the program of another package, which building the tests alone doesn't make.
    let first = start(&["build", "--bins"])?;
    let ran = start(&["test", "--no-run", "--no-fail-fast"])?;
    let all = first.lines.iter().chain(&ran.lines).filter_map(|line| parse(line));
    let mut built =
        Built { took: first.took + ran.took, problem: first.problem.or(ran.problem), ..Built::default() };
    let mut programs = Vec::new();
    for binary in all {
        match binary.kind {
            Kind::Test => built.binaries.push(binary),
            Kind::Program => programs.push(binary),
            Kind::Example if binary.package == "examples" => built.examples.push(binary),
            Kind::Example => {}
        }
    }
    for binary in &mut built.binaries {
        let own = programs.iter().filter(|program| program.package == binary.package);
        binary.programs = own.map(|program| program.path.clone()).collect();
        binary.programs.dedup();
    }
    Ok(built)
}

/// Builds the one test or bench that these arguments of cargo mean.
pub(crate) fn build_one(arguments: &[&str], deadline: Duration) -> Result<Binary> {
    let mut command = run::cargo(arguments);
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let ran = run::stream(command, Echo::Hidden, deadline)?;
    if let Some(problem) = ran.problem {
        bail!("cargo {}: {problem}", arguments.join(" "));
    }
    let mut built = ran.lines.iter().filter_map(|line| parse(line));
    let binary = built.find(|binary| binary.kind == Kind::Test);
    binary.with_context(|| format!("cargo {} built no executable", arguments.join(" ")))
}

/// *Source:* the cargo book, external tools: the message `compiler-artifact`.
fn parse(line: &str) -> Option<Binary> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let target = &message["target"];
    let kind = match (message["profile"]["test"].as_bool()?, target["kind"][0].as_str()?) {
        (true, _) => Kind::Test,
        (false, "example") => Kind::Example,
        (false, "bin") => Kind::Program,
        (false, _) => return None,
    };
    let directory = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = package_name(message["package_id"].as_str()?)?;
    let target = target["name"].as_str()?.to_owned();
    Some(Binary { package, target, path, directory, programs: Vec::new(), files: Vec::new(), kind })
}

/// *Source:* the cargo book, package id specifications: `URL#NAME@VERSION`, or `URL#VERSION` where the URL ends with
/// the name.
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
    fn test_binaries_programs_and_examples_are_picked_out() {
        let test = parse(&artifact(true, "test", r#""/w/target/it-1""#)).unwrap();
        assert_eq!((test.name(), test.kind), ("nodekeel-supervisor it".to_owned(), Kind::Test));
        assert_eq!(test.directory, Path::new("/w/supervisor"));
        let example = parse(&artifact(false, "example", r#""/w/target/x""#)).unwrap();
        assert_eq!(example.kind, Kind::Example);
        assert_eq!(parse(&artifact(false, "bin", r#""/w/target/noded""#)).unwrap().kind, Kind::Program);
    }

    #[test]
    fn libraries_and_other_messages_are_not() {
        assert_eq!(parse(&artifact(true, "lib", "null")), None);
        assert_eq!(parse(r#"{"reason":"build-finished","success":true}"#), None);
    }

    #[test]
    fn a_package_named_as_its_directory_is_known_by_it() {
        assert_eq!(package_name("path+file:///w/bins/testbed#0.1.0").as_deref(), Some("testbed"));
    }
}
