//! Parses the kubelet's requests: pure functions from messages to values, or to the status that rejects them.

use std::path::Path;

use tonic::Status;

use super::mounter::MountRestrictions;
use super::proto::csi;
use super::target_path::TargetPath;
use crate::claim::mount_option::{MountOption, UnknownMountOption, split_options};
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::name::StoreName;
use crate::objects::{KIND_ATTRIBUTE, STORE_NAME_ATTRIBUTE};

/// Maximum length of a text in bytes. *Source:* CSI specification, "Size Limits".
const MAX_TEXT_BYTES: usize = 128;

/// Maximum length of all mount flags in bytes. *Source:* as above.
const MAX_FLAGS_BYTES: usize = 4096;

/// A request to mount a volume at a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PublishRequest {
    pub(super) id: VolumeId,
    pub(super) target: TargetPath,
    /// The store that the PersistentVolume names, one of several on the node.
    pub(super) store: Option<StoreName>,
    /// The kind in the PersistentVolume; the request asks for the volume in this way.
    pub(super) kind: VolumeKind,
    pub(super) options: MountOptions,
    /// The volume may be published at one target only.
    pub(super) is_exclusive: bool,
}

/// The mount options of a request; `None` if not specified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MountOptions {
    read_only: bool,
    suid: Option<bool>,
    dev: Option<bool>,
    exec: Option<bool>,
}

impl MountOptions {
    /// The flags to mount with. By default, a volume permits executing programs, but neither set-user-ID nor
    /// devices.
    pub(super) fn mount_flags(self) -> MountRestrictions {
        MountRestrictions {
            read_only: self.read_only,
            no_suid: !self.suid.unwrap_or(false),
            no_dev: !self.dev.unwrap_or(false),
            no_exec: !self.exec.unwrap_or(true),
        }
    }

    /// Returns whether a mount with these flags satisfies the request. Unspecified options match either way: the
    /// defaults may have changed since the mount was created.
    pub(super) fn match_flags(self, flags: MountRestrictions) -> bool {
        let is_match =
            |requested: Option<bool>, denied: bool| requested.is_none_or(|allowed| allowed != denied);
        self.read_only == flags.read_only
            && is_match(self.suid, flags.no_suid)
            && is_match(self.dev, flags.no_dev)
            && is_match(self.exec, flags.no_exec)
    }

    fn apply_option(&mut self, flag: &str) -> Result<(), Status> {
        // An unknown option is an error: a pod must not run without a restriction that its volume asks for.
        match flag.parse().map_err(|_| unknown_option(flag))? {
            MountOption::ReadOnly(read_only) => self.read_only |= read_only,
            MountOption::Suid(allowed) => self.suid = Some(allowed),
            MountOption::Dev(allowed) => self.dev = Some(allowed),
            MountOption::Exec(allowed) => self.exec = Some(allowed),
        }
        Ok(())
    }
}

fn unknown_option(flag: &str) -> Status {
    let shown: String = flag.chars().take(MAX_TEXT_BYTES / 4).collect();
    Status::invalid_argument(format!("unknown mount option {shown:?}{}", UnknownMountOption::HINT))
}

impl PublishRequest {
    pub(super) fn parse(request: &csi::NodePublishVolumeRequest, kubelet: &Path) -> Result<Self, Status> {
        // Missing fields are checked first: they are errors with any content of the others.
        require_fields(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let capability =
            request.volume_capability.as_ref().ok_or_else(|| missing_field("volume_capability"))?;
        let id = parse_volume_id(&request.volume_id)?;
        let target = parse_target(kubelet, &request.target_path, "target_path")?;
        let mode = parse_access_mode(capability)?;
        let kind = parse_kind(request)?;
        let store = request.volume_context.get(STORE_NAME_ATTRIBUTE).filter(|name| !name.is_empty());
        let store = store.map(StoreName::try_new).transpose();
        let store = store.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut options = MountOptions::default();
        for flag in requested_options(capability, kind)? {
            options.apply_option(flag)?;
        }
        if options.dev == Some(true) && kind != VolumeKind::Directory {
            return Err(Status::invalid_argument(
                "mount option dev is not supported by strict volumes: remove it from mountOptions of the StorageClass",
            ));
        }
        // Any of the three makes the mount read-only: an option, the pod, or the access mode.
        options.read_only |= request.readonly || mode.is_read_only;
        Ok(Self { id, target, store, kind, options, is_exclusive: mode.is_exclusive })
    }
}

/// A request to unmount a volume from a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnpublishRequest {
    pub(super) id: VolumeId,
    pub(super) target: TargetPath,
}

impl UnpublishRequest {
    pub(super) fn parse(request: &csi::NodeUnpublishVolumeRequest, kubelet: &Path) -> Result<Self, Status> {
        require_fields(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let id = parse_volume_id(&request.volume_id)?;
        Ok(Self { id, target: parse_target(kubelet, &request.target_path, "target_path")? })
    }
}

/// A request for the usage of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StatsRequest {
    pub(super) id: VolumeId,
    pub(super) target: TargetPath,
}

