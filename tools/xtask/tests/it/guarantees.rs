//! Every command of docs/promises.md selects tests that exist: cargo runs no test without a word where none
//! matches.

use std::fs;

use crate::{invariants, sources};

/// Options of cargo and of the test harness that take a value; of `--skip` the value selects tests.
const WITH_VALUE: [&str; 6] = ["-p", "--package", "--bin", "--test", "--features", "--bench"];

/// The commands of the tables.
fn commands(text: &str) -> impl Iterator<Item = &str> {
    let quoted =
        text.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('`').skip(1).step_by(2));
    quoted.filter(|quoted| quoted.contains("cargo "))
}

/// The words by which a command selects tests.
fn filters(command: &str) -> Vec<&str> {
    if let Some((_, filter)) = command.split_once("kernel-test ") {
        return filter.trim_matches('"').split(' ').skip(2).collect();
    }
    let Some((_, words)) = command.split_once("cargo test") else { return Vec::new() };
    let mut found = Vec::new();
    let mut words = words.split_whitespace();
    while let Some(word) = words.next() {
        if WITH_VALUE.contains(&word) {
            words.next();
        } else if !word.starts_with('-') {
            found.push(word);
        }
    }
    found
}

#[test]
fn every_command_of_a_guarantee_selects_tests_that_exist() {
    let text = fs::read_to_string(sources::root().join("docs/promises.md")).unwrap();
    let sources = sources::below(".");
    let tests = sources.iter().flat_map(|source| invariants::tests_of(&source.text));
    let modules = sources.iter().flat_map(|source| source.path.iter()).filter_map(|part| part.to_str());
    let names: Vec<String> = tests.chain(modules.map(str::to_owned)).collect();
    let exists = |part: &str| names.iter().any(|name| name.contains(part));
    let gone: Vec<&str> = commands(&text)
        .flat_map(filters)
        .filter(|filter| !filter.split("::").filter(|part| !part.is_empty()).all(exists))
        .collect();
    assert!(commands(&text).flat_map(filters).count() > 30 && gone.is_empty(), "no test matches {gone:?}");
}

/// Of a test in a guest, its binary and the module with which its filter begins: a filter is text of `PACKAGE BINARY TEST`.
fn guest_module(command: &str) -> Option<(&str, &str)> {
    let (_, filter) = command.split_once("kernel-test ")?;
    let mut words = filter.trim_matches('"').split(' ').skip(1);
    Some((words.next()?, words.next()?.split("::").next()?))
}

#[test]
fn every_filter_of_a_guest_begins_with_a_module_of_its_binary() {
    let text = fs::read_to_string(sources::root().join("docs/promises.md")).unwrap();
    let sources = sources::below(".");
    let exists = |(binary, module): &(&str, &str)| {
        sources.iter().any(|source| {
            let mut parts = source.path.iter().filter_map(|part| part.to_str());
            parts.any(|part| part == "tests")
                && parts.next() == Some(*binary)
                && parts.next().is_some_and(|file| file.starts_with(module))
        })
    };
    let gone: Vec<_> = commands(&text).filter_map(guest_module).filter(|module| !exists(module)).collect();
    assert!(commands(&text).filter_map(guest_module).count() > 10 && gone.is_empty(), "no module {gone:?}");
}

#[test]
fn no_command_gives_cargo_two_filters() {
    let text = fs::read_to_string(sources::root().join("docs/promises.md")).unwrap();
    let before_dashes = |command: &str| filters(command.split(" -- ").next().unwrap_or_default()).len();
    let rejected: Vec<&str> = commands(&text)
        .filter(|command| command.contains("cargo test") && before_dashes(command) > 1)
        .collect();
    assert!(rejected.is_empty(), "cargo takes one filter, the others belong after `--`: {rejected:?}");
}

#[test]
fn filters_are_told_from_options() {
    assert_eq!(
        filters("cargo test -p x --features a --test it a::b c -- --ignored d --skip e::"),
        ["a::b", "c", "d", "e::"]
    );
    assert_eq!(filters("cargo xtask kernel-test \"nodekeel-provisioner it csi::sanity\""), ["csi::sanity"]);
    assert_eq!(filters("cargo xtask kernel-test dirquota"), Vec::<&str>::new());
    assert_eq!(guest_module("cargo xtask kernel-test \"a it b::c\""), Some(("it", "b")));
    assert_eq!(guest_module("cargo xtask kernel-test dirquota"), None);
    assert_eq!(filters("cargo xtask bench quota"), Vec::<&str>::new());
    assert_eq!(
        commands("`cargo test a`\n| b | `cargo test c`; `x` |\n").collect::<Vec<_>>(),
        ["cargo test c"]
    );
}
