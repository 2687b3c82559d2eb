use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use proptest::prelude::*;
use tonic::Code;

const ID: &str = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
const TARGET: &str = "/k/pods/u/volumes/d/pv/mount";

fn publish_message(mode: Mode, flags: &[&str]) -> csi::NodePublishVolumeRequest {
    let mount_flags = flags.iter().map(ToString::to_string).collect();
    csi::NodePublishVolumeRequest {
        volume_id: ID.into(),
        target_path: TARGET.into(),
        volume_capability: Some(csi::VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(MountVolume { mount_flags, ..Default::default() })),
        }),
        ..Default::default()
    }
}

fn parse_publish(request: &csi::NodePublishVolumeRequest) -> Result<PublishRequest, Status> {
    PublishRequest::parse(request, Path::new("/k"))
}

#[track_caller]
fn rejection_message(change: impl FnOnce(&mut csi::NodePublishVolumeRequest)) -> String {
    let mut request = publish_message(Mode::SingleNodeWriter, &[]);
    change(&mut request);
    let status = parse_publish(&request).expect_err("rejected");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    status.message().to_owned()
}

fn capability_mut(request: &mut csi::NodePublishVolumeRequest) -> &mut csi::VolumeCapability {
    request.volume_capability.as_mut().expect("a capability")
}

#[test]
fn missing_fields_are_named() {
    assert!(rejection_message(|request| request.volume_id.clear()).contains("volume_id is missing"));
    assert!(rejection_message(|request| request.target_path.clear()).contains("target_path is missing"));
    let both = |request: &mut csi::NodePublishVolumeRequest| {
        request.volume_id = "unknown".into();
        request.volume_capability = None;
    };
    assert!(
        rejection_message(both).contains("volume_capability is missing"),
        "also if the volume is unknown"
    );
    assert!(
        rejection_message(|request| request.volume_capability = None)
            .contains("volume_capability is missing")
    );
    assert!(
        rejection_message(|request| capability_mut(request).access_mode = None)
            .contains("access_mode is missing")
    );
    assert!(
        rejection_message(|request| capability_mut(request).access_type = None)
            .contains("access_type is missing")
    );
}

#[test]
fn unsupported_requests_are_rejected() {
    rejection_message(|request| {
        capability_mut(request).access_type = Some(AccessType::Block(BlockVolume {}))
    });
    rejection_message(|request| *request = self::publish_message(Mode::MultiNodeMultiWriter, &[]));
    rejection_message(|request| *request = self::publish_message(Mode::MultiNodeSingleWriter, &[]));
    rejection_message(|request| *request = self::publish_message(Mode::Unknown, &[]));
    rejection_message(|request| capability_mut(request).access_mode = Some(AccessMode { mode: 4711 }));
    rejection_message(|request| {
        let mount = MountVolume { volume_mount_group: "1".into(), ..Default::default() };
        capability_mut(request).access_type = Some(AccessType::Mount(mount));
    });
}

/// The kind and the read-only flag of a volume that is requested in this way, or the rejection.
fn parse_kind_of(kind: Option<&str>, access: AccessType) -> Result<(VolumeKind, bool), Status> {
    let mut request = publish_message(Mode::SingleNodeReaderOnly, &[]);
    request.volume_context.extend(kind.map(|kind| (KIND_ATTRIBUTE.to_owned(), kind.to_owned())));
    capability_mut(&mut request).access_type = Some(access);
    parse_publish(&request).map(|publish| (publish.kind, publish.options.mount_flags().read_only))
}

fn mount_access(fs_type: &str, flag: &str) -> AccessType {
    AccessType::Mount(MountVolume {
        fs_type: fs_type.into(),
        mount_flags: vec![flag.into()],
        ..Default::default()
    })
}

#[test]
fn a_volume_is_requested_as_what_it_is() {
    let block = || AccessType::Block(BlockVolume {});
    for (kind, access) in [
        (None, mount_access("", "")),
        (None, mount_access("btrfs", "dev")),
        (Some("directory"), mount_access("", "")),
        (Some("block"), block()),
        (Some("ext4"), mount_access("ext4", "suid,noexec")),
        (Some("xfs"), mount_access("", "nodev")),
    ] {
        let expected: VolumeKind = kind.unwrap_or("directory").parse().expect("a kind");
        assert_eq!(parse_kind_of(kind, access).expect("accepted"), (expected, true));
    }
    for (kind, access, reason) in [
        (None, block(), "volumeMode Filesystem"),
        (Some("ext4"), block(), "volumeMode Filesystem"),
        (Some("block"), mount_access("", ""), "volumeMode Block"),
        (Some("ext4"), mount_access("xfs", ""), "fs_type"),
        (Some("xfs"), mount_access("", "dev"), "option dev"),
        (Some("zfs"), mount_access("", ""), KIND_ATTRIBUTE),
    ] {
        let status = parse_kind_of(kind, access).expect_err("rejected");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(reason), "{status}");
    }
}

