//! Where and how results are printed.

use std::io::{self, IsTerminal as _, Write};

use serde::Serialize;

use crate::cli::{Cli, Color, Format};

pub(crate) struct Out {
    pub(crate) json: bool,
    quiet: bool,
    color: bool,
    to: Box<dyn Write>,
}

/// What a piece of text means, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Pending,
    Bad,
    Strong,
}

impl Out {
    /// The standard output, as the command line wants it.
    pub(crate) fn new(cli: &Cli) -> Self {
        let color = match cli.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                io::stdout().is_terminal()
                    && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        let to = Box::new(io::stdout().lock());
        Self { json: cli.output == Format::Json, quiet: cli.quiet, color, to }
    }

    /// The text, in its colour if there are colours.
    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        // *Source:* ECMA-48, "select graphic rendition".
        let code = match tone {
            Tone::Good => "32",
            Tone::Pending => "33",
            Tone::Bad => "31",
            Tone::Strong => "1",
            Tone::Plain => return text.to_owned(),
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        self.bytes(text.as_bytes())?;
        self.bytes(b"\n")
    }

    /// A value as one line of JSON.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string(value)?;
        self.line(&text)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)
    }

    /// Something that went well, and that people should know about, beside the results.
    pub(crate) fn warn(&self, text: &str) {
        if !self.quiet && !self.json {
            // Nobody may be there to read it.
            let _ = writeln!(io::stderr(), "dirquota: warning: {}", safe(text));
        }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Text of somebody else's, made safe for a terminal: control characters are escaped.
pub(crate) fn safe(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
