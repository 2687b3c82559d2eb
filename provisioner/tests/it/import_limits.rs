//! Imported volumes have limits that the kernel enforces.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::sync::Arc;

use nodekeel_fsquota::{AuditOptions, Bytes, Inodes, ProjectQuota, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{DirStore, ImportMode, ImportOutcome, VolumeImporter, VolumeStore as _};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use testbed::guest::disk::{FileSystem, GuestDisk};

use crate::fixture::id;

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(8 << 20)), inodes: Some(Inodes(100)) };
const DATA_BYTES: usize = 3 << 20;

#[tokio::test]
#[ignore = "sampled: needs kernel with 2 disks of 512 MiB"]
async fn an_imported_volume_counts_all_its_files_and_cannot_exceed_its_limits() {
    let disks = GuestDisk::acquire_many(2).expect("disks");
    for (disk, kind) in disks.into_iter().zip([FileSystem::Xfs, FileSystem::Ext4]) {
        let mounted = disk.format_and_mount(kind, "prjquota").expect("a file system");
        let elsewhere = tempfile::tempdir().expect("a directory");
        let base = mounted.mount_point();
        let quota = || Arc::new(ProjectQuota::open(base).expect("project quotas"));
        let store = DirStore::new(Dir::open(base).expect("open"), quota()).expect("a store");
        store.create_identity().await.expect("an identity");
        let importer =
            VolumeImporter::open(Dir::open(base).expect("open"), quota(), None).expect("an importer");
        let sources = [
            (base.join("moved"), ImportMode::Move),
            (base.join("copied"), ImportMode::Copy),
            (elsewhere.path().join("copied"), ImportMode::Copy),
        ];
        for (number, (source, mode)) in (1..).zip(&sources) {
            let context = format!("{kind:?}, {}, {mode:?}", source.display());
            let id = id(number);
            write_data(source);
            let outcome = importer.import(&id, LIMITS, source, *mode).unwrap_or_else(|error| {
                panic!("{context}: {error}: {:?}", std::error::Error::source(&error))
            });
            assert_eq!(outcome, ImportOutcome::Imported { uncounted: 0, devices: 0 }, "{context}");
            let usage = store.usage(&id).await.expect("usage");
            assert_eq!(usage.limits, LIMITS, "{context}");
            assert_eq!(usage.usage.inodes, Inodes(4), "{context}: two directories and two files");
            assert!(usage.usage.bytes >= Bytes(DATA_BYTES as u64), "{context}: {usage:?}");
            assert_limited(&base.join("volumes").join(id.as_str()), &context);
        }
        let audit =
            store.audit_limits(AuditOptions::default()).await.expect("an audit").expect("a summary").summary;
        assert_eq!((audit.escaped.bytes, audit.outside.bytes), (Bytes(0), Bytes(0)), "{kind:?}: {audit:?}");
    }
}

fn write_data(at: &Path) {
    fs::create_dir_all(at.join("below")).expect("a directory");
    fs::write(at.join("below/file"), vec![7; DATA_BYTES]).expect("a file");
    fs::write(at.join("small"), "data").expect("a file");
}

/// Checks that the limit ends writes, without the capability with which ext4 permits any.
fn assert_limited(volume: &Path, context: &str) {
    assert_eq!(fs::read(volume.join("below/file")).expect("the data").len(), DATA_BYTES, "{context}");
    let write = || {
        let mut sets = capabilities(None).expect("the capabilities");
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets).expect("without a capability");
        let mut file = fs::File::create(volume.join("below/more")).expect("a file");
        let chunk = vec![7; 1 << 20];
        // Without the sync, delayed allocation would report the error later.
        (0..16).find_map(|_| file.write_all(&chunk).and_then(|()| file.sync_data()).err())
    };
    let error = std::thread::scope(|scope| scope.spawn(write).join().expect("no panic"));
    let kind = error.unwrap_or_else(|| panic!("{context}: it exceeds the limit")).kind();
    assert!(matches!(kind, ErrorKind::QuotaExceeded | ErrorKind::StorageFull), "{context}: {kind}");
}
