//! The effects of the steps. Each step may be repeated after it was completed, or started.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::pki::{CertificateTemplate, CommonName, Credentials};
use nodekeel_localstorage::tree::{IdentityDir, LayoutTarget, PkiDir};
use nodekeel_localstorage::{Dir, OsFileStore};

use super::cluster_node::SharedState;
use super::driver::EnrolmentDriver;
use super::failure::StepError;
use super::fsm::StepOutput;
use super::progress::{EnrolmentKind, EnrolmentProgress};
use super::state::EnrolmentState;
use super::step::{EnrolmentStep, StepMode};
use crate::consensus::{
    self, MemberName, MemberStatus, PreparedMember, RecoveryState, StartOptions, StatusWatch,
};
use crate::node::NODES_NAMESPACE;
use crate::node::{
    ClusterId, GoldenTicket, GoldenTicketIssuer, NodeId, NodeRecord, NodeRemover, NodeRoles, NodeStore,
    NodeStoreError, expel_others,
};

/// The pause before an unanswered call to the cluster is retried, unless the member's status changes first.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

nodekeel_localstorage::layout! {
    /// The node's directory on its data volume.
    struct NodeLayout {
        /// The node's identity.
        node: IdentityDir = "node", 0o700;
    }
}

/// Runs the steps within the run of this driver.
pub(super) struct StepRunner<'a>(pub(super) &'a EnrolmentDriver);

