//! Consensus by a supervised etcd: clients and members over mutual TLS.
//!
//! ```text
//!  root.consensus ─┬─ etcd      the process, in a private directory
//!                  ├─ crl       writes the list of revoked certificates from the keys to the disk
//!                  └─ promoter  promotes learners, where this member leads
//! ```
//!
//! What is on the disk decides how a member starts, not the mode that it was given first: see [`Consensus`].
//! A cluster is created in this order, and each step finds what an earlier run has done:
//!
//! 1. a CA is created, and written beside the member's credentials;
//! 2. it certifies the member; key and certificate are written;
//! 3. etcd starts without data: data that an earlier run has left is removed, since no other node has seen it
//!    yet;
//! 4. the CA is saved into etcd, once, and removed from the disk. From now on the data is never touched.
//!
//! A member that restarts at another address starts etcd there with its old certificate, has its key
//! certified for the new address, and then updates its peer URL in the list. Its own client has a certificate
//! that names no host, which was issued when the member first ran; it reaches the other members before they
//! can reach it, which is enough for them to agree with it. Two members that change their addresses at once
//! cannot discover each other: readdress one at a time.

mod address_change;
mod client;
mod command_line;
mod config;
mod convert;
mod crl_recovery;
mod etcd_child;
mod files;
mod health;
mod join_check;
mod join_claim;
mod kv;
mod lease;
mod members;
mod peer_client;
mod promote;
mod release;
mod watch;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::pki::{Certificate, Credentials};
use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_supervisor::{Context, Failure};
use tokio::sync::watch::channel;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

pub use config::EtcdConfig;
#[cfg(any(test, feature = "testing"))]
pub(crate) use peer_client::check_arbitrary_answer;

use self::command_line::EtcdCommand;
use self::crl_recovery::CrlRecovery;
use self::etcd_child::EtcdChild;
use self::files::{InitialCluster, PreparedFiles};
use self::health::HealthWatch;
use self::join_check::JoinCheck;
use self::kv::EtcdKv;
use self::members::EtcdMembers;
use self::peer_client::PeerClient;
use super::kv::{KeyRange, KvStore, RangeRequest};
use super::{
    ClusterAccess, ClusterMembers, Consensus, ConsensusError, MemberName, MemberService, MemberStatus, Peer,
    PeerUrl, PreparedMember, StartOptions, StatusReporter, StatusWatch,
};
use crate::pki::{CaError, ClusterCa, PendingCa, sync_revocation_list};

/// The first pause after an unanswered read; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

nodekeel_localstorage::layout! {
    /// On a data volume: the directory of a member.
    pub struct EtcdLayout {
        /// Its credentials and its database.
        pub etcd: EtcdDir = "etcd", 0o700;
    }
}

/// A member by etcd, 3.4 or newer, with its files in a directory.
#[derive(Clone, Debug)]
pub struct EtcdConsensus {
    config: EtcdConfig,
    files: EtcdDir,
}

impl EtcdConsensus {
    /// A member with its data and credentials in `files`, which must be in a directory of the operating
    /// system.
    pub fn new(config: EtcdConfig, files: EtcdDir) -> EtcdConsensus {
        EtcdConsensus { config, files }
    }
}

impl Consensus for EtcdConsensus {
    fn prepare_member(&self, start: StartOptions) -> PreparedMember {
        let (sender, receiver) = channel(MemberStatus::NotStarted);
        let (sender, member) = (Arc::new(sender), self.clone());
        let run = move |ctx: Context| {
            let (sender, member, start) = (Arc::clone(&sender), member.clone(), start.clone());
            async move {
                let reporter = StatusReporter::report_starting(&sender);
                let result = member.run_member(&ctx, &reporter, start).await;
                reporter.report_exit(result)
            }
        };
        PreparedMember {
            service: MemberService::from_runnable(run),
            status: StatusWatch::from_receiver(receiver),
        }
    }
}

