//! What the steps do. Each may be done again after it was done, or begun.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::pki::{CommonName, Credentials, Template};
use nodekeel_localstorage::tree::{Identity, Pki, Site};
use nodekeel_localstorage::{Dir, OsPlacement};

use super::book::Book;
use super::cluster::Shared;
use super::core::Outcome;
use super::decide::Found;
use super::drive::{Drive, Moved};
use super::reason::StepError;
use super::state::State;
use super::step::{Flow, Mode, Progress, Step};
use crate::consensus::{self, MemberName, Start, Started, Status, StatusWatch};
use crate::node::NODES;
use crate::node::{
    ClusterId, GoldenTicket, GoldenTickets, NodeId, NodeRecord, NodeStore, RecordError, Roles,
};

/// How long a call to the cluster that got no answer is left alone, unless the member changes before.
const RETRY: Duration = Duration::from_millis(200);

nodekeel_localstorage::layout! {
    /// What is kept of the node itself on its data volume, as in [`nodekeel_localstorage::tree::Data`].
    struct OnVolume {
        /// Who the node is.
        node: Identity = "node", 0o700;
    }
}

impl Drive {
    pub(super) async fn examine(&self) -> Result<Found, StepError> {
        let shared = Arc::clone(&self.shared);
        let opened = self.blocking(move || {
            let Shared { deps, hook, .. } = &*shared;
            Book::open(&deps.state, &deps.enrolment, hook)
        });
        let (book, found) = opened.await?;
        self.made().book = Some(book);
        Ok(found)
    }

    pub(super) async fn record(&self, progress: Progress) -> Result<(), StepError> {
        let Some(book) = self.made().book.take() else { return Ok(()) };
        let shared = Arc::clone(&self.shared);
        let book = self.blocking(move || book.record(&progress, &shared.hook)).await?;
        self.made().book = Some(book);
        Ok(())
    }

    pub(super) async fn step(&self, step: Step, mode: Mode) -> Result<Outcome, StepError> {
        let now = Now::of(self.state())?;
        match step {
            Step::Network => self.address().await.map(|_| Outcome::Network),
            Step::Storage => self.storage(mode, now).await.map(|()| Outcome::Storage),
            Step::Identity => self.identity(mode, now).await.map(Outcome::Identity),
            Step::Consensus => self.consensus(mode, now).await.map(Outcome::Consensus),
            Step::Record => self.put_record(mode, now).await.map(|()| Outcome::Record),
            Step::Local => self.local(now).await.map(|()| Outcome::Local),
        }
    }

    /// Waits for an address.
    async fn address(&self) -> Result<IpAddr, StepError> {
        let network = &self.shared.deps.network;
        let mut watch = network.address();
        loop {
            if let Some(address) = *watch.borrow_and_update() {
                return Ok(address.ip());
            }
            let trouble = network.trouble().unwrap_or_else(|| "there is no address yet".to_owned());
            self.trouble(Some(trouble));
            watch.changed().await.map_err(|_| StepError::NoNetwork)?;
        }
    }

    /// The address that the member was started at: what the node tells of itself is of one moment.
    async fn member_address(&self) -> Result<IpAddr, StepError> {
        let started = self.made().address;
        match started {
            Some(address) => Ok(address),
            None => self.address().await,
        }
    }

    async fn storage(&self, mode: Mode, now: Now) -> Result<(), StepError> {
        let shared = Arc::clone(&self.shared);
        let enrolment = now.progress.enrolment();
        self.blocking(move || {
            let Shared { deps, settings, held, .. } = &*shared;
            held.open(&*deps.volume, mode, enrolment, &settings.erase)
        })
        .await
    }

    async fn identity(&self, mode: Mode, now: Now) -> Result<NodeId, StepError> {
        let shared = Arc::clone(&self.shared);
        let ticket = now.ticket.clone();
        let credentials = self
            .blocking(move || {
                let pki = credentials_in(&shared.top()?)?;
                match (mode, ticket) {
                    (Mode::Again, _) => {
                        load(&pki)?.ok_or_else(|| StepError::CredentialsGone { path: pki.path().to_owned() })
                    }
                    (Mode::Make, None) => {
                        let mut template = Template::default();
                        template.common_name = CommonName::WithKey(shared.settings.prefix.clone());
                        pki.ensure_self_signed(&template).map_err(StepError::Credentials)
                    }
                    (Mode::Make, Some(ticket)) => take(&pki, &ticket),
                }
            })
            .await?;
        let key = credentials.key.public();
        self.made().certificate = Some(credentials.certificate);
        let known = now.progress.node().or(now.ticket.as_deref().map(GoldenTicket::node));
        match known.filter(|node| node.is_of(&key)) {
            Some(node) => Ok(node.clone()),
            None => NodeId::new(&self.shared.settings.prefix, &key).map_err(StepError::Name),
        }
    }

