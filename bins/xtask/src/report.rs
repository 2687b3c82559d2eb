//! What a task has done, part by part, and its closing line.

use std::process::ExitCode;
use std::time::Duration;

use testbed::Table;

/// One part of a task.
#[derive(Debug)]
pub(crate) struct Part {
    /// What ran, and how.
    pub(crate) name: String,
    /// How many tests or checks passed.
    pub(crate) passed: usize,
    /// How many failed.
    pub(crate) failed: usize,
    /// How long it took.
    pub(crate) took: Duration,
}

/// Everything that a task has done so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    parts: Vec<Part>,
    problems: Vec<String>,
}

impl Report {
    /// Adds a part that ran.
    pub(crate) fn ran(&mut self, part: Part) {
        self.parts.push(part);
    }

    /// Adds a part that is one check.
    pub(crate) fn checked(&mut self, name: &str, took: Duration, problem: Option<String>) {
        let failed = usize::from(problem.is_some());
        self.parts.push(Part { name: name.into(), passed: 1 - failed, failed, took });
        self.problems.extend(problem.map(|problem| format!("{name}: {problem}")));
    }

    /// Notes why something failed whose failure is counted in its part.
    pub(crate) fn note(&mut self, problem: impl Into<String>) {
        self.problems.push(problem.into());
    }

    /// Counts something that could not run at all as a failure.
    pub(crate) fn could_not_run(&mut self, what: &str, why: &str) {
        let part = Part { name: what.into(), passed: 0, failed: 1, took: Duration::ZERO };
        self.parts.push(part);
        self.problems.push(format!("{what}: could not run: {why}"));
    }

    /// Prints the summary, with the counts alone on its last line, and gives the exit code.
    pub(crate) fn finish(&self) -> ExitCode {
        println!("\n{self}");
        if self.failed() == 0 && self.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn passed(&self) -> usize {
        self.parts.iter().map(|part| part.passed).sum()
    }

    fn failed(&self) -> usize {
        self.parts.iter().map(|part| part.failed).sum()
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(["passed", "failed", "minutes", "part"]);
        let total: Duration = self.parts.iter().map(|part| part.took).sum();
        for part in &self.parts {
            table.row([
                part.passed.to_string(),
                part.failed.to_string(),
                minutes(part.took),
                part.name.clone(),
            ]);
        }
        table.row([
            self.passed().to_string(),
            self.failed().to_string(),
            minutes(total),
            "together".to_owned(),
        ]);
        writeln!(f, "{table}\n")?;
        for problem in &self.problems {
            writeln!(f, "problem: {problem}")?;
        }
        write!(f, "{} passed, {} failed", self.passed(), self.failed())
    }
}

fn minutes(took: Duration) -> String {
    format!("{:.2}", took.as_secs_f64() / 60.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_counts_alone() {
        let mut report = Report::default();
        report.ran(Part { name: "logtree it".into(), passed: 3, failed: 1, took: Duration::from_secs(90) });
        report.note("logtree it: a test failed");
        report.checked("docs", Duration::from_secs(30), None);
        report.could_not_run("noded it", "not root");
        let text = report.to_string();
        assert_eq!(text.lines().last(), Some("4 passed, 2 failed"));
        assert!(
            text.contains("2.00     together") && text.contains("noded it: could not run: not root"),
            "{text}"
        );
        assert_eq!(report.finish(), ExitCode::FAILURE);
    }

    #[test]
    fn nothing_wrong_is_success() {
        let mut report = Report::default();
        report.checked("docs", Duration::ZERO, None);
        assert_eq!(report.finish(), ExitCode::SUCCESS);
    }
}
