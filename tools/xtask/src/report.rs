//! The results of a task, part by part.

use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use testbed::Table;

use crate::run::{Log, run_command, show_line};

/// How many tests the list of the slowest shows.
const SLOWEST: usize = 20;

/// A test's time and outcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TestResult {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    /// What it wrote, where it failed.
    pub(crate) failure: Option<String>,
}

/// One part of a task: the tests of a binary that ran together, or one check.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) seconds: f64,
    pub(crate) tests: Vec<TestResult>,
}

/// The results so far, and the log of the commands behind them.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) log: Log,
    start: Instant,
    parts: Vec<Part>,
    problems: Vec<String>,
}

impl Report {
    /// An empty report.
    pub(crate) fn new(log: Log) -> Self {
        Self { log, start: Instant::now(), parts: Vec::new(), problems: Vec::new() }
    }

    /// Adds a part that ran.
    pub(crate) fn add_part(&mut self, part: Part) {
        self.parts.push(part);
    }

    /// Adds a part that is one check.
    pub(crate) fn add_check(&mut self, name: &str, elapsed: Duration, problem: Option<String>) {
        let failed = usize::from(problem.is_some());
        let seconds = elapsed.as_secs_f64();
        self.parts.push(Part { name: name.into(), passed: 1 - failed, failed, seconds, tests: Vec::new() });
        self.problems.extend(problem.map(|problem| format!("{name}: {problem}")));
    }

    /// Notes why something failed whose failure is counted in its part.
    pub(crate) fn add_problem(&mut self, problem: impl Into<String>) {
        self.problems.push(problem.into());
    }

    /// Counts what could not run at all as a failure.
    pub(crate) fn could_not_run(&mut self, what: &str, why: &str) {
        self.add_check(what, Duration::ZERO, Some(format!("could not run: {why}")));
    }

    /// Runs a command that is one check.
    pub(crate) fn run_check(&mut self, name: &str, command: Command, deadline: Duration) {
        self.log.headline(name);
        match run_command(command, &self.log, show_line, deadline) {
            Ok(outcome) => self.add_check(name, outcome.elapsed, outcome.problem),
            Err(error) => self.could_not_run(name, &format!("{error:#}")),
        }
    }

    /// Takes over the parts and problems of another report.
    pub(crate) fn merge(&mut self, other: Self) {
        self.parts.extend(other.parts);
        self.problems.extend(other.problems);
    }

    /// How long the task has been running.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Prints the summary, with the counts alone on its last line, and gives the exit code.
    pub(crate) fn finish(&self) -> ExitCode {
        println!("\n{self}");
        if self.failed() == 0 && self.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// `N passed, N failed`.
    pub(crate) fn counts(&self) -> String {
        format!("{} passed, {} failed", self.passed(), self.failed())
    }

    fn passed(&self) -> usize {
        self.parts.iter().map(|part| part.passed).sum()
    }

    fn failed(&self) -> usize {
        self.parts.iter().map(|part| part.failed).sum()
    }

    fn parts_table(&self) -> Table {
        let mut table = Table::new(["passed", "failed", "minutes", "part"]);
        let mut row = |passed: usize, failed: usize, seconds: f64, name: &str| {
            table.add_row([passed.to_string(), failed.to_string(), minutes(seconds), name.to_owned()]);
        };
        for part in &self.parts {
            row(part.passed, part.failed, part.seconds, &part.name);
        }
        let seconds = self.parts.iter().map(|part| part.seconds).sum();
        row(self.passed(), self.failed(), seconds, "sum of all parts");
        table
    }

    /// The slowest tests; `None` where no test ran.
    fn slowest_table(&self) -> Option<Table> {
        let tests = self.parts.iter().flat_map(|part| part.tests.iter().map(move |test| (part, test)));
        let mut tests: Vec<_> = tests.collect();
        tests.sort_by(|(_, one), (_, other)| other.seconds.total_cmp(&one.seconds));
        let mut table = Table::new(["seconds", "slowest tests", "part"]);
        for (part, test) in tests.iter().take(SLOWEST) {
            table.add_row([format!("{:.1}", test.seconds), test.name.clone(), part.name.clone()]);
        }
        (!tests.is_empty()).then_some(table)
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(table) = self.slowest_table() {
            writeln!(f, "{table}\n")?;
        }
        writeln!(f, "{}\n", self.parts_table())?;
        for problem in &self.problems {
            writeln!(f, "problem: {problem}")?;
        }
        let (wall, processors) = (minutes(self.elapsed().as_secs_f64()), minutes(processor_seconds()));
        writeln!(f, "{wall} minutes, {processors} of all processors")?;
        f.write_str(&self.counts())
    }
}

fn minutes(seconds: f64) -> String {
    format!("{:.2}", seconds / 60.0)
}

/// The processor time of all children that have ended; 0 where the kernel does not say.
///
/// *Source:* proc_pid_stat(5): fields 16 and 17, in ticks of a hundredth of a second.
fn processor_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, times: &[f64]) -> Part {
        let test =
            |seconds: &f64| TestResult { name: format!("t{seconds}"), seconds: *seconds, failure: None };
        let tests: Vec<_> = times.iter().map(test).collect();
        Part { name: name.into(), passed: 3, failed: 1, seconds: 90.0, tests }
    }

    #[test]
    fn the_last_line_is_the_counts_alone() {
        let mut report = Report::new(Log::default());
        report.add_part(part("logtree it", &[]));
        report.add_problem("logtree it: a test failed");
        report.add_check("docs", Duration::from_secs(30), None);
        report.could_not_run("noded it", "not root");
        let text = report.to_string();
        assert_eq!(text.lines().last(), Some("4 passed, 2 failed"));
        assert!(
            text.contains("2.00     sum of all parts") && text.contains("noded it: could not run: not root"),
            "{text}"
        );
        assert_eq!(report.finish(), ExitCode::FAILURE);
    }

    #[test]
    fn the_slowest_tests_come_first_with_their_parts() {
        let mut report = Report::new(Log::default());
        report.add_part(part("a", &[1.0, 30.0]));
        let mut other = Report::new(Log::buffered());
        other.add_part(part("b", &[2.0; 30]));
        report.merge(other);
        let table = report.slowest_table().unwrap().to_string();
        let lines: Vec<_> = table.lines().collect();
        assert!(lines.len() == SLOWEST + 1 && lines[1].starts_with("30.0") && lines[2].ends_with('b'));
    }
}
