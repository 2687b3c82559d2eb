//! A member in memory.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_supervisor::{Cancelled, Context, Failure};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cluster::{Cluster, MemoryMembership, MemoryNet};
use crate::consensus::kv::KvStore;
use crate::consensus::{
    Consensus, ConsensusError, Member, MemberId, MembershipError, Mode, PEER_PORT, PeerUrl, Running, Service,
    Start, Started, Status, StatusWatch, Turn,
};
use crate::pki::{Authority, AuthorityError, Leaf, NewAuthority};

/// One node's member in memory. What it remembers between runs, as another has it on its disk, lasts as long as this.
#[derive(Debug, Default)]
pub struct MemoryConsensus {
    net: MemoryNet,
    disk: Arc<Mutex<Option<Disk>>>,
}

/// What a member remembers.
#[derive(Clone, Debug)]
struct Disk {
    cluster: Arc<Cluster>,
    id: MemberId,
    /// The authority of a cluster that was made here, until it is saved.
    new: Option<Arc<NewAuthority>>,
}

impl MemoryConsensus {
    /// A node that is alone.
    pub fn new() -> MemoryConsensus {
        MemoryConsensus::default()
    }

    /// A node that reaches all others on the net.
    pub fn on(net: &MemoryNet) -> MemoryConsensus {
        MemoryConsensus { net: net.clone(), disk: Arc::default() }
    }
}

impl Consensus for MemoryConsensus {
    fn start(&self, start: Start) -> Started {
        let (sender, receiver) = watch::channel(Status::New);
        let (sender, net, disk) = (Arc::new(sender), self.net.clone(), Arc::clone(&self.disk));
        let run = move |ctx: Context| {
            let (sender, net, disk, start) =
                (Arc::clone(&sender), net.clone(), Arc::clone(&disk), start.clone());
            async move {
                let turn = Turn::begin(&sender);
                let result = run(&ctx, &turn, &start, &net, &disk).await;
                turn.end(result)
            }
        };
        Started { service: Service::new(run), status: StatusWatch::new(receiver) }
    }
}

async fn run(
    ctx: &Context,
    turn: &Turn<'_>,
    start: &Start,
    net: &MemoryNet,
    disk: &Mutex<Option<Disk>>,
) -> Result<(), Failure> {
    let (running, removed) = enter(turn, start, net, disk).await?;
    ctx.ready()?;
    turn.running(running);
    tokio::select! {
        biased;
        cancelled = ctx.cancelled() => Err::<(), Cancelled>(cancelled)?,
        () = removed.cancelled() => {}
    }
    Err(not_added(start).into())
}

async fn enter(
    turn: &Turn<'_>,
    start: &Start,
    net: &MemoryNet,
    disk: &Mutex<Option<Disk>>,
) -> Result<(Running, CancellationToken), ConsensusError> {
    let found = lock(disk).clone();
    let there = match (found, &start.mode) {
        (Some(there), _) => there,
        (None, Mode::New) => {
            let mut authority = NewAuthority::generate().map_err(ConsensusError::Authority)?;
            let leaf = Leaf::member(start.name.clone(), start.address);
            authority.issue(&leaf).map_err(ConsensusError::Authority)?;
            let (cluster, id) = net.create(&start.name, PeerUrl::new(start.address, PEER_PORT));
            Disk { cluster, id, new: Some(Arc::new(authority)) }
        }
        (None, Mode::Existing { .. }) => join(start, net).await?,
        (None, Mode::Restart) => return Err(ConsensusError::NoMember { data: place() }),
    };
    *lock(disk) = Some(there.clone());
    let root: Arc<dyn KvStore> = Arc::new(there.cluster.kv.until(turn.stopped()));
    if let Some(new) = &there.new {
        new.save(Arc::clone(&root)).await.map_err(ConsensusError::Authority)?;
        *lock(disk) = Some(Disk { new: None, ..there.clone() });
    }
    let (this, removed): (Member, _) =
        there.cluster.started(there.id, &start.name, start.address).ok_or_else(|| not_added(start))?;
    let members = MemoryMembership { cluster: there.cluster, stopped: turn.stopped() };
    Ok((Running::new(this, root, Arc::new(members)), removed))
}

/// Finds the cluster, and checks what it would check.
async fn join(start: &Start, net: &MemoryNet) -> Result<Disk, ConsensusError> {
    let Mode::Existing { peers, credentials, revoked } = &start.mode else {
        return Err(ConsensusError::NoMember { data: place() });
    };
    let silent = || MembershipError::Unavailable {
        operation: "find the other members",
        source: "nobody is there".into(),
    };
    let cluster = net.find(peers).ok_or_else(|| ConsensusError::Membership(silent()))?;
    let root: Arc<dyn KvStore> = Arc::new(cluster.kv.clone());
    let authority = Authority::load(root).await.map_err(ConsensusError::Authority)?;
    if authority.certificate() != &credentials.ca || !credentials.certificate.is_signed_by(&credentials.ca) {
        return Err(ConsensusError::Authority(AuthorityError::Another));
    }
    let now_revoked = authority.revoked().await.map_err(ConsensusError::Authority)?;
    if now_revoked.revokes(&credentials.certificate) || revoked.revokes(&credentials.certificate) {
        return Err(ConsensusError::Revoked { certificate: place() });
    }
    let id = cluster.expected(start.address).ok_or_else(|| not_added(start))?;
    Ok(Disk { cluster, id, new: None })
}

fn not_added(start: &Start) -> ConsensusError {
    ConsensusError::NotAdded { name: start.name.clone(), address: start.address }
}

/// What stands for the path of files in errors.
fn place() -> PathBuf {
    PathBuf::from("memory")
}

fn lock(disk: &Mutex<Option<Disk>>) -> MutexGuard<'_, Option<Disk>> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}
