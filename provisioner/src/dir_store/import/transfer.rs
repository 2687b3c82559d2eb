//! A volume arrives from another node, or is removed after it has arrived on one.

use std::io::Read;
use std::os::fd::AsFd as _;

use nodekeel_fsquota::{Bytes, QuotaLimits, QuotaStatus};
use nodekeel_localstorage::{Dir, FileMode, RenameMode};

use super::journal::journal_name;
use super::{COPY_PREFIX, VolumeImporter, dir_error, quota_error};
use crate::dir_store::import::SourceError;
use crate::id::VolumeId;
use crate::step::VolumeStep;
use crate::store::ErrorSource;

impl VolumeImporter {
    /// Checks that a volume of another node can [arrive](Self::receive); changes nothing. `owner` is the UID of the move.
    /// Success also if it has arrived: then it returns true.
    ///
    /// # Errors
    /// [`SourceError::CopyExists`], [`SourceError::NoRoom`]; [`SourceError::Store`].
    pub fn check_arrival(
        &self,
        id: &VolumeId,
        owner: &str,
        limits: QuotaLimits,
    ) -> Result<bool, SourceError> {
        for dir in [&self.volumes, &self.imports] {
            if dir.exists(id.as_str()).map_err(dir_error)? {
                let is_ours = self.read_journal(id)?.is_some_and(|journal| journal == *owner_record(owner));
                return if is_ours {
                    Ok(true)
                } else {
                    Err(SourceError::CopyExists { id: id.clone(), path: dir.path().join(id.as_str()) })
                };
            }
        }
        let shortage = self.find_shortage(limits, Bytes(0))?;
        shortage.map_err(|source| SourceError::NoRoom { id: id.clone(), source })?;
        Ok(false)
    }

    /// Makes the tree that [`Dir::send_tree`](nodekeel_localstorage::Dir::send_tree) has written on another node a volume
    /// with these limits. It appears complete, or not at all. Success, without reading the tree, if an earlier call with the
    /// same `owner` has done it. Once the volume has its PersistentVolume, call [`finish`](Self::finish).
    ///
    /// `check_wanted` is asked before anything is made, and again before the volume appears: a stream takes long, and its move
    /// may have been cancelled. Who cancels it and then opens an importer finds the volume complete, or not at all.
    ///
    /// # Errors
    /// Those of [`check_arrival`](Self::check_arrival); [`SourceError::Unwanted`]; [`SourceError::Store`] if the tree is
    /// damaged, not complete or larger than the limits: repeat the call with a new stream.
    pub fn receive(
        &self,
        id: &VolumeId,
        owner: &str,
        limits: QuotaLimits,
        from: &mut dyn Read,
        check_wanted: &dyn Fn() -> Result<(), ErrorSource>,
    ) -> Result<(), SourceError> {
        let check_wanted =
            || check_wanted().map_err(|source| SourceError::Unwanted { id: id.clone(), source });
        check_wanted()?;
        if self.check_arrival(id, owner, limits)? {
            // The rename of a killed call may not be durable yet.
            return self.volumes.sync().map_err(dir_error);
        }
        let received = self.receive_copy(id, limits, from).and_then(|copy| {
            check_wanted()?;
            // Before the rename: a volume in its place is known to be of this move.
            let record = owner_record(owner);
            self.imports
                .write(journal_name(id), record.as_os_str().as_encoded_bytes(), FileMode::PRIVATE_FILE)
                .map_err(dir_error)?;
            self.commit(&copy, &copy_name(id), id)
        });
        received.inspect_err(|_| self.discard_copy(id))
    }