impl StatsRequest {
    pub(super) fn parse(request: &csi::NodeGetVolumeStatsRequest, kubelet: &Path) -> Result<Self, Status> {
        require_fields(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
        let id = parse_volume_id(&request.volume_id)?;
        // The volume cannot be mounted at any other path.
        let target = TargetPath::try_new(kubelet, &request.volume_path).map_err(|error| {
            Status::not_found(format!("volume {id} is not mounted at volume_path: {error}"))
        })?;
        Ok(Self { id, target })
    }
}

fn missing_field(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

/// Rejects a request without one of these fields.
fn require_fields(fields: &[(&str, &str)]) -> Result<(), Status> {
    fields.iter().find(|(_, text)| text.is_empty()).map_or(Ok(()), |(field, _)| Err(missing_field(field)))
}

/// Parses a volume id. Another text cannot name an existing volume.
fn parse_volume_id(text: &str) -> Result<VolumeId, Status> {
    text.parse().map_err(|error| Status::not_found(format!("volume_id: {error}")))
}

fn parse_target(kubelet: &Path, path: &str, field: &str) -> Result<TargetPath, Status> {
    TargetPath::try_new(kubelet, path).map_err(|error| Status::invalid_argument(format!("{field}: {error}")))
}

/// The meaning of an access mode on a node.
struct NodeAccess {
    is_read_only: bool,
    is_exclusive: bool,
}

/// *Source:* CSI specification, `NodePublishVolume`, the table for plugins with `SINGLE_NODE_MULTI_WRITER`.
fn parse_access_mode(capability: &csi::VolumeCapability) -> Result<NodeAccess, Status> {
    use csi::volume_capability::access_mode::Mode;
    let mode =
        capability.access_mode.as_ref().ok_or_else(|| missing_field("volume_capability.access_mode"))?;
    let (is_read_only, is_exclusive) = match mode.mode() {
        Mode::SingleNodeWriter | Mode::SingleNodeSingleWriter => (false, true),
        Mode::SingleNodeReaderOnly => (true, true),
        Mode::SingleNodeMultiWriter => (false, false),
        Mode::MultiNodeReaderOnly => (true, false),
        Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => {
            return Err(Status::invalid_argument(
                "unsupported access mode: a volume is local to one node, so other nodes cannot write to it",
            ));
        }
        Mode::Unknown => return Err(Status::invalid_argument("unknown access mode")),
    };
    Ok(NodeAccess { is_read_only, is_exclusive })
}

/// The kind in the PersistentVolume; none means a directory.
fn parse_kind(request: &csi::NodePublishVolumeRequest) -> Result<VolumeKind, Status> {
    VolumeKind::from_attribute(request.volume_context.get(KIND_ATTRIBUTE).map(String::as_str))
        .map_err(|error| Status::invalid_argument(format!("volume_context {KIND_ATTRIBUTE}: {error}")))
}

/// The requested mount options; rejects a volume of this kind that is requested in another way.
fn requested_options(
    capability: &csi::VolumeCapability,
    kind: VolumeKind,
) -> Result<impl Iterator<Item = &str>, Status> {
    use csi::volume_capability::AccessType;
    let is_block = kind == VolumeKind::Image(ImageFormat::Block);
    let options: &[String] = match capability.access_type.as_ref() {
        None => return Err(missing_field("volume_capability.access_type")),
        Some(AccessType::Block(_)) if is_block => &[],
        Some(AccessType::Block(_)) => {
            return Err(Status::invalid_argument(format!(
                "the volume has a file system ({kind}) and is not a block device: use volumeMode Filesystem"
            )));
        }
        Some(AccessType::Mount(_)) if is_block => {
            return Err(Status::invalid_argument("the volume is a block device: use volumeMode Block"));
        }
        Some(AccessType::Mount(mount)) => check_mount(mount, kind)?,
    };
    Ok(split_options(options))
}

/// The mount options of a volume with a file system.
fn check_mount(mount: &csi::volume_capability::MountVolume, kind: VolumeKind) -> Result<&[String], Status> {
    if !mount.volume_mount_group.is_empty() {
        return Err(Status::invalid_argument("volume_mount_group is not supported"));
    }
    // A directory is on any file system.
    let fs_type = kind.image_format().and_then(ImageFormat::fs_type).unwrap_or(mount.fs_type.as_str());
    if ![fs_type, ""].contains(&mount.fs_type.as_str()) {
        let text = format!("fs_type is not that of the volume: {fs_type}");
        return Err(Status::invalid_argument(text));
    }
    let size: usize = mount.mount_flags.iter().map(String::len).sum();
    if size > MAX_FLAGS_BYTES {
        return Err(Status::invalid_argument(format!("mount_flags exceeds {MAX_FLAGS_BYTES} bytes")));
    }
    Ok(&mount.mount_flags)
}

#[cfg(test)]
#[path = "request_test.rs"]
mod tests;
