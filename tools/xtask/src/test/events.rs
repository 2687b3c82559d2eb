//! Reads what a test harness reports of its tests: one JSON event a line.
//!
//! *Source:* library/test/src/formatters/json.rs of Rust. The format is unstable: a harness of a stable
//! toolchain writes it where `RUSTC_BOOTSTRAP` is set while it runs.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::report::TestResult;

/// The harness's arguments for events with each test's time.
pub(crate) const ARGUMENTS: [&str; 3] = ["-Zunstable-options", "--format=json", "--report-time"];
/// The variable that lets a stable harness accept them.
pub(crate) const UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// A test that did not run, with the reason in its `#[ignore = "…"]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IgnoredTest {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// The results of one run of a harness, or of several after each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TestRun {
    pub(crate) tests: Vec<TestResult>,
    /// Whether every suite that started has ended, and one did.
    pub(crate) is_complete: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    name: String,
    exec_time: f64,
    /// Why a test failed, where its output doesn't say it.
    message: String,
    stdout: String,
    ignore_message: String,
}

impl TestRun {
    pub(crate) fn from_lines<'a>(lines: impl IntoIterator<Item = &'a str>) -> Self {
        let mut run = Self::default();
        let (mut package, mut running) = (String::new(), BTreeSet::new());
        let (mut open, mut ended) = (0_usize, 0);
        for event in lines.into_iter().filter_map(parse_event) {
            let name = format!("{package}{}", event.name);
            match (event.kind.as_str(), event.event.as_str()) {
                ("package", _) => package = format!("{} ", event.name),
                ("suite", "started") => open += 1,
                ("suite", "ok" | "failed") => (open, ended) = (open.saturating_sub(1), ended + 1),
                ("test", "started") => drop(running.insert(name)),
                ("test", "ignored") => drop(running.remove(&name)),
                ("test", "ok" | "failed") => {
                    running.remove(&name);
                    run.tests.push(event.into_result(name));
                }
                _ => {}
            }
        }
        run.is_complete = ended > 0 && open == 0;
        let cut_off = running.into_iter().map(|name| {
            let failure = Some("the test binary ended, or was killed, while this test ran".to_owned());
            TestResult { name, seconds: 0.0, failure }
        });
        run.tests.extend(cut_off);
        run
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &TestResult> {
        self.tests.iter().filter(|test| test.failure.is_some())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tests.iter().any(|test| test.name == name)
    }
}

impl Event {
    fn into_result(self, name: String) -> TestResult {
        let failure = (self.event == "failed").then(|| format!("{}{}", self.message, self.stdout));
        TestResult { name, seconds: self.exec_time, failure }
    }
}

/// An event may stand behind what a child of a test wrote without a line break.
fn parse_event(line: &str) -> Option<Event> {
    serde_json::from_str(&line[line.find(r#"{ "type": ""#)?..]).ok()
}

/// The ignored tests in the output of `--list --ignored --format=json`.
///
/// # Errors
/// A line is not an event. The harness doesn't escape reasons there, so a reason holds no quotation mark.
pub(crate) fn parse_list(text: &str) -> Result<Vec<IgnoredTest>> {
    let events = text.lines().map(|line| parse_event(line).with_context(|| format!("parse {line:?}")));
    let tests = events.filter(|event| event.as_ref().map_or(true, |event| event.event == "discovered"));
    tests
        .map(|event| event.map(|event| IgnoredTest { name: event.name, reason: event.ignore_message }))
        .collect()
}

/// A readable line of a harness: one line for each test that ended, with the output of those that failed.
pub(crate) fn show_event(line: &str) -> Option<String> {
    let Some(event) = parse_event(line) else { return Some(line.to_owned()) };
    let (seconds, name) = (event.exec_time, &event.name);
    match (event.kind.as_str(), event.event.as_str()) {
        ("package", _) => Some(format!("package {name}")),
        ("test", "ok") => Some(format!("ok      {seconds:8.3} s  {name}")),
        ("test", "failed") => {
            Some(format!("FAILED  {seconds:8.3} s  {name}\n{}{}", event.message, event.stdout))
        }
        ("test", "timeout") => Some(format!("still running after a minute: {name}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = r#"{ "type": "suite", "event": "started", "test_count": 3 }
{ "type": "test", "event": "started", "name": "a" }
{ "type": "test", "event": "started", "name": "b::c" }
written by a child{ "type": "test", "name": "a", "event": "ok", "exec_time": 0.5 }
{ "type": "test", "event": "started", "name": "d" }
{ "type": "test", "name": "d", "event": "ignored", "message": "needs etcd" }
{ "type": "test", "name": "b::c", "event": "failed", "exec_time": 0.25, "stdout": "no \"such\" thing\n" }
{ "type": "suite", "event": "failed", "passed": 1, "failed": 1, "ignored": 1, "exec_time": 0.7 }"#;

    #[test]
    fn results_carry_times_and_the_output_of_failures() {
        let run = TestRun::from_lines(SUITE.lines());
        let failure = Some("no \"such\" thing\n".to_owned());
        assert!(run.is_complete && run.has("a") && !run.has("d"));
        assert_eq!(run.tests[0], TestResult { name: "a".into(), seconds: 0.5, failure: None });
        assert_eq!(run.tests[1], TestResult { name: "b::c".into(), seconds: 0.25, failure });
    }

    #[test]
    fn a_run_that_died_is_incomplete_and_names_the_tests_that_were_running() {
        let died = SUITE.lines().take(4);
        let run = TestRun::from_lines(died);
        let failures: Vec<_> = run.failures().map(|test| test.name.as_str()).collect();
        assert_eq!((failures, run.is_complete), (vec!["b::c"], false));
        assert!(!TestRun::from_lines([]).is_complete);
    }

    #[test]
    fn the_human_output_of_a_nested_run_is_not_counted() {
        let nested = ["running 1 test", "test x ... ok", "test result: ok. 1 passed; 0 failed"];
        let run = TestRun::from_lines(nested.into_iter().chain(SUITE.lines()));
        assert_eq!((run.tests.len(), run.is_complete), (2, true));
    }

    #[test]
    fn doctests_are_named_with_their_package() {
        let package = r#"{ "type": "package", "name": "nodekeel-logtree" }"#;
        let run = TestRun::from_lines([package].into_iter().chain(SUITE.lines()));
        assert!(run.has("nodekeel-logtree a"));
    }

    #[test]
    fn a_list_gives_ignored_tests_with_their_reasons() {
        let list = r#"{ "type": "suite", "event": "discovery" }
{ "type": "test", "event": "discovered", "name": "a", "ignore": false, "ignore_message": "needs provisionerd's image" }
{ "type": "suite", "event": "completed", "tests": 1, "total": 1, "ignored": 0 }"#;
        let reason = "needs provisionerd's image".to_owned();
        assert_eq!(parse_list(list).unwrap(), [IgnoredTest { name: "a".into(), reason }]);
        let quoted =
            r#"{ "type": "test", "event": "discovered", "name": "a", "ignore_message": "needs "x"" }"#;
        assert!(parse_list(quoted).is_err());
    }

    #[test]
    fn each_test_is_shown_as_a_line_and_other_output_as_it_is() {
        let shown: Vec<_> = SUITE.lines().chain(["noise"]).filter_map(show_event).collect();
        assert_eq!(shown.len(), 3);
        assert!(shown[0].ends_with("0.500 s  a") && shown[1].contains("no \"such\"") && shown[2] == "noise");
    }
}
