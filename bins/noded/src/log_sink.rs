//! Stores the output of services as log entries of their DN.

use std::io;

use nodekeel_logtree::{Dn, LogStore, WriterOptions};
use nodekeel_supervisor::{OutputOrigin, OutputSink};

use crate::client::log_parser_for;

/// Sends the output of runnables and their processes to a log store. Parses the output of etcd and
/// containerd, to keep its levels, times and fields.
#[derive(Debug, Clone)]
pub struct LogStoreSink(pub LogStore);

impl OutputSink for LogStoreSink {
    fn open_writer(&self, origin: OutputOrigin<'_>) -> Box<dyn io::Write + Send> {
        let options = WriterOptions::new(origin.stream.as_str()).generation(origin.generation);
        let options = match log_parser_for(origin.dn) {
            Some(parser) => options.line_parser(parser),
            None => options,
        };
        let dn: Dn = origin.dn.parse().expect("every name in the tree is a DN");
        Box::new(self.0.line_writer(&dn, options))
    }
}
