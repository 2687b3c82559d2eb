//! Calls of the API by kubectl, as operators make them.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::options::ADMIN;
use super::{Kube, ObjectChange, ObjectWatch};
use crate::command_output;

/// How long the waiting calls wait.
const WITHIN: Duration = Duration::from_secs(60);

/// A name is `NAMESPACE/NAME`, or `NAME` for an object without a namespace.
impl Kube {
    /// A kubectl as the admin.
    pub fn kubectl_command(&self) -> Command {
        self.kubectl_as(ADMIN).expect("the admin is among the users of every control plane")
    }

    /// A kubectl as this user.
    ///
    /// # Errors
    /// The user is unknown.
    pub fn kubectl_as(&self, user: &str) -> Result<Command> {
        let kubeconfig = self.kubeconfig_file(user)?;
        let mut command = self.bare_kubectl();
        command.arg("--kubeconfig").arg(kubeconfig);
        Ok(command)
    }

    /// A kubectl without the caller's preferences and cache.
    pub(super) fn bare_kubectl(&self) -> Command {
        let mut command = Command::new(self.programs.program_path("kubectl"));
        command.env_clear().env("HOME", self.home.path()).env("KUBERC", "off");
        command
    }

    /// Creates or changes the objects of the manifests (YAML or JSON), by server-side apply.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn apply_manifests(&self, manifests: &str) -> Result<()> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["apply", "--server-side", "--force-conflicts", "--filename=-"]);
        run_with_input(kubectl, manifests).map(drop)
    }

    /// Creates the objects of the manifests, which must not exist, and gives them as they were stored: a list
    /// where they are more than one. Only the API server validates them.
    ///
    /// # Errors
    /// The API server rejects them.
    pub fn create_objects(&self, manifests: &str) -> Result<Value> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["create", "--validate=false", "--output=json", "--filename=-"]);
        let text = run_with_input(kubectl, manifests)?;
        serde_json::from_str(&text).context("parse what was created")
    }

    /// An object; `None` where it doesn't exist.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn find_object(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["get", kind, "--ignore-not-found", "--output=json"]);
        let text = command_output(kubectl.args(object_arguments(name)))?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        serde_json::from_str(&text).map(Some).with_context(|| format!("parse {kind} {name}"))
    }

    /// An object.
    ///
    /// # Errors
    /// It doesn't exist, or kubectl fails.
    pub fn get_object(&self, kind: &str, name: &str) -> Result<Value> {
        self.find_object(kind, name)?.with_context(|| format!("{kind} {name} does not exist"))
    }

    /// All objects of a kind, of all namespaces.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn list_objects(&self, kind: &str) -> Result<Vec<Value>> {
        let text =
            command_output(self.kubectl_command().args(["get", kind, "--all-namespaces", "--output=json"]))?;
        let mut list: Value =
            serde_json::from_str(&text).with_context(|| format!("parse the list of {kind}"))?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            _ => anyhow::bail!("parse the list of {kind}: {text}"),
        }
    }

    /// Changes an object by a JSON merge patch.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn patch_object(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        self.patch_with(kind, name, patch, &[])
    }

    /// Changes an object's status by a JSON merge patch.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn patch_status(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        self.patch_with(kind, name, patch, &["--subresource=status"])
    }

    fn patch_with(&self, kind: &str, name: &str, patch: &Value, more: &[&str]) -> Result<()> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["patch", kind, "--type=merge", "--patch", &patch.to_string()]).args(more);
        command_output(kubectl.args(object_arguments(name))).map(drop)
    }

    /// Deletes an object without waiting for its finalizers.
    ///
    /// # Errors
    /// It doesn't exist, or kubectl fails.
    pub fn delete_object(&self, kind: &str, name: &str) -> Result<()> {
        command_output(
            self.kubectl_command().args(["delete", kind, "--wait=false"]).args(object_arguments(name)),
        )
        .map(drop)
    }

    /// Waits for `create`, `delete`, `condition=Ready`, `jsonpath={.status.phase}=Bound`: the conditions of
    /// `kubectl wait --for`, which watches instead of polling.
    ///
    /// # Errors
    /// The condition isn't met within a minute.
    pub fn wait_for_condition(&self, kind: &str, name: &str, what: &str) -> Result<()> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["wait", kind, &format!("--for={what}"), &format!("--timeout={}s", WITHIN.as_secs())]);
        command_output(kubectl.args(object_arguments(name))).map(drop)
    }

    /// Watches all objects of a kind in all namespaces: the existing ones come first, as added.
    ///
    /// # Errors
    /// kubectl can't be executed.
    pub fn watch_objects(&self, kind: &str) -> Result<ObjectWatch> {
        ObjectWatch::start(self.kubectl_command().args(["get", kind, "--all-namespaces"]))
    }

    /// Waits until an object exists and meets the condition, and gives it.
    ///
    /// # Errors
    /// It isn't met within a minute; with the last state of the object.
    pub fn wait_for_object(
        &self,
        kind: &str,
        name: &str,
        is_so: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        self.wait_for_object_within(WITHIN, kind, name, is_so)
    }

    /// The same with another deadline.
    ///
    /// # Errors
    /// It isn't met in time; with the last state of the object.
    pub fn wait_for_object_within(
        &self,
        within: Duration,
        kind: &str,
        name: &str,
        mut is_so: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        let mut kubectl = self.kubectl_command();
        let mut watch = ObjectWatch::start(kubectl.args(["get", kind]).args(selector_arguments(name)))?;
        let found = watch.wait_for_change(
            within,
            |change| matches!(change, ObjectChange::Present(object) if is_so(object)),
        );
        Ok(found.with_context(|| format!("wait for {kind} {name}"))?.into_object())
    }

    /// Waits until an object doesn't exist.
    ///
    /// # Errors
    /// It still exists after a minute.
    pub fn wait_until_gone(&self, kind: &str, name: &str) -> Result<()> {
        self.wait_for_condition(kind, name, "delete")
    }

    /// Waits for an event with this reason about an object, and gives it.
    ///
    /// # Errors
    /// None comes within a minute.
    pub fn wait_for_event(&self, about: &str, reason: &str) -> Result<Value> {
        let (namespace, name) = split_name(about);
        let mut selector = format!("involvedObject.name={name},reason={reason}");
        if let Some(namespace) = namespace {
            selector += &format!(",involvedObject.namespace={namespace}");
        }
        let mut kubectl = self.kubectl_command();
        kubectl.args(["get", "events", "--all-namespaces", "--field-selector", &selector]);
        let found = ObjectWatch::start(&mut kubectl)?
            .wait_for_change(WITHIN, |change| matches!(change, ObjectChange::Present(_)));
        Ok(found.with_context(|| format!("wait for the event {reason} about {about}"))?.into_object())
    }
}

