//! Revokes the certificates of nodes that leave: their members are removed first, and then reach nothing any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure};
use tokio::time::{Instant, sleep};

use super::sealing::members_error;
use super::{CaError, CaSealing, ClusterCa, Voter};
use crate::consensus::ClusterMembers;
use crate::consensus::kv::{KeyEvent, KeyRange, KvStore, ListWatchUpdate, ListWatcher};

/// Key prefix of nodes that leave, by their names.
const DEPARTURES: &str = "/etcd-departures/";
/// The pause between two looks at the members while a node leaves.
const PAUSE: Duration = Duration::from_millis(200);
/// The time in which a node whose member is removed learns that from the others, which reject its certificates afterwards.
const FAREWELL: Duration = Duration::from_secs(3);

/// Records that a node leaves: once it is no member any more, the others revoke its certificates.
pub(crate) async fn announce_departure(root: &dyn KvStore, name: &str) -> Result<(), CaError> {
    let put = root.put(departure_key(name).as_bytes(), b"").await;
    put.map(drop).map_err(CaError::store_error("record that this node leaves"))
}

/// A runnable that revokes the certificates of nodes that have left, and seals the private key to the others alone. Each voter
/// runs it, and it sleeps while no node leaves.
pub(crate) async fn revoke_departed(
    ctx: Context,
    root: Arc<dyn KvStore>,
    members: Arc<dyn ClusterMembers>,
    voter: Option<Arc<Voter>>,
) -> Result<(), Failure> {
    let mut follow = ListWatcher::new(Arc::clone(&root), KeyRange::prefix(DEPARTURES));
    ctx.signal_ready()?;
    let departures = Departures { root, members, voter };
    let (mut leaving, mut left_at) = (BTreeSet::new(), BTreeMap::new());
    loop {
        tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            update = follow.next_update() => apply_update(&mut leaving, update?),
            () = sleep(PAUSE), if !leaving.is_empty() => {}
        }
        for name in &leaving {
            tokio::select! {
                biased;
                canceled = ctx.canceled() => return Err(canceled.into()),
                // Each step can be repeated, also by several voters at once.
                revoked = departures.revoke(name, &mut left_at) => if let Err(error) = revoked {
                    tracing::debug!("can't revoke the certificates of {name} yet: {}", Failure::new(error));
                }
            }
        }
    }
}

struct Departures {
    root: Arc<dyn KvStore>,
    members: Arc<dyn ClusterMembers>,
    voter: Option<Arc<Voter>>,
}

impl Departures {
    async fn revoke(&self, name: &str, left_at: &mut BTreeMap<String, Instant>) -> Result<(), CaError> {
        let members = self.members.list_members().await.map_err(members_error)?;
        if members.iter().any(|member| member.name.as_deref() == Some(name)) {
            return Ok(());
        }
        if left_at.entry(name.to_owned()).or_insert_with(Instant::now).elapsed() < FAREWELL {
            return Ok(());
        }
        let root = || Arc::clone(&self.root);
        let cluster_ca = match &self.voter {
            Some(voter) => ClusterCa::load_sealed(root(), voter).await?,
            None => ClusterCa::load_ca(root()).await?,
        };
        match cluster_ca.revoke_name(name).await {
            Ok(_) | Err(CaError::UnknownName { .. }) => {}
            Err(error) => return Err(error),
        }
        if let Some(voter) = &self.voter {
            CaSealing::new(root(), Arc::clone(&self.members), Arc::clone(voter)).exclude(name).await?;
        }
        left_at.remove(name);
        let deleted = self.root.delete(KeyRange::single_key(departure_key(name))).await;
        deleted.map(drop).map_err(CaError::store_error("record that a node has left"))
    }
}

fn departure_key(name: &str) -> String {
    format!("{DEPARTURES}{name}")
}

fn apply_update(leaving: &mut BTreeSet<String>, update: ListWatchUpdate) {
    let name = |key: Vec<u8>| Some(String::from_utf8(key).ok()?.strip_prefix(DEPARTURES)?.to_owned());
    match update {
        ListWatchUpdate::Snapshot(kvs) => *leaving = kvs.into_iter().filter_map(|kv| name(kv.key)).collect(),
        ListWatchUpdate::Events(events) => {
            for event in events {
                match event {
                    KeyEvent::Put(kv) => leaving.extend(name(kv.key)),
                    KeyEvent::Delete { key, .. } => {
                        leaving.retain(|other| Some(other) != name(key.clone()).as_ref())
                    }
                }
            }
        }
    }
}
