//! Accounts for people.

use std::io;

use unicode_width::UnicodeWidthStr as _;

use crate::model::{Amount, Status};
use crate::out::{Out, Tone, safe};

const HEAD: [&str; 8] = ["PROJECT", "BYTES", "LIMIT", "FREE", "INODES", "LIMIT", "FREE", "DIRECTORY"];

/// One line for each account, below their names.
pub(crate) fn print(statuses: &[Status], out: &mut Out) -> io::Result<()> {
    let rows: Vec<[(String, Tone); 8]> = statuses.iter().map(row).collect();
    let has_directory = statuses.iter().any(|status| status.directory.is_some());
    let columns = if has_directory { 8 } else { 7 };
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].0.width());
        cells.chain([HEAD[column].width()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let head = HEAD.map(|name| (name.to_owned(), Tone::Strong));
    for row in std::iter::once(&head).chain(&rows) {
        let line: Vec<String> =
            row.iter().zip(&widths).enumerate().map(|(at, cell)| pad(at, cell, out)).collect();
        out.line(line.join("  ").trim_end())?;
    }
    Ok(())
}

/// Numbers end in one column, directories begin in one.
fn pad(column: usize, ((text, tone), width): (&(String, Tone), &usize), out: &Out) -> String {
    let painted = out.paint(*tone, text);
    if column == 7 { painted } else { " ".repeat(width.saturating_sub(text.width())) + &painted }
}

fn row(status: &Status) -> [(String, Tone); 8] {
    let plain = |text: String| (text, Tone::Plain);
    let limit = |limit: Option<u64>, show: fn(u64) -> String| limit.map_or("-".to_owned(), show);
    let directory = status.directory.as_deref().map(safe).unwrap_or_default();
    let Status { bytes, inodes, .. } = status;
    [
        plain(status.project.to_string()),
        (binary(bytes.used), tone(bytes)),
        plain(limit(bytes.limit, binary)),
        plain(limit(bytes.available, binary)),
        (inodes.used.to_string(), tone(inodes)),
        plain(limit(inodes.limit, |number| number.to_string())),
        plain(limit(inodes.available, |number| number.to_string())),
        plain(directory),
    ]
}

/// Red beyond the limit and at it, yellow from nine tenths of it.
fn tone(amount: &Amount) -> Tone {
    match amount.limit {
        Some(limit) if amount.used >= limit => Tone::Bad,
        Some(limit) if amount.used >= limit / 10 * 9 => Tone::Pending,
        _ => Tone::Plain,
    }
}

/// Bytes with at most one digit after the point; exact where it has none.
pub(crate) fn binary(bytes: u64) -> String {
    const SUFFIXES: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let Some(suffix) = power.checked_sub(1).map(|power| SUFFIXES[power]) else { return bytes.to_string() };
    let unit = 1u64 << (10 * power);
    if bytes.is_multiple_of(unit) {
        return format!("{}{suffix}", bytes / unit);
    }
    // A tenth short of the truth rather than beyond it.
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    format!("{}.{}{suffix}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_or_have_one_digit_after_the_point() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1536, "1.5Ki"),
            ((10 << 30) - 1, "9.9Gi"),
            (10 << 30, "10Gi"),
            (u64::MAX, "15.9Ei"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }
}
