//! The RBAC permissions that provisionerd needs.

/// A verb on a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ApiPermission {
    pub(crate) group: &'static str,
    /// With the subresource, if any, after a slash.
    pub(crate) resource: &'static str,
    pub(crate) verb: &'static str,
}

/// A permission in one namespace, or on one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScopedPermission {
    pub(crate) permission: ApiPermission,
    /// `None`: in all namespaces.
    pub(crate) namespace: Option<String>,
    /// `None`: on all objects.
    pub(crate) name: Option<String>,
}

impl From<ApiPermission> for ScopedPermission {
    fn from(permission: ApiPermission) -> Self {
        Self { permission, namespace: None, name: None }
    }
}

const REQUIRED: [(&str, &str, &[&str]); 11] = [
    ("", "persistentvolumes", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "persistentvolumeclaims", &["get", "list", "watch", "patch"]),
    ("", "persistentvolumeclaims/status", &["patch"]),
    ("", "nodes", &["get", "list", "watch"]),
    ("storage.k8s.io", "storageclasses", &["list", "watch"]),
    ("storage.k8s.io", "volumeattributesclasses", &["get"]),
    ("storage.k8s.io", "csidrivers", &["get"]),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents", &["get", "list", "watch", "patch"]),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents/status", &["patch"]),
    ("snapshot.storage.k8s.io", "volumesnapshots", &["get"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// In the namespace of the credentials only.
const REQUIRED_IN_NAMESPACE: [(&str, &str, &[&str]); 1] =
    [("storage.k8s.io", "csistoragecapacities", &["get", "list", "watch", "create", "patch", "delete"])];

/// The cluster-wide permissions of the provisioner and `check`; the ClusterRole of deploy/rbac.yaml grants exactly
/// these.
pub(crate) fn required_permissions() -> impl Iterator<Item = ApiPermission> {
    list_permissions(&REQUIRED)
}

/// Those in its namespace; the Role of deploy/rbac.yaml grants exactly these.
pub(crate) fn namespace_permissions(namespace: &str) -> impl Iterator<Item = ScopedPermission> {
    list_permissions(&REQUIRED_IN_NAMESPACE).map(move |permission| ScopedPermission {
        permission,
        namespace: Some(namespace.to_owned()),
        name: None,
    })
}

fn list_permissions(
    required: &'static [(&'static str, &'static str, &'static [&'static str])],
) -> impl Iterator<Item = ApiPermission> {
    required.iter().flat_map(|(group, resource, verbs)| {
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
        assert_same_permissions(&documents, "ClusterRole", required_permissions().collect());
        let in_namespace = namespace_permissions("nodekeel").map(|scoped| scoped.permission);
        assert_same_permissions(&documents, "Role", in_namespace.collect());
    }

    fn assert_same_permissions(documents: &[Value], kind: &str, needed: Vec<ApiPermission>) {
        let is_of_daemon =
            |document: &&Value| document["kind"] == kind && document["metadata"]["name"] == "provisionerd";
        let role = documents.iter().find(is_of_daemon).expect("a role");
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
        let mut needed: Vec<_> = needed
            .into_iter()
            .map(|it| (it.group.to_owned(), it.resource.to_owned(), it.verb.to_owned()))
            .collect();
        granted.sort();
        needed.sort();
        assert_eq!(granted, needed);
    }
}
