//! The output of programs into the journal.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::journal::Shared;
use crate::line::{Line, LineSplitter};
use crate::parse::Parser;
use crate::record::{Record, now, time};
use crate::state::Address;
use crate::text::safe_text;
use crate::{Dn, Origin};

/// Where the lines of a [`LineWriter`] come from, and whether they can be understood.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    origin: Origin,
    parser: Option<Parser>,
}

impl WriterOptions {
    /// Lines of the stream of this name, stored as they are.
    pub fn new(stream: impl Into<String>) -> WriterOptions {
        WriterOptions { origin: Origin { stream: stream.into(), generation: 0 }, parser: None }
    }

    /// Says which start of the program writes.
    pub fn generation(mut self, generation: u64) -> WriterOptions {
        self.origin.generation = generation;
        self
    }

    /// Stores the lines the parser understands as leveled entries. The others stay raw: none is lost.
    pub fn parser(mut self, parser: Parser) -> WriterOptions {
        self.parser = Some(parser);
        self
    }
}

/// Stores what is written to it line by line. Made by [`Journal::writer`](crate::Journal::writer), one for each stream
/// and each start of a program, so that lines of two writers never mix.
///
/// A write never fails and never waits for a reader. An entry's time is that of the write that ended the line. `flush`
/// does nothing; a line without its end is stored when the writer is dropped or [closed](LineWriter::close).
pub struct LineWriter {
    splitter: LineSplitter,
    sink: Sink,
}

/// What becomes of a whole line.
struct Sink {
    shared: Arc<Shared>,
    to: Address,
    options: WriterOptions,
    /// Of raw lines, and of parsed ones.
    raw: Record,
    leveled: Record,
}

impl LineWriter {
    pub(crate) fn new(shared: Arc<Shared>, dn: Dn, options: WriterOptions) -> LineWriter {
        let limits = &shared.limits;
        // A line to be parsed may be as long as a message: half a JSON object says nothing.
        let limit = limits.line_bytes.max(if options.parser.is_some() { limits.message_bytes } else { 0 });
        let raw = Record::raw_of(&options.origin);
        let sink = Sink { to: Address::new(dn), options, raw, leveled: Record::default(), shared };
        LineWriter { splitter: LineSplitter::new(limit), sink }
    }

    /// Stores what was written of a line without its end. Dropping does the same.
    pub fn close(self) {}
}

impl Sink {
    fn store(&mut self, line: Line<'_>, now: i64) {
        let parsed = self.options.parser.is_some_and(|parse| self.store_parsed(parse, line, now));
        if !parsed {
            self.store_raw(line, now);
        }
    }

    fn store_parsed(&mut self, parse: Parser, line: Line<'_>, now: i64) -> bool {
        let text = safe_text(line.bytes, line.is_cut()).text;
        let Some(message) = parse(&text, time(now)) else { return false };
        let original_bytes = line.is_cut().then_some(line.length);
        let (origin, limit) = (Some(&self.options.origin), self.shared.limits.message_bytes);
        self.leveled.ready(&message, now, origin, limit, original_bytes);
        self.shared.append(&self.to, &mut self.leveled);
        true
    }

    fn store_raw(&mut self, line: Line<'_>, now: i64) {
        let bytes = &line.bytes[..line.bytes.len().min(self.shared.limits.line_bytes)];
        let cut = line.length > bytes.len() as u64;
        let original_bytes = cut.then_some(line.length);
        if bytes.is_ascii() {
            // Most lines are, and this is seen in half the time.
            self.raw.raw(now, bytes, original_bytes, false);
        } else {
            let safe = safe_text(bytes, cut);
            self.raw.raw(now, safe.text.as_bytes(), original_bytes, safe.lossy);
        }
        self.shared.append(&self.to, &mut self.raw);
    }
}

impl io::Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = now();
        self.splitter.push(bytes, |line| self.sink.store(line, now));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        self.splitter.flush(|line| self.sink.store(line, now()));
    }
}

impl fmt::Debug for LineWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineWriter")
            .field("to", &self.sink.to.dn)
            .field("options", &self.sink.options)
            .finish()
    }
}
