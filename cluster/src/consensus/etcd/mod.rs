//! Consensus by a supervised etcd: members over mutual TLS, and this node's clients at a socket in a private directory.
//!
//! ```text
//!  root.consensus ─┬─ etcd      the process, in a private directory
//!                  ├─ crl       writes the list of revoked certificates from the keys to the disk
//!                  ├─ ca-key    keeps the private key of the CA sealed to the voters
//!                  ├─ departures  removes what is left of nodes that have left
//!                  ├─ peer-name  has the peer ports admit members alone: see `peer_name.rs`
//!                  ├─ joins     admits nodes that join, where this member leads
//!                  └─ promoter  promotes learners, where this member leads
//! ```
//!
//! The files on the disk decide how a member starts, not the mode that it was given first: see [`Consensus`].
//! A cluster is created in this order, and each step finds what an earlier run has done:
//!
//! 1. a CA is created, and written next to the member's credentials;
//! 2. it certifies the member; key and certificate are written;
//! 3. etcd starts without data: data that an earlier run has left is removed, since no other node has seen it
//!    yet;
//! 4. the CA is saved into etcd, once, and removed from the disk. From now on the data is never touched.
//!
//! A member that joins can sign as any other: once it votes, it waits until another voter has sealed the CA's private key to it.
//!
//! A member that has a log asks the others, before etcd starts, whether its disk is an older copy: see `starts.rs`.
//!
//! A member that restarts at another address starts etcd there with its old certificate, has its key
//! certified for the new address, and then updates its peer URL in the list. It reaches the other members before they
//! can reach it, which is enough for them to agree with it. Two members that change their addresses at once
//! cannot discover each other: readdress one at a time.

mod address_change;
mod admission;
mod backend;
mod client;
mod compare;
mod config;
mod convert;
mod etcd_child;
mod fault;
mod files;
mod health;
mod join_check;
mod join_claim;
mod join_verdict;
mod kv;
mod local_member;
mod maintenance;
mod members;
mod peer_client;
mod peer_name;
mod peer_server;
mod promote;
mod recovery;
mod restore;
mod retry_pause;
mod start_number;
mod starts;
mod transfer;
mod version;
mod wal;
mod witness;

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, Credentials};
use nodekeel_localstorage::tree::{EtcdDir, LayoutDir};
use nodekeel_supervisor::process::Process;
use nodekeel_supervisor::{Context, Failure};
use thiserror::Error;
use tokio::sync::watch::channel;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

pub use config::EtcdConfig;
#[cfg(any(test, feature = "testing"))]
pub(crate) use fault::check_arbitrary_output;
#[cfg(any(test, feature = "testing"))]
pub(crate) use peer_client::check_arbitrary_answer;
#[cfg(any(test, feature = "testing"))]
pub(crate) use wal::check_arbitrary_log;

use self::client::WithoutLeader;
use self::etcd_child::{EtcdChild, ExitWatch};
use self::files::{InitialCluster, PreparedFiles};
use self::health::HealthWatch;
use self::join_check::JoinCheck;
use self::kv::EtcdKv;
use self::local_member::LocalMember;
use self::maintenance::EtcdMaintenance;
use self::members::EtcdMembers;
use self::peer_name::PeerNames;
use self::recovery::EtcdRecovery;
use self::retry_pause::RetryPause;
use self::starts::MemberStart;
use self::version::EtcdVersion;
use super::kv::{KeyRange, KvStore};
use super::{
    ClusterAccess, ClusterMembers, Consensus, ConsensusError, MemberService, MemberStatus, PreparedMember,
    StartMode, StartOptions, StatusReporter, StatusWatch, StoreMaintenance,
};
use crate::node::{complete_departures, withdraw_own_departure};
use crate::pki::{CA_CERT_PATH, CaError, CaSealing, ClusterCa, PendingCa, Voter, sync_revocation_list};

nodekeel_localstorage::layout! {
    /// On a data volume: the directory of a member.
    pub struct EtcdLayout {
        /// The member's credentials and its database.
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
        let recovery =
            EtcdRecovery::new(self.config.clone(), self.files.clone(), start.name.clone(), start.address);
        let recovery = Arc::new(recovery);
        let recovering = Arc::clone(&recovery);
        // The supervisor calls this for each run, so each gets its own copy of the options.
        let run = move |ctx: Context| {
            let (sender, member, start) = (Arc::clone(&sender), member.clone(), start.clone());
            let recovery = Arc::clone(&recovering);
            async move {
                let reporter = StatusReporter::report_starting(&sender);
                let EtcdConsensus { config, files } = &member;
                let this = LocalMember { config, files, name: &start.name, address: start.address };
                let mut requests = recovery.watch_requests();
                let run = MemberRun { ctx: &ctx, reporter: &reporter, member: this, recovery: &recovery };
                let result = tokio::select! {
                    biased;
                    // The sender lives as long as this run.
                    Ok(()) = requests.changed() => Err(RecoveryRequested.into()),
                    result = run.run(start.clone()) => result,
                };
                reporter.report_exit(result)
            }
        };
        PreparedMember {
            service: MemberService::from_runnable(run),
            status: StatusWatch::from_receiver(receiver),
            recovery: Some(recovery),
        }
    }
}

