//! The control port on the host's side: requests to the guest's agent, and its messages.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// What the agent reports of one command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TaskMessage {
    Line(String),
    Exit(i32),
}

/// The command's number with its message; `None` for `up`.
type AgentMessage = (Option<u64>, TaskMessage);

/// The port and the tasks that wait for messages.
#[derive(Debug)]
pub(super) struct ControlPort {
    port: Mutex<UnixStream>,
    waiting: Arc<Mutex<PendingTasks>>,
}

#[derive(Debug, Default)]
struct PendingTasks {
    last: u64,
    tasks: HashMap<u64, Sender<TaskMessage>>,
    is_closed: bool,
}

impl ControlPort {
    /// Reads messages on a separate thread, which ends with the guest. The second value reports when the
    /// agent is up.
    pub(super) fn new(port: UnixStream) -> Result<(Arc<Self>, AgentStart)> {
        let reader = port.try_clone().context("share the control port")?;
        let waiting = Arc::new(Mutex::new(PendingTasks::default()));
        let (tell_up, up) = channel();
        let shared = Arc::clone(&waiting);
        std::thread::spawn(move || {
            for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
                match parse_message(&String::from_utf8_lossy(&line)) {
                    Some((None, _)) => drop(tell_up.send(())),
                    Some((Some(id), said)) => lock_pending(&shared).deliver(id, said),
                    None => {}
                }
            }
            let mut waiting = lock_pending(&shared);
            waiting.is_closed = true;
            // Disconnects the tasks that still wait for a message.
            waiting.tasks.clear();
        });
        Ok((Arc::new(Self { port: Mutex::new(port), waiting }), AgentStart(up)))
    }

    pub(super) fn start_task(self: &Arc<Self>, command: &Command) -> Result<GuestTask> {
        let snippet = shell_line(command)?;
        let (sender, said) = channel();
        let id = {
            let mut waiting = lock_pending(&self.waiting);
            waiting.last += 1;
            let id = waiting.last;
            if !waiting.is_closed {
                waiting.tasks.insert(id, sender);
            }
            id
        };
        self.send_request(&format!("run {id} {snippet}"))?;
        Ok(GuestTask { id, messages: said, control: Arc::clone(self) })
    }

    pub(super) fn send_request(&self, request: &str) -> Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        port.write_all(format!("{request}\n").as_bytes()).context("write to the guest: it has ended")
    }
}

/// Reports when the agent is up.
#[derive(Debug)]
pub(super) struct AgentStart(Receiver<()>);

impl AgentStart {
    pub(super) fn wait_until_up(&self, deadline: Duration) -> Result<()> {
        match self.0.recv_timeout(deadline) {
            Ok(()) => Ok(()),
            Err(RecvTimeoutError::Timeout) => bail!("wait for the guest to boot: not up after {deadline:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the guest ended before it was up"),
        }
    }
}

impl PendingTasks {
    fn deliver(&mut self, id: u64, said: TaskMessage) {
        let is_end = matches!(said, TaskMessage::Exit(_));
        // The task may have been dropped.
        let _ = self.tasks.get(&id).map(|task| task.send(said));
        if is_end {
            self.tasks.remove(&id);
        }
    }
}

fn lock_pending(waiting: &Mutex<PendingTasks>) -> MutexGuard<'_, PendingTasks> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A command that runs in the guest. Dropping this leaves it running.
#[derive(Debug)]
pub struct GuestTask {
    id: u64,
    messages: Receiver<TaskMessage>,
    control: Arc<ControlPort>,
}

impl GuestTask {
    /// Waits for the command's exit and gives its code: 128 + N where signal N ended it. `on_line` gets each
    /// line of both outputs.
    ///
    /// # Errors
    /// The deadline has passed, and the command keeps running; or the guest has ended before the command, by
    /// a panic or a power-off.
    pub fn wait_for_exit(&self, deadline: Duration, mut on_line: impl FnMut(&str)) -> Result<i32> {
        let end = Instant::now() + deadline;
        loop {
            match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(TaskMessage::Line(line)) => on_line(&line),
                Ok(TaskMessage::Exit(code)) => return Ok(code),
                Err(RecvTimeoutError::Timeout) => bail!("still ran after {deadline:?}"),
                Err(RecvTimeoutError::Disconnected) => bail!("the guest ended before its command did"),
            }
        }
    }

    /// Waits for a line with this text, and gives it; the lines before it are dropped.
    ///
    /// # Errors
    /// The deadline has passed, or the command or the guest has ended.
    pub fn wait_for_line(&self, text: &str, deadline: Duration) -> Result<String> {
        let end = Instant::now() + deadline;
        loop {
            match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(TaskMessage::Line(line)) if line.contains(text) => return Ok(line),
                Ok(TaskMessage::Line(_)) => {}
                Ok(TaskMessage::Exit(code)) => bail!("exited with {code} before it wrote {text:?}"),
                Err(RecvTimeoutError::Timeout) => bail!("did not write {text:?} within {deadline:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the guest ended before the command wrote {text:?}")
                }
            }
        }
    }

    /// Sends a signal, such as `KILL`, to the command's process group.
    ///
    /// # Errors
    /// The guest has ended.
    pub fn send_signal(&self, signal: &str) -> Result<()> {
        self.control.send_request(&format!("kill {} {signal}", self.id))
    }
}

/// *Source:* agent.sh.
fn parse_message(line: &str) -> Option<AgentMessage> {
    if line == "up" {
        return Some((None, TaskMessage::Line(String::new())));
    }
    let (verb, rest) = line.split_once(' ')?;
    let (id, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let said = match verb {
        "out" => TaskMessage::Line(rest.to_owned()),
        "end" => TaskMessage::Exit(rest.trim().parse().ok()?),
        _ => return None,
    };
    Some((Some(id.parse().ok()?), said))
}

/// The command as one line of shell, with its directory and the variables that it sets.
fn shell_line(command: &Command) -> Result<String> {
    let mut words = Vec::new();
    if let Some(directory) = command.get_current_dir() {
        words.push(format!("cd {} &&", quote_word(directory.as_os_str().as_bytes())?));
    }
    words.push("exec env".to_owned());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => words.push(quote_word(&[name.as_bytes(), b"=", value.as_bytes()].concat())?),
            None => words.insert(words.len(), format!("-u {}", quote_word(name.as_bytes())?)),
        }
    }
    words.push(quote_word(command.get_program().as_bytes())?);
    for argument in command.get_args() {
        words.push(quote_word(argument.as_bytes())?);
    }
    Ok(words.join(" "))
}

fn quote_word(word: &[u8]) -> Result<String> {
    let word = std::str::from_utf8(word).context("a word for the guest is not UTF-8")?;
    ensure!(!word.contains('\n'), "a word for the guest has a line break: {word:?}");
    Ok(format!("'{}'", word.replace('\'', r"'\''")))
}
