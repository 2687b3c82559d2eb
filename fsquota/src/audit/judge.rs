//! Decides which project an entry should have, by its project, its mark and its parent.
//!
//! | is in | has | is |
//! |---|---|---|
//! | anything | the mark of an owner | an owner: its project is the one of the mark |
//! | a limited directory | its project | counted |
//! | a limited directory | none, that of an owner elsewhere, or one that nothing limits; a file: any other | escaped |
//! | no limited directory | none | free |
//! | no limited directory | that of an owner elsewhere | moved out, or copied if it has the owner's mark |
//! | anything else | that of an unknown owner | unowned, or restored if it has the owner's mark: it is limited by that project |
//!
//! The owner of a file can give it any project with an ioctl, but limits to none.

use std::collections::HashSet;

use super::report::FindingKind;
use crate::kernel::ProjectTag;

/// The owner that the mark of a directory names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum MarkHolder {
    /// The directory has no mark.
    #[default]
    Nobody,
    /// The directory itself, as the owner of this project.
    Itself(u32),
    /// Another inode, or the mark is damaged: it was copied with the attributes.
    Another,
}

/// The projects of the file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KnownProjects {
    /// Those whose owner is in the tree.
    pub(super) owned: HashSet<u32>,
    /// Those with limits, also of other programs.
    pub(super) limited: HashSet<u32>,
}

/// Project and mark of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EntryFacts {
    pub(super) tag: ProjectTag,
    pub(super) mark: MarkHolder,
    pub(super) is_directory: bool,
}

/// The meaning of a directory for its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Not limited.
    Free,
    /// Limited by a project, whose owner is known or not.
    Limited { project: u32, is_owned: bool },
    /// In the project of an owner elsewhere.
    Elsewhere { project: u32, kind: FindingKind },
}

/// The judgement of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    /// The finding to report.
    pub(super) finding: Option<FindingKind>,
    /// The entry is counted with the unowned ones and not reported: its directory is.
    pub(super) is_in_unowned: bool,
    /// The tag that repairs it.
    pub(super) repair: Option<ProjectTag>,
    /// The scope of its own entries.
    pub(super) below: Scope,
}

pub(super) fn judge_entry(entry: EntryFacts, scope: Scope, projects: &KnownProjects) -> Judgement {
    let EntryFacts { tag, mark, is_directory } = entry;
    let is_owned = |project| projects.owned.contains(&project);
    let is_of_others = |number| is_directory && !is_owned(number) && projects.limited.contains(&number);
    match (mark, scope) {
        // An owner, wherever it is: projects do not nest.
        (MarkHolder::Itself(project), _) => judge_limited(entry, project, true),
        // In a limited directory. A directory that another program limits is judged below, and keeps its
        // project.
        (_, Scope::Limited { project, is_owned: has_owner })
            if tag.project == project || !is_of_others(tag.project) =>
        {
            let judged = judge_limited(entry, project, has_owner);
            Judgement { is_in_unowned: !has_owner && judged.finding.is_none(), ..judged }
        }
        // It came with the directory that was moved out or copied.
        (_, Scope::Elsewhere { project, kind }) if tag.project == project => {
            judge_elsewhere(tag.project, kind)
        }
        // Nothing limits it, and nothing should.
        _ if tag.project == 0 => {
            Judgement { finding: None, is_in_unowned: false, repair: None, below: Scope::Free }
        }
        // The mark came with a copy of all attributes: its owner is another inode in the tree.
        (MarkHolder::Another, _) if is_directory && is_owned(tag.project) => {
            judge_elsewhere(tag.project, FindingKind::Copied)
        }
        _ if is_owned(tag.project) => judge_elsewhere(tag.project, FindingKind::MovedOut),
        // The owner of the mark is not in the tree: this may be the owner itself, restored from a backup.
        (MarkHolder::Another, _) => judge_unowned(tag.project, FindingKind::Restored),
        _ => judge_unowned(tag.project, FindingKind::Unowned),
    }
}

/// An entry that should have this project: an owner, or one in a limited directory.
fn judge_limited(entry: EntryFacts, project: u32, is_owned: bool) -> Judgement {
    let wanted = ProjectTag { project, inherit: entry.is_directory };
    let is_right = entry.tag.project == project && (entry.tag.inherit || !entry.is_directory);
    Judgement {
        finding: (!is_right).then_some(FindingKind::Escaped),
        is_in_unowned: false,
        // Without a known owner, the project may be that of another program: it is reported and never
        // changed.
        repair: (!is_right && is_owned).then_some(wanted),
        below: Scope::Limited { project, is_owned },
    }
}

fn judge_elsewhere(project: u32, kind: FindingKind) -> Judgement {
    Judgement {
        finding: Some(kind),
        is_in_unowned: false,
        repair: Some(ProjectTag::default()),
        below: Scope::Elsewhere { project, kind },
    }
}

fn judge_unowned(project: u32, kind: FindingKind) -> Judgement {
    let below = Scope::Limited { project, is_owned: false };
    Judgement { finding: Some(kind), is_in_unowned: false, repair: None, below }
}

#[cfg(test)]
#[path = "judge_test.rs"]
mod tests;
