//! What tests do with the API: through kubectl, which is what people use.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::options::ADMIN;
use super::{Change, Kube, Watch};
use crate::output;

/// How long the waiting calls wait.
const WITHIN: Duration = Duration::from_secs(60);

/// A name is `NAMESPACE/NAME`, or `NAME` for what lies in no namespace.
impl Kube {
    /// A kubectl that is the admin.
    pub fn kubectl(&self) -> Command {
        self.kubectl_as(ADMIN).expect("the admin is among the users of every control plane")
    }

    /// A kubectl that is this user.
    ///
    /// # Errors
    /// When there is no such user.
    pub fn kubectl_as(&self, user: &str) -> Result<Command> {
        let kubeconfig = self.kubeconfig(user)?;
        let mut command = self.bare_kubectl();
        command.arg("--kubeconfig").arg(kubeconfig);
        Ok(command)
    }

    /// Neither the caller's preferences nor its cache have to do with it.
    pub(super) fn bare_kubectl(&self) -> Command {
        let mut command = Command::new(self.programs.path("kubectl"));
        command.env_clear().env("HOME", self.home.path()).env("KUBERC", "off");
        command
    }

    /// Makes what the manifests (YAML or JSON) describe, or changes it to that.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn apply(&self, manifests: &str) -> Result<()> {
        let mut kubectl = self.kubectl();
        kubectl.args(["apply", "--server-side", "--force-conflicts", "--filename=-"]);
        feed(kubectl, manifests).map(drop)
    }

    /// Makes what the manifests describe, which must not be there yet, and gives it as it was stored: a list where it
    /// is more than one. Nothing is checked before the API server does.
    ///
    /// # Errors
    /// What the API server says.
    pub fn create(&self, manifests: &str) -> Result<Value> {
        let mut kubectl = self.kubectl();
        kubectl.args(["create", "--validate=false", "--output=json", "--filename=-"]);
        let text = feed(kubectl, manifests)?;
        serde_json::from_str(&text).context("parse what was created")
    }

    /// An object; `None` where there is none.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn find(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        let mut kubectl = self.kubectl();
        kubectl.args(["get", kind, "--ignore-not-found", "--output=json"]);
        let text = output(kubectl.args(whole(name)))?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        serde_json::from_str(&text).map(Some).with_context(|| format!("parse {kind} {name}"))
    }

    /// An object.
    ///
    /// # Errors
    /// When it isn't there, or what kubectl says.
    pub fn get(&self, kind: &str, name: &str) -> Result<Value> {
        self.find(kind, name)?.with_context(|| format!("there is no {kind} {name}"))
    }

    /// All objects of a kind, of all namespaces.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn list(&self, kind: &str) -> Result<Vec<Value>> {
        let text = output(self.kubectl().args(["get", kind, "--all-namespaces", "--output=json"]))?;
        let mut list: Value =
            serde_json::from_str(&text).with_context(|| format!("parse the list of {kind}"))?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            _ => anyhow::bail!("kubectl gave no list of {kind}: {text}"),
        }
    }

    /// Changes an object by a JSON merge patch.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn patch(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        self.patch_with(kind, name, patch, &[])
    }

    /// Changes an object's status by a JSON merge patch.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn patch_status(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        self.patch_with(kind, name, patch, &["--subresource=status"])
    }

    fn patch_with(&self, kind: &str, name: &str, patch: &Value, more: &[&str]) -> Result<()> {
        let mut kubectl = self.kubectl();
        kubectl.args(["patch", kind, "--type=merge", "--patch", &patch.to_string()]).args(more);
        output(kubectl.args(whole(name))).map(drop)
    }

    /// Asks for an object's deletion and does not wait until its finalizers allow it.
    ///
    /// # Errors
    /// When it isn't there, or what kubectl says.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        output(self.kubectl().args(["delete", kind, "--wait=false"]).args(whole(name))).map(drop)
    }

    /// Waits for `create`, `delete`, `condition=Ready`, `jsonpath={.status.phase}=Bound`: what `kubectl wait --for`
    /// knows, which watches and does not ask again and again.
    ///
    /// # Errors
    /// When it isn't so within a minute.
    pub fn wait(&self, kind: &str, name: &str, what: &str) -> Result<()> {
        let mut kubectl = self.kubectl();
        kubectl.args(["wait", kind, &format!("--for={what}"), &format!("--timeout={}s", WITHIN.as_secs())]);
        output(kubectl.args(whole(name))).map(drop)
    }

    /// Watches all objects of a kind in all namespaces: those that are there come first, as added.
    ///
    /// # Errors
    /// When kubectl can't be executed.
    pub fn watch(&self, kind: &str) -> Result<Watch> {
        Watch::start(self.kubectl().args(["get", kind, "--all-namespaces"]))
    }

    /// Waits until an object is as it should be, and gives it; one that isn't there yet is waited for.
    ///
    /// # Errors
    /// When it isn't so within a minute: with the object as it was last.
    pub fn until(&self, kind: &str, name: &str, is_so: impl FnMut(&Value) -> bool) -> Result<Value> {
        self.until_within(WITHIN, kind, name, is_so)
    }

    /// The same with another deadline.
    ///
    /// # Errors
    /// When it isn't so in time: with the object as it was last.
    pub fn until_within(
        &self,
        within: Duration,
        kind: &str,
        name: &str,
        mut is_so: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        let mut kubectl = self.kubectl();
        let mut watch = Watch::start(kubectl.args(["get", kind]).args(selected(name)))?;
        let found = watch.until(within, |change| matches!(change, Change::Is(object) if is_so(object)));
        Ok(found.with_context(|| format!("wait for {kind} {name}"))?.into_object())
    }

    /// Waits until an object is gone; one that was never there is.
    ///
    /// # Errors
    /// When it is still there after a minute.
    pub fn until_gone(&self, kind: &str, name: &str) -> Result<()> {
        self.wait(kind, name, "delete")
    }

    /// Waits for an event with this reason about an object, and gives it.
    ///
    /// # Errors
    /// When there is none within a minute.
    pub fn until_event(&self, about: &str, reason: &str) -> Result<Value> {
        let (namespace, name) = split(about);
        let mut selector = format!("involvedObject.name={name},reason={reason}");
        if let Some(namespace) = namespace {
            selector += &format!(",involvedObject.namespace={namespace}");
        }
        let mut kubectl = self.kubectl();
        kubectl.args(["get", "events", "--all-namespaces", "--field-selector", &selector]);
        let found = Watch::start(&mut kubectl)?.until(WITHIN, |change| matches!(change, Change::Is(_)));
        Ok(found.with_context(|| format!("wait for the event {reason} about {about}"))?.into_object())
    }
}

