//! Logs durations in the test output.

use std::cell::Cell;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// Prints the duration of steps.
#[derive(Debug)]
pub(crate) struct StepTimer(Cell<Instant>);

impl StepTimer {
    pub(crate) fn start() -> Self {
        Self(Cell::new(Instant::now()))
    }

    /// Prints the time since the last step.
    pub(crate) fn log_step(&self, what: &str) {
        self.log_duration(what, self.0.get().elapsed());
    }

    /// Prints a duration, which ends a step.
    pub(crate) fn log_duration(&self, what: &str, duration: Duration) {
        let line = format!("    {what}: {:.1} s\n", duration.as_secs_f64());
        // Not with `println!`, whose output is shown only for a failed test. A closed stdout is not a
        // failure.
        let _ = std::io::stdout().write_all(line.as_bytes());
        self.0.set(Instant::now());
    }
}
