//! What the output of Rust's test harness says.

/// A test that did not run, with the reason in its `#[ignore = "…"]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ignored {
    pub(crate) test: String,
    pub(crate) reason: String,
}

/// What one run of the harness, or several after each other, have said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) ignored: Vec<Ignored>,
    /// The names of the failed tests.
    pub(crate) failures: Vec<String>,
    /// Whether every run that was begun has closed with a result, and there was one.
    pub(crate) is_complete: bool,
}

/// Reads the output's lines.
///
/// *Source:* the pretty format of library/test: `running N tests`, `test NAME ... ok|FAILED|ignored, REASON`,
/// `test result: ok. N passed; N failed; …`. What a test itself writes may stand between a name and its `ok`.
pub(crate) fn read(lines: &[String]) -> Outcome {
    let mut outcome = Outcome::default();
    let (mut open, mut closed) = (0_usize, 0);
    for line in lines {
        if is_begin(line) {
            open += 1;
        } else if let Some((passed, failed)) = result(line) {
            open = open.saturating_sub(1);
            // A test may run its own binary again: what that counts is inside of the one test.
            if open == 0 {
                closed += 1;
                outcome.passed += passed;
                outcome.failed += failed;
            }
        } else if let Some((test, what)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
        {
            note(&mut outcome, test, what);
        }
    }
    outcome.is_complete = closed > 0 && open == 0;
    outcome.failures.sort();
    outcome.failures.dedup();
    if !outcome.is_complete {
        // No total was told: what was said test by test has to do, and the one that it died of counts, too.
        outcome.passed =
            lines.iter().filter(|line| line.starts_with("test ") && line.ends_with("... ok")).count();
        outcome.failed = outcome.failures.len() + 1;
    }
    outcome
}

fn note(outcome: &mut Outcome, test: &str, what: &str) {
    // `#[should_panic]` adds " - should panic" to the name, which the harness doesn't know it by.
    let test = test.strip_suffix(" - should panic").unwrap_or(test).to_owned();
    if let Some(reason) = what.strip_prefix("ignored") {
        let reason = reason.strip_prefix(", ").unwrap_or_default().to_owned();
        outcome.ignored.push(Ignored { test, reason });
    } else if what.ends_with("FAILED") {
        outcome.failures.push(test);
    }
}

fn is_begin(line: &str) -> bool {
    let count = line.strip_prefix("running ").and_then(|rest| rest.split_once(' '));
    count.is_some_and(|(count, unit)| count.parse::<usize>().is_ok() && matches!(unit, "test" | "tests"))
}

fn result(line: &str) -> Option<(usize, usize)> {
    let rest = line.strip_prefix("test result: ")?;
    let counts = rest.split_once(". ")?.1;
    let count = |what: &str| {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(what));
        part.and_then(|number| number.trim().parse().ok())
    };
    Some((count("passed")?, count("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Outcome {
        read(&text.lines().map(String::from).collect::<Vec<_>>())
    }

    const ONE: &str = "
running 4 tests
test a ... ok
test b::c - should panic ... ok
test d ... ignored, needs etcd
test e ... FAILED

failures:
    e

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s
";

    #[test]
    fn counts_reasons_and_failures_are_read() {
        let outcome = read_text(ONE);
        let ignored = Ignored { test: "d".into(), reason: "needs etcd".into() };
        assert_eq!((outcome.passed, outcome.failed, outcome.is_complete), (2, 1, true));
        assert_eq!((outcome.ignored, outcome.failures), (vec![ignored], vec!["e".to_owned()]));
    }

    #[test]
    fn several_runs_add_up() {
        let outcome = read_text(&format!("{ONE}{ONE}"));
        assert_eq!((outcome.passed, outcome.failed, outcome.is_complete), (4, 2, true));
    }

    #[test]
    fn a_run_that_died_is_not_complete() {
        let died = read_text("running 3 tests\ntest a ... ok\ntest b ... FAILED");
        assert_eq!((died.passed, died.failed, died.is_complete), (1, 2, false));
        assert!(!read_text(&format!("{ONE}running 2 tests")).is_complete);
        assert!(!read_text("").is_complete);
    }

    #[test]
    fn a_run_inside_of_a_test_counts_as_that_test() {
        let inner = "running 1 test\ntest x ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let text =
            format!("running 2 tests\n{inner}test a ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored");
        let outcome = read_text(&text);
        assert_eq!((outcome.passed, outcome.is_complete), (2, true));
    }

    #[test]
    fn a_run_of_no_test_is_complete() {
        let text =
            "running 0 tests\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out";
        assert!(read_text(text).is_complete);
    }

    #[test]
    fn output_of_the_test_itself_does_not_hide_its_failure() {
        assert_eq!(read_text("test a ... progress FAILED").failures, ["a"]);
        assert_eq!(read_text("running late").is_complete, read_text("").is_complete);
    }
}
