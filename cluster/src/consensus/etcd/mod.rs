//! Consensus by an etcd that the tree supervises: clients and members over mutual TLS.
//!
//! ```text
//!  root.consensus ─┬─ etcd      the process, in a directory of its own
//!                  ├─ crl       the list of revoked certificates, from its keys to the disk
//!                  └─ promoter  gives learners their vote
//! ```
//!
//! What is on the disk decides how a member starts, not what it was told first: see [`Consensus`]. In the order in which a
//! cluster is made, each step finds what an earlier run has done:
//!
//! 1. an authority is made, and written beside the member's credentials;
//! 2. it certifies the member; both are written;
//! 3. etcd starts anew: what data an earlier run has left is removed, since nobody has seen it yet;
//! 4. the authority is saved into it, once, and removed from the disk. From now on the data is never touched.
//!
//! A member that comes back at another address starts etcd there with its old certificate, has its key certified for the new
//! address, and then has itself listed there. Its own client comes with a certificate that names no host, which was issued
//! when the member ran for the first time; the others are reached before they can reach it, which is enough for them to
//! agree with it. Two members that move at once don't find each other: move one after the other.

mod child;
mod client;
mod config;
mod convert;
mod files;
mod kv;
mod lease;
mod members;
mod moved;
mod process;
mod promote;
mod watch;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::pki::{Certificate, Credentials};
use nodekeel_localstorage::tree::Etcd;
use nodekeel_supervisor::{Context, Failure};
use tokio::sync::watch::channel;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

pub use config::EtcdConfig;

use self::child::Child;
use self::files::{Initial, Prepared};
use self::kv::EtcdKv;
use self::members::EtcdMembers;
use super::kv::{KeyRange, KvStore, Range};
use super::{
    Consensus, ConsensusError, MemberName, Membership, PeerUrl, Running, Service, Start, Started, Status,
    StatusWatch, Turn,
};
use crate::pki::{Authority, AuthorityError, NewAuthority, keep_revoked};

/// The pause after a read that was not answered doubles from here.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// And ends here.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A member by etcd, 3.4 or newer, with its files in a directory.
#[derive(Clone, Debug)]
pub struct EtcdConsensus {
    config: EtcdConfig,
    files: Etcd,
}

impl EtcdConsensus {
    /// A member whose data and credentials are in `files`, which must be in a directory of the operating system.
    pub fn new(config: EtcdConfig, files: Etcd) -> EtcdConsensus {
        EtcdConsensus { config, files }
    }
}

impl Consensus for EtcdConsensus {
    fn start(&self, start: Start) -> Started {
        let (sender, receiver) = channel(Status::New);
        let (sender, member) = (Arc::new(sender), self.clone());
        let run = move |ctx: Context| {
            let (sender, member, start) = (Arc::clone(&sender), member.clone(), start.clone());
            async move {
                let turn = Turn::begin(&sender);
                let result = member.run(&ctx, &turn, start).await;
                turn.end(result)
            }
        };
        Started { service: Service::new(run), status: StatusWatch::new(receiver) }
    }
}

impl EtcdConsensus {
    async fn run(&self, ctx: &Context, turn: &Turn<'_>, start: Start) -> Result<(), Failure> {
        let this = (start.name.clone(), start.address);
        let (name, address) = &this;
        let prepared = self.prepare(start).await?;
        let process = process::process(&self.config, &self.files, name, *address, &prepared.initial);
        let (child, mut trouble) = Child::new(process);
        ctx.run("etcd", child)?;
        let serving = async {
            ctx.wait_ready(&format!("{}.etcd", ctx.dn())).await?;
            let credentials = prepared.client.as_ref().unwrap_or(&prepared.credentials);
            let client = client::connect(&self.config, name, *address, credentials).await?;
            self.serve(ctx, turn, EtcdKv::new(client, turn.stopped()), prepared, &this).await
        };
        tokio::select! {
            biased;
            cancelled = ctx.cancelled() => Err(cancelled.into()),
            failure = trouble.hopeless() => Err(ConsensusError::Process { failure, log: format!("{}.etcd", ctx.dn()) }.into()),
            served = serving => served,
        }
    }

