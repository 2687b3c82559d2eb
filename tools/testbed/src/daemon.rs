//! A daemon in a private directory, ended with its group whatever happens.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{ScratchDir, end_group, leftovers, wait_exit, wait_until};

/// Ten times what the slowest of them takes on a machine that does nothing else.
const READY_WITHIN: Duration = Duration::from_secs(60);
const LINES_SHOWN: usize = 20;

/// A running daemon and its directory. Dropping this ends the daemon and removes the directory.
///
/// The daemon leads a separate process group. Where the test process is killed, a keeper (a shell that waits
/// for the end of a pipe that only the test process holds open) kills that group. A parent-death signal would
/// not do: it is sent when the *thread* ends that started the daemon, and tests share daemons between
/// threads.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Its exit status, once it is known; the kernel may reuse its process group's number then.
    exit_status: Option<ExitStatus>,
    keeper: Child,
    log_file: PathBuf,
    /// Dropped last: it removes what the group has left.
    scratch: ScratchDir,
}

impl Daemon {
    /// Starts the command with its output in a file of the scratch directory, and waits until `ready`
    /// succeeds.
    ///
    /// # Errors
    /// It can't be executed, ends before it is ready, or isn't ready in time; with the last lines of its
    /// output.
    pub fn start(
        mut command: Command,
        scratch: ScratchDir,
        mut ready: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let name = Path::new(command.get_program()).display().to_string();
        let log_file = scratch.path().join("output.log");
        let file = File::create(&log_file).with_context(|| format!("create {}", log_file.display()))?;
        let errors = file.try_clone().context("share the log file")?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        command.env(leftovers::MARK, scratch.path());
        let mut keeper = start_keeper()?;
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                end_group(&mut keeper)?;
                return Err(error).with_context(|| format!("execute {name}"));
            }
        };
        let mut daemon = Self { child, exit_status: None, keeper, log_file, scratch };
        daemon.send_group_to_keeper()?;
        daemon.wait_ready(&name, &mut ready).with_context(|| daemon.last_output(LINES_SHOWN))?;
        Ok(daemon)
    }

    /// The process id.
    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Its private directory.
    pub fn directory_path(&self) -> &Path {
        self.scratch.path()
    }

    /// Its output so far.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn read_log(&self) -> Result<String> {
        let bytes = fs::read(&self.log_file).with_context(|| format!("read {}", self.log_file.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends SIGTERM and waits for its exit; `None` if it still runs at the deadline. The directory and the
    /// processes that the daemon may have left stay until this is dropped.
    ///
    /// # Errors
    /// The system call fails.
    pub fn terminate(&mut self, deadline: Duration) -> Result<Option<ExitStatus>> {
        if self.exit_status.is_none() {
            kill_process(Pid::from_child(&self.child), Signal::TERM).context("send SIGTERM to the daemon")?;
        }
        self.wait_for_exit(deadline)
    }

    /// Waits for its exit; `None` if it still runs at the deadline.
    ///
    /// # Errors
    /// The system call fails.
    pub fn wait_for_exit(&mut self, deadline: Duration) -> Result<Option<ExitStatus>> {
        if self.exit_status.is_none() {
            self.exit_status = wait_exit(&mut self.child, deadline)?;
        }
        Ok(self.exit_status)
    }

    fn send_group_to_keeper(&mut self) -> Result<()> {
        let pipe = self.keeper.stdin.as_mut().context("the keeper has a pipe")?;
        writeln!(pipe, "{}", self.child.id()).context("write the process group to the keeper")
    }

    fn wait_ready(&mut self, name: &str, ready: &mut impl FnMut() -> Result<()>) -> Result<()> {
        // Etcd and containerd notify only a service manager's socket, and a notified daemon may not serve
        // yet: readiness is a real call that is repeated.
        wait_until(READY_WITHIN, &format!("{name} to be ready"), || {
            self.exit_status = self.child.try_wait().context("reap child")?;
            if self.exit_status.is_some() { Ok(()) } else { ready() }
        })?;
        match self.exit_status {
            Some(status) => bail!("{name} exited before it was ready: {status}"),
            None => Ok(()),
        }
    }

    /// The last lines of its output, for an error.
    pub(crate) fn last_output(&self, count: usize) -> String {
        let log = self.read_log().unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        format!("its last output:\n{}\n", lines[lines.len().saturating_sub(count)..].join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon first: after the keeper's exit nothing watches it. Removing the scratch directory kills
        // the processes left by a daemon that has exited by itself.
        let daemon = self.exit_status.is_none().then_some(&mut self.child);
        for child in daemon.into_iter().chain([&mut self.keeper]) {
            if let Err(error) = end_group(child) {
                eprintln!("testbed: {error:#}");
            }
        }
    }
}

/// The keeper has a separate group, so that a Ctrl-C at the terminal doesn't end it before its work is done.
fn start_keeper() -> Result<Child> {
    let script = r#"read -r group; read -r _; [ -z "$group" ] || kill -s KILL -- "-$group""#;
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    shell.process_group(0).spawn().context("start the keeper")
}

/// Runs a command to its end and gives its standard output.
///
/// # Errors
/// It can't be executed, or fails; with its standard error.
pub fn command_output(command: &mut Command) -> Result<String> {
    let name = Path::new(command.get_program()).display().to_string();
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("execute {name}"))?;
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{name} failed ({}): {}", done.status, errors.trim());
    String::from_utf8(done.stdout).with_context(|| format!("parse the output of {name} as UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_daemon_and_what_it_forked_are_gone_after_drop() {
        let scratch = ScratchDir::new().unwrap();
        let directory = scratch.path().to_owned();
        let marker = directory.join("up");
        let script = format!("setsid sh -c 'echo > {}; sleep 1000; :' & sleep 1000; :", marker.display());
        let is_up = || if marker.exists() { Ok(()) } else { bail!("not up") };
        let daemon = Daemon::start(shell(&script), scratch, is_up).unwrap();
        // The marker says nothing of the shell's other child.
        wait_until(Duration::from_secs(10), "all processes to be started", || {
            ensure!(leftovers::find_processes(&directory)?.len() >= 3, "some are missing");
            Ok(())
        })
        .unwrap();
        drop(daemon);
        assert_eq!(leftovers::find_processes(&directory).unwrap(), []);
        assert!(!directory.exists());
    }

    #[test]
    fn a_terminated_daemon_reports_its_status_and_keeps_its_directory_until_drop() {
        let scratch = ScratchDir::new().unwrap();
        let directory = scratch.path().to_owned();
        let mut daemon =
            Daemon::start(shell("trap 'exit 7' TERM; sleep 1000 & echo up; wait"), scratch, || Ok(()))
                .unwrap();
        wait_until(Duration::from_secs(10), "the trap to be set", || {
            ensure!(daemon.read_log()?.contains("up"), "not up");
            Ok(())
        })
        .unwrap();
        let status = daemon.terminate(Duration::from_secs(10)).unwrap();
        assert_eq!(status.and_then(|status| status.code()), Some(7));
        assert_eq!(leftovers::find_processes(&directory).unwrap().len(), 1, "its child was left");
        drop(daemon);
        assert_eq!(leftovers::find_processes(&directory).unwrap(), []);
        assert!(!directory.exists());
    }

    #[test]
    fn a_daemon_that_ends_early_is_reported_with_its_output() {
        let scratch = ScratchDir::new().unwrap();
        let error = Daemon::start(shell("echo cannot bind; exit 3"), scratch, || bail!("no")).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("cannot bind") && text.contains("exit status: 3"), "{text}");
    }

    #[test]
    fn the_keeper_kills_the_group_when_its_pipe_breaks() {
        let mut child = shell("sleep 1000").process_group(0).spawn().unwrap();
        let mut keeper = start_keeper().unwrap();
        let mut pipe = keeper.stdin.take().unwrap();
        writeln!(pipe, "{}", child.id()).unwrap();
        drop(pipe);
        let status = wait_exit(&mut child, Duration::from_secs(10));
        end_group(&mut child).unwrap();
        end_group(&mut keeper).unwrap();
        assert!(status.unwrap().is_some_and(|status| !status.success()));
    }

    #[test]
    fn a_failed_command_is_reported_with_its_standard_error() {
        let error = command_output(&mut shell("echo no such key >&2; exit 1")).unwrap_err();
        assert!(error.to_string().contains("no such key"), "{error}");
    }
}
