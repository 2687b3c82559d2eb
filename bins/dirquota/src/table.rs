//! Prints limits and usage as a table.

use std::io;

use unicode_width::UnicodeWidthStr as _;

use crate::output::{OutputWriter, TextStyle, escape_control};
use crate::report::{StatusReport, UsageAmount};

const COLUMNS: [&str; 8] = ["PROJECT", "BYTES", "LIMIT", "FREE", "INODES", "LIMIT", "FREE", "DIRECTORY"];

/// Prints a header and a line for each directory or project.
pub(crate) fn print_table(statuses: &[StatusReport], out: &mut OutputWriter) -> io::Result<()> {
    let rows: Vec<[(String, TextStyle); 8]> = statuses.iter().map(table_row).collect();
    let has_directory = statuses.iter().any(|status| status.directory.is_some());
    let columns = if has_directory { 8 } else { 7 };
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].0.width());
        cells.chain([COLUMNS[column].width()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let head = COLUMNS.map(|name| (name.to_owned(), TextStyle::Strong));
    for row in std::iter::once(&head).chain(&rows) {
        let line: Vec<String> =
            (0..columns).map(|column| pad_cell(column, &row[column], widths[column], out)).collect();
        out.print_line(line.join("  ").trim_end())?;
    }
    Ok(())
}

/// Right-aligns numbers and left-aligns directories.
fn pad_cell(column: usize, cell: &(String, TextStyle), width: usize, out: &OutputWriter) -> String {
    let (text, tone) = cell;
    let painted = out.paint(*tone, text);
    // The color codes have no width, so the text is measured before it is painted.
    if column == 7 { painted } else { " ".repeat(width.saturating_sub(text.width())) + &painted }
}

fn table_row(status: &StatusReport) -> [(String, TextStyle); 8] {
    let plain = |text: String| (text, TextStyle::Plain);
    let limit = |limit: Option<u64>, show: fn(u64) -> String| limit.map_or("-".to_owned(), show);
    let directory = status.directory.as_deref().map(escape_control).unwrap_or_default();
    let StatusReport { bytes, inodes, .. } = status;
    [
        plain(status.project.to_string()),
        (format_bytes(bytes.used), usage_style(bytes)),
        plain(limit(bytes.limit, format_bytes)),
        plain(limit(bytes.available, format_bytes)),
        (inodes.used.to_string(), usage_style(inodes)),
        plain(limit(inodes.limit, |number| number.to_string())),
        plain(limit(inodes.available, |number| number.to_string())),
        plain(directory),
    ]
}

/// Red from the limit on, yellow from nine tenths of it.
fn usage_style(amount: &UsageAmount) -> TextStyle {
    match amount.limit {
        Some(limit) if amount.used >= limit => TextStyle::Bad,
        Some(limit) if amount.used >= limit / 10 * 9 => TextStyle::Pending,
        _ => TextStyle::Plain,
    }
}

/// Bytes with at most one decimal digit; exact without one.
pub(crate) fn format_bytes(bytes: u64) -> String {
    const SUFFIXES: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let Some(suffix) = power.checked_sub(1).map(|power| SUFFIXES[power]) else { return bytes.to_string() };
    let unit = 1u64 << (10 * power);
    if bytes.is_multiple_of(unit) {
        return format!("{}{suffix}", bytes / unit);
    }
    // Rounded down.
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
            assert_eq!(format_bytes(bytes), text);
        }
    }
}