impl StepRunner<'_> {
    pub(super) async fn run(&self, step: EnrolmentStep, mode: StepMode) -> Result<StepOutput, StepError> {
        // A copy suffices: the state does not change until this step returns.
        let input = StepInput::from_state(self.0.current_state())?;
        match step {
            EnrolmentStep::Network => drop(self.0.wait_address().await?),
            EnrolmentStep::Storage => self.open_storage(mode, input).await?,
            EnrolmentStep::Identity => {
                return self.establish_identity(mode, input).await.map(StepOutput::Node);
            }
            EnrolmentStep::Consensus => {
                return self.start_consensus(mode, input).await.map(StepOutput::Cluster);
            }
            EnrolmentStep::Record => self.put_record(mode, input).await?,
            EnrolmentStep::Local => self.apply_local_names(input).await?,
        }
        Ok(StepOutput::Done)
    }

    /// The address that the member was started at: everything the node publishes about itself uses the same
    /// one.
    async fn member_address(&self) -> Result<IpAddr, StepError> {
        let started = self.0.run_state().member_address;
        match started {
            Some(address) => Ok(address),
            None => self.0.wait_address().await,
        }
    }

    async fn open_storage(&self, mode: StepMode, input: StepInput) -> Result<(), StepError> {
        let shared = Arc::clone(&self.0.shared);
        self.0
            .run_blocking(move || {
                // Before the volume: once a cluster may exist on it, the loss of the volume must not permit
                // another bootstrap.
                shared.record_enrolment(&input.progress)?;
                let SharedState { deps, settings, volume, .. } = &*shared;
                volume.open_or_create(&*deps.volume, mode, input.progress.enrolment_id(), &settings.erase)
            })
            .await
    }

    async fn establish_identity(&self, mode: StepMode, input: StepInput) -> Result<NodeId, StepError> {
        let shared = Arc::clone(&self.0.shared);
        let ticket = input.ticket.clone();
        let credentials = self
            .0
            .run_blocking(move || {
                let pki = place_credentials(&shared.volume_root()?)?;
                match (mode, ticket) {
                    // The key is the node's identity: a missing one is an error, and is never replaced.
                    (StepMode::Rerun, _) => load_credentials(&pki)?
                        .ok_or_else(|| StepError::CredentialsMissing { path: pki.path().to_owned() }),
                    // A killed run may have made the key already: `ensure_self_signed` keeps it.
                    (StepMode::FirstRun, None) => {
                        let mut template = CertificateTemplate::default();
                        template.common_name = CommonName::WithKeyId(shared.settings.node_prefix.clone());
                        pki.ensure_self_signed(&template).map_err(StepError::Credentials)
                    }
                    (StepMode::FirstRun, Some(ticket)) => install_ticket_credentials(&pki, &ticket),
                }
            })
            .await?;
        let key = credentials.key.public_key();
        self.0.run_state().certificate = Some(credentials.certificate);
        // A known name stays, even if another prefix is configured now. A name of another key gives way to that
        // of the key on the disk: the state machine compares it with the record, and fails the run.
        let known = input.progress.node_id().or(input.ticket.as_deref().map(GoldenTicket::node_id));
        match known.filter(|node| node.matches_key(&key)) {
            Some(node) => Ok(node.clone()),
            None => NodeId::from_key(&self.0.shared.settings.node_prefix, &key).map_err(StepError::Name),
        }
    }

    async fn start_consensus(&self, mode: StepMode, input: StepInput) -> Result<ClusterId, StepError> {
        let name = input.member_name()?;
        let address = self.0.wait_address().await?;
        // Published with the record and the local names, even if the network reports another one by then.
        self.0.run_state().member_address = Some(address);
        let start = match (mode, input.progress.enrolment_kind(), input.ticket) {
            // From now on the member's own files decide, and the ticket is not read.
            (StepMode::Rerun, _, _) => StartOptions::restart_member(name, address),
            (StepMode::FirstRun, EnrolmentKind::Bootstrap, _) => StartOptions::new_cluster(name, address),
            (StepMode::FirstRun, EnrolmentKind::Restore, _) => {
                let snapshot = self.0.shared.settings.snapshot.clone();
                let snapshot =
                    snapshot.ok_or_else(|| StepError::Consensus("no snapshot is configured".into()))?;
                StartOptions::restore_cluster(name, address, snapshot, input.progress.enrolment_id().to_hex())
            }
            (StepMode::FirstRun, EnrolmentKind::Join(_), Some(ticket)) => {
                // Checked again: the node may have got another address since it accepted the ticket.
                let port = self.0.shared.deps.consensus.peer_port;
                ticket.check_address(address, port).map_err(StepError::Ticket)?;
                let (peers, revoked) = (ticket.peers().to_vec(), ticket.revocation_list().clone());
                StartOptions::join_cluster(name, address, peers, ticket.member_credentials(), revoked)
            }
            // Unreachable without a ticket: the plan requires one until this step is done.
            (StepMode::FirstRun, EnrolmentKind::Join(_), None) => {
                return Err(StepError::Ticket(crate::node::TicketError::NoTicket));
            }
        };
        let shared = Arc::clone(&self.0.shared);
        let opened = self.0.run_blocking(move || {
            shared.deps.consensus.open(&shared.volume_root()?).map_err(StepError::Consensus)
        });
        let PreparedMember { service, status, recovery } = opened.await?.prepare_member(start);
        // A child of this run: the supervisor stops it when the run ends, and the next run starts another.
        self.0.ctx.run_child("consensus", service).map_err(StepError::Tree)?;
        {
            let mut run_state = self.0.run_state();
            (run_state.member, run_state.recovery) = (Some(status), recovery);
        }
        // Only the first start writes the cluster's id. Later ones read it, and the state machine compares it
        // with the record.
        let founded = input.progress.founded_cluster().filter(|_| mode == StepMode::FirstRun);
        let cluster = self.call_cluster(|nodes| async move {
            match founded {
                Some(founded) => nodes.init_cluster_id(founded).await,
                None => nodes.cluster_id().await,
            }
        });
        let cluster = cluster.await?;
        self.finish_recovery().await?;
        Ok(cluster)
    }

    /// Removes what the cluster has of all other nodes, if it is recovered from this one.
    async fn finish_recovery(&self) -> Result<(), StepError> {
        let (recovery, status) = {
            let run_state = self.0.run_state();
            (run_state.recovery.clone(), run_state.member.clone())
        };
        let (Some(recovery), Some(mut status)) = (recovery, status) else { return Ok(()) };
        if recovery.state().await.map_err(StepError::Recovery)? != RecoveryState::Alone {
            return Ok(());
        }
        let running = self.wait_serving(&mut status).await?;
        let remover = NodeRemover::new(running).map_err(|error| StepError::Consensus(error.into()))?;
        for removed in remover.remove_all_others().await.map_err(StepError::LostNodes)? {
            tracing::warn!("the cluster is recovered from this node: {removed} is removed");
        }
        // Last: until then, each start repeats it.
        recovery.complete().await.map_err(StepError::Recovery)
    }

    async fn put_record(&self, mode: StepMode, input: StepInput) -> Result<(), StepError> {
        let (node, name) = (input.node_id()?, input.member_name()?);
        let address = self.member_address().await?;
        // The identity step of this run has loaded it.
        let Some(certificate) = self.0.run_state().certificate.clone() else {
            return Err(StepError::CredentialsMissing {
                path: self.0.shared.volume_root()?.path().to_owned(),
            });
        };
        if mode == StepMode::FirstRun && input.progress.enrolment_kind() == EnrolmentKind::Restore {
            // Before this node has a record: with it, the restore is complete.
            let this = &node;
            self.call_member(|running| async move { expel_others(&running, this).await }).await?;
        }
        let mut roles = NodeRoles::empty();
        // The roles are new, so neither was set before.
        let _ = roles.set_consensus_member(name.clone());
        if self.0.shared.settings.kubernetes_worker {
            let _ = roles.set_kubernetes_worker(node.as_str());
        }
        let record = NodeRecord { certificate, former_unlock_key: None, address: Some(address), roles };
        let this = (node, record);
        self.call_cluster(|nodes| {
            let (node, record) = this.clone();
            async move {
                // Only once: a node whose record an operator has removed must not readmit itself at its next
                // start.
                if mode == StepMode::FirstRun {
                    nodes.create_record(&node, &record).await?;
                }
                // A killed run may have created it at another address.
                nodes.update_record(&node, |existing| existing.address = Some(address)).await.map(drop)
            }
        })
        .await?;
        // After the record, by which the issuer knows that the ticket's node has joined.
        self.delete_used_ticket().await;
        self.remove_snapshot().await;
        Ok(())
    }

    /// Removes a snapshot, which has the secrets of its cluster: the one that was restored, or that was staged before the node has
    /// come to its cluster in another way.
    async fn remove_snapshot(&self) {
        let Some(snapshot) = self.0.shared.settings.snapshot.clone() else { return };
        let removed = self.0.run_blocking(move || {
            let (dir, name) =
                (snapshot.parent().unwrap_or(&snapshot), snapshot.file_name().unwrap_or_default());
            Dir::open(dir).and_then(|dir| dir.remove_file(name)).map_err(StepError::volume_root(dir))
        });
        if let Err(error) = removed.await {
            tracing::warn!(
                "can't remove the decrypted snapshot of a cluster: {}",
                nodekeel_supervisor::Failure::new(error)
            );
        }
    }

    /// Deletes the ticket that this node has joined by. A ticket that remains only takes up namespace, so a
    /// failure here does not fail the step.
    async fn delete_used_ticket(&self) {
        let member = self
            .0
            .run_state()
            .member
            .as_ref()
            .and_then(|status| status.current_status().cluster_access().cloned());
        let Some(running) = member else { return };
        let url = running.this_member().peer_urls.first().and_then(|url| url.parse().ok());
        let tickets = GoldenTicketIssuer::new(running, self.0.shared.settings.node_prefix.as_str());
        if let (Some(url), Ok(tickets)) = (url, tickets)
            && let Err(error) = tickets.delete_ticket(&url).await
        {
            tracing::warn!("delete the used ticket: {}", nodekeel_supervisor::Failure::new(error));
        }
    }

    async fn apply_local_names(&self, input: StepInput) -> Result<(), StepError> {
        let (node, address) = (input.node_id()?, self.member_address().await?);
        let shared = Arc::clone(&self.0.shared);
        self.0
            .run_blocking(move || shared.deps.local_names.apply_names(&node, address))
            .await
            .map_err(StepError::LocalNames)
    }

    /// Calls the cluster for its records, as [`call_member`](Self::call_member).
    async fn call_cluster<T, Answer>(&self, question: impl Fn(NodeStore) -> Answer) -> Result<T, StepError>
    where
        Answer: Future<Output = Result<T, NodeStoreError>>,
    {
        let (module, namespace) = NODES_NAMESPACE;
        self.call_member(|running| {
            question(NodeStore::new(running.namespaced_kv(module, namespace).expect("fixed names are valid")))
        })
        .await
    }

    /// Calls the cluster once the member serves, and retries until it answers: the supervisor may
    /// restart the member at any time. Only the deadline ends the retries.
    async fn call_member<T, Answer>(
        &self,
        question: impl Fn(consensus::ClusterAccess) -> Answer,
    ) -> Result<T, StepError>
    where
        Answer: Future<Output = Result<T, NodeStoreError>>,
    {
        let Some(mut status) = self.0.run_state().member.clone() else {
            return Err(StepError::Consensus("the member was not started".into()));
        };
        loop {
            // Asked anew for each attempt: a handle of an earlier run of the member stays unusable.
            let running = self.wait_serving(&mut status).await?;
            match question(running).await {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_retryable() => {
                    self.0.set_condition(Some(nodekeel_supervisor::Failure::new(error).to_string()));
                    // Only a pause: the loop reads the present status in any case.
                    let _ = tokio::time::timeout(RETRY_PAUSE, status.next_status()).await;
                }
                Err(error) => return Err(StepError::Record(error)),
            }
        }
    }

    /// Waits until the member serves, and publishes the condition that it waits for.
    async fn wait_serving(&self, status: &mut StatusWatch) -> Result<consensus::ClusterAccess, StepError> {
        let mut now = status.current_status();
        loop {
            match now {
                // An impaired member may answer again by the time of the call, which is retried if not.
                MemberStatus::Running(access) | MemberStatus::Impaired { access, .. } => return Ok(access),
                MemberStatus::Refused(refusal) => return Err(StepError::JoinRefused(refusal)),
                MemberStatus::Waiting { reason } => self.0.set_condition(Some(reason.to_string())),
                MemberStatus::Receiving(transfer) => {
                    self.0.record_received();
                    self.0.set_condition(Some(transfer.to_string()));
                }
                // Not a failure of this step: the supervisor restarts the member.
                MemberStatus::Exited { failure: Some(failure) } => {
                    self.0.set_condition(Some(format!("the member failed: {failure}")));
                }
                _ => {}
            }
            let Some(next) = status.next_status().await else {
                return Err(StepError::Consensus("the member's service is gone".into()));
            };
            now = next;
        }
    }
}

