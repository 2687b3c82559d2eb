//! The first pass: which directories own a project.

use std::collections::HashSet;
use std::io;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use super::ProjectDirectories;
use super::pace::WalkPace;
use crate::linux::{read_owner_mark, read_project_tag};
use crate::tree::TreeVisitor;

/// Collects the owned projects, and the directories of one of them.
pub(super) struct OwnerSearch {
    target: Option<u32>,
    /// The projects of marked directories.
    pub(super) owned: HashSet<u32>,
    /// The directories of the target.
    pub(super) found: ProjectDirectories,
    /// Whether each directory on the way down has the target.
    has_target: Vec<bool>,
    pace: WalkPace,
}

impl OwnerSearch {
    pub(super) fn new(target: Option<u32>, entries_per_second: Option<NonZeroU32>) -> Self {
        let pace = WalkPace::new(entries_per_second);
        Self {
            target,
            owned: HashSet::new(),
            found: ProjectDirectories::default(),
            has_target: Vec::new(),
            pace,
        }
    }
}

impl TreeVisitor for OwnerSearch {
    fn visit_inode(&mut self, file: BorrowedFd<'_>, _: bool, path: &dyn Fn() -> PathBuf) -> io::Result<bool> {
        self.pace.wait();
        let marked = read_owner_mark(file)?.map(|mark| mark.project);
        self.owned.extend(marked);
        let has_target = self.target.is_some() && Some(read_project_tag(file)?.project) == self.target;
        if self.target.is_some() && marked == self.target {
            self.found.owner = Some(path());
        } else if has_target && !self.has_target.last().copied().unwrap_or(false) {
            self.found.others.push(path());
        }
        // A directory in the owner is not another directory of the project.
        self.has_target.push(has_target || (self.target.is_some() && marked == self.target));
        Ok(true)
    }

    fn visits_files(&self) -> bool {
        false
    }

    fn leave_directory(&mut self) {
        self.has_target.pop();
    }
}
