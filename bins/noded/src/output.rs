//! What the services print becomes log entries at their DN.

use std::io;

use nodekeel_logtree::{Dn, Journal, WriterOptions};
use nodekeel_supervisor::{Origin, OutputSink};

use crate::client::parser_of;

/// Sends the output of runnables and their processes into a journal; that of etcd and containerd is parsed, so that its
/// levels, times and fields are not lost.
#[derive(Debug, Clone)]
pub struct JournalSink(pub Journal);

impl OutputSink for JournalSink {
    fn open(&self, origin: Origin<'_>) -> Box<dyn io::Write + Send> {
        let options = WriterOptions::new(origin.stream.as_str()).generation(origin.generation);
        let options = match parser_of(origin.dn) {
            Some(parser) => options.parser(parser),
            None => options,
        };
        let dn: Dn = origin.dn.parse().expect("every name in the tree is a DN");
        Box::new(self.0.writer(&dn, options))
    }
}
