//! A member in memory.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_supervisor::{CanceledError, Context, Failure};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cluster::{MemoryCluster, MemoryMembers, MemoryNetwork};
use crate::consensus::join::{check_join, invitation_key};
use crate::consensus::kv::KvStore;
use crate::consensus::{
    ClusterAccess, ClusterMembers as _, Consensus, ConsensusError, DEFAULT_PEER_PORT, Member, MemberId,
    MemberService, MemberStatus, MembershipError, NewMember, Peer, PeerUrl, PreparedMember, StartMode,
    StartOptions, StatusReporter, StatusWatch,
};
use crate::node::{complete_departures, withdraw_own_departure};
use crate::pki::{CaError, CertificateSpec, ClusterCa, PendingCa};

/// One node's member in memory. Its state between runs, the counterpart of a disk, exists as long as this
/// value.
#[derive(Debug, Default)]
pub struct MemoryConsensus {
    network: MemoryNetwork,
    disk: Arc<Mutex<Option<MemberDisk>>>,
}

/// The state of a member between runs.
#[derive(Clone, Debug)]
struct MemberDisk {
    cluster: Arc<MemoryCluster>,
    id: MemberId,
    /// The CA of a cluster that was created here, until it is saved.
    pending_ca: Option<Arc<PendingCa>>,
}

impl MemoryConsensus {
    /// A node on a private network.
    pub fn new() -> MemoryConsensus {
        MemoryConsensus::default()
    }

    /// A node on a shared network.
    pub fn on_network(network: &MemoryNetwork) -> MemoryConsensus {
        MemoryConsensus { network: network.clone(), disk: Arc::default() }
    }
}

impl Consensus for MemoryConsensus {
    fn prepare_member(&self, start: StartOptions) -> PreparedMember {
        let (sender, receiver) = watch::channel(MemberStatus::NotStarted);
        let (sender, network, disk) = (Arc::new(sender), self.network.clone(), Arc::clone(&self.disk));
        let run = move |ctx: Context| {
            let (sender, network, disk, start) =
                (Arc::clone(&sender), network.clone(), Arc::clone(&disk), start.clone());
            async move {
                let reporter = StatusReporter::report_starting(&sender);
                let result = run_member(&ctx, &reporter, &start, &network, &disk).await;
                reporter.report_exit(result)
            }
        };
        PreparedMember {
            service: MemberService::from_runnable(run),
            status: StatusWatch::from_receiver(receiver),
            recovery: None,
        }
    }
}

async fn run_member(
    ctx: &Context,
    reporter: &StatusReporter<'_>,
    start: &StartOptions,
    network: &MemoryNetwork,
    disk: &Mutex<Option<MemberDisk>>,
) -> Result<(), Failure> {
    let started = start_member(reporter, start, network, disk).await;
    if let Err(ConsensusError::JoinRefused(refusal)) = &started {
        reporter.report_refused(refusal);
    }
    let (running, removed) = started?;
    withdraw_own_departure(&running).await;
    let access = running.clone();
    ctx.run_child("departures", move |ctx| complete_departures(ctx, access.clone()))?;
    ctx.signal_ready()?;
    reporter.report_running(running);
    tokio::select! {
        biased;
        canceled = ctx.canceled() => Err::<(), CanceledError>(canceled)?,
        () = removed.cancelled() => {}
    }
    Err(ConsensusError::Removed.into())
}

