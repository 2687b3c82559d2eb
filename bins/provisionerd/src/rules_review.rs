//! The permissions that the API server lists as granted: one call, in place of one for each permission.

use k8s_openapi::api::authorization::v1::{ResourceRule, SelfSubjectRulesReview, SelfSubjectRulesReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::permissions::{ApiPermission, ScopedPermission};

/// Those permissions that the API server does not list as granted to these credentials, in their namespace or everywhere: all
/// of them if it lists none. It need not list everything, so they may be granted all the same.
pub(crate) async fn find_unlisted(client: &Client, needed: Vec<ScopedPermission>) -> Vec<ScopedPermission> {
    let namespace = Some(client.default_namespace().to_owned());
    let review = SelfSubjectRulesReview {
        spec: SelfSubjectRulesReviewSpec { namespace },
        ..SelfSubjectRulesReview::default()
    };
    let reviewed = Api::all(client.clone()).create(&PostParams::default(), &review).await;
    // Without an answer nothing is listed, and the caller asks for each permission.
    let status = reviewed.ok().and_then(|review: SelfSubjectRulesReview| review.status);
    let rules = status.map(|status| status.resource_rules).unwrap_or_default();
    needed.into_iter().filter(|needed| !is_listed(&rules, needed.permission)).collect()
}

/// True if a rule grants a permission on all objects.
fn is_listed(rules: &[ResourceRule], permission: ApiPermission) -> bool {
    let has = |all: &[String], wanted: &str| all.iter().any(|it| it == wanted || it == "*");
    rules.iter().any(|rule| {
        has(rule.api_groups.as_deref().unwrap_or_default(), permission.group)
            && has(rule.resources.as_deref().unwrap_or_default(), permission.resource)
            && has(&rule.verbs, permission.verb)
            // A rule for named objects does not grant the permission for all.
            && rule.resource_names.as_deref().unwrap_or_default().is_empty()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_permission_is_listed_only_by_a_rule_for_all_objects() {
        let rule = |group: &str, resource: &str, verb: &str, names: &[&str]| {
            let rule = json!({
                "apiGroups": [group], "resources": [resource], "verbs": [verb], "resourceNames": names,
            });
            serde_json::from_value::<ResourceRule>(rule).expect("a rule")
        };
        let wanted = ApiPermission { group: "", resource: "persistentvolumeclaims/status", verb: "patch" };
        for (listed, rules) in [
            (
                true,
                vec![rule("", "nodes", "get", &[]), rule("", "persistentvolumeclaims/status", "patch", &[])],
            ),
            (true, vec![rule("*", "*", "*", &[])]),
            (false, vec![rule("", "persistentvolumeclaims", "patch", &[])]),
            (false, vec![rule("", "persistentvolumeclaims/status", "get", &[])]),
            (false, vec![rule("apps", "persistentvolumeclaims/status", "patch", &[])]),
            (false, vec![rule("", "persistentvolumeclaims/status", "patch", &["one"])]),
            (false, Vec::new()),
        ] {
            assert_eq!(is_listed(&rules, wanted), listed, "{rules:?}");
        }
    }
}
