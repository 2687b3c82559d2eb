//! Prints results and warnings.

use std::io::{self, IsTerminal as _, Write};

use serde::Serialize;

use crate::cli::{Cli, ColorMode, OutputFormat};

pub(crate) struct OutputWriter {
    pub(crate) json: bool,
    quiet: bool,
    color: bool,
    stream: Box<dyn Write>,
}

/// The meaning of a text, which determines its color.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStyle {
    Plain,
    Good,
    Pending,
    Bad,
    Strong,
}

impl OutputWriter {
    /// Standard output, with the options of the command line.
    pub(crate) fn new(cli: &Cli) -> Self {
        let color = match cli.color {
            ColorMode::Always => true,
            ColorMode::Never => false,
            ColorMode::Auto => {
                io::stdout().is_terminal()
                    && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        let stream = Box::new(io::stdout().lock());
        Self { json: cli.output == OutputFormat::Json, quiet: cli.quiet, color, stream }
    }

    /// The text, in its color if colors are enabled.
    pub(crate) fn paint(&self, tone: TextStyle, text: &str) -> String {
        // *Source:* ECMA-48, "select graphic rendition".
        let code = match tone {
            TextStyle::Good => "32",
            TextStyle::Pending => "33",
            TextStyle::Bad => "31",
            TextStyle::Strong => "1",
            TextStyle::Plain => return text.to_owned(),
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn print_line(&mut self, text: &str) -> io::Result<()> {
        self.write_bytes(text.as_bytes())?;
        self.write_bytes(b"\n")
    }

    /// A value as one line of JSON.
    pub(crate) fn print_json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string(value)?;
        self.print_line(&text)
    }

    pub(crate) fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Prints a warning about a success to stderr, for people only.
    pub(crate) fn warn(&self, text: &str) {
        if !self.quiet && !self.json {
            // A closed stderr is not an error.
            let _ = writeln!(io::stderr(), "dirquota: warning: {}", escape_control(text));
        }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Makes foreign text safe for a terminal: escapes control characters.
pub(crate) fn escape_control(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
