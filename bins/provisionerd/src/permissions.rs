//! The RBAC permissions that provisionerd needs.

/// A verb on a resource, cluster-wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ApiPermission {
    pub(crate) group: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) verb: &'static str,
}

const REQUIRED: [(&str, &str, &[&str]); 6] = [
    ("", "persistentvolumes", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "persistentvolumeclaims", &["get", "list", "watch", "patch"]),
    ("", "nodes", &["get"]),
    ("storage.k8s.io", "storageclasses", &["list", "watch"]),
    ("storage.k8s.io", "csidrivers", &["get"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// All permissions of the provisioner and `check`; deploy/rbac.yaml grants exactly these.
pub(crate) fn required_permissions() -> impl Iterator<Item = ApiPermission> {
    REQUIRED.into_iter().flat_map(|(group, resource, verbs)| {
        verbs.iter().map(move |verb| ApiPermission { group, resource, verb })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn the_manifest_grants_exactly_the_required_permissions() {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(include_str!("../../../deploy/rbac.yaml")).expect("YAML");
        let role = documents.iter().find(|document| document["kind"] == "ClusterRole").expect("a role");
        let texts = |value: &Value| -> Vec<String> {
            value
                .as_array()
                .expect("a list")
                .iter()
                .map(|text| text.as_str().expect("a text").to_owned())
                .collect()
        };
        let mut granted = Vec::new();
        for rule in role["rules"].as_array().expect("rules") {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    granted.extend(
                        texts(&rule["verbs"]).into_iter().map(|verb| (group.clone(), resource.clone(), verb)),
                    );
                }
            }
        }
        let mut needed: Vec<_> = required_permissions()
            .map(|it| (it.group.to_owned(), it.resource.to_owned(), it.verb.to_owned()))
            .collect();
        granted.sort();
        needed.sort();
        assert_eq!(granted, needed);
    }
}