fn split(name: &str) -> (Option<&str>, &str) {
    name.split_once('/').map_or((None, name), |(namespace, name)| (Some(namespace), name))
}

/// The arguments by which kubectl knows one object, which must be there.
fn whole(name: &str) -> Vec<String> {
    let (namespace, name) = split(name);
    let place = namespace.map(|namespace| format!("--namespace={namespace}"));
    place.into_iter().chain(["--".to_owned(), name.to_owned()]).collect()
}

/// The arguments by which kubectl knows one object, which may not be there yet.
fn selected(name: &str) -> Vec<String> {
    let (namespace, name) = split(name);
    let place = namespace.map(|namespace| format!("--namespace={namespace}"));
    place.into_iter().chain([format!("--field-selector=metadata.name={name}")]).collect()
}

/// Runs a command that reads `text`, and gives its standard output.
fn feed(mut command: Command, text: &str) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("execute kubectl")?;
    let mut pipe = child.stdin.take().context("its input is piped")?;
    let text = text.to_owned();
    // On a thread of its own: it may write before it has read everything.
    let writer = std::thread::spawn(move || pipe.write_all(text.as_bytes()));
    let done = child.wait_with_output().context("reap kubectl")?;
    // One that ended early has said why.
    let _ = writer.join();
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "kubectl failed ({}): {}", done.status, errors.trim());
    String::from_utf8(done.stdout).context("kubectl wrote something that isn't UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_slash_lies_in_a_namespace() {
        assert_eq!(whole("a/b"), ["--namespace=a", "--", "b"]);
        assert_eq!(whole("b"), ["--", "b"]);
        assert_eq!(selected("a/b"), ["--namespace=a", "--field-selector=metadata.name=b"]);
    }

    #[test]
    fn what_is_fed_is_read_and_a_failure_tells_its_reason() {
        assert_eq!(feed(Command::new("cat"), &"x".repeat(200_000)).unwrap().len(), 200_000);
        let mut failing = Command::new("sh");
        failing.args(["-c", "echo no such kind >&2; exit 1"]);
        let error = feed(failing, &"x".repeat(200_000)).unwrap_err();
        assert!(error.to_string().contains("no such kind"), "{error}");
    }
}
