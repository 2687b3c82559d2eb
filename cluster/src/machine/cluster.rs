//! A node's way into its cluster as a runnable, and what others may ask of it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::{DataVolume, Erase};
#[cfg(feature = "etcd")]
use nodekeel_localstorage::{OsPlacement, tree::Site};
use nodekeel_supervisor::{Context, RunFuture, Runnable};
use thiserror::Error;
use tokio::sync::watch;

use super::book::Hook;
use super::drive;
use super::reason::Reason;
use super::state::{Kind, Membership, State};
use super::volume::Held;
#[cfg(feature = "etcd")]
use crate::consensus::etcd::EtcdConsensus;
use crate::consensus::kv::KvStore;
use crate::consensus::{self, Consensus, InvalidName, StatusWatch};
use crate::network::Network;
use crate::node::{DEFAULT_PREFIX, Enrolment, GoldenTickets, IssueError, LocalNames, NODES, NodeStore};

/// What a node's way into its cluster needs.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "whoever builds a node has all of it")]
pub struct Deps {
    /// Where the journal of the enrolment is kept: there before the data volume is, as the EFI system partition.
    pub state: Dir,
    /// Where the node is told how to get into a cluster.
    pub enrolment: Enrolment,
    /// What tells its address.
    pub network: Arc<dyn Network>,
    /// What holds its data. It is opened here, and stays open when the run ends: whoever made it unmounts it.
    pub volume: Arc<dyn DataVolume>,
    /// What runs its member.
    pub consensus: ConsensusSource,
    /// Where this system is told its name.
    pub local: LocalNames,
}

/// Makes what runs a node's member, once the data volume is open.
#[derive(Clone)]
pub struct ConsensusSource {
    open: Arc<Open>,
    /// Where the others reach the member, as far as that is known.
    pub(super) peer_port: Option<u16>,
}

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Open = dyn Fn(&Dir) -> Result<Arc<dyn Consensus>, Failed> + Send + Sync;

impl ConsensusSource {
    /// One whose files lie on the data volume, of which this is the top directory. It may block.
    pub fn on_volume<E: Into<Failed>>(
        open: impl Fn(&Dir) -> Result<Arc<dyn Consensus>, E> + Send + Sync + 'static,
    ) -> Self {
        Self { open: Arc::new(move |top| open(top).map_err(Into::into)), peer_port: None }
    }

    /// etcd, with its data and its credentials on the data volume, as in [`nodekeel_localstorage::tree::Data`].
    #[cfg(feature = "etcd")]
    pub fn etcd(config: crate::consensus::etcd::EtcdConfig) -> Self {
        let port = config.peer_port;
        let source = Self::on_volume(move |top| {
            let (path, top) = (top.path().to_owned(), top.try_clone()?);
            let placed: etcd::OnVolume = Site::new(Arc::new(OsPlacement::new(top)), path).place()?;
            let etcd = EtcdConsensus::new(config.clone(), placed.etcd.clone());
            Ok::<Arc<dyn Consensus>, Failed>(Arc::new(etcd))
        });
        source.at_port(port)
    }

    /// One that needs no data volume.
    pub fn anywhere(consensus: Arc<dyn Consensus>) -> Self {
        Self { open: Arc::new(move |_| Ok(Arc::clone(&consensus))), peer_port: None }
    }

    /// The port at which the others reach the member: a ticket for another one is refused before anything is started with it.
    #[must_use]
    pub fn at_port(self, peer_port: u16) -> Self {
        Self { peer_port: Some(peer_port), ..self }
    }

    pub(super) fn open(&self, top: &Dir) -> Result<Arc<dyn Consensus>, Failed> {
        (self.open)(top)
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use nodekeel_localstorage::tree::Etcd;

    nodekeel_localstorage::layout! {
        /// What etcd keeps on the data volume.
        pub(super) struct OnVolume {
            /// The node's member.
            pub(super) etcd: Etcd = "etcd", 0o700;
        }
    }
}

impl fmt::Debug for ConsensusSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsensusSource").finish_non_exhaustive()
    }
}

