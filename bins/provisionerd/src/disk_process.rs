//! What may hang with a disk, in a process of its own.
//!
//! A thread that waits for a disk can't be killed, and its process is not gone for the one that waits for it before all of its
//! threads are. So a command that shows several stores asks this program once more for each of them, with a hidden command
//! that answers with one line of JSON. One that does not answer in time is killed, and left to end when its disk answers.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::config::DaemonConfig;

/// The time within which the disk of a store has to answer.
pub(crate) const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// A store, as a process that reads it needs to know it.
#[derive(Debug, Args)]
pub(crate) struct DiskFlags {
    #[arg(long)]
    directory: PathBuf,
    #[arg(long)]
    kubelet: PathBuf,
}

impl DiskFlags {
    /// The configuration of the store, with nothing else in it.
    pub(crate) fn into_config(self) -> DaemonConfig {
        DaemonConfig { directory: self.directory, kubelet: self.kubelet, ..DaemonConfig::default() }
    }
}

/// A disk gave no answer.
#[derive(Debug, Error)]
pub(crate) enum DiskError {
    #[error("can't start a process that reads {}", path.display())]
    Start {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the disk of {} has not answered within {} s: see `dmesg`; the other stores are not concerned", path.display(), timeout.as_secs())]
    Hung { path: PathBuf, timeout: Duration },
    #[error("the process that reads {} has ended without an answer: see `dmesg`", path.display())]
    NoAnswer { path: PathBuf },
}

/// A process that reads a store.
#[derive(Debug)]
pub(crate) struct DiskProcess {
    path: PathBuf,
    child: Child,
    answer: Receiver<String>,
    started: Instant,
}

impl DiskProcess {
    /// Runs this program with a hidden command and further arguments on the directory of a store.
    pub(crate) fn start(
        config: &DaemonConfig,
        command: &str,
        arguments: &[&OsStr],
    ) -> Result<Self, DiskError> {
        let path = config.directory.clone();
        let mut process = Command::new("/proc/self/exe");
        process.arg0("provisionerd").arg(command).arg("--directory").arg(&path);
        process.arg("--kubelet").arg(&config.kubelet).args(arguments);
        // Nothing of it may keep the streams of this process open.
        process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let started = process.spawn().and_then(|mut child| {
            let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
            Ok((child, stdout))
        });
        let (child, stdout) = started.map_err(|source| DiskError::Start { path: path.clone(), source })?;
        let (sender, answer) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            // A line without its end is not complete. Sending fails only if nobody waits any more.
            if BufReader::new(stdout).read_line(&mut line).is_ok() && line.ends_with('\n') {
                let _ = sender.send(line);
            }
        });
        Ok(Self { path, child, answer, started: Instant::now() })
    }

    /// The answer, within a time since the start.
    pub(crate) fn answer<T: DeserializeOwned>(mut self, timeout: Duration) -> Result<T, DiskError> {
        let answer = self.answer.recv_timeout(timeout.saturating_sub(self.started.elapsed()));
        let path = self.path;
        match answer {
            // Not waited for: what it does not need for its answer may hang.
            Ok(line) => serde_json::from_str(&line).map_err(|_| DiskError::NoAnswer { path }),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                // It ends once its disk answers.
                let _ = self.child.kill();
                Err(DiskError::Hung { path, timeout })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(DiskError::NoAnswer { path }),
        }
    }
}

/// Answers the process that has started this one.
pub(crate) fn print_answer(answer: &impl Serialize) -> Result<ExitCode> {
    let line = serde_json::to_string(answer).context("can't format the answer")? + "\n";
    let mut stdout = io::stdout();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).context("can't write the answer")?;
    Ok(ExitCode::SUCCESS)
}