    async fn consensus(&self, mode: Mode, now: Now) -> Result<ClusterId, StepError> {
        let name = now.member_name()?;
        let address = self.address().await?;
        self.made().address = Some(address);
        let start = match (mode, now.progress.flow(), now.ticket) {
            (Mode::Again, _, _) => Start::restart(name, address),
            (Mode::Make, Flow::Create, _) => Start::new_cluster(name, address),
            (Mode::Make, Flow::Join(_), Some(ticket)) => {
                let port = self.shared.deps.consensus.peer_port;
                ticket.check_place(address, port).map_err(StepError::Ticket)?;
                let (peers, revoked) = (ticket.peers().to_vec(), ticket.revoked().clone());
                Start::join(name, address, peers, ticket.member(), revoked)
            }
            // Nobody gets here without a ticket: it is needed until this step is done.
            (Mode::Make, Flow::Join(_), None) => {
                return Err(StepError::Ticket(crate::node::TicketError::NoTicket));
            }
        };
        let shared = Arc::clone(&self.shared);
        let opened =
            self.blocking(move || shared.deps.consensus.open(&shared.top()?).map_err(StepError::Consensus));
        let Started { service, status } = opened.await?.start(start);
        self.ctx.run("consensus", service).map_err(StepError::Tree)?;
        self.made().member = Some(status);
        let founded = match (mode, now.progress.flow()) {
            (Mode::Make, Flow::Create) => Some(ClusterId::new(now.progress.enrolment().0)),
            _ => None,
        };
        self.ask(|nodes| async move {
            match founded {
                Some(founded) => nodes.found(founded).await,
                None => nodes.cluster().await,
            }
        })
        .await
    }

    async fn put_record(&self, mode: Mode, now: Now) -> Result<(), StepError> {
        let (node, name) = (now.node()?, now.member_name()?);
        let address = self.member_address().await?;
        let Some(certificate) = self.made().certificate.clone() else {
            return Err(StepError::CredentialsGone { path: self.shared.top()?.path().to_owned() });
        };
        let mut roles = Roles::none();
        // They are new, so neither was given before.
        let _ = roles.make_consensus_member(name.clone());
        if self.shared.settings.kubernetes_worker {
            let _ = roles.make_kubernetes_worker(node.as_str());
        }
        let record = NodeRecord { certificate, unlock_key: None, address: Some(address), roles };
        let this = (node, record);
        self.ask(|nodes| {
            let (node, record) = this.clone();
            async move {
                if mode == Mode::Make {
                    nodes.create(&node, &record).await?;
                }
                nodes.update(&node, |there| there.address = Some(address)).await.map(drop)
            }
        })
        .await?;
        self.ticket_is_used().await;
        Ok(())
    }

    /// A ticket that this node has joined by need not be kept any more. That it is costs nothing but room: it is not the
    /// step's failure.
    async fn ticket_is_used(&self) {
        let member = self.made().member.as_ref().and_then(|status| status.now().running().cloned());
        let Some(running) = member else { return };
        let url = running.this().peer_urls.first().and_then(|url| url.parse().ok());
        let tickets = GoldenTickets::new(running, self.shared.settings.prefix.as_str());
        if let (Some(url), Ok(tickets)) = (url, tickets)
            && let Err(error) = tickets.forget(&url).await
        {
            tracing::warn!("the ticket is still kept: {}", nodekeel_supervisor::Failure::new(error));
        }
    }

    async fn local(&self, now: Now) -> Result<(), StepError> {
        let (node, address) = (now.node()?, self.member_address().await?);
        let shared = Arc::clone(&self.shared);
        self.blocking(move || shared.deps.local.tell(&node, address)).await.map_err(StepError::Local)
    }

