//! Printing of results.

use std::io::{self, IsTerminal as _, Write};

use clap::ValueEnum;
use nodekeel_logtree::is_unprintable;
use nodekeel_logtree::render::printable_json;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use tokio::sync::oneshot;
use unicode_width::UnicodeWidthStr as _;

use crate::error::CommandError;

/// Longer cells of all columns but the last are not padded: they move the rest of their line to the right.
const MAX_PADDED_WIDTH: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    Table,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorMode {
    Auto,
    Always,
    Never,
}

pub(crate) struct Printer {
    pub(crate) is_json: bool,
    color: bool,
    is_terminal: bool,
    writer: Box<dyn Write>,
}

/// A line on the standard error that is written again and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgressLine {
    is_shown: bool,
}

impl ProgressLine {
    /// Shows this text in place of the last one; an empty one ends the progress.
    pub(crate) fn show(self, text: &str) {
        if self.is_shown {
            // To the beginning of the line, and clear to its end. A terminal that has gone shows no progress.
            let _ = write!(io::stderr(), "\r\x1b[K{text}").and_then(|()| io::stderr().flush());
        }
    }

    /// The same of a file of which so many bytes are done. Once for each megabyte is enough.
    pub(crate) fn show_bytes(self, before: u64, done: u64, total: Option<u64>) {
        const MEGABYTE: u64 = 1_000_000;
        if before / MEGABYTE != done / MEGABYTE {
            let total = total.map(|total| format!(" of {}", total.div_ceil(MEGABYTE))).unwrap_or_default();
            self.show(&format!("{}{total} MB", done / MEGABYTE));
        }
    }
}

/// The meaning of a text, which selects its color.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStyle {
    Plain,
    Good,
    Pending,
    Bad,
    Faint,
    Strong,
}

impl Printer {
    /// A printer to the standard output.
    pub(crate) fn new(format: OutputFormat, color: ColorMode) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let color = match color {
            ColorMode::Always => true,
            ColorMode::Never => false,
            // *Source:* no-color.org: every value but an empty one disables colors.
            ColorMode::Auto => {
                is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        Self {
            is_json: format == OutputFormat::Json,
            color,
            is_terminal,
            // Locked once, since nothing else writes to the standard output.
            writer: Box::new(io::stdout().lock()),
        }
    }

    /// The text in its color, if colors are enabled.
    pub(crate) fn style_text(&self, style: TextStyle, text: &str) -> String {
        // *Source:* ECMA-48, "select graphic rendition".
        let code = match style {
            TextStyle::Good => "32",
            TextStyle::Pending => "33",
            TextStyle::Bad => "31",
            TextStyle::Faint => "2",
            TextStyle::Strong => "1",
            TextStyle::Plain => return text.to_owned(),
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The line that shows progress next to the result, where somebody watches.
    pub(crate) fn progress_line(&self) -> ProgressLine {
        ProgressLine { is_shown: self.is_terminal && !self.is_json && io::stderr().is_terminal() }
    }

    pub(crate) fn print_line(&mut self, text: &str) -> io::Result<()> {
        self.writer.write_all(text.as_bytes())?;
        self.writer.write_all(b"\n")
    }

    /// A value as one line of JSON, which is safe for a terminal.
    pub(crate) fn print_json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let text = printable_json(serde_json::to_string(value)?);
        self.print_line(&text)
    }

    /// Prints the result of a command: the value for programs, or the text for people.
    pub(crate) fn print_result(&mut self, value: &impl Serialize, text: &str) -> Result<(), CommandError> {
        if self.is_json {
            self.print_json(value)?
        } else {
            self.print_line(text)?
        }
        Ok(())
    }

    /// Prints a table with a row a line, whose columns are as wide as their longest cell; on a terminal that is narrower, a
    /// block of lines for each row.
    pub(crate) fn print_table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: &[(TextStyle, [String; N])],
    ) -> io::Result<()> {
        let cells: Vec<_> = rows.iter().map(|(_, cells)| cells).collect();
        let header = header.map(str::to_owned);
        let lines = table_lines(&header, &cells);
        let width = self.terminal_size().filter(|_| self.is_terminal).map(|(columns, _)| columns);
        if let Some(width) = width.filter(|width| lines.iter().any(|line| line.width() > *width)) {
            for (style, cells) in rows {
                for line in block_lines(&header, cells, width) {
                    self.print_line(&self.style_text(*style, &line))?;
                }
            }
            return Ok(());
        }
        let styles = std::iter::once(TextStyle::Strong).chain(rows.iter().map(|(style, _)| *style));
        for (style, line) in styles.zip(lines) {
            self.print_line(&self.style_text(style, &line))?;
        }
        Ok(())
    }

    /// True if the output is a terminal, and for people.
    pub(crate) fn draws_on_terminal(&self) -> bool {
        self.is_terminal && !self.is_json
    }

    /// Columns and rows of the terminal; `None` if it does not report them.
    pub(crate) fn terminal_size(&self) -> Option<(usize, usize)> {
        // A terminal without a known size reports zeros.
        let size = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0)?;
        Some((size.ws_col.into(), size.ws_row.into()))
    }

