//! The cryptsetup program, run as a child.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use zeroize::Zeroizing;

use crate::sys;

/// The exit code of cryptsetup for a passphrase that opens no slot. *Source:* cryptsetup(8), RETURN CODES.
const WRONG_PASSPHRASE: i32 = 2;
/// *Source:* cryptsetup, `lib/luks2/luks2_reencrypt.c`, `LUKS2_reencrypt_lock`.
const RUNNING: &str = "Reencryption process is already running";
/// *Source:* cryptsetup, `src/utils_tools.c`, `tools_passphrase_msg`.
const UNUSABLE_PASSPHRASE: &str = "No usable keyslot is available.";

/// The longest time of a call: the slowest, a key slot with the most memory that Argon2 permits, takes a minute.
const CALL_LIMIT: Duration = Duration::from_secs(300);

/// The socket of a running udev. *Source:* systemd-udevd.service(8).
const UDEV_SOCKET: &str = "/run/udev/control";

/// Runs cryptsetup, and finds the mappings that it has made.
///
/// # Contract
/// - Secrets reach the program through its standard input only: neither through its arguments nor through its
///   environment, which other processes can read.
/// - [`run`](Self::run) returns when the program has ended. Its changes are durable then.
///
/// [`CryptsetupProgram`] runs the real one; `testing::FileCryptsetup` does without device-mapper.
pub trait Cryptsetup: Send + Sync + fmt::Debug {
    /// Runs one action.
    ///
    /// # Errors
    /// [`CryptsetupError`] if the program can't be run, or fails.
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError>;

    /// Runs an action that takes hours. Each line of its output is given to `report` until that breaks: then the program gets
    /// SIGTERM, and ends when its state is whole. It gets the same when this process ends, and keeps `lock` open until it has
    /// ended itself. Without an implementation of its own, it is run like any other.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), also if it was stopped.
    fn run_long(
        &self,
        call: &CryptsetupCall<'_>,
        lock: BorrowedFd<'_>,
        report: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(), CryptsetupError> {
        let (_, _) = (lock, report);
        self.run(call)
    }

    /// The active mapping of this name; none if the name is not in use.
    ///
    /// # Errors
    /// Errors of reading the kernel's list.
    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>>;
}

/// One call of cryptsetup.
pub struct CryptsetupCall<'a> {
    /// The action, such as `luksFormat`: the first argument.
    pub action: &'static str,
    /// The arguments after it. They contain no secret.
    pub arguments: Vec<OsString>,
    /// The open disk, which the program inherits: the arguments name it by `/proc/self/fd/NUMBER`.
    pub device: Option<BorrowedFd<'a>>,
    /// The standard input: secrets, or the JSON of a token.
    pub input: Zeroizing<Vec<u8>>,
}

/// Without the input, which is a secret.
impl fmt::Debug for CryptsetupCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CryptsetupCall")
            .field("action", &self.action)
            .field("arguments", &self.arguments)
            .finish_non_exhaustive()
    }
}

/// A mapping of the kernel's device-mapper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveMapping {
    /// The block device.
    pub device_path: PathBuf,
    /// The identifier, `CRYPT-LUKS2-`, the UUID of the volume without dashes, a dash, the name.
    pub identifier: String,
}

/// A failure of cryptsetup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CryptsetupError {
    /// cryptsetup could not be started: install it.
    #[error("can't run {}: install cryptsetup", .program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// cryptsetup did not end in five minutes, and was killed. The next call finds its changes.
    #[error(
        "cryptsetup {action} did not end and was killed: check the disk in the kernel's log, and that udev answers (udevadm settle)"
    )]
    TimedOut {
        /// The action.
        action: &'static str,
    },
    /// cryptsetup failed.
    #[error("cryptsetup {action} failed with {status}: {stderr}")]
    Failed {
        /// The action.
        action: &'static str,
        /// The exit status.
        status: ExitStatus,
        /// The first line of its error output.
        stderr: String,
    },
}

impl CryptsetupError {
    /// The passphrase opens no slot.
    pub fn is_wrong_passphrase(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.code() == Some(WRONG_PASSPHRASE))
    }

    /// The passphrase does not open both volume keys of a re-encryption: cryptsetup has no exit code for that.
    pub(super) fn is_unusable_passphrase(&self) -> bool {
        matches!(self, Self::Failed { stderr, .. } if stderr == UNUSABLE_PASSPHRASE)
    }

    /// cryptsetup was killed by a signal, in whatever it did.
    pub fn is_killed(&self) -> bool {
        matches!(self, Self::Failed { status, .. } if status.signal().is_some())
    }

    /// Another process re-encrypts the volume.
    pub(super) fn is_running_elsewhere(&self) -> bool {
        matches!(self, Self::Failed { stderr, .. } if stderr.contains(RUNNING))
    }
}

