//! The cryptsetup program, run as a child.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use zeroize::Zeroizing;

use crate::sys;

/// The exit code of cryptsetup for a passphrase that opens no slot. *Source:* cryptsetup(8), RETURN CODES.
const WRONG_PASSPHRASE: i32 = 2;

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
        // The next start resumes what this one has begun; it must not find its cryptsetup still at work.
        sys::end_with_parent(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| self.start_error(source))?;
        let ended = talk_to(&mut child, call, self.limit).map_err(|source| self.start_error(source))?;
        let (status, stderr) = ended.ok_or(CryptsetupError::TimedOut { action: call.action })?;
        if status.success() {
            return Ok(());
        }
        let first_line = stderr.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason");
        Err(CryptsetupError::Failed { action: call.action, status, stderr: first_line.to_owned() })
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        find_mapping_in(Path::new("/sys/block"), name)
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
    fn a_program_that_hangs_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("cryptsetup");
        testbed::write_program(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        let tool = CryptsetupProgram { program, limit: Duration::from_millis(50) };
        let error = tool.run(&call("open", b"a secret")).unwrap_err();
        assert!(matches!(error, CryptsetupError::TimedOut { action: "open" }), "{error}");
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