/// How a node gets into its cluster.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// What nodes' names begin with. Default: [`DEFAULT_PREFIX`].
    pub prefix: String,
    /// How long a run may take until it is in the cluster, waiting for an address among it. Default: two minutes; an
    /// etcd starts in less than two seconds, and a lease of an address may take a minute.
    pub deadline: Duration,
    /// What making the data volume may destroy. Default: nothing. It has a say only where a node is in no cluster.
    pub erase: Erase,
    /// Whether the node is a worker of Kubernetes. Default: it is.
    pub kubernetes_worker: bool,
    /// Whether golden tickets can be made here. Default: they can't. Whoever has read one is the node that it is for.
    pub golden_tickets: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prefix: DEFAULT_PREFIX.to_owned(),
            deadline: Duration::from_secs(120),
            erase: Erase::Nothing,
            kubernetes_worker: true,
            golden_tickets: false,
        }
    }
}

/// A node's way into its cluster, and its place there: a runnable, and a handle for everybody else.
///
/// It is ready when it is [`State::Running`]. A run that fails returns the [`Reason`] as its error; whether there is
/// another one is the tree's policy. A run ends too when the node gets another address, since its member is where nobody
/// reaches it: the next one starts it at the new address. Each run goes on where the journal says, with a machine of its own that begins as
/// [`State::New`]. One run at a time, which the tree sees to.
#[derive(Clone)]
pub struct Cluster(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) deps: Deps,
    pub(super) settings: Settings,
    pub(super) held: Held,
    pub(super) hook: Hook,
    published: watch::Sender<Published>,
}

/// What everybody sees.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) state: State,
    pub(super) history: Vec<Kind>,
    /// Where it runs.
    pub(super) member: Option<StatusWatch>,
}

/// The node is in no cluster at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// It is not [`State::Running`].
    #[error("the node is {state}, not Running")]
    NotRunning {
        /// What it is.
        state: Kind,
    },
    /// It is, and its member has ended, and is being started again: wait for it, or try again.
    #[error("the node's member does not serve at the moment")]
    NoMember,
}