impl EtcdConsensus {
    async fn run_member(
        &self,
        ctx: &Context,
        reporter: &StatusReporter<'_>,
        start: StartOptions,
    ) -> Result<(), Failure> {
        let this = (start.name.clone(), start.address);
        let (name, address) = &this;
        let mut prepared = self.prepare_files(start).await?;
        if prepared.lacks_crl {
            return self.restore_revocation_list(ctx, &prepared, &this).await;
        }
        let peer = Peer::new(name.clone(), PeerUrl::new(*address, self.config.peer_port));
        address_change::check_moved(&prepared, &peer, *address).await?;
        tokio::select! {
            biased;
            cancelled = ctx.canceled() => return Err(cancelled.into()),
            admitted = self.wait_admitted(reporter, &mut prepared, &this) => admitted?,
        }
        let process = self.command(name, *address).member_process(&prepared.initial_cluster).await;
        let (child, mut exits) = EtcdChild::new(process);
        ctx.run_child("etcd", child)?;
        let credentials = prepared.client_credentials.as_ref().unwrap_or(&prepared.credentials);
        let known_peers = match &prepared.initial_cluster {
            InitialCluster::Existing { peers } => peers.clone(),
            InitialCluster::New { .. } | InitialCluster::FromData => Vec::new(),
        };
        let health = HealthWatch::new(&self.config, name, *address, credentials, known_peers).await?;
        let serving = async {
            ctx.wait_ready(&format!("{}.etcd", ctx.dn())).await?;
            let credentials = prepared.client_credentials.as_ref().unwrap_or(&prepared.credentials);
            let client = client::connect_client(&self.config, name, *address, credentials).await?;
            self.serve_member(ctx, reporter, EtcdKv::new(client, reporter.stop_token()), prepared, &this)
                .await
        };
        tokio::select! {
            biased;
            cancelled = ctx.canceled() => Err(cancelled.into()),
            failure = exits.wait_broken() => {
                Err(ConsensusError::Process { failure, log: format!("{}.etcd", ctx.dn()) }.into())
            }
            served = serving => served,
            never = health.report_conditions(reporter) => match never {},
            signaled = reporter.signal_readiness(ctx) => {
                Err(signaled.map(|never| match never {}).unwrap_or_else(Failure::from))
            }
        }
    }

    fn command<'a>(&'a self, name: &'a MemberName, address: IpAddr) -> EtcdCommand<'a> {
        EtcdCommand { config: &self.config, files: &self.files, name, address }
    }

    /// Writes the missing list of revoked certificates, and ends the run: the next one starts with it.
    async fn restore_revocation_list(
        &self,
        ctx: &Context,
        prepared: &PreparedFiles,
        (name, address): &(MemberName, IpAddr),
    ) -> Result<(), Failure> {
        tracing::warn!("the list of revoked certificates is missing: reading it from etcd's data");
        let trusted = files::client_certificate(&self.files, prepared)?;
        let process = self.command(name, *address).isolated_process(&trusted).await;
        let (child, mut exits) = EtcdChild::new(process);
        ctx.run_child("etcd", child)?;
        let credentials = prepared.client_credentials.as_ref().unwrap_or(&prepared.credentials);
        let recovery = CrlRecovery { config: &self.config, name, address: *address, credentials };
        let list = tokio::select! {
            biased;
            cancelled = ctx.canceled() => return Err(cancelled.into()),
            failure = exits.wait_broken() => {
                return Err(ConsensusError::Process { failure, log: format!("{}.etcd", ctx.dn()) }.into());
            }
            list = recovery.read_list() => list,
        };
        let files = self.files.clone();
        let stored = spawn_blocking(move || files.store_revocation_list(&list)).await;
        stored.map_err(backend_error("write the list of revoked certificates"))??;
        Err(ConsensusError::RevocationListRestored.into())
    }

    /// Asks the cluster whether a member that joins may start, and updates its list of the others.
    async fn wait_admitted(
        &self,
        reporter: &StatusReporter<'_>,
        prepared: &mut PreparedFiles,
        (name, address): &(MemberName, IpAddr),
    ) -> Result<(), ConsensusError> {
        let (InitialCluster::Existing { peers }, Some(question)) =
            (&mut prepared.initial_cluster, &prepared.join_question)
        else {
            return Ok(());
        };
        let this = Peer::new(name.clone(), PeerUrl::new(*address, self.config.peer_port));
        let check =
            JoinCheck { question, this, address: *address, credentials: &prepared.credentials, peers };
        *peers = check.wait_admitted(reporter).await?;
        reporter.report_starting_again();
        Ok(())
    }

