//! The destination of raw output of runnables and their child processes.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::containment::{DropContained, catch_panic};

/// One of a runnable's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutputStream {
    /// Output of the runnable itself, by [`Context::open_raw_output`](crate::Context::open_raw_output).
    Raw,
    /// The standard output of its child process.
    Stdout,
    /// The standard error of its child process.
    Stderr,
}

impl OutputStream {
    /// The stream in lower case, as programs should store it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

impl fmt::Display for OutputStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The source of the output that a writer gets. Each start of a runnable has separate writers, so lines of
/// two generations never mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputOrigin<'a> {
    /// The runnable's name in the tree.
    pub dn: &'a str,
    /// The output.
    pub stream: OutputStream,
    /// The number of this incarnation of its DN, counted from 1.
    pub generation: u64,
}

/// Takes raw output. Implemented for every `Fn(OutputOrigin) -> impl io::Write`.
///
/// # Contract
/// `open_writer` is called once for each requested writer. The writer never blocks: async tasks call it. It
/// takes bytes in arbitrary chunks, not lines; dropping it ends the stream. Its errors are ignored. After a panic it
/// gets no more output; the [exit](crate::process::ProcessExit::output_problem) of the process names it.
pub trait OutputSink: Send + Sync + 'static {
    /// Opens the writer for one output of one run.
    fn open_writer(&self, origin: OutputOrigin<'_>) -> Box<dyn io::Write + Send>;
}

impl<F, W> OutputSink for F
where
    F: Fn(OutputOrigin<'_>) -> W + Send + Sync + 'static,
    W: io::Write + Send + 'static,
{
    fn open_writer(&self, origin: OutputOrigin<'_>) -> Box<dyn io::Write + Send> {
        Box::new(self(origin))
    }
}

/// Logs each line: the default sink of a supervisor.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LogOutput;

impl OutputSink for LogOutput {
    fn open_writer(&self, origin: OutputOrigin<'_>) -> Box<dyn io::Write + Send> {
        let OutputOrigin { dn, stream, generation } = origin;
        Box::new(LineLogger { dn: dn.into(), stream, generation, partial: Vec::new() })
    }
}

/// The longest part of a line that is logged as one event, in bytes.
const MAX_LOGGED_BYTES: usize = 16 * 1024;

struct LineLogger {
    dn: Box<str>,
    stream: OutputStream,
    generation: u64,
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
}

impl LineLogger {
    fn log_line(&mut self) {
        let line = printable_text(&self.partial);
        let Self { dn, generation, stream, .. } = self;
        tracing::info!(dn = &**dn, generation, stream = stream.as_str(), "{line}");
        self.partial.clear();
    }
}

impl io::Write for LineLogger {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (line, is_complete) = match piece.strip_suffix(b"\n") {
                Some(line) => (line, true),
                None => (piece, false),
            };
            for part in line.chunks(MAX_LOGGED_BYTES) {
                if self.partial.len() + part.len() > MAX_LOGGED_BYTES {
                    self.log_line();
                }
                self.partial.extend_from_slice(part);
            }
            if is_complete {
                self.log_line();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineLogger {
    fn drop(&mut self) {
        if !self.partial.is_empty() {
            self.log_line();
        }
    }
}

/// A line as text that is safe to print on any terminal.
pub(crate) fn printable_text(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let printable = |char| if is_unprintable(char) { char::REPLACEMENT_CHARACTER } else { char };
    String::from_utf8_lossy(line).chars().map(printable).collect()
}

/// Returns whether a character controls the terminal, or reorders or breaks its line, instead of being printed.
fn is_unprintable(char: char) -> bool {
    matches!(
        char,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
    ) || char.is_control() && char != '\t'
}

/// A writer of a sink, whose panics go no further.
pub(crate) struct SinkWriter {
    dn: Arc<str>,
    /// Or the message of its panic.
    writer: Result<DropContained<Box<dyn io::Write + Send>>, String>,
}

impl SinkWriter {
    pub(crate) fn open(sink: &dyn OutputSink, dn: &Arc<str>, stream: OutputStream, generation: u64) -> Self {
        let opened = catch_panic(|| sink.open_writer(OutputOrigin { dn, stream, generation }));
        let writer = opened.map(DropContained::new).inspect_err(|panic| log_panic(dn, panic));
        Self { dn: Arc::clone(dn), writer }
    }

    /// The message of its panic, if it has panicked.
    pub(crate) fn panic(&self) -> Option<&str> {
        self.writer.as_ref().err().map(String::as_str)
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut dyn io::Write) -> io::Result<T>) -> io::Result<T> {
        let panic = match &mut self.writer {
            Ok(writer) => match catch_panic(|| call(&mut **writer)) {
                Ok(result) => return result,
                Err(panic) => panic,
            },
            Err(panic) => return Err(io::Error::other(format!("the output sink has panicked: {panic}"))),
        };
        log_panic(&self.dn, &panic);
        let error = io::Error::other(format!("the output sink panicked: {panic}"));
        self.writer = Err(panic);
        Err(error)
    }
}

fn log_panic(dn: &str, panic: &str) {
    tracing::error!(dn, "the output sink panicked, and gets no more output of this run: {panic}");
}

impl io::Write for SinkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.call(|writer| writer.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.call(|writer| writer.flush())
    }
}

impl fmt::Debug for SinkWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SinkWriter").field("dn", &self.dn).field("panic", &self.panic()).finish()
    }
}
