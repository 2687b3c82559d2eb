//! Splits bytes into lines.

use std::sync::Arc;

use memchr::memchr;

use crate::line_budget::{PartialLine, PartialLineBudget};

/// A line without its terminator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutputLine<'a> {
    /// The line, or its start if it is longer than the limit.
    pub(crate) bytes: &'a [u8],
    /// The original length.
    pub(crate) length: u64,
}

impl OutputLine<'_> {
    pub(crate) fn is_cut(&self) -> bool {
        self.length > self.bytes.len() as u64
    }
}

/// Splits chunks of bytes at `\n` and `\r\n`, keeping at most `limit` bytes of a line, fewer if the
/// budget for partial lines is used up.
#[derive(Debug)]
pub(crate) struct LineSplitter {
    limit: usize,
    /// The start of a line whose end has not arrived.
    kept: PartialLine,
    /// The length so far, and whether it ends in `\r`.
    length: u64,
    ends_in_cr: bool,
}

impl LineSplitter {
    pub(crate) fn new(limit: usize, budget: Arc<PartialLineBudget>) -> LineSplitter {
        LineSplitter { limit, kept: PartialLine::new(budget), length: 0, ends_in_cr: false }
    }

    /// Appends the next bytes and calls `each` with every line that ends in them.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(OutputLine<'_>)) {
        while let Some(at) = memchr(b'\n', bytes) {
            let line = &bytes[..at];
            bytes = &bytes[at + 1..];
            // Most lines are within one write, and are passed on without a copy.
            if self.length == 0 {
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                each(OutputLine { bytes: &line[..line.len().min(self.limit)], length: line.len() as u64 });
                continue;
            }
            self.keep_partial(line);
            self.length -= u64::from(self.ends_in_cr);
            self.finish_line(&mut each);
        }
        if !bytes.is_empty() {
            self.keep_partial(bytes);
        }
    }

    /// Calls `each` with the partial line, whose end will not arrive.
    pub(crate) fn flush(&mut self, each: impl FnOnce(OutputLine<'_>)) {
        if self.length > 0 {
            self.finish_line(each);
        }
    }

    fn keep_partial(&mut self, bytes: &[u8]) {
        // Nothing is kept after a cut, also if there is space again.
        if self.length == self.kept.bytes().len() as u64 {
            self.kept.extend(bytes, self.limit);
        }
        self.length += bytes.len() as u64;
        self.ends_in_cr = bytes.last().map_or(self.ends_in_cr, |&last| last == b'\r');
    }

    fn finish_line(&mut self, each: impl FnOnce(OutputLine<'_>)) {
        // The `\r` that was just subtracted from the length may have been kept.
        let kept = self.kept.bytes();
        let end = usize::try_from(self.length).map_or(kept.len(), |length| length.min(kept.len()));
        each(OutputLine { bytes: &kept[..end], length: self.length });
        self.kept.clear();
        self.length = 0;
        self.ends_in_cr = false;
    }
}
