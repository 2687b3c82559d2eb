//! The list of revoked certificates, from the cluster's keys to the disk, where etcd reads it.

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_localstorage::tree::Etcd;
use nodekeel_supervisor::{Context, Failure};
use tokio::task::spawn_blocking;

use super::stored::list;
use super::{AuthorityError, REVOKED};
use crate::consensus::kv::{Change, Follow, KeyRange, KvStore, Update};

/// A runnable that keeps the list on the disk as it is in the root keys: ready once it is there, and then on each change,
/// also after one that a compaction has swallowed. etcd reads it anew for each connection.
///
/// What is not a list of this authority never comes to the disk: the run fails, names the key, and the tree starts it
/// again.
///
/// # Errors
/// The cancellation of its context; [`AuthorityError`].
pub async fn keep_revoked(
    ctx: Context,
    root: Arc<dyn KvStore>,
    ca: Certificate,
    files: Etcd,
) -> Result<(), Failure> {
    let mut follow = Follow::new(root, KeyRange::key(REVOKED));
    let mut is_ready = false;
    loop {
        let update = tokio::select! {
            biased;
            cancelled = ctx.cancelled() => return Err(cancelled.into()),
            update = follow.next() => update,
        };
        let update = update.map_err(AuthorityError::store("follow the list of revoked certificates"))?;
        let der = newest(update).ok_or(AuthorityError::Incomplete { missing: REVOKED })?;
        store(list(&der, &ca)?, ca.clone(), files.clone()).await?;
        if !is_ready {
            ctx.ready()?;
            is_ready = true;
        }
    }
}

/// The list as it is after an update; none where it was removed, or isn't there.
fn newest(update: Update) -> Option<Vec<u8>> {
    match update {
        Update::All { kvs, .. } => kvs.into_iter().next_back().map(|kv| kv.value),
        Update::Changes(changes) => match changes.into_iter().next_back()? {
            Change::Put(kv) => Some(kv.value),
            Change::Deleted { .. } => None,
        },
    }
}

/// Writes the list, unless it is there already: a write that changes nothing would wear the disk at each start.
async fn store(list: RevocationList, ca: Certificate, files: Etcd) -> Result<(), AuthorityError> {
    let write = move || {
        // What can't be read as a list is replaced like an old one.
        match files.load_revoked(&ca) {
            Ok(Some(there)) if there == list => Ok(()),
            _ => files.store_revoked(&list),
        }
    };
    let written = spawn_blocking(write).await;
    let written = written.map_err(|error| AuthorityError::make("a thread that writes")(error.into()))?;
    written.map_err(AuthorityError::Keep)
}
