//! Implements the commands.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{LimitChange, ProjectQuota, QuotaChange, QuotaSetter as _};
use rustix::fs::{Mode, OFlags};

use crate::cli::SetArgs;
use crate::error::CommandError;
use crate::output::{OutputWriter, TextStyle, escape_control};
use crate::report::{CheckReport, ClearReport, ReleaseReport, StatusReport, TreeCounts};
use crate::table::{self, format_bytes};

/// Opens a directory without following a link, so that replacing it by a link cannot limit another directory.
pub(crate) fn open_directory(path: &Path) -> Result<OwnedFd, CommandError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
        let source = io::Error::from(error);
        let not = |what| CommandError::NotADirectory { path: path.into(), what };
        // ENOTDIR and ELOOP tell too little. This look only words the error: nothing is done with the path.
        match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_symlink() => not("a symbolic link"),
            Ok(metadata) if !metadata.is_dir() => not("not a directory"),
            _ => CommandError::OpenDirectory { path: path.into(), source },
        }
    })
}

/// The project quotas of the file system of a directory or mount point.
pub(crate) fn open_quota(path: &Path) -> Result<ProjectQuota, CommandError> {
    ProjectQuota::open(path).map_err(CommandError::OpenQuota)
}

/// As `open_quota`, also on a read-only mount.
pub(crate) fn open_quota_for_reading(path: &Path) -> Result<ProjectQuota, CommandError> {
    ProjectQuota::open_for_reading(path).map_err(CommandError::OpenQuota)
}

pub(crate) fn set_limits(args: &SetArgs, out: &mut OutputWriter) -> Result<(), CommandError> {
    let path = &args.directory;
    let dir = open_directory(path)?;
    let quota = open_quota(path)?;
    let change =
        QuotaChange { bytes: args.bytes.unwrap_or_default(), inodes: args.inodes.unwrap_or_default() };
    let failed = CommandError::for_action("set limits on", path);
    let (status, tree) = if args.recursive {
        quota
            .set_limits_recursive(dir.as_fd(), change)
            .map(|(status, changed)| (status, Some(changed)))
            .map_err(failed)?
    } else {
        (quota.set_limits(dir.as_fd(), change).map_err(failed)?, None)
    };
    let report = StatusReport { tree: tree.map(TreeCounts::from), ..StatusReport::new(Some(path), &status) };
    if out.json {
        return Ok(out.print_json(&report)?);
    }
    table::print_table(std::slice::from_ref(&report), out)?;
    warn_about_result(&report, args, out);
    // The first one only, which concerns each file system; `check` prints all.
    if let Some(warning) = quota.enforcement_gaps().first() {
        out.warn(&warning.to_string());
    }
    Ok(())
}

/// Warns where the result differs from the command.
fn warn_about_result(status: &StatusReport, args: &SetArgs, out: &OutputWriter) {
    if let (Some(LimitChange::Set(requested)), Some(set)) = (args.bytes, status.bytes.limit)
        && requested.0 != set
    {
        out.warn(&format!("the limit was rounded up from {requested} to {}", format_bytes(set)));
    }
    if status.over_limit {
        out.warn("the usage already exceeds the limit: existing content stays, but cannot grow");
    }
    warn_about_tree(status.tree.as_ref(), "not counted", out);
}

/// Warns of entries that were skipped.
fn warn_about_tree(tree: Option<&TreeCounts>, effect: &str, out: &OutputWriter) {
    let Some(TreeCounts { special, foreign, immutable, immutable_paths, .. }) = tree else { return };
    if special + foreign > 0 {
        out.warn(&format!(
            "{effect}: {special} symbolic links and special files, {foreign} trees of other projects or mounts"
        ));
    }
    if *immutable > 0 {
        let more = if immutable_paths.len() as u64 == *immutable { "" } else { ", …" };
        let paths = immutable_paths.join(", ");
        out.warn(&format!(
            "{effect}: {immutable} immutable entries: {paths}{more}: run `chattr -i` on them, then try again"
        ));
    }
}

pub(crate) fn show_limits(directories: &[PathBuf], out: &mut OutputWriter) -> Result<(), CommandError> {
    let mut found = Vec::new();
    for path in directories {
        let dir = open_directory(path)?;
        let status = open_quota_for_reading(path)?
            .read_status(dir.as_fd())
            .map_err(CommandError::for_action("read the quota of", path))?;
        let status = status.ok_or_else(|| CommandError::NoLimits { path: path.clone() })?;
        found.push(StatusReport::new(Some(path), &status));
    }
    print_statuses(&found, out)
}

pub(crate) fn list_projects(mount: &Path, out: &mut OutputWriter) -> Result<(), CommandError> {
    let listed = open_quota_for_reading(mount)?
        .list_projects()
        .map_err(CommandError::for_action("list the projects of", mount))?;
    let found: Vec<StatusReport> = listed.iter().map(|status| StatusReport::new(None, status)).collect();
    print_statuses(&found, out)
}

fn print_statuses(statuses: &[StatusReport], out: &mut OutputWriter) -> Result<(), CommandError> {
    let printed = if out.json { out.print_json(&statuses) } else { table::print_table(statuses, out) };
    Ok(printed?)
}

pub(crate) fn clear_limits(path: &Path, recursive: bool, out: &mut OutputWriter) -> Result<(), CommandError> {
    let dir = open_directory(path)?;
    let quota = open_quota(path)?;
    let failed = CommandError::for_action("clear the limits of", path);
    let tree = if recursive {
        Some(quota.clear_limits_recursive(dir.as_fd()).map_err(failed)?)
    } else {
        quota.clear_limits(dir.as_fd()).map_err(failed)?;
        None
    };
    let (name, tree) = (path.to_string_lossy().into_owned(), tree.map(TreeCounts::from));
    if out.json {
        return Ok(out.print_json(&ClearReport { directory: name, tree })?);
    }
    out.print_line(&format!("{} has no limits", escape_control(&name)))?;
    warn_about_tree(tree.as_ref(), "still in the project", out);
    Ok(())
}

pub(crate) fn release_projects(mount: &Path, out: &mut OutputWriter) -> Result<(), CommandError> {
    let released = open_quota(mount)?
        .release_unused_projects(&[])
        .map_err(CommandError::for_action("release the projects of", mount))?;
    let projects: Vec<u32> = released.into_iter().map(|project| project.get()).collect();
    if out.json {
        return Ok(out.print_json(&ReleaseReport { projects })?);
    }
    Ok(out.print_line(&format!("{} projects without directories were released", projects.len()))?)
}

pub(crate) fn check_quota(mount: &Path, out: &mut OutputWriter) -> Result<(), CommandError> {
    let quota = open_quota(mount)?;
    let checked = CheckReport::from(&quota);
    if out.json {
        return Ok(out.print_json(&checked)?);
    }
    let binds = out.paint(TextStyle::Good, "limits are enforced");
    let CheckReport { mount_point, file_system, source, .. } = &checked;
    out.print_line(&format!(
        "{}: {binds} ({file_system} on {})",
        escape_control(mount_point),
        escape_control(source)
    ))?;
    for warned in &checked.warnings {
        let word = out.paint(TextStyle::Pending, "warning");
        out.print_line(&format!("{word}: {}", warned.text))?;
    }
    Ok(())
}