    fn receive_copy(
        &self,
        id: &VolumeId,
        limits: QuotaLimits,
        from: &mut dyn Read,
    ) -> Result<Dir, SourceError> {
        let create = || self.imports.ensure_dir(copy_name(id), FileMode::PRIVATE_DIR);
        let copy = self.steps.run_step(VolumeStep::CreateDirectory, create).map_err(dir_error)?;
        // Limits before the first file, as of a copy.
        let limit = || self.quota.set_limits(copy.as_fd(), limits.into());
        self.steps.run_step(VolumeStep::SetLimits, limit).map_err(|error| quota_error(&copy, error))?;
        let receive = || copy.receive_tree(from);
        let received = self.steps.run_step(VolumeStep::CopyTree, receive).map_err(dir_error)?;
        // On ext4, root may exceed limits.
        let status = self.quota.read_status(copy.as_fd()).map_err(|error| quota_error(&copy, error))?;
        if let Some(status) = status.filter(QuotaStatus::is_over_limit) {
            return Err(SourceError::TooLarge { path: copy.path().to_owned(), used: status.usage, limits });
        }
        if received.separate_files > 0 {
            tracing::warn!(handle = %id, count = received.separate_files, "made files of some hard links");
        }
        Ok(copy)
    }

    /// Removes a volume whose PersistentVolume is on another node, and which is not mounted: the caller has seen both while
    /// this importer was open, which keeps others from making it a volume of this node again. Blocks until its data are
    /// erased. Success also if it does not exist.
    ///
    /// # Errors
    /// [`SourceError::Store`]; a retry can help.
    pub fn discard(&self, id: &VolumeId) -> Result<(), SourceError> {
        if self.volumes.exists(id.as_str()).map_err(dir_error)? {
            let rename =
                || self.volumes.rename(id.as_str(), &self.imports, copy_name(id), RenameMode::NoReplace);
            self.steps.run_step(VolumeStep::MoveToTrash, rename).map_err(dir_error)?;
        }
        // What a call leaves that is killed here, the next importer removes.
        self.remove_incomplete_copies()?;
        self.finish(id)
    }
}

fn copy_name(id: &VolumeId) -> String {
    format!("{COPY_PREFIX}{id}")
}

