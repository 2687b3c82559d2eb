//! A cgroup for each start, which the kernel kills as one.
//!
//! ```text
//! <parent>                      this program's own cgroup, or one that it was given
//! └── nodekeel-<program>-<host>-<n> locked for as long as the host lives
//!     └── <start>               one start of one process, with all that descends from it
//! ```
//!
//! Nobody escapes a kill by forking, and the kernel tells when the last has ended. Whoever finds a directory of exactly such
//! a name whose lock nobody holds has found what a supervisor has left that was killed: it is killed and removed.
//!
//! *Source:* the kernel's `Documentation/admin-guide/cgroup-v2.rst`, `cgroup.kill` (Linux 5.14) and `cgroup.events`.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use super::procfs;
use super::tag::{Giver, Tag};
use crate::sys::{self, Changing};

/// What all hosts' directories begin with.
const PREFIX: &str = "nodekeel-";
/// How many names a host tries for its directory.
const NAMES: usize = 8;
/// How long all together that was left by dead supervisors may take to end. It has been killed: what takes longer waits
/// for a device, and the next host looks again.
const LEFT_WITHIN: Duration = Duration::from_secs(1);

/// Where child processes get a cgroup of their own, so that the kernel kills all that descends from one at once.
///
/// Without, descendants are known by a mark and chased one by one, which a machine under load lets some win for a while.
/// It takes cgroup v2, Linux 5.14, and the right to make directories and to move processes in the parent: root has it,
/// and whoever the parent is delegated to (`Delegate=yes` for a unit of systemd).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Cgroups {
    /// Below the program's own, where it may: else there are none.
    #[default]
    Own,
    /// Below this directory of a mounted hierarchy, where it may: else there are none.
    Below(PathBuf),
    /// Nowhere.
    None,
}

/// The directory of one host.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
    /// Tells others that this host lives.
    _lock: File,
}

impl Home {
    /// Makes it, and ends what dead hosts have left beside it. `Ok(None)` where none is wanted.
    pub(super) fn make(wanted: &Cgroups, giver: Giver) -> io::Result<Option<Self>> {
        let parent = match wanted {
            Cgroups::Own => procfs::own_cgroup()?,
            Cgroups::Below(parent) => parent.clone(),
            Cgroups::None => return Ok(None),
        };
        // A child may be born elsewhere only by who may move processes from where it would have been born.
        rustix::fs::access(parent.join("cgroup.procs"), rustix::fs::Access::WRITE_OK)?;
        end_left(&parent);
        let mut names = (0..NAMES).map(|n| parent.join(format!("{PREFIX}{giver}-{n}")));
        let made = names.find_map(|dir| Self::take(dir).transpose());
        made.unwrap_or_else(|| Err(ErrorKind::AlreadyExists.into())).map(Some)
    }

    /// Makes a directory of that name, unless another has it: somebody who looks for what was left can take it for that as
    /// long as it is not locked.
    fn take(dir: PathBuf) -> io::Result<Option<Self>> {
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(None),
            made => made?,
        }
        let Some(lock) = lock(&dir)? else { return Ok(None) };
        let home = Self { dir, _lock: lock };
        fs::metadata(home.dir.join("cgroup.kill"))?;
        Ok(Some(home))
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A cgroup for one start.
    pub(super) fn add(&self, tag: Tag) -> io::Result<Cgroup> {
        let dir = self.dir.join(format!("{:x}", tag.limit()));
        fs::create_dir(&dir)?;
        Cgroup::open(&dir).inspect_err(|_| _ = fs::remove_dir(&dir))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Should somebody be left, the next host ends it: nobody holds the lock then.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// All that descends from one start and has not left for another cgroup. It is removed when this is dropped, if nobody
/// is left in it.
#[derive(Debug)]
pub(super) struct Cgroup {
    dir: PathBuf,
    /// Open from the start: at the end there may be no descriptors to be had.
    kill: File,
    events: Arc<OwnedFd>,
}

impl Cgroup {
    fn open(dir: &Path) -> io::Result<Self> {
        let kill = File::options().write(true).open(dir.join("cgroup.kill"))?;
        let events = Arc::new(File::open(dir.join("cgroup.events"))?.into());
        Ok(Self { dir: dir.to_owned(), kill, events })
    }

    /// What a child is born into.
    pub(super) fn directory(&self) -> io::Result<OwnedFd> {
        Ok(File::open(&self.dir)?.into())
    }

    /// Kills everybody in it and below it, and whoever is being forked.
    pub(super) fn kill(&self) -> io::Result<()> {
        (&self.kill).write_all(b"1")
    }

    /// Resolves when nobody is left in it, nor below it, but for zombies.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub(super) async fn empty(&self) -> io::Result<()> {
        let changing = Changing::new(Arc::clone(&self.events))?;
        while self.is_populated()? {
            changing.changed().await?;
        }
        Ok(())
    }

    /// Reads it anew, which also makes the next change one that is told.
    fn is_populated(&self) -> io::Result<bool> {
        let mut text = [0; 256];
        let length = rustix::io::pread(&*self.events, &mut text, 0)?;
        Ok(!text[..length].split(|&byte| byte == b'\n').any(|line| line == b"populated 0"))
    }

    /// Waits without a runtime. Whether nobody was left in time.
    fn is_empty_by(&self, deadline: Instant) -> io::Result<bool> {
        while self.is_populated()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            sys::wait_for_change(self.events.as_fd(), left)?;
        }
        Ok(true)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Who is left in it is the next host's to end.
        let _ = remove(&self.dir);
    }
}

