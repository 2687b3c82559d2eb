//! Stores the output of runnables as log entries of their DN.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use nodekeel_logtree::parse::{LogFormat, LogZone};
use nodekeel_logtree::{Dn, LogStore, WriterOptions};
use nodekeel_supervisor::{OutputOrigin, OutputSink};

/// Sends the output of runnables and their processes to a log store. Parses lines whose format is known, to keep
/// their levels, times and fields.
#[derive(Debug, Clone)]
pub(crate) struct LogStoreSink {
    log_store: LogStore,
    formats: Arc<RwLock<Formats>>,
}

/// By DN; without a zone, that of the machine.
type Formats = BTreeMap<String, (LogFormat, Option<LogZone>)>;

impl LogStoreSink {
    /// A sink that parses the lines of these DNs.
    pub(crate) fn new(log_store: LogStore, formats: Formats) -> Self {
        Self { log_store, formats: Arc::new(RwLock::new(formats)) }
    }

    /// Changes the formats of all DNs. A writer keeps its own.
    pub(crate) fn set_formats(&self, formats: Formats) {
        *self.formats.write().unwrap_or_else(PoisonError::into_inner) = formats;
    }
}

impl OutputSink for LogStoreSink {
    fn open_writer(&self, origin: OutputOrigin<'_>) -> Box<dyn io::Write + Send> {
        let options = WriterOptions::new(origin.stream.as_str()).generation(origin.generation);
        // A writer keeps the format that it was opened with: a reload that changes the format restarts the
        // runnable.
        let options = match self.formats.read().unwrap_or_else(PoisonError::into_inner).get(origin.dn) {
            Some((format, zone)) => {
                options.format(*format).zone(zone.clone().unwrap_or_else(|| LogZone::of_program(None)))
            }
            None => options,
        };
        let dn: Dn = origin.dn.parse().expect("every name in the tree is a DN");
        Box::new(self.log_store.line_writer(&dn, options))
    }
}
