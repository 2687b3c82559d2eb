//! Bytes into lines.

use memchr::memchr;

/// A line without its terminator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// The line, or its beginning if it is longer than the limit.
    pub(crate) bytes: &'a [u8],
    /// How long it was.
    pub(crate) length: u64,
}

impl Line<'_> {
    pub(crate) fn is_cut(&self) -> bool {
        self.length > self.bytes.len() as u64
    }
}

/// Splits bytes that come in chunks at `\n` and `\r\n`, keeping at most `limit` bytes of a line.
#[derive(Debug)]
pub(crate) struct LineSplitter {
    limit: usize,
    /// The beginning of a line whose end has not come.
    kept: Vec<u8>,
    /// Its length so far, and whether a `\r` came last.
    length: u64,
    ends_in_cr: bool,
}

impl LineSplitter {
    pub(crate) fn new(limit: usize) -> LineSplitter {
        LineSplitter { limit, kept: Vec::new(), length: 0, ends_in_cr: false }
    }

    /// Takes the next bytes and hands out the lines that end in them.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(Line<'_>)) {
        while let Some(at) = memchr(b'\n', bytes) {
            let line = &bytes[..at];
            bytes = &bytes[at + 1..];
            if self.length == 0 {
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                each(Line { bytes: &line[..line.len().min(self.limit)], length: line.len() as u64 });
                continue;
            }
            self.keep(line);
            self.length -= u64::from(self.ends_in_cr);
            self.finish(&mut each);
        }
        if !bytes.is_empty() {
            self.keep(bytes);
        }
    }

    /// Hands out a line that has begun and will not end.
    pub(crate) fn flush(&mut self, each: impl FnOnce(Line<'_>)) {
        if self.length > 0 {
            self.finish(each);
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = self.limit - self.kept.len();
        self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.length += bytes.len() as u64;
        self.ends_in_cr = bytes.last().map_or(self.ends_in_cr, |&last| last == b'\r');
    }

    fn finish(&mut self, each: impl FnOnce(Line<'_>)) {
        // A `\r` just taken off the length may have been kept.
        let kept = usize::try_from(self.length).map_or(self.kept.len(), |length| length.min(self.kept.len()));
        each(Line { bytes: &self.kept[..kept], length: self.length });
        self.kept.clear();
        self.length = 0;
        self.ends_in_cr = false;
    }
}
