//! Test doubles for the plugin: a mounter in memory, the conformance suite of
//! [`VolumeMounter`](super::VolumeMounter), a fake kubelet, and a check of arbitrary messages.

mod conformance;
mod fake_kubelet;
mod mem_mounter;

use std::path::{Component, Path};

use prost::Message;
use tonic::{Code, Status};

use crate::csi::proto::csi;
use crate::csi::request::{PublishRequest, StatsRequest, UnpublishRequest};
use crate::csi::target_path::TargetPath;
use crate::id::VolumeId;

pub use conformance::{ConformanceSetup, conformance};
pub use fake_kubelet::{FakeKubelet, KubeletError, connect_socket};
pub use mem_mounter::MemMounter;

const KUBELET: &str = "/var/lib/kubelet";

/// Maximum length of an error message in bytes: it goes into a header, and into the kubelet's log and events.
const MAX_MESSAGE_BYTES: usize = 1024;

/// Checks that a message from the kubelet's socket is parsed or rejected as the sender's error; a parsed
/// request has the same volume and the same path as the message, below the kubelet's directory.
///
/// # Panics
/// If a check fails.
pub fn fuzz_request(message: &[u8]) {
    let kubelet = Path::new(KUBELET);
    if let Ok(request) = csi::NodePublishVolumeRequest::decode(message) {
        let parsed = PublishRequest::parse(&request, kubelet);
        let read_only = request.readonly;
        if let Ok(publish) = &parsed {
            let flags = publish.options.mount_flags();
            assert!(!read_only || flags.read_only, "{request:?}");
            assert!(publish.options.match_flags(flags), "{request:?}: a repeated publish matches its mount");
            let access = request.volume_capability.as_ref().and_then(|wanted| wanted.access_type.as_ref());
            let is_block = matches!(access, Some(csi::volume_capability::AccessType::Block(_)));
            assert_eq!(is_block, publish.kind.volume_mode() == "Block", "{request:?}");
        }
        let parsed = parsed.map(|publish| (publish.id, publish.target));
        check_parsed(parsed, &request.volume_id, &request.target_path);
    }
    if let Ok(request) = csi::NodeUnpublishVolumeRequest::decode(message) {
        let parsed = UnpublishRequest::parse(&request, kubelet).map(|it| (it.id, it.target));
        check_parsed(parsed, &request.volume_id, &request.target_path);
    }
    if let Ok(request) = csi::NodeGetVolumeStatsRequest::decode(message) {
        let parsed = StatsRequest::parse(&request, kubelet).map(|it| (it.id, it.target));
        check_parsed(parsed, &request.volume_id, &request.volume_path);
    }
}

fn check_parsed(parsed: Result<(VolumeId, TargetPath), Status>, id: &str, path: &str) {
    match parsed {
        Ok((parsed_id, target)) => {
            assert_eq!(parsed_id.as_str(), id);
            assert!(
                target.relative_path().components().all(|part| matches!(part, Component::Normal(_))),
                "{target:?}"
            );
            assert_eq!(Path::new(KUBELET).join(target.relative_path()), Path::new(path), "{path:?}");
        }
        Err(status) => {
            assert!(matches!(status.code(), Code::InvalidArgument | Code::NotFound), "{status:?}");
            assert!(status.message().len() <= MAX_MESSAGE_BYTES, "{status:?}");
        }
    }
}