/// Ends what hosts have left that are dead. That nobody may be there to end is no error: the own host works all the same.
fn end_left(parent: &Path) {
    let deadline = Instant::now() + LEFT_WITHIN;
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    // Beside it are everybody's, where the own cgroup is the root of a hierarchy.
    let homes = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_home));
    // All are killed before one is waited for, and locked until all are gone.
    let left: Vec<_> = homes.filter_map(|entry| left_in(entry.path())).collect();
    for Left { cgroup, .. } in &left {
        match cgroup.is_empty_by(deadline) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(cgroup = %cgroup.dir.display(), "what was left in it does not die"),
            Err(error) => tracing::warn!(cgroup = %cgroup.dir.display(), %error, "can't wait for its end"),
        }
    }
}

/// Whether a directory's name is one that a host gives its own.
fn is_home(name: &str) -> bool {
    let parts = name.strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(giver, number)| {
        Giver::is_shown_as(giver) && (0..NAMES).any(|n| n.to_string() == number)
    })
}

/// What a host has left. The fields are dropped in this order: it is removed before it is unlocked, or a host that has
/// only just made it could lock it in between.
struct Left {
    cgroup: Cgroup,
    _lock: File,
}

/// What a host that is dead has left, killed.
fn left_in(dir: PathBuf) -> Option<Left> {
    let lock = lock(&dir).ok().flatten()?;
    let cgroup = Cgroup::open(&dir).ok()?;
    if cgroup.is_populated().unwrap_or(true) {
        tracing::info!(cgroup = %dir.display(), "ending what a supervisor has left that was killed");
    }
    cgroup.kill().ok()?;
    Some(Left { cgroup, _lock: lock })
}

/// Takes the lock of a host's directory, unless another has it, or has removed it.
fn lock(dir: &Path) -> io::Result<Option<File>> {
    let locked = || {
        let file = File::open(dir)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let is_there = fs::metadata(dir)?.ino() == file.metadata()?.ino();
        Ok(is_there.then_some(file))
    };
    locked().or_else(|error: io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::NotFound => Ok(None),
        _ => Err(error),
    })
}

/// Removes a cgroup and those below it, in which nobody is left.
fn remove(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tag::{Program, Tags};

    #[test]
    fn only_names_that_hosts_give_are_theirs() {
        let program = Program::current().expect("proc is mounted");
        for thread in [0, 1, i32::MAX] {
            let giver = Tags::new(program, thread).giver();
            assert!((0..NAMES).all(|n| is_home(&format!("{PREFIX}{giver}-{n}"))), "{giver}");
        }
        assert!(is_home("nodekeel-0-0-0") && is_home("nodekeel-7fff-3fffff-7"));
        let others = "precious 1-1 1-1-8 1-1-0-0 x-1-0 1-x-0 01-1-0 1-1-00 +1-1-0 A-1-0 8000-1-0 1-400000-0";
        for name in others.split(' ').chain([""]) {
            assert!(!is_home(&format!("nodekeel-{name}")), "{name}");
        }
    }
}
