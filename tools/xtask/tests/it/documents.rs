//! What the documents name exists: files, symbols, links, tests, commands.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use crate::sources;

/// Every document of the workspace, as its path below the root and its text.
fn documents() -> Vec<(String, String)> {
    let listed =
        Command::new("git").args(["ls-files", "*.md"]).current_dir(sources::root()).output().unwrap();
    let paths = String::from_utf8(listed.stdout).unwrap();
    let read = |path: &str| Some((path.to_owned(), fs::read_to_string(sources::root().join(path)).ok()?));
    let documents: Vec<_> = paths.lines().filter_map(read).collect();
    assert!(documents.len() > 20, "the documents were read");
    documents
}

fn document(path: &str) -> String {
    fs::read_to_string(sources::root().join(path)).unwrap()
}

/// The texts in backticks of the lines outside of code blocks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    let prose = text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    });
    prose.flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The names of the functions below a `#[test]`, `#[tokio::test]` or `#[rstest]` attribute.
fn tests_of(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        let is_code = !line.starts_with("#[") && !line.starts_with("//");
        is_test |= ["#[test]", "#[tokio::test", "#[rstest]"].iter().any(|mark| line.starts_with(mark));
        if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test && is_code) {
            names.push(rest.split('(').next().unwrap_or(rest).to_owned());
            is_test = false;
        }
    }
    names
}

/// The test cells of a table's rows: what stands in backticks, with the word `soak` or `bench` that precedes it.
fn test_cells(text: &str) -> Vec<(Option<&str>, &str)> {
    let mut named = Vec::new();
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    for cell in rows.filter_map(|row| row.trim_end_matches(" |").rsplit_once(" | ")).map(|(_, cell)| cell) {
        for part in cell.split("; ") {
            let kind = ["soak", "bench"].into_iter().find(|kind| part.starts_with(kind));
            named.extend(part.split('`').skip(1).step_by(2).map(|name| (kind, name)));
        }
    }
    named
}

/// What `cargo xtask soak` knows, by its answer to an unknown name.
fn known_soaks() -> String {
    let asked = Command::new(env!("CARGO_BIN_EXE_xtask")).args(["soak", "none"]).output().unwrap();
    String::from_utf8(asked.stderr).unwrap()
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let text = document("docs/guarantees.md");
    let sources = sources::below(".");
    let tests = sources.iter().flat_map(|source| tests_of(&source.text));
    let modules = sources.iter().flat_map(|source| source.path.iter()).filter_map(|part| part.to_str());
    let names: Vec<String> = tests.chain(modules.map(str::to_owned)).collect();
    let soaks = known_soaks();
    let exists = |(kind, name): &(Option<&str>, &str)| match kind {
        Some("soak") => soaks.contains(name),
        // Each bench of cargo, and the groups of them.
        Some(_) => sources.iter().any(|source| source.path.to_string_lossy().contains("benches/")),
        None if name.starts_with("cargo xtask") => true,
        None => name
            .split("::")
            .filter(|part| !part.is_empty())
            .all(|part| names.iter().any(|known| known.contains(part))),
    };
    let named = test_cells(&text);
    let gone: Vec<_> = named.iter().filter(|named| !exists(named)).collect();
    assert!(named.len() > 100 && gone.is_empty(), "docs/guarantees.md names {gone:?}");
    for row in text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Guarantee")) {
        assert!(row.contains('`'), "a guarantee without a test: {row}");
    }
}

/// Whether a source defines a function or a type of that name.
fn defines(source: &str, symbol: &str) -> bool {
    ["fn", "struct", "enum", "trait"].iter().any(|keyword| {
        let definition = format!("{keyword} {symbol}");
        source.match_indices(&definition).any(|(at, _)| {
            let next = source[at + definition.len()..].chars().next();
            !next.is_some_and(|next| next.is_alphanumeric() || next == '_')
        })
    })
}

#[test]
fn every_file_and_symbol_that_a_document_names_exists() {
    let root = sources::root();
    let members: BTreeSet<_> = fs::read_dir(&root)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    let mut gone = Vec::new();
    for (document, text) in documents() {
        let place = root.join(&document);
        for name in quoted(&text) {
            let (path, symbol) = name.split_once("::").unwrap_or((name, ""));
            let is_in_member = path.split_once('/').is_some_and(|(first, _)| members.contains(first));
            // Other paths are those of a node or a machine.
            let is_source = path.contains("/src")
                || [".rs", ".toml", ".md", ".proto"].iter().any(|end| path.ends_with(end));
            if !is_in_member || !is_source || path.contains(['*', ' ', '$', '<']) {
                continue;
            }
            let found = [root.join(path), place.with_file_name(path)].into_iter().find(|path| path.exists());
            let defined = |path| symbol.is_empty() || defines(&fs::read_to_string(path).unwrap(), symbol);
            if !found.is_some_and(defined) {
                gone.push(format!("{document}: {name}"));
            }
        }
    }
    assert!(gone.is_empty(), "{gone:#?}");
}

#[test]
fn every_link_leads_to_a_file() {
    let mut gone = Vec::new();
    for (document, text) in documents() {
        let place = sources::root().join(&document);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = target.split('#').next().unwrap_or_default();
            let is_outside = target.contains("://") || path.is_empty();
            if !is_outside && !place.parent().unwrap().join(path).exists() {
                gone.push(format!("{document}: {target}"));
            }
        }
    }
    assert!(gone.is_empty(), "{gone:#?}");
}

#[test]
fn every_command_of_xtask_that_a_document_names_exists() {
    let mut commands = BTreeSet::new();
    let documents = documents();
    for (document, text) in &documents {
        for rest in text.split("cargo xtask ").skip(1) {
            let command =
                rest.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next().unwrap_or_default();
            if !command.is_empty() {
                commands.insert((command, document));
            }
        }
    }
    let help = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let is_known = |command: &str| help.lines().any(|line| line.split_whitespace().next() == Some(command));
    let gone: Vec<_> = commands.iter().filter(|(command, _)| !is_known(command)).collect();
    assert!(commands.len() > 10 && gone.is_empty(), "{gone:#?}");
}

#[test]
fn names_are_read_as_they_are_written() {
    assert!(defines("pub fn run(self) {}", "run") && defines("struct Plan;", "Plan"));
    assert!(!defines("fn run_once() {} // run", "run") && !defines("struct Plan;", "Pla"));
    assert_eq!(quoted("`a` b `c`\n```sh\n`d`\n```\n`e`").collect::<Vec<_>>(), ["a", "c", "e"]);
    let rows = "| Guarantee | Tests |\n|---|---|\n| It is `x`. | `a::b`, `c`; soak `d` |\n";
    assert_eq!(test_cells(rows), [(None, "a::b"), (None, "c"), (Some("soak"), "d")]);
    let source = "#[test]\n#[ignore = \"needs root\"]\nfn one() {}\nfn helper() {}\n\
        #[tokio::test(start_paused = true)]\nasync fn two() {}\n\
        #[rstest]\n#[case::debian(Debian)]\nfn three(#[case] release: Release) {}\n";
    assert_eq!(tests_of(source), ["one", "two", "three"]);
}
