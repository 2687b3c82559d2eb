//! A TPM 2.0 in software.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, ScratchDir, tools};

/// A swtpm with a private state: another one is another TPM. Dropping it ends it and removes its state.
#[derive(Debug)]
pub struct SoftwareTpm {
    /// It ends when its user disconnects, unless it serves a socket.
    daemon: Daemon,
    socket_path: PathBuf,
    /// Dropped after the daemon.
    state: ScratchDir,
}

impl SoftwareTpm {
    /// Starts one that is switched on, for [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`tools::MissingTool`] where it isn't installed; else why it did not start, with its last output.
    pub fn start() -> Result<Self> {
        Self::start_on(ScratchDir::new()?)
    }

    fn start_on(state: ScratchDir) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let socket_path = scratch.path().join("tpm");
        let server = format!("type=unixio,path={}", socket_path.display());
        let arguments = ["--server", &server, "--flags", "not-need-init,startup-clear"];
        Self::start_with(scratch, socket_path, state, &arguments)
    }

    /// Switches it off and on, as a reboot does: its PCRs are those of a start, and its keys the same.
    ///
    /// # Errors
    /// See [`start`](Self::start).
    pub fn reboot(self) -> Result<Self> {
        let Self { daemon, state, .. } = self;
        drop(daemon);
        Self::start_on(state)
    }

    /// Starts one that QEMU switches on, through the socket at [`socket_path`](Self::socket_path).
    pub(crate) fn start_for_guest() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let socket_path = scratch.path().join("control");
        let control = format!("type=unixio,path={}", socket_path.display());
        Self::start_with(scratch, socket_path, ScratchDir::new()?, &["--ctrl", &control])
    }

    fn start_with(
        scratch: ScratchDir,
        socket_path: PathBuf,
        state: ScratchDir,
        arguments: &[&str],
    ) -> Result<Self> {
        let mut command = Command::new(tools::find_tool(tools::SWTPM)?);
        let directory = format!("dir={}", state.path().display());
        command.args(["socket", "--tpm2", "--tpmstate", &directory]).args(arguments);
        // A connection now would be the one of its user.
        let daemon = Daemon::start(command, scratch, || {
            let sockets = fs::read_to_string("/proc/net/unix").context("read /proc/net/unix")?;
            ensure!(is_listening(&sockets, &socket_path), "nothing listens on {}", socket_path.display());
            Ok(())
        })?;
        Ok(Self { daemon, socket_path, state })
    }

    /// Connects to it: what is written is a command, and what is read its response. One connection is served at a time.
    ///
    /// # Errors
    /// It has ended.
    pub fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(&self.socket_path)
    }

    /// The path of its socket.
    pub fn socket_path(&self) -> &Path {
        &self.socket_path
    }
}

/// Whether a process accepts connections to this path. The file of a socket is there before that.
///
/// *Source:* Linux `unix_seq_show`: the flags are the fourth field, and `__SO_ACCEPTCON` is the only one.
fn is_listening(sockets: &str, path: &Path) -> bool {
    sockets.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(3) == Some("00010000") && fields.next_back().map(Path::new) == Some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_bound_listens_only_after_listen() {
        let bound = "0000000000000000: 00000002 00000000 00000000 0001 01 51 /scratch/tpm\n";
        let listening = bound.replace("00000000 0001 01", "00010000 0001 01");
        assert!(!is_listening(bound, Path::new("/scratch/tpm")));
        assert!(is_listening(&listening, Path::new("/scratch/tpm")));
        assert!(!is_listening(&listening, Path::new("/scratch/other")));
    }
}