impl SharedState {
    /// The root of the data volume, which is open from [`EnrolmentStep::Storage`] on.
    fn volume_root(&self) -> Result<Dir, StepError> {
        self.volume.root_dir()?.ok_or_else(|| {
            let state = self.deps.volume.state();
            StepError::Volume(nodekeel_localstorage::volume::VolumeError::InvalidState { state })
        })
    }
}

/// The input of a step, copied from the state machine.
struct StepInput {
    progress: EnrolmentProgress,
    node_id: Option<NodeId>,
    ticket: Option<Arc<GoldenTicket>>,
}

impl StepInput {
    /// Only states with a run in progress perform steps.
    fn from_state(state: EnrolmentState) -> Result<Self, StepError> {
        let ticket = match &state {
            EnrolmentState::Joining { ticket, .. } => ticket.clone(),
            EnrolmentState::New
            | EnrolmentState::Waiting(_)
            | EnrolmentState::CreatingCluster(_)
            | EnrolmentState::Restarting(_)
            | EnrolmentState::Running(_)
            | EnrolmentState::Failed(_) => None,
        };
        let Some(run) = state.active_run() else {
            return Err(StepError::Consensus(format!("no step to run in state {}", state.phase()).into()));
        };
        Ok(Self { progress: run.progress().clone(), node_id: run.node_id().cloned(), ticket })
    }

