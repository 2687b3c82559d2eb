//! The RBAC permissions that the agent needs.

use crate::permissions::{ApiPermission, ScopedPermission};

/// On all objects of the cluster.
const CLUSTER: [(&str, &str, &[&str]); 7] = [
    ("", "persistentvolumeclaims", &["list", "watch", "patch"]),
    ("", "persistentvolumes", &["get", "list", "watch"]),
    ("", "nodes", &["list", "watch"]),
    ("", "pods", &["list", "watch"]),
    ("storage.k8s.io", "csinodes", &["list", "watch"]),
    ("storage.k8s.io", "storageclasses", &["list", "watch"]),
    ("events.k8s.io", "events", &["create"]),
];

/// For `--remove-volumes-of-gone-nodes`, on all objects of the cluster.
const REMOVAL: [(&str, &str, &[&str]); 4] = [
    ("", "persistentvolumeclaims", &["get"]),
    ("", "persistentvolumes", &["patch", "delete"]),
    ("", "nodes", &["get"]),
    ("storage.k8s.io", "csinodes", &["get"]),
];

/// On all Leases of the namespace: those of the agents and of the nodes.
const LEASES: [&str; 4] = ["get", "list", "watch", "create"];

/// On what nodes have published of their capacity.
const CAPACITIES: [&str; 2] = ["list", "delete"];

/// The namespace of the kubelets' Leases.
const NODE_LEASES: &str = "kube-node-lease";

/// All permissions of an agent; the manifests in deploy/agent grant exactly these.
pub(super) fn agent_permissions(namespace: &str, lease: &str, may_remove: bool) -> Vec<ScopedPermission> {
    let scoped = |group, resource, verb, namespace: Option<&str>, name: Option<&str>| ScopedPermission {
        permission: ApiPermission { group, resource, verb },
        namespace: namespace.map(str::to_owned),
        name: name.map(str::to_owned),
    };
    let on_leases =
        |verb, namespace, name| scoped("coordination.k8s.io", "leases", verb, Some(namespace), name);
    let removal = if may_remove { REMOVAL.as_slice() } else { &[] };
    let everywhere = CLUSTER.iter().chain(removal).flat_map(|(group, resource, verbs)| {
        verbs.iter().map(move |verb| scoped(group, resource, verb, None, None))
    });
    let leases = LEASES.iter().map(|verb| on_leases(verb, namespace, None));
    let capacities = CAPACITIES
        .iter()
        .map(|verb| scoped("storage.k8s.io", "csistoragecapacities", verb, Some(namespace), None));
    let mut all: Vec<_> = everywhere.chain(leases).chain(capacities).collect();
    // The one of the agents alone.
    all.push(on_leases("patch", namespace, Some(lease)));
    if may_remove {
        // A Lease of the kubelet shows before a removal that the node still exists.
        all.push(on_leases("get", NODE_LEASES, None));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permissions::tests::assert_granted;

    const RBAC: &str = include_str!("../../../../deploy/agent/rbac.yaml");
    const REMOVE_VOLUMES: &str = include_str!("../../../../deploy/agent/remove-volumes.yaml");

    #[test]
    fn the_manifests_grant_exactly_the_required_permissions() {
        for (manifests, may_remove) in [(&[RBAC][..], false), (&[RBAC, REMOVE_VOLUMES][..], true)] {
            assert_granted(manifests, agent_permissions("nodekeel", "provisionerd-agent", may_remove));
        }
    }
}
