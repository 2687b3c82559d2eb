//! What remained after kills.

use std::fmt;

/// Counts of kills and leaks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LeakCounts {
    pub(super) kills: usize,
    pub(super) directories: usize,
    pub(super) projects: usize,
    pub(super) mounts: usize,
    pub(super) volumes: usize,
    pub(super) doubles: usize,
}

impl fmt::Display for LeakCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, directories, projects, mounts, volumes, doubles } = self;
        write!(
            f,
            "{kills} kills: {directories} directories, {projects} projects, {mounts} mounts and {volumes} \
             PersistentVolumes leaked, {doubles} provisioned twice"
        )
    }
}

impl LeakCounts {
    pub(super) fn add(mut self, other: &Self) -> Self {
        self.kills += other.kills;
        self.directories += other.directories;
        self.projects += other.projects;
        self.mounts += other.mounts;
        self.volumes += other.volumes;
        self.doubles += other.doubles;
        self
    }
}
