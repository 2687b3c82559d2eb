//! ARCHITECTURE.md names a test for each invariant, and files and symbols that exist.

use std::collections::HashSet;
use std::fs;

use crate::sources;

/// The rows of the table below `## Invariants`: the claim, and the test that checks it.
fn invariants(text: &str) -> Vec<(&str, &str)> {
    let section = text.split_once("\n## Invariants\n").map(|(_, rest)| rest).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    // The header and its underline are not claims.
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').rsplit_once('|').unwrap_or((row, "")))
        .map(|(claim, test)| (claim.trim(), test.trim()))
        .collect()
}

/// The claims without an existing test.
fn violations(text: &str, tests: &HashSet<String>) -> Vec<String> {
    let judge = |(claim, test): (&str, &str)| {
        let names: Vec<&str> = test.split('`').skip(1).step_by(2).collect();
        let gone: Vec<&str> = names.iter().copied().filter(|name| !exists(name, tests)).collect();
        match (names.is_empty(), gone.is_empty()) {
            (true, _) => Some(format!("names no test: {claim}")),
            (_, false) => Some(format!("{} does not exist: {claim}", gone.join(", "))),
            _ => None,
        }
    };
    invariants(text).into_iter().filter_map(judge).collect()
}

fn exists(name: &str, tests: &HashSet<String>) -> bool {
    tests.contains(name.rsplit("::").next().unwrap_or(name))
}

/// The names of the functions below a `#[test]` or `#[tokio::test]` attribute, and of those that `on_both!`
/// makes a test of for each release of a daemon.
pub(crate) fn tests_of(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    let mut is_list = false;
    for line in source.lines().map(str::trim) {
        is_list = line == "on_both! {" || is_list && line != "}";
        if let Some((_, name)) =
            line.strip_suffix(';').and_then(|path| path.rsplit_once("::")).filter(|_| is_list)
        {
            names.push(name.to_owned());
        }
        let is_code = !line.starts_with("#[") && !line.starts_with("//");
        is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test && is_code) {
            names.push(rest.split('(').next().unwrap_or(rest).to_owned());
            is_test = false;
        }
    }
    names
}

#[test]
fn every_stated_invariant_names_a_test_that_exists() {
    let text = fs::read_to_string(sources::root().join("ARCHITECTURE.md")).unwrap();
    let tests = sources::below(".").iter().flat_map(|source| tests_of(&source.text)).collect();
    assert!(!invariants(&text).is_empty(), "ARCHITECTURE.md states its invariants in a table");
    assert_eq!(violations(&text, &tests), Vec::<String>::new());
}

/// What a text names as `path/to/file.rs::symbol`, in backticks.
fn symbols(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    quoted.filter_map(|quoted| quoted.split_once(".rs::"))
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
fn every_symbol_that_the_architecture_names_is_defined_in_its_file() {
    let text = fs::read_to_string(sources::root().join("ARCHITECTURE.md")).unwrap();
    let is_gone = |(file, symbol): &(&str, &str)| {
        let source = fs::read_to_string(sources::root().join(format!("{file}.rs"))).unwrap_or_default();
        !defines(&source, symbol)
    };
    let gone: Vec<_> = symbols(&text).filter(is_gone).collect();
    assert!(symbols(&text).count() > 10 && gone.is_empty(), "{gone:?} of ARCHITECTURE.md");
}

#[test]
fn only_a_definition_with_the_whole_name_counts() {
    assert!(defines("pub fn run(self) {}", "run") && defines("struct Plan;", "Plan"));
    assert!(!defines("fn run_once() {} // run", "run") && !defines("struct Plan;", "Pla"));
}

#[test]
fn planted_violations_are_found() {
    let tests = HashSet::from(["spans_carry_dn".to_owned()]);
    let text = "# A\n| no | claim |\n\n## Invariants\n\n| Invariant | Test |\n|---|---|\n\
        | Spans carry `dn`. | `it::spans_carry_dn` |\n| The sky is blue. | |\n| No ticker. | `gone_test` |\n\n\
        ## Origin\n\n| a | b |\n";
    let found = violations(text, &tests);
    assert_eq!(found, ["names no test: The sky is blue.", "gone_test does not exist: No ticker."]);
}

#[test]
fn only_functions_below_a_test_attribute_count() {
    let source = "#[test]\n#[ignore = \"needs root\"]\nfn one() {}\nfn helper() {}\n\
        #[tokio::test(start_paused = true)]\nasync fn two() {}\n\
        on_both! {\n    room::three;\n}\nroom::four;\n";
    assert_eq!(tests_of(source), ["one", "two", "three"]);
}
