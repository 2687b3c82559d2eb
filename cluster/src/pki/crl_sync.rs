//! Copies the list of revoked certificates from the cluster's keys to the disk, where etcd reads it.

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_supervisor::{Context, Failure};
use tokio::task::spawn_blocking;

use super::stored::parse_revocation_list;
use super::{CRL_PATH, CaError};
use crate::consensus::kv::{KeyEvent, KeyRange, KvStore, ListWatchUpdate, ListWatcher};

/// A runnable that keeps the list on the disk equal to that in the root keys: it signals ready after the
/// first write, and writes every change, even one that was compacted away before it was read. etcd reads the
/// file for each connection.
///
/// A list that this CA has not signed is never written to the disk: the run fails with an error that names
/// the key, and the supervisor restarts it.
///
/// # Errors
/// The cancellation of its context; [`CaError`].
pub async fn sync_revocation_list(
    ctx: Context,
    root: Arc<dyn KvStore>,
    ca: Certificate,
    files: EtcdDir,
) -> Result<(), Failure> {
    let mut follow = ListWatcher::new(root, KeyRange::single_key(CRL_PATH));
    let mut is_ready = false;
    loop {
        let update = tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            update = follow.next_update() => update,
        };
        let update = update.map_err(CaError::store_error("watch the list of revoked certificates"))?;
        let der = newest_list(update).ok_or(CaError::Incomplete { missing: CRL_PATH })?;
        // Outside of the select: a write on a thread could not be canceled.
        store_if_changed(parse_revocation_list(&der, &ca)?, ca.clone(), files.clone()).await?;
        if !is_ready {
            ctx.signal_ready()?;
            is_ready = true;
        }
    }
}

/// The list after an update; `None` if it was removed or does not exist.
fn newest_list(update: ListWatchUpdate) -> Option<Vec<u8>> {
    match update {
        // A single key is watched, and changes are in order: the last one is the newest.
        ListWatchUpdate::Snapshot(kvs) => kvs.into_iter().next_back().map(|kv| kv.value),
        ListWatchUpdate::Events(changes) => match changes.into_iter().next_back()? {
            KeyEvent::Put(kv) => Some(kv.value),
            KeyEvent::Delete { .. } => None,
        },
    }
}

/// Writes the list unless the file is up to date: an unnecessary write at each start would wear the disk.
async fn store_if_changed(list: RevocationList, ca: Certificate, files: EtcdDir) -> Result<(), CaError> {
    let write = move || {
        // An invalid file is replaced like an outdated one.
        match files.load_revocation_list(&ca) {
            Ok(Some(on_disk)) if on_disk == list => Ok(()),
            _ => files.store_revocation_list(&list),
        }
    };
    let written = spawn_blocking(write).await;
    let written = written.map_err(|error| CaError::create_error("a writer thread")(error.into()))?;
    written.map_err(CaError::WriteRevocationList)
}
