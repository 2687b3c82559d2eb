//! What the volume controllers of a cluster do.

use serde_json::{Value, json};

use super::state::{Key, Kind, State};

/// Keeps the object of a volume in use. *Source:* Kubernetes, storage object in use protection.
const PROTECTION: &str = "kubernetes.io/pv-protection";

/// Binds and releases, until nothing changes.
pub(super) fn control(state: &mut State) {
    let volumes: Vec<Key> = state.objects.keys().filter(|key| key.kind == Kind::Volume).cloned().collect();
    volumes.iter().for_each(|key| control_volume(state, key));
}

fn control_volume(state: &mut State, key: &Key) {
    // Looked at without a copy: this is done for every volume after every change.
    let Some(volume) = state.objects.get(key) else { return };
    let reference = &volume["spec"]["claimRef"];
    if !reference["uid"].is_string() {
        return;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let claim_key =
        Key { kind: Kind::Claim, namespace: text(&reference["namespace"]), name: text(&reference["name"]) };
    let claim = state.objects.get(&claim_key).filter(|claim| claim["metadata"]["uid"] == reference["uid"]);
    let is_going = volume["metadata"]["deletionTimestamp"].is_string();
    let phase = match claim.map(|claim| &claim["spec"]["volumeName"]) {
        None => Some("Released"),
        Some(name) if *name == key.name.as_str() => Some("Bound"),
        // What is going away is bound to nobody.
        Some(_) if is_going => None,
        Some(name) if name.is_string() => Some("Released"),
        Some(_) => Some("Bound"),
    };
    let is_unbound = claim.is_some_and(|claim| claim["status"]["phase"] != "Bound");
    let is_told = phase.is_none_or(|phase| volume["status"]["phase"] == phase);
    if phase == Some("Bound") && is_unbound {
        let bound = json!({ "spec": { "volumeName": key.name }, "status": { "phase": "Bound" } });
        let _ = state.patch(&claim_key, bound);
    }
    if !is_told {
        let _ = state.patch(key, json!({ "status": { "phase": phase } }));
    }
    if is_going && phase != Some("Bound") {
        release(state, key);
    }
}

/// Stops protecting a volume that is going away.
fn release(state: &mut State, key: &Key) {
    let finalizers = state.objects.get(key).and_then(|volume| volume["metadata"]["finalizers"].as_array());
    let finalizers = finalizers.cloned().unwrap_or_default();
    if finalizers.contains(&json!(PROTECTION)) {
        let others: Vec<&Value> = finalizers.iter().filter(|finalizer| **finalizer != PROTECTION).collect();
        let _ = state.patch(key, json!({ "metadata": { "finalizers": others } }));
    }
}
