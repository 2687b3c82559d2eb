//! What has to be allowed at the API server.

/// A verb on a kind of object, cluster-wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Right {
    pub(crate) group: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) verb: &'static str,
}

const NEEDED: [(&str, &str, &[&str]); 6] = [
    ("", "persistentvolumes", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "persistentvolumeclaims", &["get", "list", "watch", "patch"]),
    ("", "nodes", &["get"]),
    ("storage.k8s.io", "storageclasses", &["list", "watch"]),
    ("storage.k8s.io", "csidrivers", &["get"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// Everything that the provisioner and `check` call; deploy/rbac.yaml grants exactly this.
pub(crate) fn needed() -> impl Iterator<Item = Right> {
    NEEDED
        .into_iter()
        .flat_map(|(group, resource, verbs)| verbs.iter().map(move |verb| Right { group, resource, verb }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn the_manifest_grants_what_is_needed_and_nothing_else() {
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
        let mut needed: Vec<_> =
            needed().map(|it| (it.group.to_owned(), it.resource.to_owned(), it.verb.to_owned())).collect();
        granted.sort();
        needed.sort();
        assert_eq!(granted, needed);
    }
}