    fn node_id(&self) -> Result<NodeId, StepError> {
        self.node_id.clone().ok_or_else(|| StepError::Consensus("the node has no name yet".into()))
    }

    fn member_name(&self) -> Result<MemberName, StepError> {
        self.node_id()?
            .as_str()
            .parse()
            .map_err(|error: consensus::InvalidName| StepError::Consensus(error.into()))
    }
}

fn place_credentials(root: &Dir) -> Result<PkiDir, StepError> {
    let path = root.path().to_owned();
    let root = root.try_clone().map_err(StepError::volume_root(&path))?;
    let placed: NodeLayout = LayoutTarget::new(Arc::new(OsFileStore::new(root)), path)
        .create_layout()
        .map_err(StepError::Place)?;
    Ok(placed.node.credentials.clone())
}

fn load_credentials(pki: &PkiDir) -> Result<Option<Credentials>, StepError> {
    pki.load_credentials().map_err(StepError::Credentials)
}

/// Stores the ticket's credentials unless they are already stored, and returns them.
fn install_ticket_credentials(pki: &PkiDir, ticket: &GoldenTicket) -> Result<Credentials, StepError> {
    let malformed =
        |source| StepError::Ticket(crate::node::TicketError::Field { field: "node's key", source });
    match load_credentials(pki)? {
        // A killed run has stored them.
        Some(existing) if existing.key.public_key() == ticket.joining_node_key() => Ok(existing),
        Some(_) => Err(StepError::CredentialsMismatch { path: pki.path().to_owned() }),
        None => {
            let credentials = ticket.node_credentials().map_err(malformed)?;
            pki.store_credentials(&credentials).map_err(StepError::Credentials)?;
            Ok(credentials)
        }
    }
}
