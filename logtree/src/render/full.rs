//! Full text, one output line for each line of an entry.

use std::fmt::Write;

use super::text::{entry_text, kind_letter, utc_time};
use crate::{EntryBody, LeveledEntry, LogEntry};

/// Renders the entry in full, in the format of the original logtree: the name in 32 columns (longer names are
/// not cut), a space, then for a message `LMMDD hh:mm:ss.uuuuuu file:line] text key=value`, for a raw line `R
/// text`, for dropped entries `- 3 entries dropped here`. Each line of a multi-line message repeats the
/// prefix. The file is without its directories; if it is unknown, file and line are left out. Text that was cut
/// ends in `...`.
pub fn full_text(entry: &LogEntry) -> String {
    let prefix = match &entry.body {
        EntryBody::Leveled(leveled) => header(entry, leveled),
        body => format!("{} ", kind_letter(body)),
    };
    let mut text = String::new();
    for (index, line) in entry_text(entry).split('\n').enumerate() {
        let newline = if index > 0 { "\n" } else { "" };
        // Writing into a `String` can't fail.
        let _ = write!(text, "{newline}{:<32} {prefix}{line}", entry.dn);
    }
    text
}

fn header(entry: &LogEntry, leveled: &LeveledEntry) -> String {
    let at = utc_time(entry.time);
    let location = match leveled.file.rsplit('/').next() {
        None | Some("") => String::new(),
        Some(file) => format!(" {file}:{}", leveled.line),
    };
    format!(
        "{}{:02}{:02} {:02}:{:02}:{:02}.{:06}{location}] ",
        leveled.level.letter(),
        at.month(),
        at.day(),
        at.hour(),
        at.minute(),
        at.second(),
        at.subsec_nanosecond() / 1000,
    )
}
