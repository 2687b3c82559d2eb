use super::*;
use csi::volume_capability::access_mode::Mode as Asked;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use proptest::prelude::*;
use tonic::Code;

const ID: &str = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
const TARGET: &str = "/k/pods/u/volumes/d/pv/mount";

fn request(mode: Asked, flags: &[&str]) -> csi::NodePublishVolumeRequest {
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

fn parse(request: &csi::NodePublishVolumeRequest) -> Result<Publish, Status> {
    Publish::parse(request, Path::new("/k"))
}

#[track_caller]
fn refused(change: impl FnOnce(&mut csi::NodePublishVolumeRequest)) -> String {
    let mut request = request(Asked::SingleNodeWriter, &[]);
    change(&mut request);
    let status = parse(&request).expect_err("refused");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    status.message().to_owned()
}

fn capability(request: &mut csi::NodePublishVolumeRequest) -> &mut csi::VolumeCapability {
    request.volume_capability.as_mut().expect("a capability")
}

#[test]
fn what_is_missing_is_named() {
    assert!(refused(|request| request.volume_id.clear()).contains("volume_id is missing"));
    assert!(refused(|request| request.target_path.clear()).contains("target_path is missing"));
    let both = |request: &mut csi::NodePublishVolumeRequest| {
        request.volume_id = "unknown".into();
        request.volume_capability = None;
    };
    assert!(refused(both).contains("volume_capability is missing"), "also where the volume is unknown");
    assert!(refused(|request| request.volume_capability = None).contains("volume_capability is missing"));
    assert!(refused(|request| capability(request).access_mode = None).contains("access_mode is missing"));
    assert!(refused(|request| capability(request).access_type = None).contains("access_type is missing"));
}

#[test]
fn what_is_not_offered_is_refused() {
    refused(|request| capability(request).access_type = Some(AccessType::Block(BlockVolume {})));
    refused(|request| *request = self::request(Asked::MultiNodeMultiWriter, &[]));
    refused(|request| *request = self::request(Asked::MultiNodeSingleWriter, &[]));
    refused(|request| *request = self::request(Asked::Unknown, &[]));
    refused(|request| capability(request).access_mode = Some(AccessMode { mode: 4711 }));
    refused(|request| {
        let mount = MountVolume { volume_mount_group: "1".into(), ..Default::default() };
        capability(request).access_type = Some(AccessType::Mount(mount));
    });
}

#[test]
fn hostile_handles_and_targets_are_refused() {
    let long = "x".repeat(4096);
    for id in [".", "..", "../x", "/etc", "a\0b", "pvc-1a2b", &long, &format!("{ID}/.."), &ID.to_uppercase()]
    {
        let mut request = request(Asked::SingleNodeWriter, &[]);
        request.volume_id = id.into();
        let status = parse(&request).expect_err("names no volume");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().len() < 300, "an error doesn't repeat what it is sent: {status}");
    }
    for path in ["x", "/", "/k", "/k/../etc", "/etc", "/k/a\0b", &format!("/k/{long}")] {
        refused(|request| request.target_path = path.into());
    }
}

#[test]
fn modes_decide_who_may_write_and_where() {
    let parsed = |mode| {
        let publish = parse(&request(mode, &[])).expect("a mode that is offered");
        (publish.options.flags().read_only, publish.is_exclusive)
    };
    assert_eq!(parsed(Asked::SingleNodeWriter), (false, true));
    assert_eq!(parsed(Asked::SingleNodeSingleWriter), (false, true));
    assert_eq!(parsed(Asked::SingleNodeMultiWriter), (false, false));
    assert_eq!(parsed(Asked::SingleNodeReaderOnly), (true, true));
    assert_eq!(parsed(Asked::MultiNodeReaderOnly), (true, false));
}

#[test]
fn options_are_taken_and_the_last_word_counts() {
    let flags = |flags: &[&str]| parse(&request(Asked::SingleNodeWriter, flags)).map(|it| it.options.flags());
    let default = MountFlags { no_suid: true, no_dev: true, ..Default::default() };
    assert_eq!(flags(&[]).expect("none"), default);
    assert_eq!(flags(&["ro"]).expect("ro"), MountFlags { read_only: true, ..default });
    assert_eq!(
        flags(&["suid,dev", "noexec"]).expect("three"),
        MountFlags { no_exec: true, ..Default::default() }
    );
    assert_eq!(flags(&["noexec", "exec", ""]).expect("two"), default);
    assert!(flags(&["ro", "rw"]).expect("a writer asks, a reader decides").read_only);
    assert!(flags(&["bind"]).is_err() && flags(&["remount,rw"]).is_err());
    assert!(flags(&vec!["exec"; 2000]).is_err());
}

#[test]
fn what_is_not_asked_for_agrees_with_any_mount() {
    let options = |flags: &[&str]| parse(&request(Asked::SingleNodeWriter, flags)).expect("options").options;
    let strict = MountFlags { no_suid: true, no_dev: true, no_exec: true, read_only: false };
    assert!(options(&[]).agree_with(strict));
    assert!(options(&[]).agree_with(MountFlags::default()));
    assert!(!options(&["ro"]).agree_with(strict));
    assert!(!options(&["exec"]).agree_with(strict));
    assert!(options(&["noexec"]).agree_with(strict));
}

#[test]
fn a_path_elsewhere_has_no_stats() {
    let stats = |path: &str| {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: ID.into(),
            volume_path: path.into(),
            ..Default::default()
        };
        Stats::parse(&request, Path::new("/k")).map_err(|status| status.code())
    };
    assert!(stats(TARGET).is_ok());
    assert_eq!(stats(""), Err(Code::InvalidArgument));
    assert_eq!(stats("/some/where"), Err(Code::NotFound));
    assert_eq!(stats("/k/../x"), Err(Code::NotFound));
}

proptest! {
    #[test]
    fn any_request_is_parsed_or_refused(
        id in ".{0,60}", path in "(/k/)?.{0,60}", flags in proptest::collection::vec(".{0,20}", 0..4), mode in any::<i32>(),
    ) {
        let mut asked = request(Asked::SingleNodeWriter, &[]);
        asked.target_path = path;
        if !id.is_empty() { asked.volume_id = id }
        asked.volume_capability = Some(csi::VolumeCapability {
            access_mode: Some(AccessMode { mode }),
            access_type: Some(AccessType::Mount(MountVolume { mount_flags: flags, ..Default::default() })),
        });
        if let Err(status) = parse(&asked) {
            prop_assert!(matches!(status.code(), Code::InvalidArgument | Code::NotFound));
            prop_assert!(status.details().is_empty() && status.message().len() < 512);
        }
    }
}
