//! What comes from outside, by the same checks as the fuzz targets run.

use nodekeel_provisioner::csi::proto::csi;
use nodekeel_provisioner::csi::testing::check_request;
use nodekeel_provisioner::testing::objects::uid;
use nodekeel_provisioner::testing::{check_grave, check_handle, check_quantity};
use proptest::prelude::*;
use prost::Message as _;

/// A fuzzer's work in small: whole texts, and whole ones with bytes changed, removed and put in.
const CASES: u32 = 1024;

/// What may become of a byte: its place, and another one, none, or one more.
type Edit = (prop::sample::Index, Option<u8>, bool);

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    prop::collection::vec(any::<Edit>(), 0..4)
}

fn edited(mut bytes: Vec<u8>, edits: Vec<Edit>) -> Vec<u8> {
    for (place, byte, is_more) in edits {
        let place = place.index(bytes.len() + 1);
        match byte {
            Some(byte) if is_more || place == bytes.len() => bytes.insert(place, byte),
            Some(byte) => bytes[place] = byte,
            None if place < bytes.len() => drop(bytes.remove(place)),
            None => {}
        }
    }
    bytes
}

fn path() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "/var/lib/kubelet/pods/[a-z0-9/.]{1,40}/mount",
        1 => "(/var/lib/kubelet)?[/.a\u{0}\u{fc}]{0,20}",
        1 => ".{0,60}",
    ]
}

fn id() -> impl Strategy<Value = String> {
    prop_oneof![4 => (0u32..9).prop_map(|number| format!("pvc-{}", uid(number))), 1 => ".{0,80}"]
}

prop_compose! {
    fn publish()(
        id in id(),
        path in path(),
        readonly: bool,
        mode in -1..9i32,
        flags in prop::collection::vec("(ro|rw|no)?(suid|dev|exec|,|.{0,3}){0,3}", 0..4),
        group in "(g)?",
        is_mount in prop::bool::weighted(0.9),
    ) -> csi::NodePublishVolumeRequest {
        use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
        let mount = MountVolume { mount_flags: flags, volume_mount_group: group, ..Default::default() };
        let access = if is_mount { AccessType::Mount(mount) } else { AccessType::Block(BlockVolume {}) };
        csi::NodePublishVolumeRequest {
            volume_id: id,
            target_path: path,
            readonly,
            volume_capability: Some(csi::VolumeCapability {
                access_mode: Some(AccessMode { mode }),
                access_type: Some(access),
            }),
            ..Default::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn no_message_is_taken_for_another_request(request in publish(), edits in edits()) {
        check_request(&edited(request.encode_to_vec(), edits));
    }

    #[test]
    fn no_other_message_is_taken_for_another_request(id in id(), path in path(), edits in edits()) {
        let unpublish = csi::NodeUnpublishVolumeRequest { volume_id: id.clone(), target_path: path.clone() };
        check_request(&edited(unpublish.encode_to_vec(), edits.clone()));
        let stats = csi::NodeGetVolumeStatsRequest { volume_id: id, volume_path: path, ..Default::default() };
        check_request(&edited(stats.encode_to_vec(), edits));
    }

    #[test]
    fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_request(&bytes);
        check_grave(&bytes);
        check_handle(&bytes);
        check_quantity(&bytes);
    }

    #[test]
    fn no_name_is_taken_for_another_grave(
        is_bare: bool, number in 0u32..9, project in 0..=u32::MAX, place: u32, edits in edits(),
    ) {
        let bare = if is_bare { "bare-" } else { "" };
        check_grave(&edited(format!("{bare}pvc-{}.{project}.{place}", uid(number)).into_bytes(), edits));
    }

    #[test]
    fn no_handle_is_taken_for_another_volume(number in 0u32..9, edits in edits()) {
        check_handle(&edited(format!("pvc-{}", uid(number)).into_bytes(), edits));
    }

    #[test]
    fn no_quantity_is_taken_for_another(text in "[+-]?[0-9.]{0,25}([numkMGTPE]i?|[eE][+-]?[0-9]{1,3})?", edits in edits()) {
        check_quantity(&edited(text.into_bytes(), edits));
    }
}
