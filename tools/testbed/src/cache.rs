//! Files that are downloaded or built once, and kept outside the tree.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

/// The cache's directory: `$NODEKEEL_CACHE`, else `$XDG_CACHE_HOME/nodekeel`, else `~/.cache/nodekeel`. It may be removed
/// whenever nothing runs: entries of earlier pins stay in it.
///
/// # Errors
/// None of the three is set.
pub fn cache_directory() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("NODEKEEL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("nodekeel")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/nodekeel")))
        .context("find the cache's directory: HOME is not set; set NODEKEEL_CACHE")
}

/// The entry of this name; `make` fills a new directory where the entry doesn't exist yet. An entry exists
/// completely or not at all, and of two processes, one waits for the other.
///
/// # Errors
/// The cache can't be written, or `make` fails.
pub fn make_entry(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    make_entry_in(&cache_directory()?, name, make)
}

fn make_entry_in(cache: &Path, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let entry = cache.join(name);
    if entry.exists() {
        return Ok(entry);
    }
    fs::create_dir_all(cache).with_context(|| format!("create {}", cache.display()))?;
    let path = cache.join(format!(".{name}.lock"));
    let lock = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    flock(&lock, FlockOperation::LockExclusive).with_context(|| format!("lock {}", path.display()))?;
    if entry.exists() {
        return Ok(entry);
    }
    // The lock is held, so an existing partial entry was left by a process that was killed.
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
        let failed = make_entry_in(cache.path(), "x", |partial| {
            fs::write(partial.join("half"), "")?;
            anyhow::bail!("no room")
        });
        assert!(format!("{:#}", failed.unwrap_err()).contains("no room"));
        assert!(!cache.path().join("x").exists());
        let made = make_entry_in(cache.path(), "x", |partial| {
            assert!(!partial.join("half").exists());
            fs::write(partial.join("whole"), "").context("write")
        });
        assert!(made.unwrap().join("whole").exists());
        make_entry_in(cache.path(), "x", |_| panic!("it is there")).unwrap();
    }
}