/// The member ends to start again as the only one of its cluster.
#[derive(Debug, Error)]
#[error("the cluster is being recovered from this member: restarting it")]
struct RecoveryRequested;

/// One run of the member, from the preparation of its files until its first part ends.
struct MemberRun<'a> {
    ctx: &'a Context,
    reporter: &'a StatusReporter<'a>,
    member: LocalMember<'a>,
    recovery: &'a EtcdRecovery,
}

impl MemberRun<'_> {
    async fn run(&self, start: StartOptions) -> Result<(), Failure> {
        // The files on the disk decide how the member starts.
        let version = EtcdVersion::of_program(&self.member.config.binary).await;
        if let StartMode::RestoredCluster { snapshot, token } = &start.mode
            && !self.has_credentials().await?
        {
            return self.restore_cluster(snapshot, token, version).await;
        }
        let mut prepared = self.prepare_files(start, version).await?;
        let voter = self.load_voter().await?;
        // Two hosts must not run as one member. A member that has moved asks at its former address, one that joins
        // asks its cluster.
        address_change::check_moved(&prepared, self.member).await?;
        // Without a majority this wait has no end, so that a stop must be able to interrupt it.
        let total = tokio::select! {
            biased;
            canceled = self.ctx.canceled() => return Err(canceled.into()),
            admitted = self.wait_admitted(&mut prepared, version) => admitted?,
        };
        let is_alone = self.recovery.resume().await?;
        // A voter whose disk is an older copy must not start. This wait, too, has no end without a majority.
        let counting = MemberStart { member: self.member, prepared: &prepared, is_alone };
        let start = tokio::select! {
            biased;
            canceled = self.ctx.canceled() => return Err(canceled.into()),
            counted = counting.wait_confirmed(self.reporter) => counted?,
        };
        // Until the member has a list of its own, the ticket's tells the health check whom to ask.
        let known_peers = match &prepared.initial_cluster {
            InitialCluster::Existing { peers } => peers.clone(),
            InitialCluster::New { .. } | InitialCluster::FromData => Vec::new(),
        };
        // Before etcd is ready: without a majority it never is.
        let health = HealthWatch::new(self.member, &prepared, known_peers, total).await?;
        let process = self.member.member_process(&prepared, version, start);
        let process = process.ready_when(health.readiness(self.member.config.ready_within));
        let mut exits = self.run_etcd(process.liveness(health.liveness()), &prepared.client_dir)?;
        let (watched, removed) = (exits.clone(), CancellationToken::new());
        // All of these last as long as the run: the first one to end ends it.
        tokio::select! {
            biased;
            canceled = self.ctx.canceled() => Err(canceled.into()),
            broken = exits.wait_broken() => Err(match exits.is_removed() {
                true => {
                    removed.cancel();
                    self.record(files::record_removal, "record the removal").await.into()
                }
                false => self.process_error(broken).into(),
            }),
            served = self.serve(prepared, voter, &health, removed.clone()) => served,
            never = health.report_conditions(self.reporter, watched) => match never {},
            signaled = self.reporter.signal_readiness(self.ctx) => {
                Err(signaled.map(|never| match never {}).unwrap_or_else(Failure::from))
            }
        }
    }

    /// Returns whether the member was certified by its cluster.
    async fn has_credentials(&self) -> Result<bool, ConsensusError> {
        let pki = self.member.files.peer_pki.clone();
        let loaded = spawn_blocking(move || pki.load_credentials()).await;
        let loaded = loaded.map_err(ConsensusError::backend("load the member's credentials"))?;
        loaded.map(|loaded| loaded.is_some()).map_err(ConsensusError::Credentials)
    }

    /// This voter, with its key.
    async fn load_voter(&self) -> Result<Arc<Voter>, ConsensusError> {
        let (files, name) = (self.member.files.clone(), self.member.name.clone());
        let voter = spawn_blocking(move || files::ensure_voter(&files, &name)).await;
        let voter = voter.map_err(ConsensusError::backend("load the voter's key"))??;
        Ok(Arc::new(voter.with_recovery(self.member.config.recovery_recipient.clone())))
    }

    async fn prepare_files(
        &self,
        start: StartOptions,
        version: Option<EtcdVersion>,
    ) -> Result<PreparedFiles, ConsensusError> {
        let (files, binary) = (self.member.files.clone(), self.member.config.binary.clone());
        let prepare = move || {
            files::check_removal(&files)?;
            recovery::exchange_logs(&files)?;
            let prepared = files::prepare_files(&files, &start)?;
            if let InitialCluster::New { .. } = prepared.initial_cluster {
                files::discard_unsaved_cluster(&files)?;
            }
            files::check_difference(&files)?;
            files::check_version(&files, &binary, version)?;
            Ok(prepared)
        };
        spawn_blocking(prepare).await.map_err(ConsensusError::backend("prepare the member's files"))?
    }

    /// Runs etcd as a child of the member.
    fn run_etcd(&self, process: Process, client_dir: &LayoutDir) -> Result<ExitWatch, Failure> {
        let (child, exits) = EtcdChild::new(process, client_dir.clone());
        self.ctx.run_child("etcd", child)?;
        Ok(exits)
    }

    fn process_error(&self, failure: Arc<str>) -> ConsensusError {
        ConsensusError::Process { failure, log: format!("{}.etcd", self.ctx.dn()) }
    }

    /// Waits until the cluster admits a member that joins, and updates its list of the others. Returns the size of the cluster's
    /// data, if it was told.
    async fn wait_admitted(
        &self,
        prepared: &mut PreparedFiles,
        version: Option<EtcdVersion>,
    ) -> Result<Option<u64>, ConsensusError> {
        // Only a member that joins has to be admitted, and only once.
        let (InitialCluster::Existing { peers }, Some(claim)) =
            (&mut prepared.initial_cluster, &prepared.join_claim)
        else {
            return Ok(None);
        };
        let credentials = &prepared.credentials;
        let check = JoinCheck { member: self.member, claim, credentials, peers, version };
        let admitted = check.wait_admitted(self.reporter).await?;
        *peers = admitted.peers;
        if admitted.is_name_required {
            let (files, ca) = (self.member.files.clone(), prepared.credentials.ca.clone());
            let name = spawn_blocking(move || {
                files::require_peer_name(&files, &ca)?;
                files::load_required_name(&files, &ca)
            });
            let failed = ConsensusError::backend("record which name the peer port requires");
            prepared.required_name = name.await.map_err(failed)??;
        }
        self.reporter.report_starting_again();
        Ok(Some(admitted.store_bytes))
    }

    /// Serves with a running etcd, until it is canceled.
    async fn serve(
        &self,
        mut prepared: PreparedFiles,
        voter: Arc<Voter>,
        health: &HealthWatch,
        removed: CancellationToken,
    ) -> Result<(), Failure> {
        self.ctx.wait_ready(&format!("{}.etcd", self.ctx.dn())).await?;
        // Requests without a leader fail, instead of waiting for one: the caller retries.
        let client = client::connect(&prepared.client_dir, WithoutLeader::Fails).await?;
        let kv = EtcdKv::new(client, self.reporter.stop_token());
        // A learner is ready for etcd, but serves no linearizable reads until it is promoted.
        wait_serving(&kv).await?;
        let root: Arc<dyn KvStore> = Arc::new(kv.clone());
        // Before anything else is written: a cluster whose CA is not saved is discarded at the next start.
        let pending_ca = prepared.pending_ca.take();
        let mut cluster_ca = self.load_or_save_ca(&root, pending_ca, &prepared.credentials, &voter).await?;
        let maintenance = Arc::new(EtcdMaintenance::new(kv.clone()));
        let members = EtcdMembers { kv, peers: health.peers.clone() };
        let sealing = CaSealing::new(Arc::clone(&root), Arc::new(members.clone()), Arc::clone(&voter));
        sealing.publish_key(&prepared.credentials).await.map_err(ConsensusError::Ca)?;
        let joins = matches!(prepared.initial_cluster, InitialCluster::Existing { .. });
        if !cluster_ca.can_sign() && (joins || !prepared.is_certified_at(self.member.address)) {
            self.reporter.hold(Some("waits until another voter seals the private key of the CA to it"));
            cluster_ca = sealing.wait_sealed().await.map_err(ConsensusError::Ca)?;
            self.reporter.hold(None);
        }
        // The others check the certificate when they connect, so it must precede the list that leads them
        // here.
        let is_name_required = prepared.required_name.is_some();
        if let Some(renewed) = address_change::ensure_certificate(&cluster_ca, self.member, prepared).await? {
            // A member that requires the name, or the address, admits the former one no more.
            let failed = ConsensusError::backend("use the member's new credentials");
            members.peers.renew(&renewed).map_err(failed)?;
            sealing.publish_key(&renewed).await.map_err(ConsensusError::Ca)?;
        }
        let this = address_change::ensure_listed(&members, self.member.peer_url()).await?;
        self.run_children(&root, &members, cluster_ca.ca_certificate(), health, is_name_required)?;
        let keeper = Arc::clone(&maintenance);
        self.ctx.run_child("ca-key", move |ctx| {
            let keeper: Arc<dyn StoreMaintenance> = keeper.clone();
            sealing.clone().keep_sealed(ctx, keeper)
        })?;
        let members: Arc<dyn ClusterMembers> = Arc::new(members);
        // The list of revoked certificates is on the disk before the node counts as a member.
        self.ctx.wait_ready(&format!("{}.crl", self.ctx.dn())).await?;
        let access = ClusterAccess::new(this, root, members).with_report(health.watch_report());
        let access = access.with_maintenance(maintenance).with_voter(Some(voter)).with_removal(removed);
        withdraw_own_departure(&access).await;
        let completing = access.clone();
        self.ctx.run_child("departures", move |ctx| complete_departures(ctx, completing.clone()))?;
        // Its data and a standing alarm are known before anyone relies on the member.
        if health.compare_data().await.is_none() {
            return Err(self.record_difference().await.into());
        }
        self.reporter.report_serving(access, health.first_condition().await.as_ref());
        tokio::select! {
            canceled = self.ctx.canceled() => Err(canceled.into()),
            () = health.wait_difference() => Err(self.record_difference().await.into()),
        }
    }

    /// Records that the data differs from that of a majority: no later run starts with it.
    async fn record_difference(&self) -> ConsensusError {
        tracing::error!("the data of this member differs from that of a majority of the voters: stopping it");
        self.record(files::record_difference, "record that the data differs").await
    }

    /// Records why no later run starts, and returns that.
    async fn record(
        &self,
        record: fn(&EtcdDir) -> Result<ConsensusError, ConsensusError>,
        operation: &str,
    ) -> ConsensusError {
        let files = self.member.files.clone();
        let recorded =
            spawn_blocking(move || record(&files)).await.map_err(ConsensusError::backend(operation));
        recorded.and_then(|recorded| recorded).unwrap_or_else(|error| error)
    }

    /// Saves the CA of a new cluster; for any other, checks that it is the one on the disk.
    async fn load_or_save_ca(
        &self,
        root: &Arc<dyn KvStore>,
        new: Option<PendingCa>,
        credentials: &Credentials,
        voter: &Voter,
    ) -> Result<ClusterCa, ConsensusError> {
        let Some(new) = new else {
            let cluster_ca = ClusterCa::load_sealed(Arc::clone(root), voter).await;
            let cluster_ca = cluster_ca.map_err(ConsensusError::Ca)?;
            // Data and credentials are of different clusters: one of the two was restored to the wrong node.
            if cluster_ca.ca_certificate() != &credentials.ca {
                return Err(ConsensusError::Ca(CaError::AnotherCa));
            }
            return Ok(cluster_ca);
        };
        let cluster_ca = new.save_sealed(Arc::clone(root), voter).await.map_err(ConsensusError::Ca)?;
        let files = self.member.files.clone();
        // Only after it is saved: a kill in between leaves it on the disk, and saving it again finds it saved.
        let removed = spawn_blocking(move || files::remove_pending_ca(&files)).await;
        removed.map_err(ConsensusError::backend("remove the saved CA from the disk"))??;
        Ok(cluster_ca)
    }

    fn run_children(
        &self,
        root: &Arc<dyn KvStore>,
        members: &EtcdMembers,
        ca: &Certificate,
        health: &HealthWatch,
        is_name_required: bool,
    ) -> Result<(), Failure> {
        if !is_name_required {
            let (root, members, ca) = (Arc::clone(root), members.clone(), ca.clone());
            let (files, report) = (self.member.files.clone(), health.watch_report());
            let names = PeerNames { root, members, ca, files, report, open: health.open_peer_port.clone() };
            self.ctx.run_child("peer-name", move |ctx| names.clone().require(ctx))?;
        }
        let (kept, files, issuer) = (Arc::clone(root), self.member.files.clone(), ca.clone());
        self.ctx.run_child("crl", move |ctx| {
            sync_revocation_list(ctx, Arc::clone(&kept), issuer.clone(), files.clone())
        })?;
        let (admitting, ca, report) = (members.clone(), ca.clone(), health.watch_report());
        self.ctx.run_child("joins", move |ctx| {
            admission::admit_joiners(ctx, admitting.clone(), ca.clone(), report.clone())
        })?;
        let (root, members) = (Arc::clone(root), members.clone());
        self.ctx.run_child("promoter", move |ctx| {
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
    let mut pause = RetryPause::default();
    loop {
        match kv.range(KeyRange::single_key(CA_CERT_PATH)).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_retryable() => pause.wait().await,
            Err(source) => {
                return Err(ConsensusError::Kv { operation: "reach the other members", source });
            }
        }
    }
}
