//! The record that this node has opened its encrypted volume by a secret: only then does a restarted noded use the open mapping
//! without one.

use std::fs;
use std::io;

use nodekeel_localstorage::volume::DiskIdentity;
use nodekeel_localstorage::{Dir, FileMode};

/// The name of the record, in the directory in memory.
const RECORD_FILE: &str = "opened-volume";

/// Records, until the machine stops, that a secret has opened this mapping. The kernel gives a mapping that is opened later
/// another identity, so the record need not be removed.
pub(super) fn record_opening(runtime: &Dir, mapping: &DiskIdentity) -> io::Result<()> {
    runtime.write(RECORD_FILE, &encode(mapping)?, FileMode::PRIVATE_FILE).map_err(io::Error::other)
}

/// Returns whether this node has opened this mapping. Without a record, the mapping is another program's.
pub(super) fn has_opened(runtime: &Dir, mapping: &DiskIdentity) -> bool {
    let recorded = runtime.read_at_most(RECORD_FILE, 4096).ok();
    recorded.is_some_and(|recorded| encode(mapping).is_ok_and(|expected| recorded == expected))
}

/// An identity does not outlast the boot, and the directory may.
///
/// *Source:* random(4), `boot_id`.
fn encode(mapping: &DiskIdentity) -> io::Result<Vec<u8>> {
    let boot = fs::read("/proc/sys/kernel/random/boot_id")?;
    Ok([b"nodekeel opened data volume, format 1\n", &boot[..], mapping.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nodekeel_localstorage::volume::inspect_disk;

    use super::*;

    #[test]
    fn only_the_mapping_that_was_opened_in_this_boot_needs_no_secret() {
        let scratch = tempfile::tempdir().expect("a directory");
        let runtime = Dir::open(scratch.path()).expect("there");
        let identity = |name: &str| {
            let path = scratch.path().join(name);
            File::create(&path).and_then(|file| file.set_len(4 << 20)).expect("created");
            inspect_disk(&path).expect("read").identity
        };
        let (own, other) = (identity("own"), identity("other"));
        assert!(!has_opened(&runtime, &own), "another program's");
        record_opening(&runtime, &own).expect("written");
        assert!(has_opened(&runtime, &own));
        assert!(!has_opened(&runtime, &other));
        let mut record = fs::read(scratch.path().join(RECORD_FILE)).expect("written");
        let boot = record.iter().position(|byte| *byte == b'\n').expect("a line") + 1;
        record[boot] ^= 1;
        fs::write(scratch.path().join(RECORD_FILE), record).expect("written");
        assert!(!has_opened(&runtime, &own), "of another boot");
    }
}
