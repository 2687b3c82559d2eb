//! The first pass: which directories own a project.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

use super::report::ProjectDirectories;
use super::walk_control::{AuditStop, UnreadEntries, WalkPace};
use crate::linux::{read_owner_mark, read_project_tag};
use crate::tree::{OpenEntry, TreeVisitor};

/// Collects the owned projects, and the directories of one of them.
pub(super) struct OwnerSearch<'a> {
    target: Option<u32>,
    /// The projects of marked directories.
    pub(super) owned: HashSet<u32>,
    /// The directories of the target.
    pub(super) found: ProjectDirectories,
    pub(super) unread: UnreadEntries,
    /// For each directory on the way down: true if it is one of the target.
    path_targets: Vec<bool>,
    pace: WalkPace,
    stop: AuditStop<'a>,
}

impl<'a> OwnerSearch<'a> {
    pub(super) fn new(target: Option<u32>, pace: WalkPace, stop: AuditStop<'a>) -> Self {
        Self {
            target,
            owned: HashSet::new(),
            found: ProjectDirectories::default(),
            unread: UnreadEntries::default(),
            path_targets: Vec::new(),
            pace,
            stop,
        }
    }
}

impl TreeVisitor for OwnerSearch<'_> {
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
        self.stop.check()?;
        self.pace.wait();
        let OpenEntry { file, path, .. } = entry;
        let marked = read_owner_mark(file)?.map(|mark| mark.project);
        self.owned.extend(marked);
        let is_owner = self.target.is_some() && marked == self.target;
        let has_project = self.target.is_some() && Some(read_project_tag(file)?.project) == self.target;
        if is_owner {
            self.found.owner = Some(path());
        } else if has_project && !self.path_targets.last().copied().unwrap_or(false) {
            self.found.others.push(path());
        }
        // A directory in the owner is not another directory of the project.
        self.path_targets.push(has_project || is_owner);
        Ok(true)
    }

    fn visit_failed(&mut self, path: PathBuf, error: io::Error) -> io::Result<()> {
        self.unread.add(path, error)
    }

    fn visits_files(&self) -> bool {
        // Only directories have marks.
        false
    }

    fn leave_directory(&mut self) {
        self.path_targets.pop();
    }
}