    /// Asks the cluster once the member serves, and again as long as there is no answer: the member may end, and be
    /// started again by the tree, at any time. Only the deadline ends that.
    async fn ask<T, Answer>(&self, question: impl Fn(NodeStore) -> Answer) -> Result<T, StepError>
    where
        Answer: Future<Output = Result<T, RecordError>>,
    {
        let Some(mut status) = self.made().member.clone() else {
            return Err(StepError::Consensus("no member was started".into()));
        };
        loop {
            let running = self.serving(&mut status).await?;
            let (module, space) = NODES;
            let kv = running.kv(module, space).map_err(|error| StepError::Consensus(error.into()))?;
            match question(NodeStore::new(kv)).await {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_retryable() => {
                    self.trouble(Some(nodekeel_supervisor::Failure::new(error).to_string()));
                    let _ = tokio::time::timeout(RETRY, status.changed()).await;
                }
                Err(error) => return Err(StepError::Record(error)),
            }
        }
    }

    /// Waits until the member serves.
    async fn serving(&self, status: &mut StatusWatch) -> Result<consensus::Running, StepError> {
        let mut now = status.now();
        loop {
            match now {
                Status::Running(running) => return Ok(running),
                Status::Ended { failure: Some(failure) } => {
                    self.trouble(Some(format!("the member has failed: {failure}")));
                }
                _ => {}
            }
            let Some(next) = status.changed().await else {
                return Err(StepError::Consensus("whoever ran the member has ended".into()));
            };
            now = next;
        }
    }

    /// Waits until the node has another address than it has started with: then its member is where nobody reaches it, and
    /// has to be started again. An address that is lost may come back.
    pub(super) async fn moved(&self) -> Moved {
        let mut watch = self.shared.deps.network.address();
        let from = self.made().address;
        loop {
            let now = *watch.borrow_and_update();
            match (now, from) {
                (None, _) => tracing::warn!("the node has lost its address"),
                (Some(now), Some(from)) if now.ip() != from => return Moved { from, to: now.ip() },
                (Some(address), _) => tracing::debug!(%address, "the node has its address"),
            }
            if watch.changed().await.is_err() {
                tracing::warn!("the network tells no addresses any more");
                return std::future::pending().await;
            }
        }
    }
}

impl Shared {
    /// The top of the data volume, which is open from [`Step::Storage`] on.
    fn top(&self) -> Result<Dir, StepError> {
        self.held.top()?.ok_or_else(|| {
            let state = self.deps.volume.state();
            StepError::Volume(nodekeel_localstorage::volume::VolumeError::State { state })
        })
    }
}

/// What a step begins with.
struct Now {
    progress: Progress,
    node: Option<NodeId>,
    ticket: Option<Arc<GoldenTicket>>,
}

impl Now {
    /// Steps are done in the states that have work; of any other there is nothing to begin with.
    fn of(state: State) -> Result<Self, StepError> {
        let ticket = match &state {
            State::Joining { ticket, .. } => ticket.clone(),
            State::New
            | State::CreatingCluster(_)
            | State::Restarting(_)
            | State::Running(_)
            | State::Failed(_) => None,
        };
        let Some(work) = state.work() else {
            return Err(StepError::Consensus(
                format!("there is nothing to do in state {}", state.kind()).into(),
            ));
        };
        Ok(Self { progress: work.progress().clone(), node: work.node().cloned(), ticket })
    }

    fn node(&self) -> Result<NodeId, StepError> {
        self.node.clone().ok_or_else(|| StepError::Consensus("the node has no name yet".into()))
    }

    fn member_name(&self) -> Result<MemberName, StepError> {
        self.node()?
            .as_str()
            .parse()
            .map_err(|error: consensus::InvalidName| StepError::Consensus(error.into()))
    }
}

fn credentials_in(top: &Dir) -> Result<Pki, StepError> {
    let top = top.try_clone().map_err(StepError::Mark)?;
    let path = top.path().to_owned();
    let placed: OnVolume =
        Site::new(Arc::new(OsPlacement::new(top)), path).place().map_err(StepError::Place)?;
    Ok(placed.node.credentials.clone())
}

fn load(pki: &Pki) -> Result<Option<Credentials>, StepError> {
    pki.load().map_err(StepError::Credentials)
}

/// The ticket's credentials, which are stored unless they are there.
fn take(pki: &Pki, ticket: &GoldenTicket) -> Result<Credentials, StepError> {
    let malformed =
        |source| StepError::Ticket(crate::node::TicketError::Field { field: "node's key", source });
    match load(pki)? {
        Some(there) if there.key.public() == ticket.public() => Ok(there),
        Some(_) => Err(StepError::OtherCredentials { path: pki.path().to_owned() }),
        None => {
            let credentials = ticket.node_credentials().map_err(malformed)?;
            pki.store(&credentials).map_err(StepError::Credentials)?;
            Ok(credentials)
        }
    }
}
