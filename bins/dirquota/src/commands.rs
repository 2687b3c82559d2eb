//! What the commands do.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{Change, Limit, ProjectQuota, QuotaSetter as _};
use rustix::fs::{Mode, OFlags};

use crate::cli::SetArgs;
use crate::failure::Failure;
use crate::model::{Checked, Cleared, Released, Status, Tree};
use crate::out::{Out, Tone, safe};
use crate::table::{self, binary};

/// A directory by its own name: whoever can put a link in its place does not get another one limited.
fn open(path: &Path) -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
        let source = io::Error::from(error);
        let not = |what| Failure::NotADirectory { path: path.into(), what };
        match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_symlink() => not("a symbolic link"),
            Ok(metadata) if !metadata.is_dir() => not("no directory"),
            _ => Failure::Directory { path: path.into(), source },
        }
    })
}

/// The quotas of what a directory or a mount point is on.
fn quotas(path: &Path) -> Result<ProjectQuota, Failure> {
    ProjectQuota::open(path).map_err(Failure::Open)
}

pub(crate) fn set(args: &SetArgs, out: &mut Out) -> Result<(), Failure> {
    let path = &args.directory;
    let dir = open(path)?;
    let quota = quotas(path)?;
    let change = Change { bytes: args.bytes.unwrap_or_default(), inodes: args.inodes.unwrap_or_default() };
    let failed = Failure::act("limit", path);
    let (status, tree) = if args.recursive {
        quota
            .set_tree(dir.as_fd(), change)
            .map(|(status, changed)| (status, Some(changed)))
            .map_err(failed)?
    } else {
        (quota.set(dir.as_fd(), change).map_err(failed)?, None)
    };
    let model = Status { tree: tree.map(Tree::from), ..Status::new(Some(path), &status) };
    if out.json {
        return Ok(out.json(&model)?);
    }
    table::print(std::slice::from_ref(&model), out)?;
    tell_of(&model, args, out);
    if let Some(warning) = quota.warnings().first() {
        out.warn(&warning.to_string());
    }
    Ok(())
}

/// What is otherwise than one might think from the command.
fn tell_of(status: &Status, args: &SetArgs, out: &Out) {
    if let (Some(Limit::At(asked)), Some(set)) = (args.bytes, status.bytes.limit)
        && asked.0 != set
    {
        out.warn(&format!("the limit was rounded up from {asked} to {}", binary(set)));
    }
    if status.over_limit {
        out.warn("it takes more than that already: what is there stays, nothing can be added");
    }
    if let Some(Tree { special, foreign, .. }) = status.tree
        && special + foreign > 0
    {
        out.warn(&format!(
            "not counted: {special} symbolic links and special files, {foreign} trees of other projects or file systems"
        ));
    }
}

pub(crate) fn show(directories: &[PathBuf], out: &mut Out) -> Result<(), Failure> {
    let mut found = Vec::new();
    for path in directories {
        let dir = open(path)?;
        let status = quotas(path)?.status(dir.as_fd()).map_err(Failure::act("look at", path))?;
        let status = status.ok_or_else(|| Failure::NoLimits { path: path.clone() })?;
        found.push(Status::new(Some(path), &status));
    }
    print(&found, out)
}

pub(crate) fn list(mount: &Path, out: &mut Out) -> Result<(), Failure> {
    let listed = quotas(mount)?.list().map_err(Failure::act("list the projects of", mount))?;
    let found: Vec<Status> = listed.iter().map(|status| Status::new(None, status)).collect();
    print(&found, out)
}

fn print(statuses: &[Status], out: &mut Out) -> Result<(), Failure> {
    let printed = if out.json { out.json(&statuses) } else { table::print(statuses, out) };
    Ok(printed?)
}

pub(crate) fn clear(path: &Path, recursive: bool, out: &mut Out) -> Result<(), Failure> {
    let dir = open(path)?;
    let quota = quotas(path)?;
    let failed = Failure::act("clear", path);
    let tree = if recursive {
        Some(quota.clear_tree(dir.as_fd()).map_err(failed)?)
    } else {
        quota.clear(dir.as_fd()).map_err(failed)?;
        None
    };
    let name = path.to_string_lossy().into_owned();
    if out.json {
        return Ok(out.json(&Cleared { directory: name, tree: tree.map(Tree::from) })?);
    }
    Ok(out.line(&format!("{} has no limits", safe(&name)))?)
}

pub(crate) fn release(mount: &Path, out: &mut Out) -> Result<(), Failure> {
    let released =
        quotas(mount)?.release_unused(&[]).map_err(Failure::act("release the projects of", mount))?;
    let projects: Vec<u32> = released.into_iter().map(|project| project.get()).collect();
    if out.json {
        return Ok(out.json(&Released { projects })?);
    }
    Ok(out.line(&format!("{} projects without directories were released", projects.len()))?)
}

pub(crate) fn check(mount: &Path, out: &mut Out) -> Result<(), Failure> {
    let quota = quotas(mount)?;
    let checked = Checked::from(&quota);
    if out.json {
        return Ok(out.json(&checked)?);
    }
    let binds = out.paint(Tone::Good, "limits bind");
    let Checked { mount_point, file_system, source, .. } = &checked;
    out.line(&format!("{}: {binds} ({file_system} on {})", safe(mount_point), safe(source)))?;
    for warned in &checked.warnings {
        let word = out.paint(Tone::Pending, "warning");
        out.line(&format!("{word}: {}", warned.text))?;
    }
    Ok(())
}