/// The record of a volume that has arrived: no path, which would begin with a slash.
fn owner_record(owner: &str) -> std::path::PathBuf {
    format!("move {owner}").into()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    use nodekeel_fsquota::Inodes;
    use nodekeel_fsquota::testing::MemQuota;

    use super::*;
    use crate::dir_store::DirStore;
    use crate::store::VolumeStore as _;
    use crate::testing::objects::sample_uid;

    const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(100)) };

    const WANTED: fn() -> Result<(), ErrorSource> = || Ok(());

    fn id() -> VolumeId {
        VolumeId::from_uid(&sample_uid(1)).expect("a UUID")
    }

    /// A store with an identity.
    fn scratch() -> (tempfile::TempDir, Arc<MemQuota>) {
        let base = tempfile::tempdir().expect("a directory");
        let quota = Arc::new(MemQuota::new());
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, quota.clone()).expect("a store");
        drop(store);
        fs::write(base.path().join("store-id"), sample_uid(7) + "\n").expect("written");
        (base, quota)
    }

    fn importer(base: &Path, quota: &Arc<MemQuota>) -> VolumeImporter {
        let base = Dir::open(base).expect("the base");
        VolumeImporter::open(base, quota.clone(), None).expect("an importer")
    }

    fn stream() -> Vec<u8> {
        let source = tempfile::tempdir().expect("a directory");
        fs::write(source.path().join("file"), "data").expect("written");
        let mut stream = Vec::new();
        Dir::open(source.path()).expect("open").send_tree(&mut stream).expect("sent");
        stream
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("a list").map(|entry| entry.expect("an entry").file_name());
        entries.map(|name| name.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_volume_arrives_once_and_complete_and_is_removed_by_its_name() {
        let (base, quota) = scratch();
        let (volumes, imports) = (base.path().join("volumes"), base.path().join(".import"));
        let stream = stream();
        let part = importer(base.path(), &quota).receive(&id(), "1", LIMITS, &mut &stream[..40], &WANTED);
        assert!(matches!(part, Err(SourceError::Store(_))), "{part:?}");
        assert_eq!((names(&volumes).len(), names(&imports).len()), (0, 0), "nothing is left");
        importer(base.path(), &quota)
            .receive(&id(), "1", LIMITS, &mut &stream[..], &WANTED)
            .expect("received");
        let file = volumes.join(id().as_str()).join("file");
        assert_eq!(fs::read_to_string(&file).expect("the data"), "data");
        // Again, without a stream: it is there. Of another move, it is not taken over.
        importer(base.path(), &quota)
            .receive(&id(), "1", LIMITS, &mut &b""[..], &WANTED)
            .expect("it is there");
        let other = importer(base.path(), &quota).receive(&id(), "2", LIMITS, &mut &stream[..], &WANTED);
        assert!(matches!(other, Err(SourceError::CopyExists { .. })), "{other:?}");
        assert!(file.exists());
        importer(base.path(), &quota).finish(&id()).expect("finished");
        let again = importer(base.path(), &quota).receive(&id(), "1", LIMITS, &mut &stream[..], &WANTED);
        assert!(matches!(again, Err(SourceError::CopyExists { .. })), "the move is over: {again:?}");
        for _ in 0..2 {
            importer(base.path(), &quota).discard(&id()).expect("removed");
            assert_eq!((names(&volumes).len(), names(&imports).len()), (0, 0));
        }
    }

    #[test]
    fn a_volume_whose_move_was_cancelled_before_or_while_it_arrives_leaves_nothing() {
        let (base, quota) = scratch();
        for cancelled_at in 0..3 {
            let asked = Cell::new(0);
            let check_wanted = || {
                asked.set(asked.get() + 1);
                if asked.get() > cancelled_at {
                    Err(ErrorSource::from("it has a PersistentVolume"))
                } else {
                    Ok(())
                }
            };
            let received =
                importer(base.path(), &quota).receive(&id(), "1", LIMITS, &mut &stream()[..], &check_wanted);
            let left = ["volumes", ".import"].map(|dir| names(&base.path().join(dir)).len());
            if cancelled_at < 2 {
                assert!(matches!(received, Err(SourceError::Unwanted { .. })), "{received:?}");
                assert_eq!(left, [0, 0], "cancelled at {cancelled_at}");
            } else {
                assert_eq!((received.is_ok(), left), (true, [1, 1]), "the volume and its record");
            }
        }
    }

    #[tokio::test]
    async fn a_volume_that_was_removed_is_not_promised_any_more() {
        let (base, quota) = scratch();
        let store = DirStore::new(Dir::open(base.path()).expect("the base"), quota.clone()).expect("a store");
        store.create(&id(), LIMITS).await.expect("created");
        let promised = async || {
            store.list().await.expect("a list");
            store.capacity().await.expect("known").expect("limited").promised
        };
        assert_eq!(Some(promised().await), LIMITS.bytes);
        importer(base.path(), &quota).discard(&id()).expect("removed");
        assert_eq!(promised().await, Bytes(0));
    }

    #[tokio::test]
    async fn an_empty_volume_that_has_arrived_is_not_swept_before_its_move_ends() {
        let (base, quota) = scratch();
        let source = tempfile::tempdir().expect("a directory");
        let mut stream = Vec::new();
        Dir::open(source.path()).expect("open").send_tree(&mut stream).expect("sent");
        importer(base.path(), &quota)
            .receive(&id(), "1", LIMITS, &mut &stream[..], &WANTED)
            .expect("received");
        let store = DirStore::new(Dir::open(base.path()).expect("the base"), quota.clone()).expect("a store");
        assert!(!store.remove_empty(&id()).await.expect("kept"));
        importer(base.path(), &quota).finish(&id()).expect("finished");
        assert!(store.remove_empty(&id()).await.expect("removed"));
    }
}
