//! The second pass: judges and repairs each entry.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::judge::{EntryFacts, Judgement, KnownProjects, MarkHolder, Scope, judge_entry};
use super::report::{AuditFinding, AuditOptions, AuditReport, FindingKind};
use super::walk_control::{AuditStop, UnreadEntries, WalkPace};
use crate::ProjectId;
use crate::engine::QuotaEngine;
use crate::kernel::ProjectTag;
use crate::linux::{self, LinuxKernel, OwnerAttribute};
use crate::tree::{NamedEntry, OpenEntry, TreeVisitor};

/// *Source:* stat(2), `st_blocks`.
const STAT_BLOCK: u64 = 512;

pub(super) struct AuditVisitor<'a> {
    engine: &'a QuotaEngine<LinuxKernel>,
    projects: &'a KnownProjects,
    repairs: bool,
    pace: WalkPace,
    /// Of the directories on the way down.
    scopes: Vec<Scope>,
    /// The nearest owners of a project of these directories: their own paths, if they are owners.
    owners: Vec<Option<Rc<PathBuf>>>,
    /// Of inodes with several names: at how many of them they were found; the largest number once they are reported.
    linked: HashMap<u64, u128>,
    report: AuditReport,
    unread: UnreadEntries,
    stop: AuditStop<'a>,
}

/// The result of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RepairOutcome {
    Repaired,
    /// The entry was changed or removed after it was judged, and is as others left it.
    Changed,
    Immutable,
}

impl RepairOutcome {
    /// Classifies a repair, which returns whether it has changed the entry.
    ///
    /// # Errors
    /// That of the repair, unless the entry was removed, or is immutable.
    fn new(repaired: io::Result<bool>, is_immutable: impl FnOnce() -> bool) -> io::Result<Self> {
        match repaired {
            Ok(true) => Ok(Self::Repaired),
            Ok(false) => Ok(Self::Changed),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::Changed),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_immutable() => {
                Ok(Self::Immutable)
            }
            Err(error) => Err(error),
        }
    }
}

impl<'a> AuditVisitor<'a> {
    pub(super) fn new(
        engine: &'a QuotaEngine<LinuxKernel>,
        projects: &'a KnownProjects,
        options: AuditOptions,
        stop: AuditStop<'a>,
        top: Scope,
    ) -> Self {
        let mut report = AuditReport::default();
        report.summary.owners = projects.owned.len() as u64;
        Self {
            engine,
            projects,
            repairs: options.repair,
            pace: WalkPace::new(options.entries_per_second),
            scopes: vec![top],
            owners: vec![None],
            linked: HashMap::new(),
            report,
            unread: UnreadEntries::default(),
            stop,
        }
    }

    /// The report, with the directories that the first pass could not read: they may hold owners of projects.
    pub(super) fn into_report(self, first_pass: UnreadEntries) -> AuditReport {
        let Self { mut report, unread, .. } = self;
        // Both passes meet mostly the same entries, so that the counts are not added.
        report.summary.unread = unread.count.max(first_pass.count);
        report.unread = if unread.count < first_pass.count { first_pass.paths } else { unread.paths };
        report
    }

    fn judge(&mut self, facts: EntryFacts) -> Judgement {
        self.report.summary.entries += 1;
        let scope = self.scopes.last().copied().unwrap_or(Scope::Free);
        judge_entry(facts, scope, self.projects)
    }

    /// Adds an entry to the report; returns the tag that repairs it, if that is asked for.
    fn record(
        &mut self,
        judged: Judgement,
        tag: ProjectTag,
        owner: Option<&PathBuf>,
        stat: impl FnOnce() -> io::Result<Stat>,
        path: &dyn Fn() -> PathBuf,
    ) -> io::Result<Option<ProjectTag>> {
        let Judgement { finding, is_in_unowned, repair, .. } = judged;
        if finding.is_none() && !is_in_unowned {
            return Ok(None);
        }
        let stat = stat()?;
        if stat.st_nlink > 1
            && !is_directory(&stat)
            && !self.is_reported_here(&stat, tag.project, repair.is_some())
        {
            return Ok(None);
        }
        self.count_uncounted(owner);
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0) * STAT_BLOCK;
        match finding {
            Some(kind) => self.report.add(kind, bytes, || AuditFinding {
                path: path(),
                kind,
                project: ProjectId::new(tag.project),
            }),
            None => self.report.summary.add(FindingKind::Unowned, bytes),
        }
        Ok(repair.filter(|_| self.repairs))
    }

    /// Counts an entry that does not count against the project of the owner that it is in, if it is in one.
    fn count_uncounted(&mut self, owner: Option<&PathBuf>) {
        let Some(owner) = owner else { return };
        match self.report.uncounted.get_mut(owner) {
            Some(count) => *count += 1,
            None => drop(self.report.uncounted.insert(owner.clone(), 1)),
        }
    }

    /// Returns whether an inode with several names is reported at this one: at the first. One that would be repaired,
    /// and has the project of another directory, may count there by another name: it is reported if it is found at all
    /// of them.
    fn is_reported_here(&mut self, stat: &Stat, project: u32, has_repair: bool) -> bool {
        let is_limited = self.projects.owned.contains(&project) || self.projects.limited.contains(&project);
        let due = if has_repair && is_limited { u128::from(stat.st_nlink) } else { 1 };
        let found = self.linked.entry(stat.st_ino).or_default();
        *found = found.saturating_add(1);
        let is_due = *found >= due && *found != u128::MAX;
        if is_due {
            *found = u128::MAX;
        }
        is_due
    }

    /// Repairs a directory, unless its limits or its owner were changed after it was judged; returns whether it did.
    fn repair_directory(
        &self,
        dir: BorrowedFd<'_>,
        facts: EntryFacts,
        wanted: ProjectTag,
    ) -> io::Result<bool> {
        // Until it is dropped, no other caller sets or clears limits between this look and the write.
        let _allocation = self.engine.hold_allocation().map_err(io::Error::other)?;
        let project = facts.tag.project;
        let is_limited_now = !self.projects.owned.contains(&project)
            && !self.projects.limited.contains(&project)
            && self.engine.is_limited(project).map_err(io::Error::other)?;
        if is_limited_now || read_facts(dir, true)? != facts {
            return Ok(false);
        }
        linux::write_project_tag(dir, wanted).map(|()| true)
    }

    fn count_repair(&mut self, outcome: RepairOutcome) {
        match outcome {
            RepairOutcome::Repaired => self.report.summary.repaired += 1,
            RepairOutcome::Immutable => self.report.summary.immutable += 1,
            RepairOutcome::Changed => {}
        }
    }

    /// Keeps the pace, and fails once the audit is canceled.
    fn start_entry(&mut self) -> io::Result<()> {
        self.pace.wait();
        self.stop.check()
    }

    /// Judges and repairs an entry that is not opened; returns whether the kernel tells its project.
    fn audit_named(&mut self, entry: NamedEntry<'_>) -> io::Result<bool> {
        let NamedEntry { dir, name, path } = entry;
        self.start_entry()?;
        let Some(tag) = linux::read_special_tag(dir, name)? else { return Ok(false) };
        let judged = self.judge(EntryFacts { tag, ..EntryFacts::default() });
        let owner = self.owners.last().cloned().flatten();
        let stat = || Ok(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?);
        if let Some(wanted) = self.record(judged, tag, owner.as_deref(), stat, path)? {
            let written = linux::write_special_tag(dir, name, wanted).map(|()| true);
            let is_immutable = || linux::is_special_immutable(dir, name).unwrap_or(false);
            self.count_repair(RepairOutcome::new(written, is_immutable)?);
        }
        Ok(true)
    }
}

