//! Changes of objects, by `kubectl get --watch`.

use std::io::{BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::{Deserializer, Value};

use crate::end_group;

/// A change of an object.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ObjectChange {
    /// It exists in this state.
    Present(Value),
    /// It was deleted in this state.
    Gone(Value),
}

impl ObjectChange {
    /// The object.
    pub fn object(&self) -> &Value {
        match self {
            Self::Present(object) | Self::Gone(object) => object,
        }
    }

    /// The object.
    pub fn into_object(self) -> Value {
        match self {
            Self::Present(object) | Self::Gone(object) => object,
        }
    }
}

/// A running `kubectl get --watch`; dropping this ends it. It ends with the API server, too.
#[derive(Debug)]
pub struct ObjectWatch {
    child: Child,
    changes: Receiver<Result<ObjectChange>>,
    last: Option<ObjectChange>,
}

impl ObjectWatch {
    /// Starts a `kubectl get …` as a watch.
    pub(super) fn start(kubectl: &mut Command) -> Result<Self> {
        kubectl.args(["--watch", "--output-watch-events", "--output=json"]).process_group(0);
        kubectl.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("execute kubectl")?;
        let (output, errors) = child.stdout.take().zip(child.stderr.take()).context("its output is piped")?;
        let (sender, changes) = channel();
        thread::spawn(move || {
            for change in read_changes(output, errors) {
                // The watch was dropped.
                if sender.send(change).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, changes, last: None })
    }

    /// The next change; `None` at the deadline.
    ///
    /// # Errors
    /// The watch has ended; with kubectl's error.
    pub fn next_change(&mut self, within: Duration) -> Result<Option<ObjectChange>> {
        match self.changes.recv_timeout(within) {
            Ok(change) => {
                let change = change?;
                self.last = Some(change.clone());
                Ok(Some(change))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("the watch has ended"),
        }
    }

    /// The next change that meets the condition.
    ///
    /// # Errors
    /// None comes in time; with the last change.
    pub fn wait_for_change(
        &mut self,
        within: Duration,
        mut is_so: impl FnMut(&ObjectChange) -> bool,
    ) -> Result<ObjectChange> {
        let end = Instant::now() + within;
        while let Some(change) = self.next_change(end.saturating_duration_since(Instant::now()))? {
            if is_so(&change) {
                return Ok(change);
            }
        }
        match &self.last {
            Some(last) => bail!("no change met the condition within {within:?}; the last one: {last:?}"),
            None => bail!("nothing changed within {within:?}"),
        }
    }
}

impl Drop for ObjectWatch {
    fn drop(&mut self) {
        if let Err(error) = end_group(&mut self.child) {
            eprintln!("testbed: {error:#}");
        }
    }
}

#[derive(Deserialize)]
struct WatchEvent {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// *Source:* kubectl get --help: `--output-watch-events` gives `{"type": …, "object": …}`, one after the
/// other.
fn read_changes(output: ChildStdout, mut errors: ChildStderr) -> impl Iterator<Item = Result<ObjectChange>> {
    let events = Deserializer::from_reader(BufReader::new(output)).into_iter::<WatchEvent>();
    let changes = events.map(|event| match event.context("read the watch")? {
        WatchEvent { kind, object } if kind == "DELETED" => Ok(ObjectChange::Gone(object)),
        WatchEvent { kind, object } if kind == "ERROR" => bail!("the watch has failed: {object}"),
        WatchEvent { object, .. } => Ok(ObjectChange::Present(object)),
    });
    let end = std::iter::once_with(move || {
        let mut said = String::new();
        errors.read_to_string(&mut said).context("read kubectl's error")?;
        bail!("the watch has ended: {}", said.trim())
    });
    changes.chain(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    fn watch(script: &str) -> ObjectWatch {
        ObjectWatch::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn changes_come_in_order_and_the_end_has_a_reason() {
        let mut watch = watch(
            r#"echo '{"type":"ADDED","object":{"n":1}}{"type":"MODIFIED","object":{"n":2}}'
               echo '{"type":"DELETED","object":{"n":2}}'; echo cut off >&2"#,
        );
        let change = watch.wait_for_change(SOON, |change| change.object()["n"] == 2).unwrap();
        assert!(matches!(change, ObjectChange::Present(_)));
        assert!(matches!(watch.next_change(SOON).unwrap(), Some(ObjectChange::Gone(_))));
        assert!(watch.next_change(SOON).unwrap_err().to_string().contains("cut off"));
    }
}
