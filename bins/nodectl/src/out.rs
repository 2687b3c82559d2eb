//! Where and how results are printed.

use std::io::{self, IsTerminal as _, Write};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::Serialize;
use tokio::sync::oneshot;

use crate::cli::{Cli, Color, Format};

pub(crate) struct Out {
    pub(crate) json: bool,
    color: bool,
    pub(crate) is_terminal: bool,
    to: Box<dyn Write>,
}

/// What a piece of text means, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Pending,
    Bad,
    Faint,
    Strong,
}

impl Out {
    /// The standard output, as the command line wants it.
    pub(crate) fn new(cli: &Cli) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let color = match cli.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        };
        Self { json: cli.output == Format::Json, color, is_terminal, to: Box::new(io::stdout().lock()) }
    }

    /// The text, in its colour if there are colours.
    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        // *Source:* ECMA-48, "select graphic rendition".
        let code = match tone {
            Tone::Good => "32",
            Tone::Pending => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
            Tone::Strong => "1",
            Tone::Plain => return text.to_owned(),
        };
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn line(&mut self, text: &str) -> io::Result<()> {
        self.to.write_all(text.as_bytes())?;
        self.to.write_all(b"\n")
    }

    /// A value as one line of JSON.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string(value)?;
        self.line(&text)
    }

    /// Empties a terminal's screen, so that what follows takes its place; what has been scrolled away stays.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        if self.is_terminal { self.to.write_all(b"\x1b[H\x1b[2J") } else { Ok(()) }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Whoever reads the standard output, who may go while there is nothing to write that would tell so.
pub(crate) struct ReaderGone(oneshot::Receiver<()>);

impl ReaderGone {
    /// Watches from a thread of its own, which goes with the program: unlike the runtime it can watch any descriptor.
    pub(crate) fn new() -> Self {
        let (tell, gone) = oneshot::channel();
        std::thread::spawn(move || {
            if watch_for_error() {
                let _ = tell.send(());
            }
        });
        Self(gone)
    }

    /// Waits for the reader's end, and gives what a write would then.
    pub(crate) async fn wait(&mut self) -> io::Error {
        match (&mut self.0).await {
            Ok(()) => io::ErrorKind::BrokenPipe.into(),
            Err(_) => std::future::pending().await,
        }
    }
}

/// Waits until the standard output has an error, which is when a pipe's or a socket's reader has gone.
///
/// *Source:* poll(2): POLLERR and POLLHUP are reported though they are not asked for.
fn watch_for_error() -> bool {
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

/// Text of somebody else's, made safe for a terminal: control characters are escaped.
pub(crate) fn safe(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
