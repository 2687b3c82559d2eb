//! Writers that store the output of programs line by line.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use crate::clock::{follow_wall_clock, now_nanos, wall_time};
use crate::line::{LineSplitter, OutputLine};
use crate::name_log::RingAddress;
use crate::parse::{
    LineContext, LineParser, LogFormat, LogZone, failure_line, java_heading, names_exception,
};
use crate::record::RecordBuffer;
use crate::shared_store::SharedLogStore;
use crate::text::{sanitize_text, strip_colors};
use crate::{Dn, Level, LogMessage, StreamOrigin};

/// Nanoseconds after a line in which the next one can be a part of its message.
const CONTINUATION_TIME: i64 = 1_000_000_000;
/// Nanoseconds after its first line in which a message can have more lines: a library that never pauses is no part of it.
const MESSAGE_TIME: i64 = 10 * CONTINUATION_TIME;

/// The origin of the lines of a [`LineWriter`], and their parser.
#[derive(Clone, Debug)]
pub struct WriterOptions {
    origin: StreamOrigin,
    format: LogFormat,
    zone: LogZone,
}

impl WriterOptions {
    /// Lines of the stream with this name, stored raw.
    pub fn new(stream: impl Into<String>) -> WriterOptions {
        let origin = StreamOrigin { stream: stream.into(), generation: 0 };
        WriterOptions { origin, format: LogFormat::Text, zone: LogZone::default() }
    }

    /// Sets the number of the program's start.
    pub fn generation(mut self, generation: u64) -> WriterOptions {
        self.origin.generation = generation;
        self
    }

    /// Stores the lines of this format as leveled entries, and so the lines that continue such an entry, with its
    /// level. All others stay raw: no line is lost.
    pub fn format(mut self, format: LogFormat) -> WriterOptions {
        self.format = format;
        self
    }

    /// Sets the zone of times in the lines that name none; UTC by default.
    pub fn zone(mut self, zone: LogZone) -> WriterOptions {
        self.zone = zone;
        self
    }

    /// Stores the lines that the parser accepts as leveled entries. The others stay raw: no line is lost.
    pub fn line_parser(mut self, parser: LineParser) -> WriterOptions {
        self.format = LogFormat::Custom(parser);
        self
    }
}

/// Stores written bytes line by line. Create it with [`LogStore::line_writer`](crate::LogStore::line_writer),
/// one for each stream and each start of a program, so that lines of two writers never mix.
///
/// Entries below the [level](crate::LogStore::set_level) of the name are not kept.
///
/// A write never fails and never waits for a reader. The time of an entry is that of the write that ended the
/// line. `flush` does nothing; a line without its end is stored when the writer is dropped or
/// [closed](LineWriter::close).
// Writers on two threads share no cache line.
#[repr(align(128))]
pub struct LineWriter {
    splitter: LineSplitter,
    sink: LineSink,
}

/// Stores complete lines.
struct LineSink {
    shared: Arc<SharedLogStore>,
    address: RingAddress,
    options: WriterOptions,
    /// Buffers for raw lines and for parsed ones.
    raw: RecordBuffer,
    leveled: RecordBuffer,
    context: LineContext,
    /// The last message, if it can have more lines.
    continued: Option<ContinuedMessage>,
}

struct ContinuedMessage {
    /// Without its text, fields and time.
    message: LogMessage,
    /// When its first and its last line came.
    first: i64,
    last: i64,
}

impl LineWriter {
    pub(crate) fn new(shared: Arc<SharedLogStore>, dn: Dn, options: WriterOptions) -> LineWriter {
        let limits = &shared.limits;
        // A line for a parser may be as long as a message: half a JSON object can't be parsed.
        let limit = limits.line_bytes.max(if options.format.line_parser().is_some() {
            limits.message_bytes
        } else {
            0
        });
        let raw = RecordBuffer::for_raw_lines(&options.origin);
        let splitter = LineSplitter::new(limit, Arc::clone(&shared.partial_lines));
        let sink = LineSink {
            address: RingAddress::new(dn),
            context: LineContext::new(UNIX_EPOCH).zone(options.zone.clone()),
            options,
            raw,
            leveled: RecordBuffer::default(),
            continued: None,
            shared,
        };
        LineWriter { splitter, sink }
    }

    /// Stores a partial line without its end. Dropping the writer does the same.
    pub fn close(self) {}
}

impl LineSink {
    fn store_line(&mut self, line: OutputLine<'_>, now: i64) {
        let parsed =
            self.options.format.line_parser().is_some_and(|parse| self.store_parsed(parse, line, now));
        if !parsed {
            self.store_raw(line, now);
        }
    }

    fn store_parsed(&mut self, parse: LineParser, line: OutputLine<'_>, now: i64) -> bool {
        let text = sanitize_text(line.bytes, line.is_cut()).text;
        let Some(message) = self.parse_line(parse, &strip_colors(&text), now) else { return false };
        // It is stored nowhere, but it is no raw line either.
        if !self.shared.keeps_level(&self.address, message.level) {
            return true;
        }
        let original_bytes = line.is_cut().then_some(line.length);
        let (origin, limit) = (Some(&self.options.origin), self.shared.limits.message_bytes);
        self.leveled.write_message(&message, now, origin, limit, original_bytes);
        self.shared.append_record(&self.address, &mut self.leveled);
        self.leveled.free_memory();
        true
    }