#[test]
fn hostile_handles_and_targets_are_rejected() {
    let long = "x".repeat(4096);
    for id in [".", "..", "../x", "/etc", "a\0b", "pvc-1a2b", &long, &format!("{ID}/.."), &ID.to_uppercase()]
    {
        let mut request = publish_message(Mode::SingleNodeWriter, &[]);
        request.volume_id = id.into();
        let status = parse_publish(&request).expect_err("not a volume");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().len() < 300, "the message must not repeat the whole input: {status}");
    }
    for path in ["x", "/", "/k", "/k/../etc", "/etc", "/k/a\0b", &format!("/k/{long}")] {
        rejection_message(|request| request.target_path = path.into());
    }
}

#[test]
fn access_modes_decide_read_only_and_exclusive() {
    let parsed = |mode| {
        let publish = parse_publish(&publish_message(mode, &[])).expect("a supported mode");
        (publish.options.mount_flags().read_only, publish.is_exclusive)
    };
    assert_eq!(parsed(Mode::SingleNodeWriter), (false, true));
    assert_eq!(parsed(Mode::SingleNodeSingleWriter), (false, true));
    assert_eq!(parsed(Mode::SingleNodeMultiWriter), (false, false));
    assert_eq!(parsed(Mode::SingleNodeReaderOnly), (true, true));
    assert_eq!(parsed(Mode::MultiNodeReaderOnly), (true, false));
}

#[test]
fn the_last_mount_option_wins() {
    let flags = |flags: &[&str]| {
        parse_publish(&publish_message(Mode::SingleNodeWriter, flags)).map(|it| it.options.mount_flags())
    };
    let default = MountRestrictions { no_suid: true, no_dev: true, ..Default::default() };
    assert_eq!(flags(&[]).expect("none"), default);
    assert_eq!(flags(&["ro"]).expect("ro"), MountRestrictions { read_only: true, ..default });
    assert_eq!(
        flags(&["suid,dev", "noexec"]).expect("three"),
        MountRestrictions { no_exec: true, ..Default::default() }
    );
    assert_eq!(flags(&["noexec", "exec", ""]).expect("two"), default);
    assert!(flags(&["ro", "rw"]).expect("read-only wins").read_only);
    assert!(flags(&["bind"]).is_err() && flags(&["remount,rw"]).is_err());
    assert!(flags(&vec!["exec"; 2000]).is_err());
}

#[test]
fn unspecified_options_match_any_mount() {
    let options = |flags: &[&str]| {
        parse_publish(&publish_message(Mode::SingleNodeWriter, flags)).expect("options").options
    };
    let strict = MountRestrictions { no_suid: true, no_dev: true, no_exec: true, read_only: false };
    assert!(options(&[]).match_flags(strict));
    assert!(options(&[]).match_flags(MountRestrictions::default()));
    assert!(!options(&["ro"]).match_flags(strict));
    assert!(!options(&["exec"]).match_flags(strict));
    assert!(options(&["noexec"]).match_flags(strict));
}

#[test]
fn a_path_outside_the_kubelet_directory_has_no_stats() {
    let stats = |path: &str| {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: ID.into(),
            volume_path: path.into(),
            ..Default::default()
        };
        StatsRequest::parse(&request, Path::new("/k")).map_err(|status| status.code())
    };
    assert!(stats(TARGET).is_ok());
    assert_eq!(stats(""), Err(Code::InvalidArgument));
    assert_eq!(stats("/some/where"), Err(Code::NotFound));
    assert_eq!(stats("/k/../x"), Err(Code::NotFound));
}

proptest! {
    #[test]
    fn any_request_is_parsed_or_rejected(
        id in ".{0,60}", path in "(/k/)?.{0,60}", flags in proptest::collection::vec(".{0,20}", 0..4), mode in any::<i32>(),
    ) {
        let mut message = publish_message(Mode::SingleNodeWriter, &[]);
        message.target_path = path;
        if !id.is_empty() { message.volume_id = id }
        message.volume_capability = Some(csi::VolumeCapability {
            access_mode: Some(AccessMode { mode }),
            access_type: Some(AccessType::Mount(MountVolume { mount_flags: flags, ..Default::default() })),
        });
        if let Err(status) = parse_publish(&message) {
            prop_assert!(matches!(status.code(), Code::InvalidArgument | Code::NotFound));
            prop_assert!(status.details().is_empty() && status.message().len() < 512);
        }
    }
}
