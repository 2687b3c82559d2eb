//! `cargo xtask check words`: how the workspace speaks: the share of one-word public names, names that several types
//! share, and phrases that no document, help text or message may contain.
//!
//! The reasons stand in CONTRIBUTING.md. Tests, benches and examples may use any words.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use testbed::Table;

use crate::report::Report;
use crate::workspace::root;

mod names;
mod phrases;

use names::NameCounts;
use phrases::Phrase;

/// The largest share of public types whose name is one word, in percent.
const ONE_WORD_TYPES: f64 = 35.0;
/// The largest share of public functions whose name is one word, in percent.
const ONE_WORD_FUNCTIONS: f64 = 30.0;
/// How many types of the workspace may have the same name.
const SAME_NAME: usize = 3;
/// Type names that every crate may have.
const SHARED_NAMES: [&str; 2] = ["Error", "Deps"];

/// Prints the figures of a checkout, and what breaks a rule.
///
/// # Errors
/// A file can't be read.
pub(crate) fn run(root: &Path) -> Result<ExitCode> {
    let words = Words::read(root)?;
    let violations = words.violations();
    println!("{words}");
    violations.iter().for_each(|violation| println!("{violation}"));
    println!("\n{} violations", violations.len());
    Ok(if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Adds the check to a report.
pub(super) fn check(report: &mut Report) {
    let start = Instant::now();
    report.log.headline("words");
    let problem = match Words::read(&root()) {
        Ok(words) => {
            report.log.line(&words.to_string());
            let violations = words.violations();
            (!violations.is_empty()).then(|| violations.join("\n"))
        }
        Err(error) => Some(format!("{error:#}")),
    };
    report.add_check("words", start.elapsed(), problem);
}

/// The words of a tree of sources.
#[derive(Debug, Default)]
pub(crate) struct Words {
    members: BTreeMap<String, NameCounts>,
    types: BTreeMap<String, Vec<String>>,
    phrases: Vec<Phrase>,
}

impl Words {
    /// Reads every tracked source and document below `root`.
    ///
    /// # Errors
    /// When `root` is not a git checkout, a file can't be read, or a source is not Rust.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut words = Self::default();
        for path in tracked_files(root)? {
            let text = || {
                std::fs::read_to_string(root.join(&path)).with_context(|| format!("read {}", path.display()))
            };
            if path.extension().is_some_and(|extension| extension == "md") {
                words.add_document(&path, &text()?);
            } else if is_source(&path) {
                words.add_source(&path, &text()?)?;
            }
        }
        Ok(words)
    }

    fn add_document(&mut self, path: &Path, text: &str) {
        // The table of old names is there so that the old words are found.
        if path != Path::new("docs/renames.md") {
            self.phrases.extend(phrases::in_document(path, text));
        }
    }

    fn add_source(&mut self, path: &Path, text: &str) -> Result<()> {
        let file = syn::parse_file(text).with_context(|| format!("parse {}", path.display()))?;
        let counts = self.members.entry(member(path)).or_default();
        for name in names::count(&file, counts) {
            self.types.entry(name).or_default().push(path.display().to_string());
        }
        self.phrases.extend(phrases::in_source(path, &file, text));
        Ok(())
    }

    fn total(&self) -> NameCounts {
        self.members.values().fold(NameCounts::default(), NameCounts::plus)
    }

    /// What breaks a rule, a line each.
    pub(crate) fn violations(&self) -> Vec<String> {
        let total = self.total();
        let mut found = Vec::new();
        for (what, share, limit) in [
            ("types", total.types.share(), ONE_WORD_TYPES),
            ("functions", total.functions.share(), ONE_WORD_FUNCTIONS),
        ] {
            if share > limit {
                found.push(format!(
                    "{share:.1} % of the public {what} have a one-word name: at most {limit} %"
                ));
            }
        }
        for (name, places) in &self.types {
            if places.len() > SAME_NAME && !SHARED_NAMES.contains(&name.as_str()) {
                found.push(format!("{} types are called {name}: {}", places.len(), places.join(", ")));
            }
        }
        found.extend(self.phrases.iter().map(ToString::to_string));
        found
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["member", "one-word types", "of", "%", "one-word functions", "of", "%"]);
        let total = self.total();
        for (member, counts) in self.members.iter().map(|(member, counts)| (member.as_str(), counts)) {
            table.add_row(counts.row(member));
        }
        table.add_row(total.row("together"));
        writeln!(f, "{table}\n")?;
        for (phrase, count) in phrases::counts(&self.phrases) {
            writeln!(f, "{count:>5} x {phrase:?}")?;
        }
        Ok(())
    }
}

fn tracked_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut git = std::process::Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let listed = testbed::command_output(&mut git).context("list the tracked files")?;
    let paths = listed.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from);
    Ok(paths.filter(|path| root.join(path).is_file()).collect())
}

/// A source of a library or program, not of a test, bench, example or fuzz target.
fn is_source(path: &Path) -> bool {
    let is_test_directory = |part: &std::ffi::OsStr| {
        ["tests", "benches", "examples", "fuzz", "testdata", "peers"].iter().any(|name| part == *name)
    };
    path.extension().is_some_and(|extension| extension == "rs")
        && !path.iter().any(is_test_directory)
        && !path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("_test"))
}

/// The directory of the package that the file belongs to.
fn member(path: &Path) -> String {
    let depth = if path.starts_with("bins") { 2 } else { 1 };
    path.iter().take(depth).collect::<PathBuf>().display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(sources: &[(&str, &str)]) -> Words {
        let mut words = Words::default();
        for (path, text) in sources {
            words.add_source(Path::new(path), text).unwrap();
        }
        words
    }

    #[test]
    fn a_planted_sentence_is_found_in_docs_help_and_messages() {
        for planted in [
            "/// Whoever calls it waits.\npub fn wait_for_exit() {}",
            "//! It is no path.",
            "#[error(\"{0} is no path\")]\nstruct PathError(String);",
            "fn f() { tracing::info!(\"the caller is told\"); }",
            "fn f() {\n    // A thread of its own.\n}",
        ] {
            let found = words(&[("a/src/lib.rs", planted)]).violations();
            let phrases: Vec<_> = found.iter().filter(|line| line.contains("lib.rs:")).collect();
            assert_eq!(phrases.len(), 1, "{planted}: {found:?}");
        }
    }

    #[test]
    fn what_is_no_longer_there_and_tests_are_free() {
        let text = "/// It is no longer read.\nfn f() {}\n#[cfg(test)]\nmod tests { const A: &str = \"is no path\"; }";
        assert_eq!(words(&[("a/src/lib.rs", text)]).violations(), Vec::<String>::new());
    }

    #[test]
    fn one_word_names_are_counted_against_the_limits() {
        let found = words(&[("a/src/lib.rs", "pub struct Held;\npub fn take() {}\npub fn read_record() {}")]);
        let violations = found.violations();
        assert!(violations[0].contains("100.0 % of the public types"), "{violations:?}");
        assert!(violations[1].contains("50.0 % of the public functions"), "{violations:?}");
    }

    #[test]
    fn a_fourth_type_of_one_name_is_a_violation_but_for_errors() {
        let files: Vec<String> = (0..4).map(|i| format!("a{i}/src/lib.rs")).collect();
        let sources: Vec<_> =
            files.iter().map(|file| (file.as_str(), "struct NodeState;\nstruct Error;")).collect();
        let violations = words(&sources).violations();
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].starts_with("4 types are called NodeState"), "{violations:?}");
    }
}
