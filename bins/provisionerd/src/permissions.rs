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

const REQUIRED: [(&str, &str, &[&str]); 12] = [
    ("", "persistentvolumes", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "persistentvolumeclaims", &["get", "list", "watch", "patch"]),
    ("", "persistentvolumeclaims/status", &["patch"]),
    ("", "nodes", &["get", "list", "watch"]),
    ("storage.k8s.io", "storageclasses", &["list", "watch"]),
    ("storage.k8s.io", "csinodes", &["list", "watch"]),
    ("storage.k8s.io", "volumeattributesclasses", &["get"]),
    ("storage.k8s.io", "csidrivers", &["get"]),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents", &["get", "list", "watch", "patch"]),
    ("snapshot.storage.k8s.io", "volumesnapshotcontents/status", &["patch"]),
    ("snapshot.storage.k8s.io", "volumesnapshots", &["get"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// In the namespace of the credentials only.
const REQUIRED_IN_NAMESPACE: [(&str, &str, &[&str]); 2] = [
    ("storage.k8s.io", "csistoragecapacities", &["get", "list", "watch", "create", "patch", "delete"]),
    ("coordination.k8s.io", "leases", &["get", "create", "patch", "delete"]),
];

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
pub(crate) mod tests {
    use serde_json::Value;

    use super::*;

    fn texts(value: &Value) -> Vec<Option<&str>> {
        value.as_array().into_iter().flatten().map(|text| Some(text.as_str().expect("a text"))).collect()
    }

    /// The permissions that the roles of manifests grant, in lines, sorted.
    fn granted_permissions(manifests: &[&str]) -> Vec<String> {
        let documents =
            manifests.iter().flat_map(|yaml| serde_saphyr::from_multiple::<Value>(yaml).expect("YAML"));
        let mut granted = Vec::new();
        for role in documents.filter(|it| matches!(it["kind"].as_str(), Some("Role" | "ClusterRole"))) {
            let namespace = role["metadata"]["namespace"].as_str();
            for rule in role["rules"].as_array().expect("rules") {
                let names = texts(&rule["resourceNames"]);
                let names = if names.is_empty() { vec![None] } else { names };
                for group in texts(&rule["apiGroups"]) {
                    for resource in texts(&rule["resources"]) {
                        for verb in texts(&rule["verbs"]) {
                            let line =
                                |name| format!("{group:?} {resource:?} {verb:?} {namespace:?} {name:?}");
                            granted.extend(names.iter().map(line));
                        }
                    }
                }
            }
        }
        granted.sort();
        granted
    }

    /// Asserts that the roles of manifests grant these permissions, and no others.
    pub(crate) fn assert_granted(manifests: &[&str], needed: impl IntoIterator<Item = ScopedPermission>) {
        let line = |it: ScopedPermission| {
            let ApiPermission { group, resource, verb } = it.permission;
            let [group, resource, verb] = [group, resource, verb].map(Some);
            format!("{group:?} {resource:?} {verb:?} {:?} {:?}", it.namespace, it.name)
        };
        let mut needed: Vec<_> = needed.into_iter().map(line).collect();
        needed.sort();
        assert_eq!(granted_permissions(manifests), needed);
    }

    #[test]
    fn the_manifest_grants_exactly_the_required_permissions() {
        let everywhere = required_permissions().map(ScopedPermission::from);
        let needed = everywhere.chain(namespace_permissions("nodekeel"));
        assert_granted(&[include_str!("../../../deploy/rbac.yaml")], needed);
    }
}
