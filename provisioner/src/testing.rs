//! Test doubles: a store and an API server in memory, sample objects, and the conformance suite of
//! [`VolumeStore`](crate::VolumeStore).

mod conformance;
mod fake_api;
mod image_conformance;
mod mem_store;
pub mod objects;
mod snapshot_conformance;

use serde_json::json;

use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::dir_store::{read_kind_mark, read_trash_name};
use crate::quantity;
use crate::volume_move::decide::MoveRecord;
use crate::{VolumeId, VolumeRejection};
use objects::{NODE, sample_identity, sample_volume};

pub use crate::dir_store::fuzz_move_header;
pub use conformance::conformance;
pub use fake_api::{FakeApi, ObjectKind, RequestFault, RequestVerb, ResponseBody};
pub use image_conformance::image_conformance;
pub use mem_store::MemStore;
pub use snapshot_conformance::snapshot_conformance;

/// Checks that a quantity is parsed or rejected, and that the formatted amount parses to the same amount.
pub fn fuzz_quantity(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    if let Ok(amount) = quantity::parse_quantity(&text) {
        assert_eq!(quantity::parse_quantity(&quantity::format_quantity(amount).0), Ok(amount), "{text:?}");
    }
}

/// Checks that a handle is an id that prints as the same text, or is rejected and deletes nothing.
pub fn fuzz_handle(handle: &[u8]) {
    let handle = String::from_utf8_lossy(handle);
    let id = handle.parse::<VolumeId>();
    assert!(id.as_ref().is_ok_and(|id| id.as_str() == handle) || id.is_err(), "{handle:?}");
    let action = plan_volume(
        &sample_identity(NODE),
        &sample_volume(1, json!({ "spec": { "csi": { "volumeHandle": handle } } })),
    );
    match (action, id) {
        (VolumeAction::Delete(deleted), Ok(id)) => assert_eq!(deleted, id),
        (VolumeAction::Reject(VolumeRejection::HandleMismatch { handle }), Ok(id)) => assert_eq!(handle, id),
        (VolumeAction::Reject(VolumeRejection::InvalidHandle { .. }), Err(_)) => {}
        (action, _) => panic!("{handle:?}: {action:?}"),
    }
}

/// Checks that a name in the trash is a trash entry that prints as the same name, or is rejected.
pub fn fuzz_trash_entry(name: &[u8]) {
    let name = String::from_utf8_lossy(name);
    if let Some(entry) = read_trash_name(&name) {
        assert_eq!(entry, name, "the parsed entry has the same name");
        assert!(entry.contains("pvc-") && !entry.contains('/'), "{entry:?}");
    }
}

/// Checks that the mark of a volume's kind is a word that prints as the same mark, or is rejected.
pub fn fuzz_kind_mark(content: &[u8]) {
    if let Some(mark) = read_kind_mark(content) {
        assert_eq!(mark.as_bytes(), content, "the parsed mark has the same content");
        assert_ne!(mark, "directory\n", "directories have none");
    }
}

/// Checks that the record of a move is one that is read as it is written, or is rejected.
pub fn fuzz_move_record(text: &[u8]) {
    if let Ok(record) = MoveRecord::parse(&String::from_utf8_lossy(text)) {
        let written = serde_json::to_string(&record).expect("a record is JSON");
        assert_eq!(MoveRecord::parse(&written).ok(), Some(record), "{written}");
    }
}
