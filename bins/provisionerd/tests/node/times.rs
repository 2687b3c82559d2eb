//! How long things take, for whoever reads the output.

use std::io::Write as _;
use std::time::Instant;

/// Prints what took how long.
#[derive(Debug)]
pub(crate) struct Times(Instant);

impl Times {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Since the last one.
    pub(crate) fn took(&mut self, what: &str) {
        let line = format!("    {what}: {:.1} s\n", self.0.elapsed().as_secs_f64());
        // Not by `println!`, which is heard only where the test fails. Whoever doesn't listen is no failure.
        let _ = std::io::stdout().write_all(line.as_bytes());
        self.0 = Instant::now();
    }
}
