//! A fake of a cluster's volume controllers.

use serde_json::{Value, json};

use super::server_state::{ObjectKey, ObjectKind, PROTECTION, ServerState};

/// Binds and releases all volumes.
pub(super) fn run_controllers(state: &mut ServerState) {
    let volumes: Vec<ObjectKey> =
        state.objects.keys().filter(|key| key.kind == ObjectKind::Volume).cloned().collect();
    volumes.iter().for_each(|key| sync_volume(state, key));
}

fn sync_volume(state: &mut ServerState, key: &ObjectKey) {
    // Without a copy: this runs for every volume after every change.
    let Some(volume) = state.objects.get(key) else { return };
    let reference = &volume["spec"]["claimRef"];
    if !reference["uid"].is_string() {
        return;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let claim_key = ObjectKey {
        kind: ObjectKind::Claim,
        namespace: text(&reference["namespace"]),
        name: text(&reference["name"]),
    };
    // By UID: a claim with the same name that was created later is another one.
    let claim = state.objects.get(&claim_key).filter(|claim| claim["metadata"]["uid"] == reference["uid"]);
    let is_going = volume["metadata"]["deletionTimestamp"].is_string();
    let phase = match claim.map(|claim| &claim["spec"]["volumeName"]) {
        None => Some("Released"),
        Some(name) if *name == key.name.as_str() => Some("Bound"),
        // A volume being deleted is not bound.
        Some(_) if is_going => None,
        Some(name) if name.is_string() => Some("Released"),
        Some(_) => Some("Bound"),
    };
    let is_unbound = claim.is_some_and(|claim| claim["status"]["phase"] != "Bound");
    let is_told = phase.is_none_or(|phase| volume["status"]["phase"] == phase);
    if phase == Some("Bound") && is_unbound {
        let spec = &volume["spec"];
        let bound = json!({
            "spec": { "volumeName": key.name },
            "status": {
                "phase": "Bound",
                "capacity": spec["capacity"],
                "currentVolumeAttributesClassName": spec["volumeAttributesClassName"],
            },
        });
        let _ = state.patch_object(&claim_key, bound);
    }
    if !is_told {
        let _ = state.patch_object(key, json!({ "status": { "phase": phase } }));
    }
    if is_going && phase != Some("Bound") {
        remove_protection(state, key);
    }
}

/// Removes the protection finalizer of a volume being deleted.
fn remove_protection(state: &mut ServerState, key: &ObjectKey) {
    let finalizers = state.objects.get(key).and_then(|volume| volume["metadata"]["finalizers"].as_array());
    let finalizers = finalizers.cloned().unwrap_or_default();
    if finalizers.contains(&json!(PROTECTION)) {
        let others: Vec<&Value> = finalizers.iter().filter(|finalizer| **finalizer != PROTECTION).collect();
        let _ = state.patch_object(key, json!({ "metadata": { "finalizers": others } }));
    }
}
