//! kubectl as a service account, and the admission policies that reject what it tries.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testbed::{Kube, command_output, wait_until};

use crate::cluster::TIMEOUT;

/// kubectl as a service account, with the token of a pod on this node; "" is a token without a node.
pub(crate) fn kubectl_as(kube: &Kube, account: &str, node: &str) -> Command {
    let mut kubectl = kube.kubectl_command();
    kubectl.args(["--as", &format!("system:serviceaccount:nodekeel:{account}")]);
    kubectl.args(["--as-group=system:serviceaccounts", "--as-group=system:authenticated"]);
    if !node.is_empty() {
        kubectl.arg(format!("--as-user-extra=authentication.kubernetes.io/node-name={node}"));
    }
    kubectl
}

/// Patches an object, or a subresource that is not "".
pub(crate) fn patch(
    mut kubectl: Command,
    kind: &str,
    name: &str,
    subresource: &str,
    patch: &Value,
) -> Result<String> {
    kubectl.args(["patch", kind, name, "--type=merge", "--patch", &patch.to_string()]);
    if !subresource.is_empty() {
        kubectl.arg(format!("--subresource={subresource}"));
    }
    command_output(&mut kubectl)
}

pub(crate) fn delete_volume(mut kubectl: Command, name: &str) -> Result<String> {
    command_output(kubectl.args(["delete", "persistentvolume", name, "--wait=false"]))
}

/// Waits until the API server has observed a policy, and what its parameters are.
pub(crate) fn wait_until_rejected(tried: impl Fn() -> Result<String>, why: &str) {
    let is_in_force = || {
        let message = format!("{:#}", tried().err().context("it is accepted")?);
        ensure!(message.contains(why), "{message}");
        Ok(())
    };
    wait_until(TIMEOUT, why, is_in_force).expect("the policy is in force");
}

/// Asserts that a policy rejects something, for this reason.
pub(crate) fn assert_rejected(tried: Result<String>, policy: &str, why: &str) {
    let message = format!("{:#}", tried.expect_err(why));
    assert!(message.contains(policy) && message.contains(why), "{why}: {message}");
}

/// Asserts that the controller manager finds no defect in the expressions of policies.
pub(crate) fn assert_type_checked(kube: &Kube, policies: &[&str]) {
    for policy in policies {
        let is_checked = |policy: &Value| !policy["status"]["observedGeneration"].is_null();
        let checked = kube.wait_for_object("validatingadmissionpolicy", policy, is_checked);
        let checked = checked.expect("the controller manager has checked the policy");
        let warnings = &checked["status"]["typeChecking"]["expressionWarnings"];
        assert!(warnings.is_null(), "{policy}: {warnings}");
    }
}