/// Why there are no keys.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvAccessError {
    /// The node is in no cluster at the moment.
    #[error("reach the cluster's keys")]
    Unavailable(#[source] Unavailable),
    /// There can be no such module or space.
    #[error("name the keys' namespace")]
    Namespace(#[source] InvalidName),
}

/// Why there are no tickets to be had here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TicketAccessError {
    /// They are not enabled: see [`Settings::golden_tickets`].
    #[error("golden tickets are not enabled on this node")]
    Disabled,
    /// The node is in no cluster at the moment.
    #[error("reach the cluster")]
    Unavailable(#[source] Unavailable),
    /// The cluster's tickets can't be reached.
    #[error("reach the cluster's tickets")]
    Issue(#[source] IssueError),
}

impl Cluster {
    /// A node that is not on its way yet: run it.
    pub fn new(deps: Deps, settings: Settings) -> Self {
        Self::with_hook(deps, settings, Arc::new(|_: &str| {}))
    }

    /// The same with a hook that hears, by name, of each moment at which a test may kill the run. A panic of it is one of
    /// the run, which ends where it is.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_points(deps: Deps, settings: Settings, hook: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self::with_hook(deps, settings, Arc::new(hook))
    }

    fn with_hook(deps: Deps, settings: Settings, hook: Hook) -> Self {
        let start = Published { state: State::New, history: vec![Kind::New], member: None };
        let published = watch::Sender::new(start);
        Self(Arc::new(Shared { deps, settings, held: Held::default(), hook, published }))
    }

    /// The state now.
    pub fn state(&self) -> State {
        self.0.published.borrow().state.clone()
    }

    /// The states that the present run went through, the present one last; [`Kind::Failed`] after [`Kind::Running`] where it
    /// has ended.
    pub fn history(&self) -> Vec<Kind> {
        self.0.published.borrow().history.clone()
    }

    /// Waits until the state is another than the one given, and returns it.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn changed_from(&self, kind: Kind) -> State {
        let mut published = self.0.published.subscribe();
        // The sender lives as long as this handle.
        match published.wait_for(|now| now.state.kind() != kind).await {
            Ok(now) => now.state.clone(),
            Err(_) => std::future::pending().await,
        }
    }

    /// Waits until the run has finished, and tells how: now, if it has. Any number may wait, from whenever on.
    ///
    /// # Errors
    /// Why the node is in no cluster: [`Reason::Ended`] where it was. Another run may follow, which this does not wait for.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_finished(&self) -> Result<Membership, Reason> {
        let mut published = self.0.published.subscribe();
        loop {
            match &published.borrow_and_update().state {
                State::Running(membership) => return Ok(membership.clone()),
                State::Failed(reason) => return Err(reason.clone()),
                State::New | State::CreatingCluster(_) | State::Joining { .. } | State::Restarting(_) => {}
            }
            if published.changed().await.is_err() {
                // The sender lives as long as this handle.
                return std::future::pending().await;
            }
        }
    }

    /// The node's place in its cluster.
    ///
    /// # Errors
    /// [`Unavailable::NotRunning`].
    pub fn node(&self) -> Result<Membership, Unavailable> {
        match &self.0.published.borrow().state {
            State::Running(membership) => Ok(membership.clone()),
            other => Err(Unavailable::NotRunning { state: other.kind() }),
        }
    }

    /// The node's member, with all that can be done by it.
    ///
    /// # Errors
    /// [`Unavailable`].
    pub fn member(&self) -> Result<consensus::Running, Unavailable> {
        self.node()?;
        let member = self.0.published.borrow().member.clone();
        member.and_then(|status| status.now().running().cloned()).ok_or(Unavailable::NoMember)
    }

    /// The keys of one module's space.
    ///
    /// # Errors
    /// [`KvAccessError`].
    pub fn kv(&self, module: &str, space: &str) -> Result<Arc<dyn KvStore>, KvAccessError> {
        let member = self.member().map_err(KvAccessError::Unavailable)?;
        member.kv(module, space).map_err(KvAccessError::Namespace)
    }

    /// All keys, those of every module among them.
    ///
    /// # Errors
    /// [`Unavailable`].
    pub fn root_kv(&self) -> Result<Arc<dyn KvStore>, Unavailable> {
        Ok(self.member()?.root())
    }

    /// The list of members, and how it changes.
    ///
    /// # Errors
    /// [`Unavailable`].
    pub fn members(&self) -> Result<Arc<dyn consensus::Membership>, Unavailable> {
        Ok(self.member()?.members())
    }

    /// The records of the cluster's nodes.
    ///
    /// # Errors
    /// [`KvAccessError::Unavailable`].
    pub fn nodes(&self) -> Result<NodeStore, KvAccessError> {
        let (module, space) = NODES;
        Ok(NodeStore::new(self.kv(module, space)?))
    }
}

impl Cluster {
    /// Golden tickets for nodes that are to join, where they are [enabled](Settings::golden_tickets).
    ///
    /// # Errors
    /// [`TicketAccessError`].
    pub fn golden_tickets(&self) -> Result<GoldenTickets, TicketAccessError> {
        if !self.0.settings.golden_tickets {
            return Err(TicketAccessError::Disabled);
        }
        let member = self.member().map_err(TicketAccessError::Unavailable)?;
        GoldenTickets::new(member, self.0.settings.prefix.as_str()).map_err(TicketAccessError::Issue)
    }
}

impl Shared {
    pub(super) fn publish(&self, published: Published) {
        self.published.send_replace(published);
    }
}

impl Runnable for Cluster {
    fn run(&self, ctx: Context) -> RunFuture {
        let shared = Arc::clone(&self.0);
        Box::pin(drive::run(shared, ctx))
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("state", &self.state().kind()).finish_non_exhaustive()
    }
}
