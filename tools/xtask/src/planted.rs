//! Plants known bugs into a copy of a crate, one by one, and checks that its tests find them.
//!
//! A test of invariants that never fails proves nothing: each invariant has a bug here that breaks it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::kernel_test;
use crate::report::Report;
use crate::run::{self, run_command};
use crate::test::binaries;
use crate::test::events::TestRun;
use crate::workspace::{cargo, root, target_directory};

/// A crate that gets the bugs of a list.
struct TestedCrate {
    directory: &'static str,
    /// The list, from the crate's directory.
    list: &'static str,
    package: &'static str,
    features: &'static [&'static str],
    /// The target of the test.
    target: &'static [&'static str],
    /// The test that has to find them; `None` if each bug names its own.
    test: Option<&'static str>,
    /// The crate, and the members that its tests are built of.
    members: &'static [&'static str],
    place: TestPlace,
}

/// Where a test runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TestPlace {
    Host,
    Guest,
}

impl TestedCrate {
    /// Whether its test needs no daemons.
    fn is_pure(&self) -> bool {
        self.target == ["--lib"]
    }
}

const CRATES: [TestedCrate; 8] = [
    TestedCrate {
        directory: "supervisor",
        list: "testdata/planted.toml",
        package: "nodekeel-supervisor",
        features: &["--all-features"],
        target: &["--lib"],
        test: Some("random_operations_keep_the_invariants"),
        members: &["supervisor", "tools/testbed"],
        place: TestPlace::Host,
    },
    TestedCrate {
        directory: "cluster",
        list: "testdata/planted.toml",
        package: "nodekeel-cluster",
        // The state machine needs no etcd, and so the bugs need no protoc.
        features: &["--features", "testing"],
        target: &["--lib"],
        test: Some("random_runs_keep_the_invariants"),
        members: &["cluster", "supervisor", "localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
    // The history of three real voters has to find what the state machine can't.
    TestedCrate {
        directory: "cluster",
        list: "testdata/planted-history.toml",
        package: "nodekeel-cluster",
        features: &["--all-features"],
        target: &["--test", "it"],
        test: Some("voters::debian::no_acknowledged_write_is_lost_whatever_happens_to_three_voters"),
        members: &["cluster", "supervisor", "localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
    // Real members have to find what a review of them has found.
    TestedCrate {
        directory: "cluster",
        list: "testdata/planted-members.toml",
        package: "nodekeel-cluster",
        features: &["--all-features"],
        target: &["--test", "it"],
        test: None,
        members: &["cluster", "supervisor", "localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
    TestedCrate {
        directory: "localstorage",
        list: "testdata/planted.toml",
        package: "nodekeel-localstorage",
        features: &["--all-features"],
        target: &["--lib"],
        test: None,
        members: &["localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
    // Power cuts have to find a missing sync.
    TestedCrate {
        directory: "localstorage",
        list: "testdata/planted-power-cuts.toml",
        package: "nodekeel-localstorage",
        features: &["--all-features"],
        target: &["--test", "it"],
        test: None,
        members: &["localstorage", "tools/testbed"],
        place: TestPlace::Guest,
    },
    TestedCrate {
        directory: "containerd-svc",
        list: "testdata/planted.toml",
        package: "nodekeel-containerd-svc",
        features: &["--features", "testing"],
        target: &["--test", "it"],
        test: None,
        members: &["containerd-svc", "supervisor", "logtree", "localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
    // Real daemons have to find what a kubelet would.
    TestedCrate {
        directory: "containerd-svc",
        list: "testdata/planted-daemon.toml",
        package: "nodekeel-containerd-svc",
        features: &["--all-features"],
        target: &["--test", "daemon"],
        test: None,
        members: &["containerd-svc", "supervisor", "logtree", "localstorage", "tools/testbed"],
        place: TestPlace::Host,
    },
];
const WITHIN: Duration = Duration::from_secs(600);
/// Each bug is a compilation, so a test run takes one of so many, and other ones with the next commit.
const SAMPLE: usize = 16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlantedBugs {
    bug: Vec<PlantedBug>,
}

/// One bug: a text of a file, and its replacement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlantedBug {
    /// The invariant that it breaks.
    invariant: String,
    /// The test that has to find it, where the list has none for all.
    test: Option<String>,
    /// The file, from the crate's directory.
    file: PathBuf,
    old: String,
    new: String,
}

/// Plants all bugs of the lists whose paths contain this text; one that the tests don't find is a failure.
pub(crate) fn run_all(text: &str, report: &mut Report) -> Result<()> {
    let path = |tested: &TestedCrate| format!("{}/{}", tested.directory, tested.list);
    let mut chosen = CRATES.iter().filter(|tested| path(tested).contains(text));
    chosen.try_for_each(|tested| plant_bugs(tested, (0, 1), report))
}

/// Whether a chosen package has bugs to plant.
pub(crate) fn has_bugs(is_chosen: impl Fn(&str) -> bool) -> bool {
    CRATES.iter().any(|tested| is_chosen(tested.package))
}

/// Plants a sample of the bugs of the chosen packages, of those that are found without daemons.
pub(crate) fn run_sample(is_chosen: impl Fn(&str) -> bool, report: &mut Report) {
    let first = commit_number() % SAMPLE;
    for tested in CRATES.iter().filter(|tested| tested.is_pure() && is_chosen(tested.package)) {
        if let Err(error) = plant_bugs(tested, (first, SAMPLE), report) {
            report.could_not_run(&format!("planted bugs of {}", tested.directory), &format!("{error:#}"));
        }
    }
}

/// A number that changes with the commit; 0 without git.
fn commit_number() -> usize {
    let head = testbed::command_output(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()));
    head.ok().and_then(|commit| usize::from_str_radix(commit.get(..4)?, 16).ok()).unwrap_or_default()
}

/// Plants each `every`th bug, from the number `first` on.
fn plant_bugs(tested: &TestedCrate, (first, every): (usize, usize), report: &mut Report) -> Result<()> {
    report.log.headline(&format!("planted bugs of {}, {}", tested.directory, tested.list));
    let bugs = read_bugs(tested)?;
    let copy = copy_workspace(tested)?;
    for bug in bugs.iter().skip(first).step_by(every) {
        plant(tested, &copy, bug, report)
            .with_context(|| format!("plant a bug against {:?}", bug.invariant))?;
    }
    Ok(())
}

fn read_bugs(tested: &TestedCrate) -> Result<Vec<PlantedBug>> {
    let list = root().join(tested.directory).join(tested.list);
    let text = fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
    let planted: PlantedBugs = toml::from_str(&text).with_context(|| format!("parse {}", list.display()))?;
    Ok(planted.bug)
}

/// The file without the bug, in which the bug has exactly one place.
fn read_sound(file: &Path, bug: &PlantedBug) -> Result<String> {
    let sound = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    ensure!(
        sound.matches(&bug.old).count() == 1,
        "{} does not contain exactly once: {}",
        bug.file.display(),
        bug.old
    );
    Ok(sound)
}

fn plant(tested: &TestedCrate, copy: &Path, bug: &PlantedBug, report: &mut Report) -> Result<()> {
    let file = copy.join(tested.directory).join(&bug.file);
    let sound = read_sound(&file, bug)?;
    fs::write(&file, sound.replacen(&bug.old, &bug.new, 1))?;
    let test = tested.test.or(bug.test.as_deref()).context("no test has to find it")?;
    let started = Instant::now();
    let searched = match tested.place {
        TestPlace::Host => search_on_host(tested, copy, test, report),
        TestPlace::Guest => search_in_guest(tested, copy, test),
    };
    fs::write(&file, sound)?;
    let problem = searched?;
    let verdict = if problem.is_none() { "found " } else { "MISSED" };
    report.log.line(&format!("{verdict}  {}", bug.invariant));
    report.add_check(&format!("planted bug: {}", bug.invariant), started.elapsed(), problem);
    Ok(())
}

/// Runs the test that has to find the bug; says why it was not found.
fn search_on_host(tested: &TestedCrate, copy: &Path, test: &str, report: &Report) -> Result<Option<String>> {
    let mut command = test_command(tested, copy);
    command.args(["--", "--include-ignored", test]);
    let outcome = run_command(command, &report.log, run::hide_line, WITHIN)?;
    let is_found = outcome.lines.iter().any(|line| line.starts_with("test result: FAILED"));
    Ok(match (is_found, outcome.problem) {
        (true, _) => None,
        (false, None) => Some("the tests do not find it".to_owned()),
        (false, Some(_)) => Some("it does not compile".to_owned()),
    })
}

/// Runs the test in a guest, where it has to run to its end and fail.
fn search_in_guest(tested: &TestedCrate, copy: &Path, test: &str) -> Result<Option<String>> {
    let binary = binaries::build_by(test_command(tested, copy), WITHIN).context("it does not compile")?;
    let outcome = kernel_test::run_one(binary, test, WITHIN)?;
    let run = TestRun::from_lines(outcome.lines.iter().map(String::as_str));
    let is_found = run.is_complete && run.failures().any(|failed| failed.name == test);
    Ok((!is_found).then(|| "the test does not find it".to_owned()))
}

fn test_command(tested: &TestedCrate, copy: &Path) -> Command {
    let mut command = cargo(&["test", "-p", tested.package]);
    command.args(tested.target).args(tested.features);
    command.current_dir(copy).env("CARGO_TARGET_DIR", target_directory()).env("RUST_BACKTRACE", "0");
    command
}

/// A separate workspace with the crate and the members that it is tested with, which shares the target
/// directory.
fn copy_workspace(tested: &TestedCrate) -> Result<PathBuf> {
    let (root, copy) = (root(), target_directory().join("planted"));
    for member in tested.members {
        copy_tree(&root.join(member), &copy.join(member))?;
    }
    fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock"))?;
    let mut manifest: toml::Table = toml::from_str(&fs::read_to_string(root.join("Cargo.toml"))?)?;
    let workspace =
        manifest.get_mut("workspace").and_then(toml::Value::as_table_mut).context("it is a workspace")?;
    workspace.remove("default-members");
    let members: Vec<_> = tested.members.iter().map(|member| toml::Value::from(*member)).collect();
    workspace.insert("members".into(), members.into());
    fs::write(copy.join("Cargo.toml"), toml::to_string(&manifest)?)?;
    Ok(copy)
}

/// Makes a directory equal to another one. A file that is equal keeps its time, so that cargo builds only what has
/// changed since the last copy.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for (name, old) in list_entries(to)? {
        let source = from.join(name);
        if !source.exists() || source.is_dir() != old.is_dir() {
            remove_entry(&old).with_context(|| format!("remove {}", old.display()))?;
        }
    }
    for (name, source) in list_entries(from)? {
        let to = to.join(name);
        if source.is_dir() {
            copy_tree(&source, &to)?;
        } else if !is_equal(&source, &to) {
            fs::copy(&source, &to).with_context(|| format!("copy {}", source.display()))?;
        }
    }
    Ok(())
}

fn list_entries(directory: &Path) -> Result<Vec<(OsString, PathBuf)>> {
    let entries = fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    entries.map(|entry| Ok(entry.map(|entry| (entry.file_name(), entry.path()))?)).collect()
}

fn remove_entry(path: &Path) -> io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

fn is_equal(one: &Path, other: &Path) -> bool {
    fs::read(other).is_ok_and(|content| fs::read(one).is_ok_and(|source| source == content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_to_its_source_and_equal_files_keep_their_times() {
        let scratch = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| scratch.path().join(name));
        let write = |path: &str, text: &str| {
            let path = scratch.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("from/src/lib.rs", "same");
        write("from/src/changed.rs", "old");
        copy_tree(&from, &to).unwrap();
        let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let copied = fs::File::options().write(true).open(to.join("src/lib.rs")).unwrap();
        copied.set_modified(long_ago).unwrap();
        write("from/src/changed.rs", "new");
        write("to/src/planted.rs", "a bug");
        write("to/removed/src/lib.rs", "");
        copy_tree(&from, &to).unwrap();
        assert_eq!(fs::metadata(to.join("src/lib.rs")).unwrap().modified().unwrap(), long_ago);
        assert_eq!(fs::read_to_string(to.join("src/changed.rs")).unwrap(), "new");
        assert_eq!(list_entries(&to).unwrap().len(), 1);
        assert_eq!(list_entries(&to.join("src")).unwrap().len(), 2);
    }

    #[test]
    fn every_planted_bug_has_its_place_in_the_sources() {
        for tested in &CRATES {
            for bug in read_bugs(tested).unwrap() {
                read_sound(&root().join(tested.directory).join(&bug.file), &bug).unwrap();
                assert!(tested.test.is_some() != bug.test.is_some(), "{}: one test finds it", bug.invariant);
            }
        }
    }
}
