//! Reads a recovery passphrase: from a file, from a terminal without echo, or from a pipe. Never from the arguments, which
//! every user of the machine can list.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write as _};
use std::path::PathBuf;

use nodekeel_node::v1::RecoveryPassphrase;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

use crate::error::CommandError;

/// More than a passphrase with any separators.
const MAX_BYTES: u64 = 256;

#[derive(Debug, clap::Args)]
pub(crate) struct PassphraseArgs {
    /// File with the recovery passphrase
    ///
    /// Default: a prompt, or the standard input if it is not a terminal.
    #[arg(long, value_name = "FILE")]
    pub(super) passphrase_file: Option<PathBuf>,
}

/// Reads the passphrase. The node checks it.
pub(crate) fn read_passphrase(args: &PassphraseArgs) -> Result<RecoveryPassphrase, CommandError> {
    let text = match &args.passphrase_file {
        Some(path) => File::open(path)
            .and_then(read_line)
            .map_err(|source| CommandError::File { path: path.clone(), source })?,
        None if io::stdin().is_terminal() => prompt().map_err(CommandError::Passphrase)?,
        None => read_line(io::stdin().lock()).map_err(CommandError::Passphrase)?,
    };
    Ok(RecoveryPassphrase { text: text.trim().to_owned() })
}

/// Reads up to a newline, or to the end.
#[expect(clippy::unbuffered_bytes, reason = "nothing would clear the passphrase from a buffer")]
fn read_line(input: impl Read) -> io::Result<Zeroizing<String>> {
    let mut line = Zeroizing::new(Vec::new());
    // A longer input is cut: it is no passphrase in any case.
    for byte in input.take(MAX_BYTES).bytes() {
        match byte? {
            b'\n' => break,
            byte => line.push(byte),
        }
    }
    // The bytes become the text without a copy, which nothing would clear.
    let text = String::from_utf8(std::mem::take(&mut *line)).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Zeroizing::new(text))
}

fn prompt() -> io::Result<Zeroizing<String>> {
    // The echo is off before the prompt appears: a fast typist is not shown.
    let _hidden = HiddenInput::start()?;
    // On stderr, so that the prompt does not mix with the output.
    let mut terminal = io::stderr();
    terminal.write_all(b"Recovery passphrase: ")?;
    terminal.flush()?;
    let line = read_line(io::stdin().lock());
    // The newline of the operator was not echoed.
    terminal.write_all(b"\n")?;
    line
}

/// Keeps the terminal from showing typed characters, until this is dropped.
struct HiddenInput(Termios);

impl HiddenInput {
    fn start() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        // `Flush` discards input that was typed before, while it was still echoed.
        tcsetattr(io::stdin(), OptionalActions::Flush, &hidden)?;
        Ok(Self(before))
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        // A terminal that is gone needs no echo.
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_is_one_line_of_text() {
        let read = |input: &[u8]| read_line(input).map(|line| line.to_string()).ok();
        assert_eq!(read(b"AAAAA-BBBBB\nmore"), Some("AAAAA-BBBBB".to_owned()));
        assert_eq!(read(b"AAAAA"), Some("AAAAA".to_owned()));
        assert_eq!(read(b"\xff\n"), None);
        assert_eq!(read(&[b'A'; 1000]).map(|line| line.len()), Some(256));
    }

    #[test]
    fn a_file_that_does_not_exist_is_named() {
        let args = PassphraseArgs { passphrase_file: Some("/nowhere/passphrase".into()) };
        let error = read_passphrase(&args).unwrap_err().to_string();
        assert!(error.contains("/nowhere/passphrase"), "{error}");
    }
}
