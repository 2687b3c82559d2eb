//! Whose directory and whose file: what another user could have written is not believed.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;
use thiserror::Error;

use super::Dir;
use crate::error::{Error, FileOperation};
use crate::metadata::{FileKind, FileMode, Metadata};
use crate::syscalls;

/// The bits that let the members of its group, and all users, change a file or the entries of a directory.
const GROUP_WRITABLE: u32 = 0o020;
const WRITABLE: u32 = 0o002;

/// In a directory with this bit, an entry is removed and renamed by its owner and that of the directory alone.
const STICKY: u32 = 0o1000;

const ROOT: u32 = 0;

/// The reason why a file or directory is not believed: a user other than root and the one that runs this program can change
/// it, or put another in its place.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrustError {
    /// It belongs to another user. Give it to root, or use another one.
    #[error(
        "{} belongs to user {uid}, who decides what is there: use another one, or, if nothing there is theirs, type: \
         chown {}{trusted} {}",
        path.display(), if *is_tree { "-R " } else { "" }, path.display()
    )]
    ForeignOwner {
        /// The file or directory, or a parent of it.
        path: PathBuf,
        /// Whether it is a directory, and not a parent: all that is in it counts.
        is_tree: bool,
        /// Its owner.
        uid: u32,
        /// The user that runs this program.
        trusted: u32,
    },
    /// Its mode lets others write to it. Change the mode, or use another one.
    #[error(
        "{} can be changed by other users (its mode is {mode}): use another one, or, if nothing there is theirs, type: \
         chmod go-w {}",
        path.display(), path.display()
    )]
    Writable {
        /// The file or directory, or a parent of it.
        path: PathBuf,
        /// Its mode.
        mode: FileMode,
    },
    /// It can't be inspected.
    #[error("can't find out who can change it")]
    Inspect(#[source] Error),
}

impl TrustError {
    /// The file or directory that others can change.
    pub fn path(&self) -> &Path {
        match self {
            Self::ForeignOwner { path, .. } | Self::Writable { path, .. } => path,
            Self::Inspect(error) => error.path(),
        }
    }
}

impl Dir {
    /// Checks that nobody but root and the user of this process can change this directory, by its descriptor. It says nothing
    /// of its parents.
    ///
    /// # Errors
    /// See [`TrustError`].
    pub fn check_owner(&self) -> Result<(), TrustError> {
        judge_file(self, &self.path, Role::Content)
    }

    /// Checks the same, and that nobody else can put another directory in its place: that its parents, and the symbolic links
    /// in its path, belong to root or to the user of this process, and that others can't write to the parents, unless they
    /// are sticky, as `/tmp` is.
    ///
    /// # Errors
    /// See [`TrustError`].
    pub fn check_owner_and_parents(&self) -> Result<(), TrustError> {
        self.check_owner()?;
        judge_parents(self)?;
        judge_links(&self.path)
    }

    /// Checks that nobody else can replace what this process creates in this directory, which may be sticky, as `/tmp` is.
    ///
    /// # Errors
    /// See [`TrustError`].
    pub fn check_parent(&self) -> Result<(), TrustError> {
        judge_file(self, &self.path, Role::Parent)?;
        judge_parents(self)?;
        judge_links(&self.path)
    }
}

/// Checks that nobody but root and the user of this process can change a file that was opened by this path, or put another in
/// its place, like [`Dir::check_owner_and_parents`]. A pipe has no place: who started the program has passed it.
///
/// # Errors
/// See [`TrustError`].
pub fn check_file_owner(file: &File, path: &Path) -> Result<(), TrustError> {
    let place = place_of(file, path)?;
    let Some(parent) = place.parent().filter(|parent| parent.is_absolute()) else { return Ok(()) };
    judge_file(file, path, Role::Content)?;
    Dir::open(parent).map_err(TrustError::Inspect)?.check_parent()?;
    judge_links(path)
}

/// What depends on a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Its content is believed.
    Content,
    /// An entry of it is.
    Parent,
}

