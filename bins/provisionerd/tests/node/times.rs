//! How long things take, for whoever reads the output.

use std::cell::Cell;
use std::io::Write as _;
use std::time::Instant;

/// Prints what took how long.
#[derive(Debug)]
pub(crate) struct Times(Cell<Instant>);

impl Times {
    pub(crate) fn start() -> Self {
        Self(Cell::new(Instant::now()))
    }

    /// Since the last one.
    pub(crate) fn took(&self, what: &str) {
        let line = format!("    {what}: {:.1} s\n", self.0.get().elapsed().as_secs_f64());
        // Not by `println!`, which is heard only where the test fails. Whoever doesn't listen is no failure.
        let _ = std::io::stdout().write_all(line.as_bytes());
        self.0.set(Instant::now());
    }
}