    /// Serves with a running etcd, until it is cancelled.
    async fn serve_member(
        &self,
        ctx: &Context,
        reporter: &StatusReporter<'_>,
        kv: EtcdKv,
        mut prepared: PreparedFiles,
        (name, address): &(MemberName, IpAddr),
    ) -> Result<(), Failure> {
        wait_serving(&kv).await?;
        let root: Arc<dyn KvStore> = Arc::new(kv.clone());
        let peer_client =
            PeerClient::new(&prepared.credentials).map_err(backend_error("use the member's credentials"))?;
        let cluster_ca =
            self.load_or_save_ca(&root, prepared.pending_ca.take(), &prepared.credentials).await?;
        // The others check the certificate when they connect, so it must precede the list that leads them
        // here.
        address_change::ensure_certificates(&cluster_ca, &self.files, prepared, name, *address).await?;
        let members = EtcdMembers::new(kv.clone()).with_peer_client(peer_client);
        let this =
            address_change::ensure_listed(&members, PeerUrl::new(*address, self.config.peer_port)).await?;
        self.run_children(ctx, &root, &members, cluster_ca.ca_certificate().clone())?;
        let members: Arc<dyn ClusterMembers> = Arc::new(members);
        ctx.wait_ready(&format!("{}.crl", ctx.dn())).await?;
        reporter.report_running(ClusterAccess::new(this, root, members));
        Err(ctx.canceled().await.into())
    }

    async fn prepare_files(&self, start: StartOptions) -> Result<PreparedFiles, ConsensusError> {
        let files = self.files.clone();
        let prepare = move || {
            let prepared = files::prepare_files(&files, &start)?;
            if let InitialCluster::New { .. } = prepared.initial_cluster {
                files::discard_unsaved_cluster(&files)?;
            }
            Ok(prepared)
        };
        spawn_blocking(prepare).await.map_err(backend_error("prepare the member's files"))?
    }

    /// Saves the CA of a new cluster; for any other, checks that it is the one on the disk.
    async fn load_or_save_ca(
        &self,
        root: &Arc<dyn KvStore>,
        new: Option<PendingCa>,
        credentials: &Credentials,
    ) -> Result<ClusterCa, ConsensusError> {
        let Some(new) = new else {
            let cluster_ca = ClusterCa::load_ca(Arc::clone(root)).await.map_err(ConsensusError::Ca)?;
            return match cluster_ca.ca_certificate() == &credentials.ca {
                true => Ok(cluster_ca),
                false => Err(ConsensusError::Ca(CaError::AnotherCa)),
            };
        };
        let cluster_ca = new.save_to(Arc::clone(root)).await.map_err(ConsensusError::Ca)?;
        let files = self.files.clone();
        let removed = spawn_blocking(move || files::remove_pending_ca(&files)).await;
        removed.map_err(backend_error("remove the saved CA from the disk"))??;
        Ok(cluster_ca)
    }

    fn run_children(
        &self,
        ctx: &Context,
        root: &Arc<dyn KvStore>,
        members: &EtcdMembers,
        ca: Certificate,
    ) -> Result<(), Failure> {
        let (kept, files) = (Arc::clone(root), self.files.clone());
        ctx.run_child("crl", move |ctx| {
            sync_revocation_list(ctx, Arc::clone(&kept), ca.clone(), files.clone())
        })?;
        let (root, members) = (Arc::clone(root), members.clone());
        ctx.run_child("promoter", move |ctx| {
            promote::promote_learners(ctx, Arc::clone(&root), members.clone())
        })?;
        Ok(())
    }
}

/// Waits until the member serves linearizable reads: until it has a leader, and a vote.
///
/// A learner serves neither such reads nor watches, so nothing notifies it of its promotion. It is polled,
/// with growing pauses.
async fn wait_serving(kv: &EtcdKv) -> Result<(), ConsensusError> {
    let mut pause = FIRST_PAUSE;
    loop {
        match kv.range(RangeRequest::new(KeyRange::single_key(crate::pki::CA_CERT_PATH))).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_retryable() => sleep(pause).await,
            Err(source) => {
                return Err(ConsensusError::Kv { operation: "reach the other members", source });
            }
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

pub(super) fn backend_error<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    operation: &str,
) -> impl FnOnce(E) -> ConsensusError {
    let operation = operation.to_owned();
    move |source| ConsensusError::Backend { operation, source: source.into() }
}
