//! What moves, by what is there: pure.

use std::fmt;

use crate::layout::VOLUME_DIR;

/// A directory of the former layout, and where it is now; both relative to the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayoutMove {
    pub(super) from: &'static str,
    pub(super) to: &'static str,
}

/// The directory of the cluster in the former layout: nothing stays in it.
pub(super) const FORMER_CLUSTER: &str = "cluster";

pub(super) const MOVES: [LayoutMove; 6] = [
    LayoutMove { from: "cluster/state", to: "esp" },
    LayoutMove { from: "cluster/names", to: "names" },
    LayoutMove { from: "cluster/volume", to: "data/cluster" },
    LayoutMove { from: "etcd", to: "data/etcd" },
    LayoutMove { from: "containerd", to: "data/containerd" },
    LayoutMove { from: "volumes", to: "data/volumes" },
];

impl LayoutMove {
    pub(super) fn is_from_cluster(self) -> bool {
        self.from.starts_with(FORMER_CLUSTER)
    }

    pub(super) fn is_to_volume(self) -> bool {
        self.to.strip_prefix(VOLUME_DIR).is_some_and(|rest| rest.starts_with('/'))
    }
}

impl fmt::Display for LayoutMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// What has a name in the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FoundEntry {
    Absent,
    EmptyDir,
    FullDir,
    MountPoint,
}

/// Why a directory is not moved. Nothing is moved then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveConflict {
    /// Both exist, with data.
    BothExist(LayoutMove),
    /// A rename can't move a mount point, or move to another file system.
    MountPoint(LayoutMove),
    /// The data volume is not the directory below the data directory.
    OtherVolume(LayoutMove),
}

/// Decides what moves. `volume` is the directory of the volume.
pub(super) fn plan_moves(
    found: &[(LayoutMove, FoundEntry, FoundEntry)],
    volume: FoundEntry,
    is_other_volume: bool,
) -> Result<Vec<LayoutMove>, MoveConflict> {
    use FoundEntry::{Absent, EmptyDir, FullDir, MountPoint};
    let mut moves = Vec::new();
    for &(rule, from, to) in found {
        match (from, to) {
            // An empty directory has no data. What is mounted at the new place was moved there.
            (Absent, _) | (EmptyDir, FullDir | MountPoint | EmptyDir) => {}
            _ if rule.is_to_volume() && is_other_volume => match from {
                EmptyDir => {}
                _ => return Err(MoveConflict::OtherVolume(rule)),
            },
            (MountPoint, _) | (_, MountPoint) => return Err(MoveConflict::MountPoint(rule)),
            (FullDir, FullDir) => return Err(MoveConflict::BothExist(rule)),
            _ if rule.is_to_volume() && volume == MountPoint => return Err(MoveConflict::MountPoint(rule)),
            (EmptyDir | FullDir, Absent) | (FullDir, EmptyDir) => moves.push(rule),
        }
    }
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_moves_and_never_onto_data_or_across_a_mount() {
        use FoundEntry::{Absent, EmptyDir, FullDir, MountPoint};
        let rule = MOVES[3];
        assert!(rule.is_to_volume());
        let plan = |from, to, volume| plan_moves(&[(rule, from, to)], volume, false);
        for volume in [Absent, EmptyDir, FullDir, MountPoint] {
            for to in [Absent, EmptyDir, FullDir, MountPoint] {
                assert_eq!(plan(Absent, to, volume), Ok(vec![]), "{to:?}");
                assert_eq!(plan(MountPoint, to, volume), Err(MoveConflict::MountPoint(rule)), "{to:?}");
            }
            assert_eq!(plan(FullDir, FullDir, volume), Err(MoveConflict::BothExist(rule)));
            assert_eq!(plan(FullDir, MountPoint, volume), Err(MoveConflict::MountPoint(rule)));
            // What was mounted at the former place is mounted at the new one.
            assert_eq!(plan(EmptyDir, MountPoint, volume), Ok(vec![]));
            let moved = match volume {
                MountPoint => Err(MoveConflict::MountPoint(rule)),
                _ => Ok(vec![rule]),
            };
            assert_eq!(plan(FullDir, Absent, volume), moved, "{volume:?}");
            assert_eq!(plan(FullDir, EmptyDir, volume), moved, "{volume:?}");
        }
    }
}
