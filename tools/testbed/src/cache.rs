//! Files that are downloaded or built once, and kept outside the tree.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How many older entries of a family stay beside a new one: other branches of the workspace may have other
/// pins.
const KEPT: usize = 2;

/// An entry that was used since then may be in use.
const LATELY: Duration = Duration::from_secs(24 * 3600);

/// The cache's directory: `$NODEKEEL_CACHE`, else `$XDG_CACHE_HOME/nodekeel`, else `~/.cache/nodekeel`.
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
/// completely or not at all, and two processes don't make it twice.
///
/// # Errors
/// The cache can't be written, or `make` fails.
pub fn make_entry(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    make_entry_in(&cache_directory()?, name, make)
}

/// As [`make_entry`], for an entry of a family, whose names begin with `FAMILY-` and of which a newer one is
/// usually wanted. Making it removes the others of the family that have not been used for a day, but for the
/// two that were used last.
///
/// # Errors
/// As [`make_entry`].
pub fn make_family_entry(
    family: &str,
    name: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    make_family_entry_in(&cache_directory()?, family, name, make)
}

pub(crate) fn make_family_entry_in(
    cache: &Path,
    family: &str,
    name: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let was_there = cache.join(name).exists();
    let entry = make_entry_in(cache, name, make)?;
    // A directory's time says when it was used last. Where it can't be set, it is the time of its creation.
    let _ = File::open(&entry).and_then(|directory| directory.set_modified(SystemTime::now()));
    if !was_there {
        sweep_family(cache, &format!("{family}-"), name, SystemTime::now() - LATELY);
    }
    Ok(entry)
}

/// Removes entries with this prefix that were not used since then, but for the new one and those that were
/// used last.
fn sweep_family(cache: &Path, prefix: &str, new: &str, since: SystemTime) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    let mut others: Vec<(SystemTime, String)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_other = name.starts_with(prefix) && name != new;
            let used = entry.metadata().ok().filter(|_| is_other)?.modified().ok()?;
            Some((used, name))
        })
        .collect();
    others.sort();
    others.truncate(others.len().saturating_sub(KEPT));
    for (_, name) in others.into_iter().filter(|(used, _)| *used < since) {
        if let Err(error) = remove_entry(cache, &name) {
            eprintln!("testbed: remove {name} from the cache: {error:#}");
        }
    }
}

/// Removes an entry, of which no part is ever left under its name.
fn remove_entry(cache: &Path, name: &str) -> Result<()> {
    let _lock = acquire_lock(cache, name, || {})?;
    let partial = cache.join(format!(".{name}.partial"));
    fs::rename(cache.join(name), &partial).context("rename it away")?;
    fs::remove_dir_all(&partial).context("remove it")
}

/// Holds a lock of the cache until it is dropped, or its process ends in any way.
#[derive(Debug)]
#[must_use]
pub struct CacheLock {
    _file: File,
}

/// Acquires the lock of this name in a directory of the cache, which is created where it doesn't exist; calls
/// `waiting` before it waits for another process that holds the lock.
///
/// # Errors
/// The directory can't be written.
pub fn acquire_lock(directory: &Path, name: &str, waiting: impl FnOnce()) -> Result<CacheLock> {
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
    Ok(CacheLock { _file: file })
}

pub(crate) fn make_entry_in(
    cache: &Path,
    name: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let entry = cache.join(name);
    if entry.exists() {
        return Ok(entry);
    }
    let waiting = || eprintln!("{name}: another process makes it; waiting for that");
    let _lock = acquire_lock(cache, name, waiting)?;
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

    #[test]
    fn a_new_entry_sweeps_its_familys_unused_entries_but_for_two() {
        let cache = tempfile::tempdir().unwrap();
        let days_ago = |name: &str, days: u64| {
            let directory = cache.path().join(name);
            fs::create_dir(&directory).unwrap();
            let time = SystemTime::now() - Duration::from_secs(days * 24 * 3600 + 60);
            File::open(directory).unwrap().set_modified(time).unwrap();
        };
        for (name, days) in
            [("etcd-1", 9), ("etcd-2", 8), ("etcd-3", 7), ("etcd-4", 6), ("etc-1", 9), ("kube", 9)]
        {
            days_ago(name, days);
        }
        let names = || {
            let entries = fs::read_dir(cache.path()).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
            names.sort();
            names
        };
        // It is used, so it is younger than the others.
        make_family_entry_in(cache.path(), "etcd", "etcd-1", |_| panic!("it is there")).unwrap();
        assert_eq!(names().len(), 6, "what was there sweeps nothing");
        make_family_entry_in(cache.path(), "etcd", "etcd-5", |_| Ok(())).unwrap();
        assert_eq!(names(), ["etc-1", "etcd-1", "etcd-4", "etcd-5", "kube"]);
        for round in 6..10 {
            make_family_entry_in(cache.path(), "etcd", &format!("etcd-{round}"), |_| Ok(())).unwrap();
        }
        assert!(names().contains(&"etcd-5".to_owned()), "what was used today stays");
    }
}
