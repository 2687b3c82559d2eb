//! What may hang with a disk, in a process of its own.
//!
//! A thread that waits for a disk can't be killed, and its process is not gone for the one that waits for it before all of its
//! threads are. So a command that shows several stores asks this program once more for each of them, with a hidden command
//! that answers with one line of JSON. An empty line before it says that the disk answers, and there is much on it. One that
//! says nothing in time is killed, and left to end when its disk answers.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use nodekeel_fsquota::{Error as QuotaError, QuotaChange, QuotaSetter, QuotaStatus};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::config::DaemonConfig;

/// The time between two signs of a process that reads volumes.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

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
    #[error("can't start a process that reads {}: free memory, or end other processes, and repeat the command", path.display())]
    Start {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the disk of {} has not answered within {} s: `dmesg` names its errors; repair the connection to it and mount it again, or \
         replace it by `provisionerd store replace`; the other stores are not concerned",
        path.display(),
        timeout.as_secs()
    )]
    Hung { path: PathBuf, timeout: Duration },
    #[error(
        "the process that reads {} was killed, or has crashed: `dmesg` says whether memory ran out or the disk fails; free memory, or \
         replace the disk, and repeat the command",
        path.display()
    )]
    NoAnswer { path: PathBuf },
}

/// A process that reads a store.
#[derive(Debug)]
pub(crate) struct DiskProcess {
    path: PathBuf,
    child: Child,
    /// The lines that it writes, of which all but the last are empty.
    lines: Receiver<String>,
    started: Instant,
}

impl DiskProcess {
    /// Runs this program with a hidden command and further arguments on the directory of a store.
    pub(crate) fn start(
        config: &DaemonConfig,
        command: &str,
        arguments: &[&OsStr],
    ) -> Result<Self, DiskError> {
        let mut process = Command::new("/proc/self/exe");
        process.arg0("provisionerd").arg(command).arg("--directory").arg(&config.directory);
        process.arg("--kubelet").arg(&config.kubelet).args(arguments);
        Self::spawn(config.directory.clone(), process)
    }

    fn spawn(path: PathBuf, mut process: Command) -> Result<Self, DiskError> {
        // Nothing of it may keep the streams of this process open.
        process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let started = process.spawn().and_then(|mut child| {
            let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
            Ok((child, stdout))
        });
        let (child, stdout) = started.map_err(|source| DiskError::Start { path: path.clone(), source })?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let (mut stdout, mut line) = (BufReader::new(stdout), String::new());
            // A line without its end is not complete. Sending fails only if nobody waits any more.
            while stdout.read_line(&mut line).is_ok() && line.ends_with('\n') {
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { path, child, lines, started: Instant::now() })
    }

    /// The answer, if there is no pause of this length before it.
    pub(crate) fn answer<T: DeserializeOwned>(mut self, timeout: Duration) -> Result<T, DiskError> {
        let mut left = timeout.saturating_sub(self.started.elapsed());
        let answer = loop {
            match self.lines.recv_timeout(left) {
                Ok(line) if line == "\n" => left = timeout,
                answer => break answer,
            }
        };
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

/// Quotas that are read for the process that has started this one: while they can be, it is told that the disk answers.
#[derive(Debug)]
pub(crate) struct ReportingQuota<W = io::Stdout> {
    inner: Box<dyn QuotaSetter>,
    interval: Duration,
    reported: Mutex<Reported<W>>,
}

#[derive(Debug)]
struct Reported<W> {
    at: Instant,
    to: W,
}

impl ReportingQuota {
    pub(crate) fn new(inner: Box<dyn QuotaSetter>) -> Self {
        let reported = Mutex::new(Reported { at: Instant::now(), to: io::stdout() });
        Self { inner, interval: PROGRESS_INTERVAL, reported }
    }
}

impl<W: io::Write> ReportingQuota<W> {
    /// Tells that the disk answers, unless that was told just now.
    pub(crate) fn report_progress(&self) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if reported.at.elapsed() >= self.interval {
            reported.at = Instant::now();
            // Without a reader, nobody waits for the answer either.
            let _ = reported.to.write_all(b"\n");
        }
    }
}

impl<W: io::Write + std::fmt::Debug + Send> QuotaSetter for ReportingQuota<W> {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, QuotaError> {
        self.inner.set_limits(dir, change)
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, QuotaError> {
        let status = self.inner.read_status(dir);
        self.report_progress();
        status
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), QuotaError> {
        self.inner.clear_limits(dir)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use nodekeel_fsquota::testing::MemQuota;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    fn answer_of(script: &str) -> Result<String, DiskError> {
        let mut process = Command::new("/bin/sh");
        process.args(["-c", script]);
        DiskProcess::spawn("/disk".into(), process).expect("it starts").answer(TIMEOUT)
    }

    #[test]
    fn a_disk_that_answers_slowly_is_not_called_hung_and_one_that_stops_is() {
        // It takes longer than the timeout, in steps that don't.
        let slow = "for _ in 1 2 3 4 5; do sleep 0.6; echo; done; echo '\"read\"'";
        let started = Instant::now();
        assert_eq!(answer_of(slow).expect("it answers"), "read");
        assert!(started.elapsed() > TIMEOUT);

        let hung = answer_of("echo; exec sleep 600").expect_err("it says nothing more");
        assert!(matches!(hung, DiskError::Hung { timeout: TIMEOUT, .. }), "{hung}");
        let ended = answer_of("echo").expect_err("it has ended");
        assert!(matches!(ended, DiskError::NoAnswer { .. }), "{ended}");
    }

    #[test]
    fn each_quota_that_is_read_is_a_sign_that_the_disk_answers_once_in_an_interval() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = std::fs::File::open(directory.path()).expect("it is there");
        for (interval, signs) in [(Duration::ZERO, "\n\n\n"), (Duration::from_secs(3600), "")] {
            let reported = Mutex::new(Reported { at: Instant::now(), to: Vec::new() });
            let quota = ReportingQuota { inner: Box::new(MemQuota::new()), interval, reported };
            for _ in 0..3 {
                quota.read_status(file.as_fd()).expect("it has none");
            }
            assert_eq!(quota.reported.into_inner().expect("not poisoned").to, signs.as_bytes());
        }
    }
}
