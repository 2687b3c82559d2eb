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
    let Some(volume) = state.objects.get(key).cloned() else { return };
    let reference = &volume["spec"]["claimRef"];
    if !reference["uid"].is_string() {
        return;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let claim_key =
        Key { kind: Kind::Claim, namespace: text(&reference["namespace"]), name: text(&reference["name"]) };
    let claim =
        state.objects.get(&claim_key).filter(|claim| claim["metadata"]["uid"] == reference["uid"]).cloned();
    let phase = match &claim {
        None => "Released",
        Some(claim) if claim["spec"]["volumeName"] == json!(key.name) => "Bound",
        // What is going away is bound to nobody.
        Some(_) if volume["metadata"]["deletionTimestamp"].is_string() => {
            return release(state, key, &volume);
        }
        Some(claim) if claim["spec"]["volumeName"].is_string() => "Released",
        Some(_) => "Bound",
    };
    if phase == "Bound" && claim.is_some_and(|claim| claim["status"]["phase"] != "Bound") {
        let bound = json!({ "spec": { "volumeName": key.name }, "status": { "phase": "Bound" } });
        let _ = state.patch(&claim_key, bound);
    }
    if volume["status"]["phase"] != phase {
        let _ = state.patch(key, json!({ "status": { "phase": phase } }));
    }
    if phase != "Bound" {
        release(state, key, &volume);
    }
}

/// Stops protecting a volume that is going away.
fn release(state: &mut State, key: &Key, volume: &Value) {
    let finalizers: Vec<Value> = volume["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    if volume["metadata"]["deletionTimestamp"].is_string() && finalizers.contains(&json!(PROTECTION)) {
        let others: Vec<&Value> = finalizers.iter().filter(|finalizer| **finalizer != PROTECTION).collect();
        let _ = state.patch(key, json!({ "metadata": { "finalizers": others } }));
    }
}
