//! Checks over arbitrary input, for property tests and the fuzzer.

use std::path::{Component, Path};

use prost::Message;
use tonic::{Code, Status};

use crate::csi::proto::csi;
use crate::csi::request::{Publish, Stats, Unpublish};
use crate::csi::target::Target;
use crate::id::VolumeId;

const KUBELET: &str = "/var/lib/kubelet";

/// Most bytes that an answer may have: it goes into a header, and into the kubelet's log and events.
const MAX_ANSWER_BYTES: usize = 1024;

/// A message, as it may come over the kubelet's socket, is a request or refused for a reason of its sender's; and what is
/// taken names a volume and a place below the kubelet's directory, as the message does.
///
/// # Panics
/// Where that isn't so.
pub fn check_request(message: &[u8]) {
    let kubelet = Path::new(KUBELET);
    if let Ok(request) = csi::NodePublishVolumeRequest::decode(message) {
        let parsed = Publish::parse(&request, kubelet);
        let read_only = request.readonly;
        if let Ok(publish) = &parsed {
            let flags = publish.options.flags();
            assert!(!read_only || flags.read_only, "{request:?}");
            assert!(publish.options.agree_with(flags), "{request:?}: a repetition finds its own mount");
        }
        let taken = parsed.map(|publish| (publish.id, publish.target));
        check_taken(taken, &request.volume_id, &request.target_path);
    }
    if let Ok(request) = csi::NodeUnpublishVolumeRequest::decode(message) {
        let taken = Unpublish::parse(&request, kubelet).map(|it| (it.id, it.target));
        check_taken(taken, &request.volume_id, &request.target_path);
    }
    if let Ok(request) = csi::NodeGetVolumeStatsRequest::decode(message) {
        let taken = Stats::parse(&request, kubelet).map(|it| (it.id, it.target));
        check_taken(taken, &request.volume_id, &request.volume_path);
    }
}

fn check_taken(taken: Result<(VolumeId, Target), Status>, id: &str, path: &str) {
    match taken {
        Ok((taken, target)) => {
            assert_eq!(taken.as_str(), id);
            assert!(
                target.path().components().all(|part| matches!(part, Component::Normal(_))),
                "{target:?}"
            );
            assert_eq!(Path::new(KUBELET).join(target.path()), Path::new(path), "{path:?}");
        }
        Err(status) => {
            assert!(matches!(status.code(), Code::InvalidArgument | Code::NotFound), "{status:?}");
            assert!(status.message().len() <= MAX_ANSWER_BYTES, "{status:?}");
        }
    }
}
