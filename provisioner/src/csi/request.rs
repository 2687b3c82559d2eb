//! What the kubelet asks for, parsed: pure functions from messages to values, or to the status that refuses them.

use std::path::Path;

use tonic::Status;

use super::mounts::MountFlags;
use super::proto::csi;
use super::target::Target;
use crate::id::VolumeId;

/// Most bytes of an ordinary text. *Source:* CSI specification, "Size Limits".
const MAX_TEXT_BYTES: usize = 128;

/// Most bytes of all mount flags. *Source:* as above.
const MAX_FLAGS_BYTES: usize = 4096;

/// A volume is wanted at a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Publish {
    pub(super) id: VolumeId,
    pub(super) target: Target,
    pub(super) options: MountOptions,
    /// It may be published at one target only.
    pub(super) is_exclusive: bool,
}

/// What the request says of a mount. What it doesn't say is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MountOptions {
    read_only: bool,
    suid: Option<bool>,
    dev: Option<bool>,
    exec: Option<bool>,
}

impl MountOptions {
    /// The flags to mount with. Unasked, a volume may execute programs, and nothing that would need trust.
    pub(super) fn flags(self) -> MountFlags {
        MountFlags {
            read_only: self.read_only,
            no_suid: !self.suid.unwrap_or(false),
            no_dev: !self.dev.unwrap_or(false),
            no_exec: !self.exec.unwrap_or(true),
        }
    }

    /// Whether a mount with these flags is what is asked for. What isn't asked for explicitly may be either way: the
    /// defaults may have changed since it was made.
    pub(super) fn agree_with(self, flags: MountFlags) -> bool {
        let agrees = |asked: Option<bool>, denied: bool| asked.is_none_or(|allowed| allowed != denied);
        self.read_only == flags.read_only
            && agrees(self.suid, flags.no_suid)
            && agrees(self.dev, flags.no_dev)
            && agrees(self.exec, flags.no_exec)
    }

    fn take(&mut self, flag: &str) -> Result<(), Status> {
        match flag {
            "ro" => self.read_only = true,
            "rw" => {}
            "suid" | "nosuid" => self.suid = Some(flag == "suid"),
            "dev" | "nodev" => self.dev = Some(flag == "dev"),
            "exec" | "noexec" => self.exec = Some(flag == "exec"),
            _ => return Err(unknown_flag(flag)),
        }
        Ok(())
    }
}

fn unknown_flag(flag: &str) -> Status {
    let shown: String = flag.chars().take(MAX_TEXT_BYTES / 4).collect();
    Status::invalid_argument(format!(
        "mount option {shown:?} is not known; use ro, rw, suid, nosuid, dev, nodev, exec and noexec"
    ))
}

impl Publish {
    pub(super) fn parse(request: &csi::NodePublishVolumeRequest, kubelet: &Path) -> Result<Self, Status> {
        // What is missing comes first: it is wrong whatever the rest is.
        present(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let capability = request.volume_capability.as_ref().ok_or_else(|| missing("volume_capability"))?;
        let id = volume_id(&request.volume_id)?;
        let target = target(kubelet, &request.target_path, "target_path")?;
        let mode = access_mode(capability)?;
        let mut options = MountOptions::default();
        for flag in flags(capability)? {
            options.take(flag)?;
        }
        options.read_only |= request.readonly || mode.is_read_only;
        Ok(Self { id, target, options, is_exclusive: mode.is_exclusive })
    }
}

/// A volume isn't wanted at a target any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unpublish {
    pub(super) id: VolumeId,
    pub(super) target: Target,
}

impl Unpublish {
    pub(super) fn parse(request: &csi::NodeUnpublishVolumeRequest, kubelet: &Path) -> Result<Self, Status> {
        present(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let id = volume_id(&request.volume_id)?;
        Ok(Self { id, target: target(kubelet, &request.target_path, "target_path")? })
    }
}

/// Somebody wants to know how full a volume is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stats {
    pub(super) id: VolumeId,
    pub(super) target: Target,
}

impl Stats {
    pub(super) fn parse(request: &csi::NodeGetVolumeStatsRequest, kubelet: &Path) -> Result<Self, Status> {
        present(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
        let id = volume_id(&request.volume_id)?;
        // Any other path is one at which the volume isn't.
        let target = Target::try_new(kubelet, &request.volume_path)
            .map_err(|error| Status::not_found(format!("volume {id} is not at volume_path: {error}")))?;
        Ok(Self { id, target })
    }
}

fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

/// Refuses a request that lacks one of these fields.
fn present(fields: &[(&str, &str)]) -> Result<(), Status> {
    fields.iter().find(|(_, text)| text.is_empty()).map_or(Ok(()), |(field, _)| Err(missing(field)))
}

/// A text that can't be an id names no volume.
fn volume_id(text: &str) -> Result<VolumeId, Status> {
    text.parse().map_err(|error| Status::not_found(format!("volume_id: {error}")))
}

fn target(kubelet: &Path, path: &str, field: &str) -> Result<Target, Status> {
    Target::try_new(kubelet, path).map_err(|error| Status::invalid_argument(format!("{field}: {error}")))
}

/// What an access mode means on a node.
struct Mode {
    is_read_only: bool,
    is_exclusive: bool,
}

/// *Source:* CSI specification, `NodePublishVolume`, the table for plugins with `SINGLE_NODE_MULTI_WRITER`.
fn access_mode(capability: &csi::VolumeCapability) -> Result<Mode, Status> {
    use csi::volume_capability::access_mode::Mode as Asked;
    let mode = capability.access_mode.as_ref().ok_or_else(|| missing("volume_capability.access_mode"))?;
    let (is_read_only, is_exclusive) = match mode.mode() {
        Asked::SingleNodeWriter | Asked::SingleNodeSingleWriter => (false, true),
        Asked::SingleNodeReaderOnly => (true, true),
        Asked::SingleNodeMultiWriter => (false, false),
        Asked::MultiNodeReaderOnly => (true, false),
        Asked::MultiNodeSingleWriter | Asked::MultiNodeMultiWriter => {
            return Err(Status::invalid_argument(
                "a volume is on one node: nobody can write to it from others",
            ));
        }
        Asked::Unknown => return Err(Status::invalid_argument("the access mode is unknown")),
    };
    Ok(Mode { is_read_only, is_exclusive })
}

/// The mount options of a volume that is asked for as a file system.
fn flags(capability: &csi::VolumeCapability) -> Result<impl Iterator<Item = &str>, Status> {
    use csi::volume_capability::AccessType;
    let mount = match capability.access_type.as_ref() {
        None => return Err(missing("volume_capability.access_type")),
        Some(AccessType::Block(_)) => {
            return Err(Status::invalid_argument("block volumes are not offered; use volumeMode Filesystem"));
        }
        Some(AccessType::Mount(mount)) => mount,
    };
    if !mount.volume_mount_group.is_empty() {
        return Err(Status::invalid_argument("volume_mount_group needs a capability that is not offered"));
    }
    let size: usize = mount.mount_flags.iter().map(String::len).sum();
    if size > MAX_FLAGS_BYTES {
        return Err(Status::invalid_argument(format!("mount_flags has more than {MAX_FLAGS_BYTES} bytes")));
    }
    // Each is an option, or, as in fstab, several.
    Ok(mount.mount_flags.iter().flat_map(|flags| flags.split(',')).filter(|flag| !flag.is_empty()))
}

#[cfg(test)]
#[path = "request_test.rs"]
mod tests;