    /// The message of a line, or of its part of the message before it.
    fn parse_line(&mut self, parse: LineParser, text: &str, now: i64) -> Option<LogMessage> {
        follow_wall_clock();
        self.context.received_at = wall_time(now);
        let format = self.options.format;
        // It belongs to the next line, and not to the message before it.
        let heading = if format == LogFormat::LevelPrefix { java_heading(text, &self.context) } else { None };
        if heading.is_some() {
            (self.context.heading, self.continued) = (heading, None);
            return None;
        }
        let parsed = parse(text, &self.context);
        self.context.heading = None;
        if let Some(message) = parsed {
            self.continued = None;
            return Some(self.start_message(message, now, format.has_continuation_lines()));
        }
        if matches!(format, LogFormat::Custom(_)) {
            return None;
        }
        if let Some(message) = failure_line(text) {
            return Some(self.start_message(message, now, true));
        }
        self.continued.take_if(|continued| {
            now.saturating_sub(continued.last) > CONTINUATION_TIME
                || now.saturating_sub(continued.first) > MESSAGE_TIME
        });
        // An exception is a part of the warning that it is logged with, but not of a message that tells of no trouble.
        if names_exception(text)
            && self.continued.as_ref().is_none_or(|continued| continued.message.level < Level::Warn)
        {
            return Some(self.start_message(LogMessage::without_position(Level::Error, text), now, true));
        }
        // Without a message that it could continue, the line stays raw.
        let continued = self.continued.as_mut()?;
        continued.last = now;
        Some(LogMessage { text: text.to_owned(), ..continued.message.clone() })
    }

    fn start_message(&mut self, message: LogMessage, now: i64, has_more_lines: bool) -> LogMessage {
        if has_more_lines {
            let without_text = LogMessage::without_position(message.level, "");
            let (file, line) = (message.file.clone(), message.line);
            let message = LogMessage { file, line, ..without_text };
            self.continued = Some(ContinuedMessage { message, first: now, last: now });
        }
        message
    }

    fn store_raw(&mut self, line: OutputLine<'_>, now: i64) {
        let bytes = &line.bytes[..line.bytes.len().min(self.shared.limits.line_bytes)];
        let cut = line.length > bytes.len() as u64;
        let original_bytes = cut.then_some(line.length);
        if bytes.is_ascii() {
            // Most lines are ASCII, and this check takes half the time.
            self.raw.write_raw_line(now, bytes, original_bytes, false);
        } else {
            let safe = sanitize_text(bytes, cut);
            self.raw.write_raw_line(now, safe.text.as_bytes(), original_bytes, safe.lossy);
        }
        self.shared.append_record(&self.address, &mut self.raw);
        self.raw.free_memory();
    }
}

impl io::Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = now_nanos();
        self.splitter.push(bytes, |line| self.sink.store_line(line, now));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        self.splitter.flush(|line| self.sink.store_line(line, now_nanos()));
    }
}