    /// Works with an etcd that is up, until it is cancelled.
    async fn serve(
        &self,
        ctx: &Context,
        turn: &Turn<'_>,
        kv: EtcdKv,
        mut prepared: Prepared,
        (name, address): &(MemberName, IpAddr),
    ) -> Result<(), Failure> {
        served(&kv).await?;
        let root: Arc<dyn KvStore> = Arc::new(kv.clone());
        let authority = self.authority(&root, prepared.new.take(), &prepared.credentials).await?;
        // The others check the certificate when they connect, so it comes before the list that leads them here.
        moved::certify(&authority, &self.files, prepared, name, *address).await?;
        let members = EtcdMembers(kv.clone());
        let this = moved::listed(&members, PeerUrl::new(*address, self.config.peer_port)).await?;
        let members: Arc<dyn Membership> = Arc::new(members);
        self.run_parts(ctx, &root, &members, authority.certificate().clone())?;
        ctx.wait_ready(&format!("{}.crl", ctx.dn())).await?;
        ctx.ready()?;
        turn.running(Running::new(this, root, members));
        Err(ctx.cancelled().await.into())
    }

    async fn prepare(&self, start: Start) -> Result<Prepared, ConsensusError> {
        let files = self.files.clone();
        let prepare = move || {
            let prepared = files::prepare(&files, &start)?;
            if let Initial::New { .. } = prepared.initial {
                files::discard_unborn(&files)?;
            }
            Ok(prepared)
        };
        spawn_blocking(prepare).await.map_err(backend("prepare the member's files"))?
    }

    /// Saves the authority of a new cluster; checks that of any other to be the one on the disk.
    async fn authority(
        &self,
        root: &Arc<dyn KvStore>,
        new: Option<NewAuthority>,
        credentials: &Credentials,
    ) -> Result<Authority, ConsensusError> {
        let Some(new) = new else {
            let authority = Authority::load(Arc::clone(root)).await.map_err(ConsensusError::Authority)?;
            return match authority.certificate() == &credentials.ca {
                true => Ok(authority),
                false => Err(ConsensusError::Authority(AuthorityError::Another)),
            };
        };
        let authority = new.save(Arc::clone(root)).await.map_err(ConsensusError::Authority)?;
        let files = self.files.clone();
        let removed = spawn_blocking(move || files::forget_new(&files)).await;
        removed.map_err(backend("remove the saved authority from the disk"))??;
        Ok(authority)
    }

    fn run_parts(
        &self,
        ctx: &Context,
        root: &Arc<dyn KvStore>,
        members: &Arc<dyn Membership>,
        ca: Certificate,
    ) -> Result<(), Failure> {
        let (kept, files) = (Arc::clone(root), self.files.clone());
        ctx.run("crl", move |ctx| keep_revoked(ctx, Arc::clone(&kept), ca.clone(), files.clone()))?;
        let (root, members) = (Arc::clone(root), Arc::clone(members));
        ctx.run("promoter", move |ctx| {
            promote::promote_learners(ctx, Arc::clone(&root), Arc::clone(&members))
        })?;
        Ok(())
    }
}

/// Waits until the member serves reads that the others have to confirm: until it has a leader, and a vote.
///
/// A learner serves neither such reads nor watches, so nothing tells it that it was promoted. It is asked, with growing
/// pauses.
async fn served(kv: &EtcdKv) -> Result<(), ConsensusError> {
    let mut pause = FIRST_PAUSE;
    loop {
        match kv.range(Range::new(KeyRange::key(crate::pki::CA))).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_retryable() => sleep(pause).await,
            Err(source) => {
                return Err(ConsensusError::Kv { operation: "wait for the other members", source });
            }
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

pub(super) fn backend<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    operation: &str,
) -> impl FnOnce(E) -> ConsensusError {
    let operation = operation.to_owned();
    move |source| ConsensusError::Backend { operation, source: source.into() }
}