fn split_name(name: &str) -> (Option<&str>, &str) {
    name.split_once('/').map_or((None, name), |(namespace, name)| (Some(namespace), name))
}

/// The arguments that select one object, which must exist.
fn object_arguments(name: &str) -> Vec<String> {
    let (namespace, name) = split_name(name);
    let place = namespace.map(|namespace| format!("--namespace={namespace}"));
    place.into_iter().chain(["--".to_owned(), name.to_owned()]).collect()
}

/// The arguments that select one object, which may not exist yet.
fn selector_arguments(name: &str) -> Vec<String> {
    let (namespace, name) = split_name(name);
    let place = namespace.map(|namespace| format!("--namespace={namespace}"));
    place.into_iter().chain([format!("--field-selector=metadata.name={name}")]).collect()
}

/// Runs a command with this input, and gives its standard output.
fn run_with_input(mut command: Command, text: &str) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("execute kubectl")?;
    let mut pipe = child.stdin.take().context("its input is piped")?;
    let text = text.to_owned();
    // On a separate thread: the command may write before it has read everything.
    let writer = std::thread::spawn(move || pipe.write_all(text.as_bytes()));
    let done = child.wait_with_output().context("reap kubectl")?;
    // A command that ended early has reported why.
    let _ = writer.join();
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "kubectl failed ({}): {}", done.status, errors.trim());
    String::from_utf8(done.stdout).context("parse kubectl's output as UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_reads_its_input_and_a_failure_reports_the_reason() {
        assert_eq!(run_with_input(Command::new("cat"), &"x".repeat(200_000)).unwrap().len(), 200_000);
        let mut failing = Command::new("sh");
        failing.args(["-c", "echo no such kind >&2; exit 1"]);
        let error = run_with_input(failing, &"x".repeat(200_000)).unwrap_err();
        assert!(error.to_string().contains("no such kind"), "{error}");
    }
}
