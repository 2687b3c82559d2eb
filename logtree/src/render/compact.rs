//! Little, for a console.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::text::{letter, words};
use crate::{Dictionary, Entry};

/// The entry for a console of `width` columns; none means endless ones, as for a pipe.
///
/// The name, [shortened](crate::Dn::shorten), stands right-aligned in 20 columns, in 16 if there are less than 80, and not at all
/// if there are less than 60; then the letter of the level, or `R` for a raw line, or `-` for dropped entries. Further
/// lines, and lines too long, go on after `| `. No line is wider than `width`, words longer than a line are broken, empty
/// lines left out; an entry that says nothing is empty.
pub fn compact(entry: &Entry, words_of_names: &Dictionary, width: Option<usize>) -> String {
    let column = match width {
        None | Some(80..) => 20,
        Some(60..80) => 16,
        Some(_) => 0,
    };
    let room =
        width.map_or(usize::MAX, |width| width.saturating_sub(column + usize::from(column > 0) + 2).max(1));
    let mut text = String::new();
    for (index, line) in words(entry).split('\n').flat_map(|line| wrap(line, room)).enumerate() {
        if index > 0 {
            text.push('\n');
        }
        if column > 0 {
            let name = if index == 0 { entry.dn.shorten(words_of_names, column) } else { String::new() };
            text.extend(std::iter::repeat_n(' ', column - name.width()));
            text.push_str(&name);
            text.push(' ');
        }
        text.push(if index == 0 { letter(&entry.body) } else { '|' });
        text.push(' ');
        text.push_str(&line);
    }
    text
}

/// Breaks a line between words, or in them where there is no other way. An empty line gives none.
fn wrap(line: &str, room: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut current = String::new();
    // Widths are of texts: those of characters one by one may add up to less.
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
        flush(&mut current, &mut lines);
        for c in word.chars() {
            let before = current.len();
            current.push(c);
            if current.width() > room {
                current.truncate(before);
                flush(&mut current, &mut lines);
                // A wide character in a single column can only be left out.
                current.extend(Some(c).filter(|c| c.width().unwrap_or(0) <= room));
            }
        }
    }
    flush(&mut current, &mut lines);
    lines
}

/// Ends the current line if there is something to see on it.
fn flush(current: &mut String, lines: &mut Vec<String>) {
    let line = std::mem::take(current);
    lines.extend(Some(line).filter(|line| !line.trim().is_empty()));
}
