//! Where the raw output of runnables and their child processes goes.

use std::fmt;
use std::io;

/// Which of a runnable's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stream {
    /// What the runnable itself writes to [`Context::raw`](crate::Context::raw).
    Raw,
    /// Its child process' standard output.
    Stdout,
    /// Its child process' standard error.
    Stderr,
}

impl Stream {
    /// The stream in lower case, as programs should store it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Whose output a writer carries: one of each exists per start of a runnable, so lines of two generations never mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Origin<'a> {
    /// The runnable's name in the tree.
    pub dn: &'a str,
    /// Which of its outputs.
    pub stream: Stream,
    /// Which run of this DN, counted from 1.
    pub generation: u64,
}

/// Takes raw output. Every `Fn(Origin) -> impl io::Write` is one.
///
/// # Contract
/// `open` is called once per writer that is asked for. The writer never blocks: it is called from async tasks. It takes
/// bytes as they come, not lines; dropping it ends the stream. An error that it returns is not acted upon.
pub trait OutputSink: Send + Sync + 'static {
    /// The writer for one output of one run.
    fn open(&self, origin: Origin<'_>) -> Box<dyn io::Write + Send>;
}

impl<F, W> OutputSink for F
where
    F: Fn(Origin<'_>) -> W + Send + Sync + 'static,
    W: io::Write + Send + 'static,
{
    fn open(&self, origin: Origin<'_>) -> Box<dyn io::Write + Send> {
        Box::new(self(origin))
    }
}

/// Discards everything: what a supervisor uses when it is given no sink.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Discard;

impl OutputSink for Discard {
    fn open(&self, _: Origin<'_>) -> Box<dyn io::Write + Send> {
        Box::new(io::sink())
    }
}
