//! What noded prints to stderr. A write there may block for as long as nobody reads, so only one thread does it, and
//! nobody waits for that thread.

use std::io::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use nodekeel_logtree::{Dn, Journal, Level, Query, Reader, render};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// How long the last lines for a reader of stderr that has stopped reading are waited for.
pub(crate) const ALLOWANCE: Duration = Duration::from_secs(1);

/// Lines that wait for a slow reader; what comes then is lost.
const WAITING_LINES: usize = 64;

/// Prints lines, and the log from a level on.
pub(crate) struct Console {
    lines: mpsc::Sender<String>,
    thread: JoinHandle<()>,
}

impl Console {
    /// Begins to print; without a level, no log.
    ///
    /// # Errors
    /// The log can't be read.
    pub(crate) fn start(journal: &Journal, level: Option<Level>) -> anyhow::Result<Self> {
        let query = |level| Query::new(Dn::root()).children().follow().min_level(level);
        let log = level.map(|level| journal.read(query(level))).transpose().context("read the log")?;
        let (lines, waiting) = mpsc::channel(WAITING_LINES);
        let runtime = tokio::runtime::Handle::current();
        let thread = tokio::task::spawn_blocking(move || runtime.block_on(print(log, waiting)));
        Ok(Self { lines, thread })
    }

    /// A line for whoever started noded; one who does not listen does not matter.
    pub(crate) fn say(&self, line: &str) {
        let _ = self.lines.try_send(format!("noded: {line}"));
    }

    /// Prints what there is, if somebody reads it.
    pub(crate) async fn end(self) {
        drop(self.lines);
        let _ = tokio::time::timeout(ALLOWANCE, self.thread).await;
    }
}

/// Prints until no more lines can come, then what is left of the log.
async fn print(mut log: Option<Reader>, mut lines: mpsc::Receiver<String>) {
    loop {
        let line = tokio::select! {
            line = lines.recv() => line,
            Some(entry) = next(&mut log) => Some(render::full(&entry)),
        };
        let Some(line) = line else { break };
        if !put(&line) {
            return;
        }
    }
    while let Some(entry) = log.as_mut().and_then(Reader::try_next) {
        if !put(&render::full(&entry)) {
            return;
        }
    }
}

async fn next(log: &mut Option<Reader>) -> Option<nodekeel_logtree::Entry> {
    match log {
        Some(log) => log.next().await,
        None => None,
    }
}

/// Writes a line at once, so that it is not torn where several write; says whether that went well.
fn put(line: &str) -> bool {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).is_ok()
}
