//! Everything, one line per line.

use std::fmt::Write;

use super::text::{letter, utc, words};
use crate::{Body, Entry, Leveled};

/// The entry in full, in the format the original logtree has: the name in 32 columns (longer ones are not cut), a space,
/// then for a message `LMMDD hh:mm:ss.uuuuuu file:line] text key=value`, for a raw line `R text`, for dropped entries `- 3
/// entries dropped here`. A message of several lines repeats everything before its text on each. The file is without
/// its directories, `???:1` if not known. What was cut ends in `...`.
pub fn full(entry: &Entry) -> String {
    let prefix = match &entry.body {
        Body::Leveled(leveled) => position(entry, leveled),
        body => format!("{} ", letter(body)),
    };
    let mut text = String::new();
    for (index, line) in words(entry).split('\n').enumerate() {
        let newline = if index > 0 { "\n" } else { "" };
        let _ = write!(text, "{newline}{:<32} {prefix}{line}", entry.dn);
    }
    text
}

fn position(entry: &Entry, leveled: &Leveled) -> String {
    let at = utc(entry.time);
    let (file, line) = match leveled.file.rsplit('/').next() {
        None | Some("") => ("???", leveled.line.max(1)),
        Some(file) => (file, leveled.line),
    };
    format!(
        "{}{:02}{:02} {:02}:{:02}:{:02}.{:06} {file}:{line}] ",
        leveled.level.letter(),
        at.month(),
        at.day(),
        at.hour(),
        at.minute(),
        at.second(),
        at.subsec_nanosecond() / 1000,
    )
}