    /// Replaces what the screen of a terminal shows; its scrollback stays.
    ///
    /// *Source:* ECMA-48: CUP moves to the top left, EL erases the rest of a line, ED the rest of the screen.
    pub(crate) fn draw_lines(&mut self, lines: &[String]) -> io::Result<()> {
        self.writer.write_all(b"\x1b[H")?;
        for line in lines {
            self.print_line(&format!("{line}\x1b[K"))?;
        }
        self.writer.write_all(b"\x1b[J")
    }

    /// Clears what the screen of a terminal shows, before the newest of several results; its scrollback stays.
    ///
    /// *Source:* ECMA-48: CUP moves to the top left, ED erases the rest of the screen.
    pub(crate) fn begin_screen(&mut self) -> io::Result<()> {
        if self.draws_on_terminal() { self.writer.write_all(b"\x1b[H\x1b[J") } else { Ok(()) }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// The header and the rows with aligned columns.
fn table_lines<const N: usize>(header: &[String; N], rows: &[&[String; N]]) -> Vec<String> {
    let all = || std::iter::once(header).chain(rows.iter().copied());
    let widths: [usize; N] = std::array::from_fn(|column| {
        // The width is that on a terminal, where some characters take two columns.
        let longest = all().map(|row| row[column].width()).max();
        longest.unwrap_or_default().min(MAX_PADDED_WIDTH)
    });
    let line = |row: &[String; N]| {
        let padded = row.iter().zip(widths).map(|(cell, width)| {
            let padding = width.saturating_sub(cell.width());
            format!("{cell}{:padding$}", "")
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    all().map(line).collect()
}

/// A row as lines of a narrow terminal: an empty one, then each cell that says something, below each other.
fn block_lines<const N: usize>(header: &[String; N], row: &[String; N], width: usize) -> Vec<String> {
    let label_width = header.iter().map(|label| label.width()).max().unwrap_or_default();
    let mut lines = vec![String::new()];
    for (label, cell) in header.iter().zip(row).filter(|(_, cell)| !matches!(cell.as_str(), "" | "-")) {
        let texts = wrap_text(cell, width.saturating_sub(label_width + 2));
        let labels = std::iter::once(label.as_str()).chain(std::iter::repeat(""));
        let line = |(label, text): (&str, String)| {
            format!("{label}{:padding$}  {text}", "", padding = label_width - label.width())
        };
        lines.extend(labels.zip(texts).map(line));
    }
    lines
}

/// The words of a text in lines of this width. A longer word, such as a path, stays whole: it is there to be copied.
fn wrap_text(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("never empty");
        if line.is_empty() {
            line.push_str(word);
        } else if line.width() + 1 + word.width() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Detects that the reader of the standard output has closed it, even while nothing is written.
pub(crate) struct ReaderHangup(oneshot::Receiver<()>);

impl ReaderHangup {
    /// Watches in a dedicated thread, which ends with the program: unlike the runtime, poll(2) can watch any
    /// descriptor.
    pub(crate) fn new() -> Self {
        let (sender, hangup) = oneshot::channel();
        std::thread::spawn(move || {
            if wait_for_hangup() {
                let _ = sender.send(());
            }
        });
        Self(hangup)
    }

    /// Waits until the reader has closed, and returns the error that a write would return.
    pub(crate) async fn wait(&mut self) -> io::Error {
        match (&mut self.0).await {
            Ok(()) => io::ErrorKind::BrokenPipe.into(),
            // The thread could not watch the output: there is nothing to wait for.
            Err(_) => std::future::pending().await,
        }
    }
}

/// Waits until the standard output reports an error: the reader of a pipe or socket has closed it.
///
/// *Source:* poll(2): POLLERR and POLLHUP are reported without a request.
fn wait_for_hangup() -> bool {
    let output = io::stdout();
    let mut watched = [PollFd::new(&output, PollFlags::empty())];
    loop {
        match poll(&mut watched, None) {
            Ok(_) => return watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Escapes characters of untrusted text that control or reorder a terminal's line.
pub(crate) fn escape_control(text: &str) -> String {
    let escape = |c: char| if is_unprintable(c) { c.escape_default().collect() } else { vec![c] };
    text.chars().flat_map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_prints_no_character_that_controls_or_reorders_its_line() {
        assert_eq!(escape_control("a\u{202e}b\u{9b}c\u{7f}d\ne"), "a\\u{202e}b\\u{9b}c\\u{7f}d\\ne");
        assert_eq!(escape_control("naïve – 日本"), "naïve – 日本");
    }

    #[test]
    fn a_row_is_a_block_of_lines_where_the_table_is_too_wide() {
        let row = |cells: [&str; 4]| cells.map(str::to_owned);
        let header = row(["PART", "PROBLEM", "WAITING FOR", ""]);
        let cells = row(["etcd", "日本 is not ready at all", "-", "/a/path/that/is/wider/than/the/terminal"]);
        assert_eq!(
            block_lines(&header, &cells, 24),
            [
                "",
                "PART         etcd",
                "PROBLEM      日本 is not",
                "             ready at",
                "             all",
                "             /a/path/that/is/wider/than/the/terminal",
            ]
        );
    }

    #[test]
    fn the_columns_of_a_table_are_aligned_by_the_width_of_their_text() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned);
        let (header, wide, short) = (row(["A", "B", ""]), row(["日本", "b", "x"]), row(["a", "bb", ""]));
        assert_eq!(table_lines(&header, &[&wide, &short]), ["A     B", "日本  b   x", "a     bb"]);
    }
}
