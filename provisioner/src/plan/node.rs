//! Whether a node takes claims that no scheduler has placed.

use k8s_openapi::api::core::v1::Node;

/// What keeps ordinary pods from a node: a cordon, or a taint by its key. A claim with immediate binding has
/// no pod whose tolerations could decide, so such a node leaves it to others.
pub(crate) fn taint_against_volumes(node: &Node) -> Option<&str> {
    let spec = node.spec.as_ref()?;
    let mut taints = spec.taints.iter().flatten();
    let repels = |effect: &str| matches!(effect, "NoSchedule" | "NoExecute");
    match spec.unschedulable {
        Some(true) => Some("cordoned"),
        _ => taints.find(|taint| repels(&taint.effect)).map(|taint| &*taint.key),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_cordoned_or_tainted_node_takes_no_claim_that_no_scheduler_has_placed() {
        let taint = |effect: &str| json!({ "taints": [{ "key": "k", "effect": effect }] });
        let table = [
            (Value::Null, None),
            (json!({}), None),
            (json!({ "unschedulable": false }), None),
            (json!({ "unschedulable": true }), Some("cordoned")),
            (taint("PreferNoSchedule"), None),
            (taint("NoSchedule"), Some("k")),
            (taint("NoExecute"), Some("k")),
        ];
        for (spec, reason) in table {
            let node: Node = serde_json::from_value(json!({ "spec": spec })).expect("a node");
            assert_eq!(taint_against_volumes(&node), reason, "{spec}");
        }
    }
}
