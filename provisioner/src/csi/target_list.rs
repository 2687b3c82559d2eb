//! The mounts that show a volume.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use nodekeel_localstorage::mount::MountEntry;
use rustix::fs::{AtFlags, StatxFlags};

use super::mounter::{FileId, TargetMount, TargetMountError};
use super::target_path::TargetPath;
use crate::image::loops::{self, LoopDevice};
use crate::store::OpenVolume;

/// The devices that have the file of a volume; none of a directory.
pub(super) fn attached_devices(volume: &OpenVolume) -> io::Result<Vec<LoopDevice>> {
    match volume {
        OpenVolume::Directory(_) => Ok(Vec::new()),
        OpenVolume::Image { file, .. } => loops::find(file.as_fd()),
    }
}

/// The mounts of what is in a directory, without those of the directory itself.
pub(super) fn mounts_below<'a>(
    dir: BorrowedFd<'_>,
    all: &'a [MountEntry],
) -> io::Result<Vec<&'a MountEntry>> {
    let stat = rustix::fs::statx(dir, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    let path = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
    let holder = all.iter().find(|mount| mount.id == stat.stx_mnt_id);
    let below = holder.and_then(|holder| Some(holder.root.join(path.strip_prefix(&holder.target).ok()?)));
    // Without a path, as of a disk that was unmounted, nothing is known of it.
    let (Some(holder), Some(volume)) = (holder, below) else { return Ok(Vec::new()) };
    let is_nested = |mount: &&MountEntry| {
        mount.info.device == holder.info.device && mount.root != volume && mount.root.starts_with(&volume)
    };
    Ok(all.iter().filter(is_nested).collect())
}

/// The targets at which this volume is mounted, sorted. A target that is missing or covered by another
/// mount does not show the volume, nor does a file of it, which some pods mount. A target that cannot be inspected
/// is an error, since it may show it.
pub(super) fn filter_targets(
    volume: FileId,
    targets: impl Iterator<Item = TargetPath>,
    inspect: impl Fn(&TargetPath) -> Result<Option<TargetMount>, TargetMountError>,
) -> Result<Vec<TargetPath>, TargetMountError> {
    let mut found = BTreeSet::new();
    for target in targets {
        let mounted = match inspect(&target) {
            // A link or a file took the place of the target or of a directory above it, so that the volume is
            // not visible there.
            Err(TargetMountError::NotDirectory { .. }) => None,
            result => result?,
        };
        if mounted.is_some_and(|mounted| mounted.volume == volume) {
            found.insert(target);
        }
    }
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::csi::mounter::MountRestrictions;
    use crate::csi::target_state::inspect_error;

    #[test]
    fn a_target_that_cannot_be_inspected_is_an_error() {
        let target =
            |name: &str| TargetPath::try_new(Path::new("/k"), &format!("/k/{name}")).expect("a target");
        let volume = FileId { device: 1, inode: 2 };
        let mounted =
            |inode| TargetMount { volume: FileId { device: 1, inode }, flags: MountRestrictions::default() };
        let seen = |target: &TargetPath| match target.to_string().as_str() {
            "gone" => Ok(None),
            "other" => Ok(Some(mounted(3))),
            "file" => Err(TargetMountError::NotDirectory { path: target.relative_path().to_owned() }),
            "unreadable" => Err(inspect_error(target)(io::Error::from_raw_os_error(libc::EMFILE))),
            _ => Ok(Some(mounted(2))),
        };
        let all = ["b", "gone", "a", "other", "file", "b"].map(target);
        assert_eq!(
            filter_targets(volume, all.into_iter(), seen).expect("all are inspected"),
            ["a", "b"].map(target)
        );
        let result = filter_targets(volume, ["gone", "unreadable"].map(target).into_iter(), seen);
        assert!(
            matches!(&result, Err(TargetMountError::Inspect { target, .. }) if target.to_string() == "unreadable"),
            "{result:?}"
        );
    }
}
