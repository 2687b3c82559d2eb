//! Changes of JSON objects.

use serde_json::{Value, json};

/// Merges a patch into a value: `null` removes a field. *Source:* RFC 7386.
pub fn merge_patch(value: &mut Value, patch: Value) {
    let Value::Object(fields) = patch else {
        *value = patch;
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (name, patch) in fields {
        match (patch, value.as_object_mut()) {
            (Value::Null, Some(object)) => drop(object.remove(&name)),
            (patch, _) => merge_patch(&mut value[name], patch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_sets_and_removes_fields() {
        let mut value = json!({ "a": { "b": 1, "c": 2 }, "d": [1] });
        merge_patch(&mut value, json!({ "a": { "b": null, "e": { "f": null, "g": 3 } }, "d": { "h": 4 } }));
        assert_eq!(value, json!({ "a": { "c": 2, "e": { "g": 3 } }, "d": { "h": 4 } }));
    }
}
