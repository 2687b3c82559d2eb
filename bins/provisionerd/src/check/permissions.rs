//! The permissions that `run` needs, as the API server grants them.

use anyhow::{Result, anyhow};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::check::CheckFinding;
use crate::permissions::{self, ApiPermission, ScopedPermission};
use crate::rules_review;

/// The manifest that grants the permissions.
const RBAC_MANIFEST: &str = "deploy/rbac.yaml";

/// All permissions that the provisioner needs.
fn needed_permissions(client: &Client) -> Vec<ScopedPermission> {
    let needed = permissions::required_permissions().map(ScopedPermission::from);
    needed.chain(permissions::namespace_permissions(client.default_namespace())).collect()
}

/// Checks each permission with a call.
pub(super) async fn check_each_permission(client: &Client) -> CheckFinding {
    check_scoped_permissions(client, needed_permissions(client), RBAC_MANIFEST).await
}

/// Checks the permissions with one call where all are listed: each node does so at each start.
pub(crate) async fn check_permissions(client: &Client) -> CheckFinding {
    let unlisted = rules_review::find_unlisted(client, needed_permissions(client)).await;
    check_scoped_permissions(client, unlisted, RBAC_MANIFEST).await
}

/// Checks that the API server grants permissions; `manifest` is what grants them.
pub(crate) async fn check_scoped_permissions(
    client: &Client,
    needed: impl IntoIterator<Item = ScopedPermission>,
    manifest: &str,
) -> CheckFinding {
    let mut missing = Vec::new();
    for right in needed {
        match is_allowed(client, &right).await {
            Ok(true) => {}
            Ok(false) => missing.push(right.permission),
            // An API server that does not answer for one permission hardly answers for the others.
            Err(error) => {
                return CheckFinding::Failure(error.context("can't query permissions at the API server"));
            }
        }
    }
    if missing.is_empty() {
        CheckFinding::Pass("the API server grants all permissions needed".into())
    } else {
        CheckFinding::Failure(missing_permissions(&missing, manifest))
    }
}

fn missing_permissions(missing: &[ApiPermission], manifest: &str) -> anyhow::Error {
    // Neighbors in the list that concern one resource are reported together.
    let of_a_kind = missing.chunk_by(|a, b| (a.group, a.resource) == (b.group, b.resource));
    let kinds = of_a_kind.map(|rights| {
        let verbs: Vec<_> = rights.iter().map(|right| right.verb).collect();
        let group = if rights[0].group.is_empty() { "core" } else { rights[0].group };
        format!("{} on {} ({group})", verbs.join(", "), rights[0].resource)
    });
    let kinds = kinds.collect::<Vec<_>>().join("; ");
    anyhow!("missing permissions: {kinds}; apply {manifest}, or grant them")
}

async fn is_allowed(client: &Client, right: &ScopedPermission) -> Result<bool> {
    let ApiPermission { group, resource, verb } = right.permission;
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.into())),
        None => (resource, None),
    };
    let resource_attributes = ResourceAttributes {
        group: Some(group.into()),
        resource: Some(resource.into()),
        subresource,
        verb: Some(verb.into()),
        namespace: right.namespace.clone(),
        name: right.name.clone(),
        ..Default::default()
    };
    let spec =
        SelfSubjectAccessReviewSpec { resource_attributes: Some(resource_attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    // The API server answers a review at its creation, and does not store it.
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_permissions_are_one_line_with_a_hint() {
        let right = |resource, verb| ApiPermission { group: "", resource, verb };
        let missing =
            [right("persistentvolumes", "get"), right("persistentvolumes", "delete"), right("nodes", "get")];
        let text = missing_permissions(&missing, "deploy/rbac.yaml").to_string();
        assert!(text.contains("get, delete on persistentvolumes (core); get on nodes (core)"), "{text}");
        assert!(text.contains("deploy/rbac.yaml"), "{text}");
    }
}
