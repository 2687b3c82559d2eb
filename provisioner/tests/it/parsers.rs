//! Parsers of external input, with the same checks as the fuzz targets.

use nodekeel_provisioner::csi::proto::csi;
use nodekeel_provisioner::csi::testing::fuzz_request;
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::testing::{
    fuzz_handle, fuzz_kind_mark, fuzz_move_header, fuzz_move_record, fuzz_quantity, fuzz_trash_entry,
};
use proptest::prelude::*;
use prost::Message as _;

/// Fewer cases than a fuzzer: valid texts, and valid texts with bytes changed, removed and inserted.
const CASES: u32 = 1024;

/// An edit: a position, and a byte to put or insert there, or none to remove one.
type Edit = (prop::sample::Index, Option<u8>, bool);

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    prop::collection::vec(any::<Edit>(), 0..4)
}

fn apply_edits(mut bytes: Vec<u8>, edits: Vec<Edit>) -> Vec<u8> {
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
    prop_oneof![4 => (0u32..9).prop_map(|number| format!("pvc-{}", sample_uid(number))), 1 => ".{0,80}"]
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
    fn no_edited_publish_message_parses_as_another_request(request in publish(), edits in edits()) {
        fuzz_request(&apply_edits(request.encode_to_vec(), edits));
    }

    #[test]
    fn no_edited_unpublish_or_stats_message_parses_as_another_request(id in id(), path in path(), edits in edits()) {
        let unpublish = csi::NodeUnpublishVolumeRequest { volume_id: id.clone(), target_path: path.clone() };
        fuzz_request(&apply_edits(unpublish.encode_to_vec(), edits.clone()));
        let stats = csi::NodeGetVolumeStatsRequest { volume_id: id, volume_path: path, ..Default::default() };
        fuzz_request(&apply_edits(stats.encode_to_vec(), edits));
    }

    #[test]
    fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        fuzz_request(&bytes);
        fuzz_trash_entry(&bytes);
        fuzz_kind_mark(&bytes);
        fuzz_handle(&bytes);
        fuzz_quantity(&bytes);
        fuzz_move_header(&bytes);
        fuzz_move_record(&bytes);
    }

    #[test]
    fn no_edited_header_or_record_of_a_move_is_read_as_another_one(edits in edits()) {
        let header = &b"{\"format\":1,\"inodes\":7,\"usedBytes\":5,\"usedInodes\":2}\nrest"[..];
        fuzz_move_header(&apply_edits(header.to_vec(), edits.clone()));
        fuzz_move_record(&apply_edits(include_bytes!("../../testdata/golden/move.json").to_vec(), edits));
    }

    #[test]
    fn no_edited_name_parses_as_another_trash_entry(
        is_bare: bool, number in 0u32..9, project in 0..=u32::MAX, place: u32, edits in edits(),
    ) {
        let bare = if is_bare { "bare-" } else { "" };
        fuzz_trash_entry(&apply_edits(format!("{bare}pvc-{}.{project}.{place}", sample_uid(number)).into_bytes(), edits));
    }

    #[test]
    fn no_edited_mark_parses_as_another_kind(word in "block|ext4|xfs|directory", edits in edits()) {
        fuzz_kind_mark(&apply_edits(format!("{word}\n").into_bytes(), edits));
    }

    #[test]
    fn no_edited_handle_parses_as_another_volume(number in 0u32..9, edits in edits()) {
        fuzz_handle(&apply_edits(format!("pvc-{}", sample_uid(number)).into_bytes(), edits));
    }

    #[test]
    fn no_edited_quantity_parses_as_another(text in "[+-]?[0-9.]{0,25}([numkMGTPE]i?|[eE][+-]?[0-9]{1,3})?", edits in edits()) {
        fuzz_quantity(&apply_edits(text.into_bytes(), edits));
    }
}