fn judge_file(file: impl AsFd, path: &Path, role: Role) -> Result<(), TrustError> {
    let inspect = |errno| inspect_error(path, errno);
    let found = Metadata::from_stat(&syscalls::stat(&file).map_err(inspect)?);
    match judge(path, &found, role, geteuid().as_raw()) {
        // Nobody writes through a read-only mount: that of a ConfigMap has mode 0777.
        Err(TrustError::Writable { .. }) if syscalls::is_mounted_read_only(&file).map_err(inspect)? => Ok(()),
        judged => judged,
    }
}

/// Judges what was found, as the user `trusted` runs the program.
fn judge(path: &Path, found: &Metadata, role: Role, trusted: u32) -> Result<(), TrustError> {
    let path = || path.to_owned();
    if found.uid != ROOT && found.uid != trusted {
        // What else is in a parent is not believed.
        let is_tree = found.kind == FileKind::Dir && role != Role::Parent;
        return Err(TrustError::ForeignOwner { path: path(), is_tree, uid: found.uid, trusted });
    }
    let bits = found.mode.bits();
    let protects_entries = role == Role::Parent && bits & STICKY != 0;
    // The group of a user alone, which has the user's number: with the usual umask of 002, all that the user creates is
    // writable for it.
    let is_private_group = found.gid == trusted && trusted != ROOT;
    let writable = if is_private_group { WRITABLE } else { WRITABLE | GROUP_WRITABLE };
    // The mode of a link has no meaning.
    if bits & writable != 0 && !protects_entries && found.kind != FileKind::Symlink {
        return Err(TrustError::Writable { path: path(), mode: found.mode });
    }
    Ok(())
}

/// Judges the real parents of a directory, up to the root.
fn judge_parents(dir: &Dir) -> Result<(), TrustError> {
    let inspect = |errno| inspect_error(&dir.path, errno);
    let identity = |fd: &OwnedFd| syscalls::stat(fd).map(|stat| Metadata::from_stat(&stat)).map_err(inspect);
    let mut below =
        syscalls::open_beneath(dir, Path::new("."), OFlags::PATH | OFlags::DIRECTORY).map_err(inspect)?;
    loop {
        let above = syscalls::open_parent_to_inspect(&below).map_err(inspect)?;
        if identity(&above)?.is_same_file(&identity(&below)?) {
            return Ok(());
        }
        judge_file(&above, &place_of(&above, &dir.path)?, Role::Parent)?;
        below = above;
    }
}

/// Judges the symbolic links in a path: their owner can let them lead elsewhere.
fn judge_links(path: &Path) -> Result<(), TrustError> {
    let path = std::path::absolute(path).map_err(|source| inspect_error(path, source))?;
    for link in path.ancestors() {
        let inspect = |errno| inspect_error(link, errno);
        let found = syscalls::open(link, OFlags::PATH | OFlags::NOFOLLOW).map_err(inspect)?;
        let found = Metadata::from_stat(&syscalls::stat(found).map_err(inspect)?);
        if found.kind == FileKind::Symlink {
            judge(link, &found, Role::Content, geteuid().as_raw())?;
            let parent = Dir::open(link.parent().unwrap_or(link)).map_err(TrustError::Inspect)?;
            judge_file(&parent, &parent.path, Role::Parent)?;
            judge_parents(&parent)?;
        }
    }
    Ok(())
}

/// The path that the kernel has for an open file; without a directory for a pipe.
fn place_of(file: impl AsFd, path: &Path) -> Result<PathBuf, TrustError> {
    fs::read_link(syscalls::proc_path(file)).map_err(|source| inspect_error(path, source))
}