impl fmt::Debug for LineWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineWriter")
            .field("to", &self.sink.address.dn)
            .field("options", &self.sink.options)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::{EntryBody, LogEntry, LogQuery, LogStore};

    fn level_letter(entry: &LogEntry) -> char {
        match &entry.body {
            EntryBody::Leveled(leveled) => leveled.level.letter(),
            _ => 'R',
        }
    }

    /// The levels of lines that come at these nanoseconds.
    fn stored_levels(format: LogFormat, lines: &[(i64, &str)]) -> String {
        let store = LogStore::default();
        let mut writer = store.line_writer(&Dn::root(), WriterOptions::new("stderr").format(format));
        for &(now, line) in lines {
            let line = OutputLine { bytes: line.as_bytes(), length: line.len() as u64 };
            writer.sink.store_line(line, now);
        }
        let entries = store.open_reader(LogQuery::of_dn(Dn::root())).expect("a valid query").read_backlog();
        entries.iter().map(level_letter).collect()
    }

    #[test]
    fn a_message_has_ended_after_ten_seconds() {
        let mut lines = vec![(0, "E1121 11:26:08.703131 1 a.go:1] failed")];
        lines.extend((1..=20).map(|line| (line * CONTINUATION_TIME, "a library that never pauses")));
        assert_eq!(stored_levels(LogFormat::Klog, &lines), "E".repeat(11) + &"R".repeat(10));
    }

    #[test]
    fn a_failure_has_its_lines_in_each_format() {
        let crash = ["panic: a bug", "", "goroutine 1 [running]:", "main.main()", "\t/a.go:1 +0x2a"]
            .map(|line| (0, line));
        for format in
            [LogFormat::Klog, LogFormat::Json, LogFormat::Logfmt, LogFormat::LevelPrefix, LogFormat::Etcd]
        {
            assert_eq!(stored_levels(format, &crash), "FFFFF", "{format}");
        }
        assert_eq!(stored_levels(LogFormat::Text, &crash), "RRRRR");
        let end = [
            (0, "level=info msg=x"),
            (0, "SIGQUIT: quit"),
            (0, "PC=0x497b81"),
            (0, "level=info msg=x"),
            (0, "x"),
        ];
        assert_eq!(stored_levels(LogFormat::Logfmt, &end), "IFFIR");
        let node =
            [(0, "/app.js:3"), (0, "TypeError: null has no x"), (0, "    at node:internal/main:28:49")];
        assert_eq!(stored_levels(LogFormat::Json, &node), "REE");
    }

    #[test]
    fn words_in_a_stack_trace_are_no_levels() {
        let python = [
            "ERROR:app:failed",
            "Traceback (most recent call last):",
            "  File \"a.py\", line 1, in <module>",
            "    logging.basicConfig(level=DEBUG)",
            "NameError: CONFIG is not defined",
        ];
        let java = [
            "SEVERE: failed",
            "java.lang.IllegalStateException: CONFIG missing",
            "\tat a.B.main(B.java:4)",
            "Caused by: java.lang.RuntimeException: INFO inner",
            "\t... 8 more",
        ];
        for lines in [python, java] {
            assert_eq!(stored_levels(LogFormat::LevelPrefix, &lines.map(|line| (0, line))), "EEEEE");
        }
        let java = [
            (0, "WARNING: retried"),
            (0, "java.io.IOException: x"),
            (0, "INFO: x"),
            (0, "java.io.IOException: x"),
        ];
        assert_eq!(stored_levels(LogFormat::LevelPrefix, &java), "WWIE");
    }

    #[test]
    fn a_line_of_java_has_the_time_of_the_line_before_it() {
        let store = LogStore::default();
        let options = WriterOptions::new("stderr").format(LogFormat::LevelPrefix);
        let mut writer = store.line_writer(&Dn::root(), options.zone("JST-9".parse().expect("a zone")));
        let lines = [
            "Nov 28, 2026 7:38:52 AM a.B main\nINFO: started\n",
            "Nov 28, 2026 7:38:52\u{202f}AM a.B main\nSEVERE: failed\njava.lang.Error: x\n\tat a.B.main(B.java:4)\n\n",
            "Nov 28, 2026 7:38:52 AM a.B main\nLOUD: a level of its own\n",
        ];
        lines.iter().for_each(|line| writer.write_all(line.as_bytes()).expect("a write never fails"));
        let entries = store.open_reader(LogQuery::of_dn(Dn::root())).expect("a valid query").read_backlog();
        assert_eq!(entries.iter().map(level_letter).collect::<String>(), "RIREEEERW");
        for (at, text) in [(1, "started"), (3, "failed"), (8, "LOUD: a level of its own")] {
            let EntryBody::Leveled(leveled) = &entries[at].body else { panic!("{at}") };
            assert_eq!(leveled.message, text);
            assert_eq!(
                leveled.claimed_time,
                Some(UNIX_EPOCH + std::time::Duration::from_secs(1_795_819_132))
            );
            assert_eq!(
                leveled.fields,
                LogMessage::new(Level::Warn, "").with_field("source", "a.B main").fields
            );
        }
    }

    #[test]
    fn colors_hide_no_level() {
        let line = "\u{1b}[32m2026-11-21 11:26:08\u{1b}[0m | \u{1b}[31m\u{1b}[1mERROR   \u{1b}[0m | loguru";
        assert_eq!(stored_levels(LogFormat::LevelPrefix, &[(0, line)]), "E");
    }

    #[test]
    fn a_message_has_ended_where_no_line_comes_for_a_second_and_with_its_writer() {
        let store = LogStore::default();
        let open = || store.line_writer(&Dn::root(), WriterOptions::new("stderr").format(LogFormat::Klog));
        let message = "E1121 11:26:08.703131 1 a.go:1] failed\n";
        let mut writer = open();
        let mut write = |now: i64, text: &str| {
            writer.splitter.push(text.as_bytes(), |line| writer.sink.store_line(line, now));
        };
        write(0, message);
        write(CONTINUATION_TIME, "its second line\n");
        write(2 * CONTINUATION_TIME, "its third line\n");
        write(3 * CONTINUATION_TIME + 1, "of a library\n");
        write(4 * CONTINUATION_TIME, message);
        write(6 * CONTINUATION_TIME, "of a library\n");
        write(7 * CONTINUATION_TIME, message);
        drop(writer);
        open()
            .sink
            .store_line(OutputLine { bytes: b"of the next process", length: 19 }, 7 * CONTINUATION_TIME);
        let entries = store.open_reader(LogQuery::of_dn(Dn::root())).expect("a valid query").read_backlog();
        assert_eq!(entries.iter().map(level_letter).collect::<String>(), "EEERERER");
        let seconds = |entry: &LogEntry| entry.time.duration_since(entries[0].time).expect("later").as_secs();
        assert_eq!(entries.iter().map(seconds).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 6, 7, 7]);
    }
}
