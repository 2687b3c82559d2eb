//! The commands that walk a tree: `audit` and `owner-of`.

use std::os::fd::AsFd as _;
use std::path::Path;

use nodekeel_fsquota::{
    AuditFinding, AuditOptions, AuditReport, AuditSummary, FindingKind, ProjectId, QuotaUsage,
};
use serde::Serialize;

use crate::commands::{open_directory, open_quota, open_quota_for_reading};
use crate::error::CommandError;
use crate::output::{OutputWriter, TextStyle, escape_control};
use crate::table::format_bytes;

/// The JSON output of `audit`.
#[derive(Debug, Serialize)]
struct AuditOutput {
    directory: String,
    entries: u64,
    owners: u64,
    escaped: UsageOutput,
    outside: UsageOutput,
    unowned: UsageOutput,
    over_limit: u64,
    repaired: u64,
    immutable: u64,
    special: u64,
    mounts: u64,
    unread: u64,
    findings: Vec<FindingOutput>,
    unread_paths: Vec<String>,
}

#[derive(Debug, Serialize)]
struct UsageOutput {
    bytes: u64,
    inodes: u64,
}

#[derive(Debug, Serialize)]
struct FindingOutput {
    path: String,
    kind: &'static str,
    project: Option<u32>,
}

/// The JSON output of `owner-of`.
#[derive(Debug, Serialize)]
struct OwnerOutput {
    project: u32,
    owner: Option<String>,
    others: Vec<String>,
    unread: u64,
}

pub(crate) fn audit_tree(
    path: &Path,
    options: AuditOptions,
    out: &mut OutputWriter,
) -> Result<(), CommandError> {
    let dir = open_directory(path)?;
    // An audit alone also works on a read-only mount.
    let quota = if options.repair { open_quota(path) } else { open_quota_for_reading(path) }?;
    let report = quota.audit_tree(dir.as_fd(), options).map_err(CommandError::for_action("audit", path))?;
    if out.json {
        out.print_json(&AuditOutput::new(path, &report))?;
    } else {
        print_report(path, &report, out)?;
    }
    let AuditSummary { repaired, escaped, outside, unread, .. } = report.summary;
    // The output names the findings.
    if repaired != escaped.inodes.0 + outside.inodes.0 {
        return Err(CommandError::AuditFindings { path: path.into(), is_repaired: options.repair });
    }
    if report.is_complete() {
        return Ok(());
    }
    Err(CommandError::AuditIncomplete { path: path.into(), unread })
}

fn print_report(path: &Path, report: &AuditReport, out: &mut OutputWriter) -> Result<(), CommandError> {
    for AuditFinding { path: found, kind, project, .. } in &report.findings {
        let name = escape_control(&shown_path(path, found));
        let project = project.map_or_else(|| "none".to_owned(), |project| project.to_string());
        let kind = out.paint(TextStyle::Pending, describe_kind(*kind));
        out.print_line(&format!("{kind}  project {project}  {name}"))?;
    }
    for unread in &report.unread {
        let name = escape_control(&shown_path(path, unread));
        out.print_line(&format!("{}  {name}", out.paint(TextStyle::Pending, "unread")))?;
    }
    let AuditSummary {
        entries,
        owners,
        escaped,
        outside,
        unowned,
        over_limit,
        repaired,
        immutable,
        special,
        mounts,
        unread,
        ..
    } = report.summary;
    // Full lists: the report names no more entries than that.
    if report.findings.len().max(report.unread.len()) as u64 == MAX_NAMED {
        out.print_line("… (the totals count the others)")?;
    }
    for (what, QuotaUsage { bytes, inodes, .. }) in [
        ("escaped from their limits", escaped),
        ("count for a directory elsewhere", outside),
        ("have a project of an unknown owner", unowned),
    ] {
        out.print_line(&format!("{} files and directories ({}) {what}", inodes.0, format_bytes(bytes.0)))?;
    }
    let mut line = format!("{entries} inspected, {owners} owners, {repaired} repaired");
    for (count, what) in [
        (over_limit, "owners over their limits"),
        (immutable, "immutable (run `chattr -i` on them, then try again)"),
        (special, "links and special files, whose project this kernel does not tell"),
        (mounts, "mounts not entered"),
        (unread, "leased, damaged or moved meanwhile"),
    ] {
        if count > 0 {
            line += &format!(", {count} {what}");
        }
    }
    Ok(out.print_line(&line)?)
}

/// The path of an entry below a directory, which is the empty path.
fn shown_path(path: &Path, below: &Path) -> String {
    let joined = if below.as_os_str().is_empty() { path.to_owned() } else { path.join(below) };
    joined.to_string_lossy().into_owned()
}

/// The number of entries of each kind that a report names.
const MAX_NAMED: u64 = 100;

fn describe_kind(kind: FindingKind) -> &'static str {
    match kind {
        FindingKind::Escaped => "escaped",
        FindingKind::MovedOut => "moved out",
        FindingKind::Copied => "copied",
        FindingKind::Restored => "restored",
        FindingKind::Unowned => "unowned",
        _ => "other",
    }
}

impl AuditOutput {
    fn new(path: &Path, report: &AuditReport) -> Self {
        let usage = |QuotaUsage { bytes, inodes, .. }| UsageOutput { bytes: bytes.0, inodes: inodes.0 };
        let finding = |found: &AuditFinding| FindingOutput {
            path: found.path.to_string_lossy().into_owned(),
            kind: match found.kind {
                FindingKind::MovedOut => "moved_out",
                other => describe_kind(other),
            },
            project: found.project.map(ProjectId::get),
        };
        let AuditSummary { entries, owners, escaped, outside, unowned, repaired, .. } = report.summary;
        let AuditSummary { over_limit, immutable, special, mounts, unread, .. } = report.summary;
        let unread_paths = report.unread.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        Self {
            directory: path.to_string_lossy().into_owned(),
            entries,
            owners,
            escaped: usage(escaped),
            outside: usage(outside),
            unowned: usage(unowned),
            over_limit,
            repaired,
            immutable,
            special,
            mounts,
            unread,
            unread_paths,
            findings: report.findings.iter().map(finding).collect(),
        }
    }
}

pub(crate) fn find_owner(
    project: ProjectId,
    path: &Path,
    out: &mut OutputWriter,
) -> Result<(), CommandError> {
    let dir = open_directory(path)?;
    let quota = open_quota_for_reading(path)?;
    let found =
        quota.find_directories(dir.as_fd(), project).map_err(CommandError::for_action("search", path))?;
    let unread = found.unread;
    if found.owner.is_none() && found.others.is_empty() {
        return Err(CommandError::NoDirectory { project, path: path.into(), unread });
    }
    let name =
        |below: &std::path::PathBuf| path.join(below).to_string_lossy().trim_end_matches('/').to_owned();
    let (owner, others) = (found.owner.as_ref().map(name), found.others.iter().map(name).collect::<Vec<_>>());
    if out.json {
        return Ok(out.print_json(&OwnerOutput { project: project.get(), owner, others, unread })?);
    }
    if let Some(owner) = owner {
        out.print_line(&format!("{}  {}", out.paint(TextStyle::Good, "owner"), escape_control(&owner)))?;
    }
    for other in others {
        let word = out.paint(TextStyle::Pending, "other");
        out.print_line(&format!("{word}  {}", escape_control(&other)))?;
    }
    if unread > 0 {
        out.print_line(&format!("{unread} directories were not read, or moved meanwhile: search again"))?;
    }
    Ok(())
}
