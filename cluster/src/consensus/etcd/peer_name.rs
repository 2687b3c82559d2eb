//! The peer ports admit members alone.
//!
//! Each certificate of the cluster's CA would open etcd's peer port. So members' certificates have a [name](peer_name()) that no other
//! has, and etcd and the member itself require it there. An earlier release gave none: such a member certifies itself again at its
//! start, and the name is required once
//!
//! - each listed member presents a certificate with it at its peer port;
//! - no unused ticket has a certificate without it.
//!
//! Then a key in the store says so for ever, and each member keeps that beside its data, where it needs no majority to know it: its
//! etcd requires the name from its next start on. Before it keeps that, it looks at the certificates again. A member that joins is
//! told with its admission, before its first start. A new cluster has the key from its creation on.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::join_all;
use nodekeel_localstorage::pki::Certificate;
use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_supervisor::{Context, Failure};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use super::files;
use super::health::name_and_url;
use super::members::EtcdMembers;
use super::retry_pause::RetryPause;
use crate::consensus::kv::{KeyRange, KvError, KvStore, ListWatcher};
use crate::consensus::{ClusterMembers as _, ClusterReport, ConsensusError, Member, OpenPeerPort, PeerUrl};
use crate::node::{find_unnamed_ticket, unused_tickets};
use crate::pki::{CA_PREFIX, PEER_NAME_PATH, has_peer_name, peer_name};

/// The member of a cluster whose peer port does not require the name yet.
#[derive(Clone)]
pub(super) struct PeerNames {
    pub(super) root: Arc<dyn KvStore>,
    pub(super) members: EtcdMembers,
    pub(super) ca: Certificate,
    pub(super) files: EtcdDir,
    /// Changes with the list of members, and with who answers.
    pub(super) report: watch::Receiver<ClusterReport>,
    pub(super) open: watch::Sender<Option<OpenPeerPort>>,
}

impl PeerNames {
    /// A runnable that waits until the name can be required, and records that in the store and beside the member's data.
    ///
    /// # Errors
    /// The cancellation of its context; that of a file. It can be repeated.
    pub(super) async fn require(mut self, ctx: Context) -> Result<(), Failure> {
        ctx.signal_ready()?;
        tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            () = self.wait_required() => {}
        }
        // Outside of the select: a write on a thread could not be canceled.
        let (files, ca) = (self.files.clone(), self.ca.clone());
        let written = spawn_blocking(move || files::require_peer_name(&files, &ca)).await;
        written.map_err(ConsensusError::backend("record which name the peer port requires"))??;
        self.open.send_replace(Some(OpenPeerPort::Restart));
        Err(ctx.canceled().await.into())
    }

    async fn wait_required(&mut self) {
        let mut pause = RetryPause::default();
        while let Err(error) = self.try_required().await {
            // As after each change of the leader.
            tracing::debug!("can't look at the names of members: {error}");
            pause.wait().await;
        }
    }

    async fn try_required(&mut self) -> Result<(), Failure> {
        let watch = |keys| ListWatcher::new(Arc::clone(&self.root), keys);
        let (mut issued, mut certified) = (watch(unused_tickets()), watch(KeyRange::prefix(CA_PREFIX)));
        let name = peer_name(&self.ca);
        let mut pause = RetryPause::default();
        loop {
            let is_recorded = is_required(&*self.root, &self.ca).await?;
            // In this order: a node is listed before its ticket is deleted.
            let stored = self.root.range(unused_tickets()).await?.kvs;
            let tickets = stored.iter().filter_map(|ticket| find_unnamed_ticket(ticket, &name));
            let listed = self.members.list_members().await?;
            // One without a name has not started: its ticket is not used up.
            let unstarted = listed.iter().filter(|member| member.name.is_none());
            let unstarted = unstarted.flat_map(|member| &member.peer_urls).filter_map(|url| url.parse().ok());
            let mut tickets: BTreeSet<PeerUrl> = tickets.chain(unstarted).collect();
            if is_recorded {
                // Their nodes are refused by name.
                tickets.clear();
            }
            let (mut members, mut silent) = (BTreeSet::new(), BTreeSet::new());
            for (member, is_named) in self.ask_names(&listed, &name).await {
                match is_named {
                    Some(true) => continue,
                    Some(false) => members.insert(member),
                    None => silent.insert(member),
                };
            }
            if tickets.is_empty() && members.is_empty() && silent.is_empty() {
                if !is_recorded {
                    self.root.put(PEER_NAME_PATH.as_bytes(), name.as_bytes()).await?;
                    tracing::info!(
                        "the peer ports of the cluster admit members alone, each from its next start on"
                    );
                }
                return Ok(());
            }
            // A change of the report tells when one answers that is silent there.
            let is_unreported = silent.iter().any(|member| !self.is_reported_silent(member));
            self.open.send_replace(Some(OpenPeerPort::Unnamed { members, silent, tickets }));
            tokio::select! {
                update = issued.next_update() => drop(update?),
                update = certified.next_update() => drop(update?),
                Ok(()) = self.report.changed() => {}
                () = pause.wait(), if is_unreported => {}
            }
        }
    }

    /// The names of the members that have started, each with whether the certificate that it presents now has the name; `None` if
    /// it presents none. What it has published says less: an earlier release may have issued it another one since.
    async fn ask_names(&self, members: &[Member], name: &str) -> Vec<(String, Option<bool>)> {
        let asked = members.iter().filter(|member| member.name.is_some()).map(async |member| {
            let presented = match name_and_url(member) {
                Some((member, url)) => self.members.peers.read_certificate(&member, &url).await.ok(),
                None => None,
            };
            let is_named = presented.map(|certificate| has_peer_name(&certificate, name));
            (member.name.clone().unwrap_or_default(), is_named)
        });
        join_all(asked).await
    }

    fn is_reported_silent(&self, name: &str) -> bool {
        let is_named = |member: &Member| member.name.as_deref() == Some(name);
        let report = self.report.borrow();
        report.members.iter().any(|report| report.silent_since.is_some() && is_named(&report.member))
    }
}

/// Returns whether the peer ports of the cluster with this CA require the name.
pub(super) async fn is_required(root: &dyn KvStore, ca: &Certificate) -> Result<bool, KvError> {
    let stored = root.get(PEER_NAME_PATH.as_bytes()).await?;
    Ok(stored.is_some_and(|stored| stored.value == peer_name(ca).as_bytes()))
}