impl TreeVisitor for AuditVisitor<'_> {
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
        let OpenEntry { file, is_directory, path } = entry;
        self.start_entry()?;
        let facts = read_facts(file, is_directory)?;
        let judged = self.judge(facts);
        let mut owner = self.owners.last().cloned().flatten();
        if matches!(facts.mark, MarkHolder::Itself(_)) {
            // What is in it counts against its own limits, and not against those of the owner above.
            self.count_uncounted(owner.as_deref());
            owner = Some(Rc::new(path()));
        }
        // Before the repair, which may fail: entries below are judged by the scope of this one all the same.
        let stat = || Ok(rustix::fs::fstat(file)?);
        let wanted = self.record(judged, facts.tag, owner.as_deref(), stat, path)?;
        if is_directory {
            self.scopes.push(judged.below);
            self.owners.push(owner);
        }
        let Some(wanted) = wanted else { return Ok(true) };
        let repaired = if is_directory {
            self.repair_directory(file, facts, wanted)
        } else {
            linux::write_project_tag(file, wanted).map(|()| true)
        };
        match RepairOutcome::new(repaired, || linux::is_immutable(file).unwrap_or(false)) {
            Ok(outcome) => self.count_repair(outcome),
            Err(error) => self.unread.add(path(), error)?,
        }
        Ok(true)
    }

    fn visit_special(&mut self, entry: NamedEntry<'_>) -> io::Result<()> {
        if !self.audit_named(entry)? {
            self.report.summary.entries += 1;
            self.report.summary.special += 1;
        }
        Ok(())
    }

    fn visit_leased(&mut self, entry: NamedEntry<'_>) -> io::Result<()> {
        // Since Linux 6.17, the project is read by name, without opening the file. Before, the file counts as
        // unread.
        if self.audit_named(entry)? { Ok(()) } else { Err(Errno::AGAIN.into()) }
    }

    fn visit_failed(&mut self, path: PathBuf, error: io::Error) -> io::Result<()> {
        self.unread.add(path, error)
    }

    fn visit_mount(&mut self) {
        self.report.summary.mounts += 1;
    }

    fn leave_directory(&mut self) {
        self.scopes.pop();
        self.owners.pop();
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn read_facts(file: BorrowedFd<'_>, is_directory: bool) -> io::Result<EntryFacts> {
    let tag = linux::read_project_tag(file)?;
    let mark = if is_directory { read_mark(file)? } else { MarkHolder::Nobody };
    Ok(EntryFacts { tag, mark, is_directory })
}

fn read_mark(dir: BorrowedFd<'_>) -> io::Result<MarkHolder> {
    Ok(match linux::read_owner_attribute(dir)? {
        OwnerAttribute::Missing => MarkHolder::Nobody,
        OwnerAttribute::Own(mark) => MarkHolder::Itself(mark.project),
        OwnerAttribute::Foreign => MarkHolder::Another,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immutable_entry_and_one_that_was_removed_end_no_audit() {
        let failed = |code| Err(io::Error::from_raw_os_error(code));
        let outcome = |repaired, is_immutable| RepairOutcome::new(repaired, || is_immutable).ok();
        assert_eq!(outcome(Ok(true), false), Some(RepairOutcome::Repaired));
        assert_eq!(outcome(Ok(false), false), Some(RepairOutcome::Changed));
        assert_eq!(outcome(failed(libc::ENOENT), false), Some(RepairOutcome::Changed));
        for denied in [libc::EPERM, libc::EACCES] {
            assert_eq!(outcome(failed(denied), true), Some(RepairOutcome::Immutable));
            assert_eq!(outcome(failed(denied), false), None);
        }
        assert_eq!(outcome(failed(libc::EIO), true), None);
    }
}