fn inspect_error(path: &Path, source: impl Into<std::io::Error>) -> TrustError {
    TrustError::Inspect(Error::new(FileOperation::Inspect, path, source))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn found(kind: FileKind, uid: u32, gid: u32, mode: u32) -> Metadata {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(scratch.path()).expect("there");
        let found = Metadata::from_stat(&syscalls::stat(&dir).expect("there"));
        Metadata { kind, uid, gid, mode: FileMode::new(mode), ..found }
    }

    #[test]
    fn a_file_is_believed_only_if_root_and_the_own_user_alone_can_change_it() {
        use FileKind::{Dir, File, Symlink};
        use Role::{Content, Parent};
        let (own, other, users) = (7, 8, 100);
        for (role, kind, (uid, gid), mode, is_trusted) in [
            (Content, Dir, (0, 0), 0o755, true),
            (Content, Dir, (own, users), 0o700, true),
            (Content, File, (own, users), 0o644, true),
            (Content, Dir, (other, own), 0o700, false),
            (Content, Dir, (own, users), 0o770, false),
            (Content, Dir, (own, 0), 0o770, false),
            (Content, Dir, (own, own), 0o775, true),
            (Content, File, (0, 0), 0o646, false),
            // Others can create in it what is believed.
            (Content, Dir, (0, 0), 0o1777, false),
            (Parent, Dir, (0, 0), 0o1777, true),
            (Parent, Dir, (0, 0), 0o777, false),
            // Its owner can remove and rename everything in it.
            (Parent, Dir, (other, 0), 0o1777, false),
            (Content, Symlink, (0, 0), 0o777, true),
            (Content, Symlink, (other, 0), 0o777, false),
        ] {
            let judged = judge(Path::new("/x"), &found(kind, uid, gid, mode), role, own);
            assert_eq!(judged.is_ok(), is_trusted, "{role:?} {kind:?} {uid} {gid} {mode:o}: {judged:?}");
        }
        // The group of root has other members than root where containers run with it.
        judge(Path::new("/x"), &found(Dir, 0, 0, 0o770), Content, 0).expect_err("others can write");
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
    }

    #[test]
    fn what_others_can_replace_is_not_believed_and_the_directory_is_named() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (above, data) = (scratch.path().join("above"), scratch.path().join("above/data"));
        fs::create_dir_all(&data).expect("made");
        let file = data.join("file");
        fs::write(&file, "").expect("written");
        let check = || {
            let file = check_file_owner(&File::open(&file).expect("there"), &file);
            (Dir::open(&data).expect("there").check_owner_and_parents(), file)
        };
        let names = |path: &Path, mode: &str| {
            for error in [check().0.expect_err("others can write"), check().1.expect_err("others can write")]
            {
                let path = path.display();
                assert!(
                    error
                        .to_string()
                        .starts_with(&format!("{path} can be changed by other users (its mode is {mode})"))
                        && error.to_string().ends_with(&format!("type: chmod go-w {path}")),
                    "{error}"
                );
            }
        };
        set_mode(&data, 0o755);
        set_mode(&above, 0o1777);
        let (dir, own) = check();
        assert!(dir.is_ok() && own.is_ok(), "{dir:?} {own:?}");
        set_mode(&above, 0o777);
        names(&above, "0777");
        set_mode(&above, 0o755);
        set_mode(&data, 0o775);
        names(&data, "0775");
        Dir::open(&above).expect("there").check_owner().expect("its own mode alone");
        // Through a link, the real parents count, and those of the link.
        set_mode(&data, 0o755);
        let links = scratch.path().join("links");
        fs::create_dir(&links).expect("made");
        symlink(&data, links.join("data")).expect("linked");
        let linked = || Dir::open(links.join("data")).expect("there").check_owner_and_parents();
        linked().expect("nobody else can change it");
        set_mode(&links, 0o777);
        assert_eq!(linked().expect_err("others can replace the link").path(), links);
        set_mode(&links, 0o755);
        set_mode(&above, 0o777);
        assert_eq!(
            linked().expect_err("others can replace its target").path(),
            above.canonicalize().expect("there")
        );
    }

    #[test]
    fn a_pipe_is_the_callers() {
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        let reader = File::from(OwnedFd::from(reader));
        check_file_owner(&reader, Path::new("/dev/fd/63")).expect("passed by the caller");
    }
}
