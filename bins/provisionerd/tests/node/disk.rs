//! The node's disk for volumes, and the kernel's view of it.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use testbed::GuestNode;

pub(crate) const VOLUMES: &str = "/var/lib/nodekeel";

/// The file system of the volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumeFileSystem {
    Xfs,
    Ext4,
}

impl VolumeFileSystem {
    /// Creates and mounts it, as in the README of `deploy/`.
    pub(crate) fn mount(self, node: &GuestNode) -> Result<()> {
        let make = match self {
            Self::Xfs => "mkfs.xfs -q",
            Self::Ext4 => "mkfs.ext4 -q -O project,quota -E quotatype=prjquota",
        };
        // The first disk holds the rest of /var/lib.
        let script = format!(
            "set -e; modprobe loop; disk=${{NODEKEEL_GUEST_DISKS##*:}}; {make} $disk; mkdir {VOLUMES}; mount -o prjquota $disk {VOLUMES}"
        );
        node.run_shell(&script).map(drop).with_context(|| format!("mount {self:?}"))
    }

    /// The error of a write beyond a limit.
    pub(crate) fn limit_error(self) -> &'static str {
        match self {
            Self::Xfs => "No space left on device",
            Self::Ext4 => "Disk quota exceeded",
        }
    }

    /// The hard limits in the kernel, in KiB and in files.
    pub(crate) fn kernel_limits(self, node: &GuestNode) -> Result<Vec<(u64, u64)>> {
        let foreign = if self == Self::Ext4 { "-f" } else { "" };
        let report = |what: &str| -> Result<Vec<(String, u64)>> {
            let command = format!("report -p -n -N {what}");
            let text = node.run_shell(&format!("xfs_quota {foreign} -x -c '{command}' {VOLUMES}"))?;
            text.lines().filter(|line| line.starts_with('#')).map(parse_hard_limit).collect()
        };
        let (blocks, files) = (report("-b")?, report("-i")?);
        let of =
            |project: &str| files.iter().find(|(other, _)| other == project).map_or(0, |(_, hard)| *hard);
        let both = blocks.iter().map(|(project, hard)| (*hard, of(project)));
        let mut limits: Vec<_> = both.filter(|limits| *limits != (0, 0)).collect();
        limits.sort_unstable();
        Ok(limits)
    }
}

/// A line of `xfs_quota`: `#ID used soft hard warnings [grace]`.
fn parse_hard_limit(line: &str) -> Result<(String, u64)> {
    let mut fields = line.split_whitespace();
    let project = fields.next().unwrap_or_default().to_owned();
    let hard = fields.nth(2).with_context(|| format!("no hard limit in {line:?}"))?;
    Ok((project, hard.parse().with_context(|| format!("read {line:?}"))?))
}

/// The directories of volumes and snapshots, in use, being created, and being erased, and their marks.
pub(crate) fn volume_directories(node: &GuestNode) -> Result<Vec<String>> {
    const PLACES: &str = "volumes/* snapshots/* kinds/* .unpublished/* .new/* .trash/*";
    let text = node.run_shell(&format!("cd {VOLUMES}; ls -d {PLACES} 2>/dev/null; true"))?;
    Ok(text.lines().map(String::from).collect())
}

/// The number of pod mounts of a volume: in the node's mount namespace, and of mount points in provisionerd's. It sees
/// `/var/lib` as a whole, too, so each mount is there twice: once hidden by the kubelet's directory.
pub(crate) fn count_mounts(node: &GuestNode, volume: &str) -> Result<[usize; 2]> {
    let mount_points = |mountinfo: &str| {
        let text = node.run_shell(&format!("cat {mountinfo}"))?;
        let points = text.lines().filter_map(|line| line.split(' ').nth(4));
        Ok::<Vec<String>, anyhow::Error>(
            points.filter(|point| point.ends_with(&format!("/{volume}/mount"))).map(String::from).collect(),
        )
    };
    // The agent is another process of the same program.
    let daemon = r"$(for pid in $(pidof provisionerd); do tr '\0' ' ' </proc/$pid/cmdline | grep -q ' run ' && echo $pid; done)";
    let of_daemon: BTreeSet<_> = mount_points(&format!("/proc/{daemon}/mountinfo"))?.into_iter().collect();
    Ok([mount_points("/proc/self/mountinfo")?.len(), of_daemon.len()])
}