/// The real program, version 2.5 or newer. It ends with this program, also when that is killed.
#[derive(Clone, Debug)]
pub struct CryptsetupProgram {
    program: PathBuf,
    limit: Duration,
}

impl CryptsetupProgram {
    /// The program at this path, or the first one of this name in `PATH`.
    pub fn new(program: impl Into<PathBuf>) -> CryptsetupProgram {
        CryptsetupProgram { program: program.into(), limit: CALL_LIMIT }
    }

    fn command(&self, call: &CryptsetupCall<'_>) -> Command {
        let mut command = Command::new(&self.program);
        // Its error output becomes part of an error here, and must not depend on the locale of the host.
        command.args(call.action.split(' ')).args(&call.arguments).env("LC_ALL", "C");
        if let Some(device) = call.device {
            sys::inherit(&mut command, device);
        }
        if !Path::new(UDEV_SOCKET).exists() {
            // Otherwise libdevmapper waits forever for an answer of udev.
            command.env("DM_DISABLE_UDEV", "1");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start_error(&self, source: io::Error) -> CryptsetupError {
        CryptsetupError::Start { program: self.program.clone(), source }
    }
}

impl Default for CryptsetupProgram {
    fn default() -> CryptsetupProgram {
        CryptsetupProgram::new("cryptsetup")
    }
}

impl Cryptsetup for CryptsetupProgram {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        let mut command = self.command(call);
        // The next start resumes what this one has begun; it must not find its cryptsetup still at work.
        sys::end_with_parent(&mut command, Signal::KILL);
        let mut child = command.spawn().map_err(|source| self.start_error(source))?;
        let ended = talk_to(&mut child, call, self.limit).map_err(|source| self.start_error(source))?;
        let (status, stderr) = ended.ok_or(CryptsetupError::TimedOut { action: call.action })?;
        check_status(call, status, &stderr)
    }

    fn run_long(
        &self,
        call: &CryptsetupCall<'_>,
        lock: BorrowedFd<'_>,
        report: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<(), CryptsetupError> {
        let mut command = self.command(call);
        sys::inherit(&mut command, lock);
        sys::end_with_parent(&mut command, Signal::TERM);
        let (output, errors) = pipes(&mut command).map_err(|source| self.start_error(source))?;
        let mut child = command.spawn().map_err(|source| self.start_error(source))?;
        // It has the ends to which the child writes: the others would never see an end.
        drop(command);
        let ended = follow(&mut child, call, (output, errors), report);
        if ended.is_err() {
            // Its output can't be read: it is not left alone with the volume.
            stop(&child);
        }
        let status = child.wait().map_err(|source| self.start_error(source))?;
        check_status(call, status, &ended.map_err(|source| self.start_error(source))?)
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        find_mapping_in(Path::new("/sys/block"), name)
    }
}

fn check_status(call: &CryptsetupCall<'_>, status: ExitStatus, stderr: &str) -> Result<(), CryptsetupError> {
    if status.success() {
        return Ok(());
    }
    let first_line = stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason");
    Err(CryptsetupError::Failed { action: call.action, status, stderr: first_line.to_owned() })
}

/// The pipes of a program's output and error output. It inherits both ends: a write after the death of this process would kill
/// it in the middle of its work otherwise.
fn pipes(command: &mut Command) -> io::Result<(PipeReader, PipeReader)> {
    let (output, to_output) = io::pipe()?;
    let (errors, to_errors) = io::pipe()?;
    command.stdout(to_output).stderr(to_errors);
    sys::inherit(command, output.as_fd());
    sys::inherit(command, errors.as_fd());
    Ok((output, errors))
}

/// Writes the input, and reads the output to its end. Returns the error output.
fn follow(
    child: &mut Child,
    call: &CryptsetupCall<'_>,
    (output, mut errors): (PipeReader, PipeReader),
    report: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> io::Result<String> {
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(&call.input);
    }
    thread::scope(|scope| {
        let errors = scope.spawn(move || {
            let mut bytes = Vec::new();
            errors.read_to_end(&mut bytes).map(|_| bytes)
        });
        for line in BufReader::new(output).split(b'\n') {
            if report(&String::from_utf8_lossy(&line?)).is_break() {
                stop(child);
            }
        }
        let bytes = errors.join().unwrap_or_else(|_| Ok(Vec::new()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    })
}

/// Has a child end as soon as its state is whole. It was not waited for, so its number is still its own.
fn stop(child: &Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// Writes the input, and waits for the end. None if it did not end in time, and was killed.
fn talk_to(
    child: &mut Child,
    call: &CryptsetupCall<'_>,
    limit: Duration,
) -> io::Result<Option<(ExitStatus, String)>> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // Closed after the input: with `--key-file -`, cryptsetup reads up to the end of the pipe.
    if let Some(mut stdin) = stdin {
        // A program that fails early closes it; its error output has the reason.
        let _ = stdin.write_all(&call.input);
    }
    // Both outputs are read at the same time: a program that has filled one pipe stops until that is read.
    let (errors, is_late) = thread::scope(|scope| {
        // Disconnected when both outputs have ended.
        let (reading_stderr, is_read) = mpsc::channel::<()>();
        let reading_stdout = reading_stderr.clone();
        let errors = scope.spawn(move || {
            let _reading = reading_stderr;
            let mut bytes = Vec::new();
            stderr.map_or(Ok(0), |mut stderr| stderr.read_to_end(&mut bytes)).map(|_| bytes)
        });
        scope.spawn(move || {
            let _reading = reading_stdout;
            stdout.map(|mut stdout| io::copy(&mut stdout, &mut io::sink()))
        });
        let is_late = is_read.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
        if is_late {
            // Both threads end with the child, since the kernel closes its ends of the pipes.
            let _ = child.kill();
        }
        (errors.join().unwrap_or_else(|_| Ok(Vec::new())), is_late)
    });
    // Also after a kill: a child that is not waited for stays a zombie.
    let status = child.wait()?;
    let text = String::from_utf8_lossy(&errors?).into_owned();
    Ok((!is_late).then_some((status, text)))
}

/// Without udev, a mapping has no device node under its name: only the kernel's `/dev/dm-N`.
fn find_mapping_in(block_devices: &Path, name: &str) -> io::Result<Option<ActiveMapping>> {
    for entry in fs::read_dir(block_devices)? {
        let entry = entry?;
        let attributes = entry.path().join("dm");
        // Another device, or one that was removed since.
        let Ok(found) = fs::read_to_string(attributes.join("name")) else { continue };
        if found.trim_end() == name {
            let identifier = fs::read_to_string(attributes.join("uuid"))?.trim_end().to_owned();
            return Ok(Some(ActiveMapping {
                device_path: Path::new("/dev").join(entry.file_name()),
                identifier,
            }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(action: &'static str, input: &[u8]) -> CryptsetupCall<'static> {
        CryptsetupCall {
            action,
            arguments: vec!["x".into()],
            device: None,
            input: Zeroizing::new(input.to_vec()),
        }
    }

    #[test]
    fn the_input_reaches_the_program_and_is_not_printed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        let script = "#!/bin/sh\ncat >\"$0.input\"\necho \"$@\" >\"$0.arguments\"\necho >&2\necho ' why' >&2\nexit 2\n";
        testbed::write_program(&program, script).unwrap();
        let tool = CryptsetupProgram::new(&program);
        let error = tool.run(&call("token import", b"a secret")).unwrap_err();
        assert!(error.is_wrong_passphrase());
        assert!(error.to_string().ends_with("failed with exit status: 2: why"), "{error}");
        let read =
            |suffix: &str| fs::read_to_string(directory.path().join(format!("cryptsetup.{suffix}"))).unwrap();
        assert_eq!((read("input"), read("arguments")), ("a secret".into(), "token import x\n".into()));
        assert!(!format!("{:?}", call("open", b"a secret")).contains("secret"));
        let missing = CryptsetupProgram::new("/nowhere/cryptsetup").run(&call("open", b"")).unwrap_err();
        assert_eq!(missing.to_string(), "can't run /nowhere/cryptsetup: install cryptsetup");
    }

    #[test]
    fn a_long_run_gives_its_lines_and_is_stopped_by_a_signal_after_which_it_ends_its_piece() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        let script = "#!/bin/sh\ntrap 'echo piece >\"$0.end\"; echo >&2 interrupted; exit 1' TERM\ncat >\"$0.input\"\necho one\n\
                      echo two\nwhile :; do sleep 0.05; done\n";
        testbed::write_program(&program, script).unwrap();
        let lock = fs::File::create(directory.path().join("lock")).unwrap();
        let mut lines = Vec::new();
        let ended = CryptsetupProgram::new(&program).run_long(
            &call("reencrypt", b"a secret"),
            lock.as_fd(),
            &mut |line| {
                lines.push(line.to_owned());
                if line == "two" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
        let error = ended.unwrap_err();
        assert!(!error.is_killed() && error.to_string().ends_with("interrupted"), "{error}");
        assert_eq!(lines, ["one", "two"]);
        let read =
            |suffix: &str| fs::read_to_string(directory.path().join(format!("cryptsetup.{suffix}"))).unwrap();
        assert_eq!((read("input"), read("end")), ("a secret".into(), "piece\n".into()));
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        testbed::write_program(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        let tool = CryptsetupProgram { program, limit: Duration::from_millis(50) };
        let error = tool.run(&call("open", b"a secret")).unwrap_err();
        assert!(matches!(error, CryptsetupError::TimedOut { action: "open" }), "{error}");
    }

    #[test]
    fn a_long_run_outlives_the_death_of_its_caller_until_its_piece_is_whole() {
        if let Some(program) = std::env::var_os(KILLED_CALLER) {
            let lock = fs::File::open("/dev/null").unwrap();
            let go_on = &mut |_: &str| ControlFlow::Continue(());
            let _ = CryptsetupProgram::new(program).run_long(&call("reencrypt", b""), lock.as_fd(), go_on);
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        // It writes to its outputs after the death of who reads them.
        let script = "#!/bin/sh\ntrap 'sleep 0.2; echo out; echo >&2 error; echo whole >\"$0.new\"; mv \"$0.new\" \"$0.end\"; exit 1' TERM\n\
                      echo $$ >\"$0.new\"\nmv \"$0.new\" \"$0.pid\"\nwhile :; do sleep 0.05; done\n";
        testbed::write_program(&program, script).unwrap();
        let name = "volume::luks::cryptsetup::tests::a_long_run_outlives_the_death_of_its_caller_until_its_piece_is_whole";
        let mut caller = Command::new(std::env::current_exe().unwrap());
        let mut caller = caller
            .args(["--exact", name])
            .env(KILLED_CALLER, &program)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let wait_for = |suffix: &str| {
            testbed::wait_until(Duration::from_secs(60), suffix, || {
                Ok(fs::read_to_string(directory.path().join(format!("cryptsetup.{suffix}")))?)
            })
            .unwrap()
        };
        wait_for("pid");
        caller.kill().unwrap();
        caller.wait().unwrap();
        assert_eq!(wait_for("end"), "whole\n");
    }

    /// Set in the program that is to be killed, which is this test again.
    const KILLED_CALLER: &str = "NODEKEEL_TEST_CRYPTSETUP_OF_A_KILLED_PROGRAM";

    #[test]
    fn a_format_ends_when_its_caller_is_killed() {
        if let Some(program) = std::env::var_os(KILLED_CALLER) {
            let _ = CryptsetupProgram::new(program).run(&call("luksFormat", b"a secret"));
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        let script = "#!/bin/sh\necho $$ >\"$0.new\"\nmv \"$0.new\" \"$0.pid\"\nexec sleep 1000\n";
        testbed::write_program(&program, script).unwrap();
        let name = "volume::luks::cryptsetup::tests::a_format_ends_when_its_caller_is_killed";
        let mut caller = Command::new(std::env::current_exe().unwrap());
        let mut caller = caller
            .args(["--exact", name])
            .env(KILLED_CALLER, &program)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid: i32 = testbed::wait_until(Duration::from_secs(60), "its start", || {
            Ok(fs::read_to_string(directory.path().join("cryptsetup.pid"))?.trim().parse()?)
        })
        .unwrap();
        caller.kill().unwrap();
        caller.wait().unwrap();
        let has_ended = testbed::wait_until(Duration::from_secs(60), "its end", || {
            // It stays a zombie where no process reaps it.
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            anyhow::ensure!(state.is_empty() || state.contains(") Z "), "{state}");
            Ok(())
        });
        if has_ended.is_err() {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).unwrap(),
                rustix::process::Signal::KILL,
            );
        }
        has_ended.unwrap();
    }

    #[test]
    fn a_mapping_is_found_by_its_name() {
        let sys = tempfile::tempdir().unwrap();
        for (device, name) in [("dm-0", Some("other")), ("dm-1", Some("data")), ("vda", None)] {
            let attributes = sys.path().join(device).join(if name.is_some() { "dm" } else { "queue" });
            fs::create_dir_all(&attributes).unwrap();
            fs::write(attributes.join("name"), format!("{}\n", name.unwrap_or_default())).unwrap();
            fs::write(attributes.join("uuid"), "CRYPT-LUKS2-1-data\n").unwrap();
        }
        let found = find_mapping_in(sys.path(), "data").unwrap().unwrap();
        assert_eq!(found.device_path, Path::new("/dev/dm-1"));
        assert_eq!(found.identifier, "CRYPT-LUKS2-1-data");
        assert_eq!(find_mapping_in(sys.path(), "dat").unwrap(), None);
    }
}
