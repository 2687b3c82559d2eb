//! The files with several names of a tree that is being cloned.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The approximate limit of the table, in bytes.
pub(super) const MAX_TABLE_BYTES: usize = 16 << 20;

/// The approximate memory of an entry without its path, in bytes.
const ENTRY_BYTES: usize = 128;

/// *Source:* `linux/limits.h`, `PATH_MAX`, which counts the NUL byte.
const PATH_MAX: usize = 4096;

/// The inode number and the time of birth of a file.
pub(super) type FileIdentity = (u64, i128);

/// The first name in the clone of each file with several names, within a bounded memory.
#[derive(Debug)]
pub(super) struct LinkTable {
    first_names: HashMap<FileIdentity, FirstName>,
    free_bytes: usize,
}

#[derive(Debug)]
struct FirstName {
    path: PathBuf,
    /// The number of names that are not cloned yet.
    missing: u64,
}

impl FirstName {
    fn bytes(&self) -> usize {
        self.path.as_os_str().len() + ENTRY_BYTES
    }
}

impl LinkTable {
    pub(super) fn new(bytes: usize) -> Self {
        Self { first_names: HashMap::new(), free_bytes: bytes }
    }

    /// The path of the first name of a file.
    pub(super) fn find(&self, file: FileIdentity) -> Option<&Path> {
        self.first_names.get(&file).map(|first| first.path.as_path())
    }

    /// Adds a file with so many names, the first of which is cloned. Returns whether the others can be links to it: its
    /// path is not too long for the kernel, nor the table full.
    pub(super) fn insert(&mut self, file: FileIdentity, path: PathBuf, names: u64) -> bool {
        let first = FirstName { path, missing: names.saturating_sub(1) };
        let bytes = first.bytes();
        if first.path.as_os_str().len() >= PATH_MAX || bytes > self.free_bytes {
            return false;
        }
        self.free_bytes -= bytes;
        self.first_names.insert(file, first);
        true
    }

    /// Notes that another name of a file is cloned. After the last one, the file is forgotten.
    pub(super) fn count_link(&mut self, file: FileIdentity) {
        let Some(first) = self.first_names.get_mut(&file) else { return };
        first.missing = first.missing.saturating_sub(1);
        if first.missing == 0 {
            self.free_bytes += first.bytes();
            self.first_names.remove(&file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_forgotten_after_its_last_name_and_its_space_is_free_again() {
        let mut table = LinkTable::new(2 * (ENTRY_BYTES + 1));
        for _ in 0..3 {
            assert!(table.insert((1, 0), "a".into(), 3) && table.insert((2, 0), "b".into(), 2));
            assert!(!table.insert((3, 0), "c".into(), 2), "the table is full");
            for _ in 0..2 {
                assert_eq!(table.find((1, 0)), Some(Path::new("a")));
                table.count_link((1, 0));
            }
            table.count_link((2, 0));
            assert!([1, 2, 3].iter().all(|inode| table.find((*inode, 0)).is_none()));
        }
        assert!(!LinkTable::new(1 << 20).insert((1, 0), "a".repeat(PATH_MAX).into(), 2), "a long path");
    }
}