async fn start_member(
    reporter: &StatusReporter<'_>,
    start: &StartOptions,
    network: &MemoryNetwork,
    disk: &Mutex<Option<MemberDisk>>,
) -> Result<(ClusterAccess, CancellationToken), ConsensusError> {
    // The state of an earlier run decides, and not the mode, as the files of a real member do.
    let found = lock_disk(disk).clone();
    let member = match (found, &start.mode) {
        (Some(member), _) => member,
        (None, StartMode::NewCluster) => {
            let mut cluster_ca = PendingCa::generate().map_err(ConsensusError::Ca)?;
            let spec = CertificateSpec::for_member(start.name.clone(), start.address);
            cluster_ca.issue_credentials(&spec).map_err(ConsensusError::Ca)?;
            let (cluster, id) =
                network.create_cluster(&start.name, PeerUrl::new(start.address, DEFAULT_PEER_PORT));
            MemberDisk { cluster, id, pending_ca: Some(Arc::new(cluster_ca)) }
        }
        (None, StartMode::ExistingCluster { .. }) => join_cluster(start, network).await?,
        // There is nothing that could be in a snapshot.
        (None, StartMode::Restart | StartMode::RestoredCluster { .. }) => {
            return Err(ConsensusError::NoMember { data: memory_path() });
        }
    };
    // Kept before it serves: a run that is dropped from here on is resumed by the next.
    *lock_disk(disk) = Some(member.clone());
    let root: Arc<dyn KvStore> = Arc::new(member.cluster.kv.with_stop_token(reporter.stop_token()));
    if let Some(new) = &member.pending_ca {
        new.save_to(Arc::clone(&root)).await.map_err(ConsensusError::Ca)?;
        *lock_disk(disk) = Some(MemberDisk { pending_ca: None, ..member.clone() });
    }
    let (this, removed): (Member, _) =
        member.cluster.start_member(member.id, &start.name, start.address).ok_or(ConsensusError::Removed)?;
    let members = MemoryMembers { cluster: member.cluster, stopped: reporter.stop_token() };
    Ok((ClusterAccess::new(this, root, Arc::new(members)).with_removal(removed.clone()), removed))
}

/// Finds the cluster, and makes the checks that the cluster would make.
async fn join_cluster(start: &StartOptions, network: &MemoryNetwork) -> Result<MemberDisk, ConsensusError> {
    let StartMode::ExistingCluster { peers, credentials, revoked } = &start.mode else {
        return Err(ConsensusError::NoMember { data: memory_path() });
    };
    let unreachable = || MembershipError::Unavailable {
        operation: "reach the other members",
        source: "no peer is on the network".into(),
    };
    let cluster = network.find_cluster(peers).ok_or_else(|| ConsensusError::Membership(unreachable()))?;
    let root: Arc<dyn KvStore> = Arc::new(cluster.kv.clone());
    let cluster_ca = ClusterCa::load_ca(root).await.map_err(ConsensusError::Ca)?;
    if cluster_ca.ca_certificate() != &credentials.ca
        || !credentials.certificate.is_signed_by(&credentials.ca)
    {
        return Err(ConsensusError::Ca(CaError::AnotherCa));
    }
    // The list of the ticket may be older than that of the cluster, so both count.
    let now_revoked = cluster_ca.revocation_list().await.map_err(ConsensusError::Ca)?;
    if now_revoked.is_revoked(&credentials.certificate) || revoked.is_revoked(&credentials.certificate) {
        return Err(ConsensusError::CertificateRevoked { certificate: memory_path() });
    }
    let (url, mut members) = cluster.members_at(start.address);
    let invitation = cluster.kv.get(&invitation_key(start.name.as_str())).await;
    if invitation.is_ok_and(|invitation| invitation.is_some()) {
        let members_of = MemoryMembers { cluster: Arc::clone(&cluster), stopped: CancellationToken::new() };
        let new = NewMember::new(start.name.clone(), url.clone());
        members_of.add_learner(&new).await.map_err(ConsensusError::Membership)?;
        members = cluster.members_at(start.address).1;
    }
    let this = Peer::new(start.name.clone(), url);
    let id = check_join(&members, &this).map_err(ConsensusError::JoinRefused)?;
    Ok(MemberDisk { cluster, id, pending_ca: None })
}

/// Takes the place of file paths in errors.
fn memory_path() -> PathBuf {
    PathBuf::from("memory")
}

fn lock_disk(disk: &Mutex<Option<MemberDisk>>) -> MutexGuard<'_, Option<MemberDisk>> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}
