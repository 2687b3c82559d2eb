//! What is downloaded or built once, and kept outside the tree.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Where it is kept: `$NODEKEEL_CACHE`, else `$XDG_CACHE_HOME/nodekeel`, else `~/.cache/nodekeel`.
///
/// # Errors
/// When none of the three is set.
pub fn directory() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("NODEKEEL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("nodekeel")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/nodekeel")))
        .context("no place for the cache: set NODEKEEL_CACHE")
}

/// The entry of this name, made by `make` in a directory of its own where it isn't there yet. An entry is there wholly
/// or not at all, and two processes don't make it twice.
///
/// # Errors
/// When the cache can't be written, or `make` fails.
pub fn entry(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    entry_in(&directory()?, name, make)
}

/// Holds a lock of the cache until it is dropped, or its process ends however that does.
#[derive(Debug)]
#[must_use]
pub struct Lock {
    _file: File,
}

/// Takes the lock of this name in a directory of the cache, which is made where it isn't there; `waiting` is called
/// before it waits for another process that has it.
///
/// # Errors
/// When the directory can't be written.
pub fn lock(directory: &Path, name: &str, waiting: impl FnOnce()) -> Result<Lock> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let path = directory.join(format!(".{name}.lock"));
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let locked = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            waiting();
            flock(&file, FlockOperation::LockExclusive)
        }
        done => done,
    };
    locked.with_context(|| format!("lock {}", path.display()))?;
    Ok(Lock { _file: file })
}

pub(crate) fn entry_in(cache: &Path, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let entry = cache.join(name);
    if entry.exists() {
        return Ok(entry);
    }
    let waiting = || eprintln!("{name}: another process makes it; waiting for that");
    let _lock = lock(cache, name, waiting)?;
    if entry.exists() {
        return Ok(entry);
    }
    // With the lock in hand, what is there was left by a maker that was killed.
    let partial = cache.join(format!(".{name}.partial"));
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))?;
    }
    fs::create_dir(&partial).with_context(|| format!("create {}", partial.display()))?;
    make(&partial).with_context(|| format!("make {}", entry.display()))?;
    fs::rename(&partial, &entry).with_context(|| format!("rename {} into place", partial.display()))?;
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_made_once_and_a_failed_one_is_not_there() {
        let cache = tempfile::tempdir().unwrap();
        let failed = entry_in(cache.path(), "x", |partial| {
            fs::write(partial.join("half"), "")?;
            anyhow::bail!("no room")
        });
        assert!(format!("{:#}", failed.unwrap_err()).contains("no room"));
        assert!(!cache.path().join("x").exists());
        let made = entry_in(cache.path(), "x", |partial| {
            assert!(!partial.join("half").exists());
            fs::write(partial.join("whole"), "").context("write")
        });
        assert!(made.unwrap().join("whole").exists());
        entry_in(cache.path(), "x", |_| panic!("it is there")).unwrap();
    }
}
