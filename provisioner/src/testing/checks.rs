//! Checks over arbitrary input: the property tests run them on what proptest makes up, the fuzz targets on what the fuzzer
//! finds. Each panics if something does not hold.

use serde_json::json;

use crate::dir_store::read_grave;
use crate::plan::{VolumeAction, plan_volume};
use crate::quantity;
use crate::testing::objects::{NODE, identity, volume};
use crate::{VolumeId, VolumeRefusal};

/// A quantity is an amount or refused; an amount prints as a quantity of the same amount.
pub fn check_quantity(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    if let Ok(amount) = quantity::parse(&text) {
        assert_eq!(quantity::parse(&quantity::print(amount).0), Ok(amount), "{text:?}");
    }
}

/// A handle is the id that it prints as, or names nothing that would be deleted.
pub fn check_handle(handle: &[u8]) {
    let handle = String::from_utf8_lossy(handle);
    let id = handle.parse::<VolumeId>();
    assert!(id.as_ref().is_ok_and(|id| id.as_str() == handle) || id.is_err(), "{handle:?}");
    let action =
        plan_volume(&identity(NODE), &volume(1, json!({ "spec": { "csi": { "volumeHandle": handle } } })));
    match (action, id) {
        (VolumeAction::Delete(deleted), Ok(id)) => assert_eq!(deleted, id),
        (VolumeAction::Refuse(VolumeRefusal::OtherVolume { handle }), Ok(id)) => assert_eq!(handle, id),
        (VolumeAction::Refuse(VolumeRefusal::Handle { .. }), Err(_)) => {}
        (action, _) => panic!("{handle:?}: {action:?}"),
    }
}

/// A name in the trash is a grave, which has that name and no other, or somebody else's.
pub fn check_grave(name: &[u8]) {
    let name = String::from_utf8_lossy(name);
    if let Some(grave) = read_grave(&name) {
        assert_eq!(grave, name, "what would be removed is what was read");
        assert!(grave.contains("pvc-") && !grave.contains('/'), "{grave:?}");
    }
}
