//! Output of the program on stderr. A write there may block for as long as the reader does not read, so one thread
//! does it, and no other thread waits for it.

use std::io::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use nodekeel_logtree::{Dn, Level, LogEntry, LogQuery, LogReader, LogStore, render};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::parts::KERNEL_DN;
use crate::program_name::program_name;

/// The time for which the program waits at exit until a slow reader of stderr has read the last lines.
pub(crate) const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Lines queued for a slow reader; further lines are dropped.
const QUEUE_LINES: usize = 64;

/// Prints lines, and log entries of a level and above.
pub(crate) struct Console {
    lines: mpsc::Sender<String>,
    thread: JoinHandle<()>,
}

impl Console {
    /// Starts the printing thread; without a level it prints no log entries.
    ///
    /// # Errors
    /// The log can't be read.
    pub(crate) fn start(log_store: &LogStore, level: Option<Level>) -> anyhow::Result<Self> {
        let query = |level| LogQuery::of_dn(Dn::root()).include_descendants().follow().min_level(level);
        let log = level
            .map(|level| log_store.open_reader(query(level)))
            .transpose()
            .context("can't read the log")?;
        let (lines, waiting) = mpsc::channel(QUEUE_LINES);
        let runtime = tokio::runtime::Handle::current();
        // A write may block for as long as the reader does not read, and so has a blocking thread of its own.
        let thread = tokio::task::spawn_blocking(move || runtime.block_on(print_all(log, waiting)));
        Ok(Self { lines, thread })
    }

    /// Prints a line for the process that started the program; dropped if the queue is full.
    pub(crate) fn print_line(&self, line: &str) {
        let _ = self.lines.try_send(format!("{}: {line}", program_name()));
    }

    /// Prints the queued lines, if the reader reads them within the timeout.
    pub(crate) async fn finish(self) {
        // The thread ends when it has printed what is queued.
        drop(self.lines);
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.thread).await;
    }
}

/// Prints until the sender is dropped, then the rest of the log.
async fn print_all(mut log: Option<LogReader>, mut lines: mpsc::Receiver<String>) {
    loop {
        let line = tokio::select! {
            line = lines.recv() => line,
            Some(entry) = next_entry(&mut log) => if is_shown(&entry) { Some(render::full_text(&entry)) } else { continue },
        };
        let Some(line) = line else { break };
        // stderr is closed, and nothing can be printed any more.
        if !write_line(&line) {
            return;
        }
    }
    while let Some(entry) = log.as_mut().and_then(LogReader::try_next) {
        if is_shown(&entry) && !write_line(&render::full_text(&entry)) {
            return;
        }
    }
}

/// Returns whether an entry is printed: not if it is the kernel's. stderr may lead to the kernel's log, and each line would come
/// back as the next one; or to the console on which the kernel prints its log itself.
fn is_shown(entry: &LogEntry) -> bool {
    entry.dn.as_str() != KERNEL_DN
}

async fn next_entry(log: &mut Option<LogReader>) -> Option<LogEntry> {
    match log {
        Some(log) => log.next().await,
        None => None,
    }
}

/// Writes a line in one call, so that lines of several writers don't mix; returns whether the write
/// succeeded.
fn write_line(line: &str) -> bool {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).is_ok()
}
