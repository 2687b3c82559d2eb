//! Compact text for a console.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::text::{entry_text, kind_letter};
use crate::{LogEntry, NameAbbreviations};

/// Renders the entry for a console of `width` columns; `None` means unlimited, as for a pipe.
///
/// The [shortened](crate::Dn::shorten_to_width) name is right-aligned in 20 columns, in 16 if `width` is less
/// than 80, and omitted if it is less than 60. Then comes the letter of the level, `R` for a raw line, or `-`
/// for dropped entries. Further lines, and wrapped lines, continue after `| `. No line is wider than `width`,
/// words longer than a line are broken, and empty lines are omitted; an entry without text is empty.
pub fn compact_text(entry: &LogEntry, words_of_names: &NameAbbreviations, width: Option<usize>) -> String {
    let column = match width {
        None | Some(80..) => 20,
        Some(60..80) => 16,
        Some(_) => 0,
    };
    let room =
        width.map_or(usize::MAX, |width| width.saturating_sub(column + usize::from(column > 0) + 2).max(1));
    let mut text = String::new();
    for (index, line) in entry_text(entry).split('\n').flat_map(|line| wrap_line(line, room)).enumerate() {
        if index > 0 {
            text.push('\n');
        }
        if column > 0 {
            let name =
                if index == 0 { entry.dn.shorten_to_width(words_of_names, column) } else { String::new() };
            text.extend(std::iter::repeat_n(' ', column - name.width()));
            text.push_str(&name);
            text.push(' ');
        }
        text.push(if index == 0 { kind_letter(&entry.body) } else { '|' });
        text.push(' ');
        text.push_str(&line);
    }
    text
}

/// Wraps a line between words, and within words only if necessary. An empty line yields no lines.
fn wrap_line(line: &str, room: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut current = String::new();
    // Measures whole texts: the widths of their characters may add up to less.
    for word in line.split(' ') {
        let before = current.len();
        if !current.is_empty() {
            current.push(' ');
        }
        current.push_str(word);
        if current.width() <= room {
            continue;
        }
        current.truncate(before);
        flush_line(&mut current, &mut lines);
        for c in word.chars() {
            let before = current.len();
            current.push(c);
            if current.width() > room {
                current.truncate(before);
                flush_line(&mut current, &mut lines);
                // A wide character can't fit into a single column, so it is omitted.
                current.extend(Some(c).filter(|c| c.width().unwrap_or(0) <= room));
            }
        }
    }
    flush_line(&mut current, &mut lines);
    lines
}

/// Ends the current line unless it is blank.
fn flush_line(current: &mut String, lines: &mut Vec<String>) {
    let line = std::mem::take(current);
    lines.extend(Some(line).filter(|line| !line.trim().is_empty()));
}
