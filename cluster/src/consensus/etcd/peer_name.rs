//! The peer ports admit members alone.
//!
//! Each certificate of the cluster's CA would open etcd's peer port. So members' certificates have a [name](peer_name()) that no other
//! has, and etcd and the member itself require it there. An earlier release gave none: such a member certifies itself again at its
//! start, and the name is required once
//!
//! - each listed member has published a certificate with it;
//! - no unused ticket has a certificate without it.
//!
//! Then a key in the store says so for ever, and each member keeps that beside its data, where it needs no majority to know it: its
//! etcd requires the name from its next start on. A member that joins is told with its admission, before its first start. A new
//! cluster has the key from its creation on.

use std::collections::BTreeSet;
use std::sync::Arc;

use nodekeel_localstorage::pki::Certificate;
use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_supervisor::{Context, Failure};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use super::files;
use crate::consensus::kv::{KeyRange, KvError, KvStore, ListWatcher};
use crate::consensus::{ClusterReport, ConsensusError, OpenPeerPort, PeerUrl};
use crate::node::{find_unnamed_ticket, unused_tickets};
use crate::pki::{CA_PREFIX, CaSealing, PEER_NAME_PATH, peer_name};

/// The member of a cluster whose peer port does not require the name yet.
#[derive(Clone)]
pub(super) struct PeerNames {
    pub(super) root: Arc<dyn KvStore>,
    pub(super) sealing: CaSealing,
    pub(super) ca: Certificate,
    pub(super) files: EtcdDir,
    /// Changes with the list of members.
    pub(super) report: watch::Receiver<ClusterReport>,
    pub(super) open: watch::Sender<Option<OpenPeerPort>>,
}

impl PeerNames {
    /// A runnable that waits until the name can be required, and records that in the store and beside the member's data.
    ///
    /// # Errors
    /// The cancellation of its context; the store's. It can be repeated.
    pub(super) async fn require(mut self, ctx: Context) -> Result<(), Failure> {
        ctx.signal_ready()?;
        tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            required = self.wait_required() => required?,
        }
        // Outside of the select: a write on a thread could not be canceled.
        let (files, ca) = (self.files.clone(), self.ca.clone());
        let written = spawn_blocking(move || files::require_peer_name(&files, &ca)).await;
        written.map_err(ConsensusError::backend("record which name the peer port requires"))??;
        self.open.send_replace(Some(OpenPeerPort::Restart));
        Err(ctx.canceled().await.into())
    }

    async fn wait_required(&mut self) -> Result<(), Failure> {
        let watch = |keys| ListWatcher::new(Arc::clone(&self.root), keys);
        let (mut issued, mut certified) = (watch(unused_tickets()), watch(KeyRange::prefix(CA_PREFIX)));
        let name = peer_name(&self.ca);
        while !is_required(&*self.root, &self.ca).await? {
            // In this order: a node is listed before its ticket is deleted.
            let stored = self.root.range(unused_tickets()).await?.kvs;
            let tickets = stored.iter().filter_map(|ticket| find_unnamed_ticket(ticket, &name));
            let unnamed = self.sealing.list_unnamed_members().await?;
            // One without a name has not started: its ticket is not used up.
            let unstarted = unnamed.iter().filter(|member| member.name.is_none());
            let unstarted = unstarted.flat_map(|member| &member.peer_urls).filter_map(|url| url.parse().ok());
            let tickets: BTreeSet<PeerUrl> = tickets.chain(unstarted).collect();
            if unnamed.is_empty() && tickets.is_empty() {
                self.root.put(PEER_NAME_PATH.as_bytes(), name.as_bytes()).await?;
                tracing::info!(
                    "the peer ports of the cluster admit members alone, each from its next start on"
                );
                continue;
            }
            let members: BTreeSet<_> = unnamed.into_iter().filter_map(|member| member.name).collect();
            self.open.send_replace(Some(OpenPeerPort::Unnamed { members, tickets }));
            tokio::select! {
                update = issued.next_update() => drop(update?),
                update = certified.next_update() => drop(update?),
                Ok(()) = self.report.changed() => {}
            }
        }
        Ok(())
    }
}

/// Returns whether the peer ports of the cluster with this CA require the name.
pub(super) async fn is_required(root: &dyn KvStore, ca: &Certificate) -> Result<bool, KvError> {
    let stored = root.get(PEER_NAME_PATH.as_bytes()).await?;
    Ok(stored.is_some_and(|stored| stored.value == peer_name(ca).as_bytes()))
}
