//! The first pass: which directories own a project.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

use super::pace::WalkPace;
use super::{AuditStop, ProjectDirectories, UnreadEntries};
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
    /// Whether each directory on the way down has the target.
    has_target: Vec<bool>,
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
            has_target: Vec::new(),
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
        let has_target = self.target.is_some() && Some(read_project_tag(file)?.project) == self.target;
        self.owned.extend(marked);
        if self.target.is_some() && marked == self.target {
            self.found.owner = Some(path());
        } else if has_target && !self.has_target.last().copied().unwrap_or(false) {
            self.found.others.push(path());
        }
        // A directory in the owner is not another directory of the project.
        self.has_target.push(has_target || (self.target.is_some() && marked == self.target));
        Ok(true)
    }

    fn visit_failed(&mut self, path: PathBuf, error: io::Error) -> io::Result<()> {
        self.unread.add(path, error)
    }

    fn visits_files(&self) -> bool {
        false
    }

    fn leave_directory(&mut self) {
        self.has_target.pop();
    }
}
