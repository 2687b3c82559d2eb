//! The control API, served on a unix socket to the node's user and to root.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::map_response;
use futures_util::{Stream, StreamExt as _};
use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_logtree::{Dn, LogQuery};
use nodekeel_supervisor::process::ProcessHandle;
use nodekeel_supervisor::{Context, ControlError, Runnable, Supervisor, wall_clock_time};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::suggestions::{NameError, resolve_name, unknown_dn_message};
use super::{log_levels, log_query, streams};
use crate::client::{MAX_CALL_BYTES, level_from_wire};
use crate::control::callers::CallerNames;
use crate::control::require_admission;
use crate::control::socket::NodeSocket;
use crate::control::stopping_status;
use crate::dn::CLUSTER as CLUSTER_DN;
use crate::dn::STORAGE as STORAGE_DN;
use crate::event_history::EventScope;
use crate::parts::api::control::{add_operator, list_operators, remove_operator};
use crate::parts::cluster::control as cluster;
use crate::parts::cluster::join_tickets;
use crate::parts::containerd::images;
use crate::parts::service::control::{reload_process, signal_process};
use crate::parts::storage::control::StorageControl;
use crate::parts::worker::{Worker, find_worker};
use crate::reset::answer_reset;
use crate::running::{ConfigRequest, RunningNode};
use crate::v1::control_server::{Control, ControlServer};
use crate::{v1, wire};

/// The DNs of requests about the cluster and about images.
const CONTAINERD_DN: &str = "root.containerd";

/// Maximum number of log entries in one status.
const MAX_STATUS_ENTRIES: u32 = 1000;

/// Longest text of an action in an event, in characters: a client chooses a part of it.
const MAX_ACTION_CHARS: usize = 512;

/// Longest message of a failed call as a header, which escapes some characters: a client takes headers of 16 KiB altogether.
/// *Source:* hyper, `DEFAULT_MAX_HEADER_LIST_SIZE`.
const MAX_MESSAGE_BYTES: usize = 12 << 10;

/// The characters that are left of a longer one: each has up to 12 bytes in the header.
const MAX_MESSAGE_CHARS: usize = 1000;

/// Grace period of calls in progress when the node stops; streams end by themselves.
pub(crate) const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The runnable that serves the control API.
pub(crate) fn serve_control(running: Arc<RunningNode>, socket: Arc<NodeSocket>) -> impl Runnable {
    // The listener is asked for again in each incarnation, while the socket itself stays bound.
    let listen = move || {
        let listening = socket.listen().map_err(std::io::Error::other);
        async move { listening }
    };
    let callers = CallerNames::look_up();
    let router = move |ctx: &Context| {
        let routes = to_router(control_routes(&running, callers.clone(), ctx));
        tonic::transport::Server::builder().add_routes(routes.into())
    };
    nodekeel_supervisor::serve_grpc(listen, router, GRACE_PERIOD)
}

/// All services of the node, for a server that runs in this context.
pub(crate) fn control_routes(running: &Arc<RunningNode>, callers: CallerNames, ctx: &Context) -> Routes {
    let api = ControlService {
        running: Arc::clone(running),
        callers,
        stop: ctx.cancellation_token(),
        dn: ctx.dn().to_string(),
        generation: ctx.generation(),
    };
    let api = ControlServer::new(api).max_decoding_message_size(MAX_CALL_BYTES);
    // The services of the parts are read in each incarnation: a reload may have added some.
    running.additions().services.routes.add_service(require_admission(api))
}

/// The router of these services, whose answers reach each client.
pub(crate) fn to_router(routes: Routes) -> Router {
    routes.into_axum_router().layer(map_response(shorten_status))
}

/// Cuts a long message of a failed call, which may repeat what the client has sent: in a header that is too large, it would
/// not arrive at all.
async fn shorten_status(mut response: http::Response<axum::body::Body>) -> http::Response<axum::body::Body> {
    let headers = response.headers_mut();
    if headers.get("grpc-message").is_some_and(|message| message.len() > MAX_MESSAGE_BYTES)
        && let Some(status) = Status::from_header_map(headers)
    {
        let message: String = status.message().chars().take(MAX_MESSAGE_CHARS).collect();
        let short = Status::new(status.code(), message + "…");
        // A text can be a header: it is escaped.
        let _ = short.add_header(headers);
    }
    response
}

struct ControlService {
    running: Arc<RunningNode>,
    callers: CallerNames,
    /// Ends the streams; otherwise a graceful stop would wait for their clients.
    stop: CancellationToken,
    /// The server's, and its generation: its end is that of the streams of events.
    dn: String,
    generation: u64,
}

impl ControlService {
    /// Adds the request for an action on a DN to the events, if the node knows the DN, and returns the request.
    fn record_action<T>(&self, request: Request<T>, describe: impl FnOnce(&T) -> (&str, String)) -> T {
        let (dn, action) = describe(request.get_ref());
        // An unknown DN is no event of the node. A client could fill the history with invented names.
        if self.is_known_dn(dn) {
            let tree = self.running.supervisor.with(Supervisor::snapshot).unwrap_or_default();
            // The event belongs to the incarnation that the client acts on, also if the action replaces it.
            let generation =
                tree.iter().find(|status| *status.dn == *dn).map_or(0, |status| status.generation);
            let caller = self.callers.caller_of(&request);
            let action: String = action.chars().take(MAX_ACTION_CHARS).collect();
            self.running.history.add_request(dn, generation, &action, caller);
        }
        request.into_inner()
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn run_action(
        &self,
        dn: &str,
        act: impl FnOnce(&Supervisor, &str) -> Result<(), ControlError>,
    ) -> Result<(), Status> {
        // A skipped runnable is not in the tree. The reason is a better answer than an unknown DN.
        self.check_not_skipped(dn)?;
        self.running.supervisor.with(|supervisor| act(supervisor, dn)).ok_or_else(stopping_status)?.map_err(
            |error| match error {
                ControlError::UnknownDn { dn } => self.unknown_dn(&dn),
                ControlError::ShuttingDown => stopping_status(),
                other => Status::failed_precondition(other.to_string()),
            },
        )
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn check_not_skipped(&self, dn: &str) -> Result<(), Status> {
        match self.running.plan().skipped.iter().find(|skipped| skipped.dn == dn) {
            None => Ok(()),
            Some(skipped) => Err(Status::failed_precondition(format!("{dn} is skipped: {}", skipped.reason))),
        }
    }

    /// The status for an unknown DN: it suggests similar ones.
    fn unknown_dn(&self, dn: &str) -> Status {
        // While the tree is starting or stopping, a missing runnable does not mean that its name is wrong.
        if self.running.supervisor.with(|_| ()).is_none() {
            return stopping_status();
        }
        let (tree, logged) = self.known_dns();
        Status::not_found(unknown_dn_message(dn, tree.into_iter().chain(logged)))
    }

    /// The DNs of the tree, and those of the log.
    fn known_dns(&self) -> (Vec<String>, Vec<String>) {
        let logged = self.running.log_store.dn_stats().into_iter().map(|stats| stats.dn.to_string());
        (self.running.tree_nodes().into_iter().map(|node| node.dn).collect(), logged.collect())
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn parse_log_dn(&self, dn: &str) -> Result<Dn, Status> {
        match dn.parse() {
            Ok(parsed) if self.is_known_dn(dn) => Ok(parsed),
            _ => Err(self.unknown_dn(dn)),
        }
    }

    /// Returns whether a DN is the root of the log, in the tree, or that of a log entry or above one.
    fn is_known_dn(&self, dn: &str) -> bool {
        let Ok(dn) = dn.parse::<Dn>() else { return false };
        dn.is_root()
            || self.running.tree_nodes().iter().any(|node| node.dn == dn.as_str())
            // A DN above one with entries is known as well: `nodectl logs --children` asks for it.
            || self.running.log_store.dn_stats().iter().any(|stats| stats.dn.is_within(&dn))
    }

    /// The process of a `[[service]]`.
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn find_process(&self, dn: &str) -> Result<ProcessHandle, Status> {
        self.check_not_skipped(dn)?;
        // A service that a reload has removed leaves its handle.
        if self.running.tree_nodes().iter().all(|node| node.dn != dn) {
            return Err(self.unknown_dn(dn));
        }
        self.running.process(dn).ok_or_else(|| {
            let why = format!(
                "{dn} is not a [[service]]: only these can be signaled or reloaded; restart it instead"
            );
            Status::failed_precondition(why)
        })
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn cluster(&self) -> Result<ClusterNode, Status> {
        if let Some((api, _)) = find_worker(&self.running) {
            return Err(Worker::refusal(&api));
        }
        cluster::require_cluster(self.running.extension())
    }

    /// The cluster, for what acts on the member of this node.
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn own_cluster(&self) -> Result<ClusterNode, Status> {
        match find_worker(&self.running) {
            Some(_) => Err(Worker::member_refusal()),
            None => self.cluster(),
        }
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn storage(&self) -> Result<Arc<StorageControl>, Status> {
        let none = || Status::failed_precondition("this node has no part that opens its data volume");
        self.running.extension().ok_or_else(none)
    }

    fn list_log_levels(&self, dn: Option<&str>) -> Result<v1::LogLevelsResponse, Status> {
        let only = dn.map(|dn| self.parse_log_dn(dn)).transpose()?;
        let configured = &self.running.plan().config.log.levels;
        Ok(v1::LogLevelsResponse {
            levels: log_levels::list_levels(&self.running.log_store, configured, only.as_ref()),
        })
    }

    fn change_log_level(&self, request: &v1::SetLogLevelRequest) -> Result<v1::LogLevelsResponse, Status> {
        let dn = request.dn.as_deref().map(|dn| self.parse_log_dn(dn)).transpose()?;
        let log_store = &self.running.log_store;
        match (&dn, level_from_wire(request.level())) {
            (Some(dn), Some(level)) => log_store.set_level(dn, level),
            (None, Some(_)) => return Err(Status::invalid_argument("a level needs a DN")),
            // Without a level, the request is a reset of one name, or of all.
            (dn, None) => {
                log_levels::reset_levels(log_store, &self.running.plan().config.log.levels, dn.as_ref())
            }
        }
        self.list_log_levels(request.dn.as_deref())
    }
}

pub(super) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Control for ControlService {
    async fn version(&self, _: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        let plan = self.running.plan();
        let node = &plan.config.node;
        Ok(Response::new(v1::VersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            name: node.name.clone(),
            pid: std::process::id(),
            started: wire::timestamp(wall_clock_time(self.running.started_at)),
            data: node.data.display().to_string(),
        }))
    }

    async fn tree(&self, _: Request<v1::TreeRequest>) -> Result<Response<v1::TreeResponse>, Status> {
        self.running.supervisor.with(|_| ()).ok_or_else(stopping_status)?;
        Ok(Response::new(v1::TreeResponse { nodes: self.running.tree_nodes() }))
    }

    type WatchTreeStream = ResponseStream<v1::TreeResponse>;

    async fn watch_tree(
        &self,
        _: Request<v1::TreeRequest>,
    ) -> Result<Response<Self::WatchTreeStream>, Status> {
        let changes = self.running.supervisor.with(Supervisor::watch_changes).ok_or_else(stopping_status)?;
        let trees = streams::tree_stream(Arc::clone(&self.running), changes);
        Ok(Response::new(streams::until_stopped(&self.stop, trees)))
    }

    async fn resolve_dn(
        &self,
        request: Request<v1::ResolveDnRequest>,
    ) -> Result<Response<v1::ResolveDnResponse>, Status> {
        self.running.supervisor.with(|_| ()).ok_or_else(stopping_status)?;
        let (tree, logged) = self.known_dns();
        match resolve_name(&request.get_ref().name, &tree, &logged) {
            Ok(dn) => Ok(Response::new(v1::ResolveDnResponse { dn })),
            Err(error @ NameError::Unknown { .. }) => Err(Status::not_found(error.to_string())),
            Err(error @ NameError::Ambiguous { .. }) => Err(Status::invalid_argument(error.to_string())),
        }
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Result<Response<v1::HealthResponse>, Status> {
        self.running.supervisor.with(|_| ()).ok_or_else(stopping_status)?;
        Ok(Response::new(wire::health_to_wire(self.running.assess_health().await)))
    }

    type WatchHealthStream = ResponseStream<v1::HealthResponse>;

    async fn watch_health(
        &self,
        _: Request<v1::HealthRequest>,
    ) -> Result<Response<Self::WatchHealthStream>, Status> {
        let changes = self.running.supervisor.with(Supervisor::watch_changes).ok_or_else(stopping_status)?;
        let health = streams::health_stream(Arc::clone(&self.running), changes);
        Ok(Response::new(streams::until_stopped(&self.stop, health)))
    }

    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let v1::StatusRequest { dn, log_entries } = request.into_inner();
        let node = self.running.tree_nodes().into_iter().find(|node| node.dn == dn);
        let node = node.ok_or_else(|| self.unknown_dn(&dn))?;
        let newest = log_entries.min(MAX_STATUS_ENTRIES) as usize;
        let query = LogQuery::of_dn(self.parse_log_dn(&dn)?).last_entries(newest);
        let mut reader = self.running.log_store.open_reader(query).map_err(log_query::invalid_query)?;
        let log = reader.read_backlog().into_iter().map(wire::entry_to_wire).collect();
        let progress = match dn == images::PRESEED_DN {
            true => images::describe_progress(self.running.extension()),
            false => String::new(),
        };
        Ok(Response::new(v1::StatusResponse { node: Some(node), log, progress }))
    }

    type LogsStream = ResponseStream<v1::LogsResponse>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let query = log_query::from_request(self.parse_log_dn(&request.dn)?, &request)?;
        let reader = self.running.log_store.open_reader(query).map_err(log_query::invalid_query)?;
        Ok(Response::new(streams::until_stopped(&self.stop, streams::log_stream(reader))))
    }

    async fn log_levels(
        &self,
        request: Request<v1::LogLevelsRequest>,
    ) -> Result<Response<v1::LogLevelsResponse>, Status> {
        Ok(Response::new(self.list_log_levels(request.get_ref().dn.as_deref())?))
    }

    async fn set_log_level(
        &self,
        request: Request<v1::SetLogLevelRequest>,
    ) -> Result<Response<v1::LogLevelsResponse>, Status> {
        let request = self.record_action(request, log_levels::describe_request);
        Ok(Response::new(self.change_log_level(&request)?))
    }

    type EventsStream = ResponseStream<v1::EventsResponse>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let v1::EventsRequest { backlog, follow, dn, children } = request.into_inner();
        let scope = if dn.is_empty() {
            EventScope::Node
        } else if self.is_known_dn(&dn) {
            EventScope::Dn { dn, children }
        } else {
            return Err(self.unknown_dn(&dn));
        };
        let events = self.running.history.read_events(backlog, scope);
        Ok(Response::new(Box::pin(streams::event_stream(events, follow, self.dn.clone(), self.generation))))
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Result<Response<v1::StartResponse>, Status> {
        // Recorded before the action, so that the events of its effects come after the request.
        let request = self.record_action(request, |request| (&request.dn, "start".into()));
        self.run_action(&request.dn, Supervisor::start_runnable)?;
        Ok(Response::new(v1::StartResponse {}))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        let v1::StopRequest { dn } = self.record_action(request, |request| (&request.dn, "stop".into()));
        if dn == "root.control" {
            let why = "root.control can't be stopped: only the control API could start it again; restart it instead";
            return Err(Status::failed_precondition(why));
        }
        self.run_action(&dn, Supervisor::stop_runnable)?;
        Ok(Response::new(v1::StopResponse {}))
    }

    async fn restart(
        &self,
        request: Request<v1::RestartRequest>,
    ) -> Result<Response<v1::RestartResponse>, Status> {
        let request = self.record_action(request, |request| (&request.dn, "restart".into()));
        self.run_action(&request.dn, Supervisor::restart_runnable)?;
        Ok(Response::new(v1::RestartResponse {}))
    }

    async fn signal(
        &self,
        request: Request<v1::SignalRequest>,
    ) -> Result<Response<v1::SignalResponse>, Status> {
        let v1::SignalRequest { dn, signal } =
            self.record_action(request, |request| (&request.dn, format!("signal {}", request.signal)));
        signal_process(&self.find_process(&dn)?, &dn, &signal)?;
        Ok(Response::new(v1::SignalResponse {}))
    }

    async fn reload(
        &self,
        request: Request<v1::ReloadRequest>,
    ) -> Result<Response<v1::ReloadResponse>, Status> {
        let request = self.record_action(request, |request| (&request.dn, "reload".into()));
        reload_process(&self.find_process(&request.dn)?, &request.dn).await?;
        Ok(Response::new(v1::ReloadResponse {}))
    }

    async fn check_config(
        &self,
        request: Request<v1::CheckConfigRequest>,
    ) -> Result<Response<v1::ConfigDifference>, Status> {
        let v1::CheckConfigRequest { file, text } = request.into_inner();
        // Without a text, the node compares with its own file.
        let request = ConfigRequest::Check(text.map(|text| (file.into(), text)));
        Ok(Response::new(self.running.answer_config(request).await?))
    }

    async fn reload_config(
        &self,
        request: Request<v1::ReloadConfigRequest>,
    ) -> Result<Response<v1::ConfigDifference>, Status> {
        // The configuration belongs to no single runnable, and so the request is an event of the root.
        self.record_action(request, |_| ("root", "reload of the configuration".into()));
        Ok(Response::new(self.running.answer_config(ConfigRequest::Reload).await?))
    }

    async fn cluster(&self, _: Request<v1::ClusterRequest>) -> Result<Response<v1::ClusterResponse>, Status> {
        if let Some((_, worker)) = find_worker(&self.running) {
            return Ok(Response::new(worker.cluster_status()));
        }
        Ok(Response::new(cluster::cluster_status(&self.cluster()?, &self.running.plan().config)))
    }

    async fn bootstrap(
        &self,
        request: Request<v1::BootstrapRequest>,
    ) -> Result<Response<v1::BootstrapResponse>, Status> {
        self.record_action(request, |_| (CLUSTER_DN, "bootstrap".into()));
        Ok(Response::new(cluster::bootstrap(&self.own_cluster()?).await?))
    }

    async fn members(&self, _: Request<v1::MembersRequest>) -> Result<Response<v1::MembersResponse>, Status> {
        Ok(Response::new(cluster::list_members(&self.cluster()?).await?))
    }

    async fn defragment(
        &self,
        request: Request<v1::DefragmentRequest>,
    ) -> Result<Response<v1::DefragmentResponse>, Status> {
        let request = self.record_action(request, |request| {
            (CLUSTER_DN, format!("defragmentation of member {}", request.member))
        });
        Ok(Response::new(cluster::defragment(&self.own_cluster()?, &request).await?))
    }

    async fn disarm(
        &self,
        request: Request<v1::DisarmRequest>,
    ) -> Result<Response<v1::DisarmResponse>, Status> {
        self.record_action(request, |_| (CLUSTER_DN, "end of the store's alarms".into()));
        Ok(Response::new(cluster::disarm(&self.own_cluster()?).await?))
    }

    type SnapshotClusterStream = ResponseStream<v1::SnapshotClusterResponse>;

    async fn snapshot_cluster(
        &self,
        request: Request<v1::SnapshotClusterRequest>,
    ) -> Result<Response<Self::SnapshotClusterStream>, Status> {
        let request = self.record_action(request, |_| (CLUSTER_DN, "snapshot".into()));
        let file = cluster::snapshot(&self.cluster()?, &self.running.plan().config, &request).await?;
        Ok(Response::new(Box::pin(streams::until_stopped(&self.stop, file).map(Result::flatten))))
    }

    async fn restore_cluster(
        &self,
        request: Request<Streaming<v1::RestoreClusterRequest>>,
    ) -> Result<Response<v1::RestoreClusterResponse>, Status> {
        let pieces = self.record_action(request, |_| (CLUSTER_DN, "restore from a snapshot".into()));
        Ok(Response::new(cluster::restore(&self.own_cluster()?, self.running.extension(), pieces).await?))
    }

    async fn create_golden_ticket(
        &self,
        request: Request<v1::CreateGoldenTicketRequest>,
    ) -> Result<Response<v1::CreateGoldenTicketResponse>, Status> {
        let request = self
            .record_action(request, |request| (CLUSTER_DN, format!("golden ticket for {}", request.address)));
        Ok(Response::new(
            cluster::create_ticket(&self.cluster()?, &self.running.plan().config, request).await?,
        ))
    }

    async fn withdraw_golden_ticket(
        &self,
        request: Request<v1::WithdrawGoldenTicketRequest>,
    ) -> Result<Response<v1::WithdrawGoldenTicketResponse>, Status> {
        let request = self.record_action(request, |request| {
            (CLUSTER_DN, format!("revocation of the ticket for {}", request.address))
        });
        Ok(Response::new(
            cluster::revoke_ticket(&self.cluster()?, &self.running.plan().config, request).await?,
        ))
    }

    async fn create_join_ticket(
        &self,
        request: Request<v1::CreateJoinTicketRequest>,
    ) -> Result<Response<v1::CreateJoinTicketResponse>, Status> {
        let request = self.record_action(request, |_| (CLUSTER_DN, "join ticket".into()));
        Ok(Response::new(join_tickets::create_ticket(&self.running, &self.cluster()?, &request).await?))
    }

    async fn join_tickets(
        &self,
        _: Request<v1::JoinTicketsRequest>,
    ) -> Result<Response<v1::JoinTicketsResponse>, Status> {
        Ok(Response::new(join_tickets::list_tickets(&self.cluster()?).await?))
    }

    async fn revoke_join_ticket(
        &self,
        request: Request<v1::RevokeJoinTicketRequest>,
    ) -> Result<Response<v1::RevokeJoinTicketResponse>, Status> {
        let request = self.record_action(request, |request| {
            (CLUSTER_DN, format!("revocation of join ticket {}", request.id))
        });
        Ok(Response::new(join_tickets::revoke_ticket(&self.cluster()?, &request.id).await?))
    }

    async fn remove_node(
        &self,
        request: Request<v1::RemoveNodeRequest>,
    ) -> Result<Response<v1::RemoveNodeResponse>, Status> {
        let request =
            self.record_action(request, |request| (CLUSTER_DN, format!("removal of node {}", request.node)));
        Ok(Response::new(cluster::remove_node(&self.cluster()?, &request.node).await?))
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveResponse>, Status> {
        self.record_action(request, |_| (CLUSTER_DN, "leaving the cluster".to_owned()));
        if let Some((api, worker)) = find_worker(&self.running) {
            return Err(worker.leave_refusal(&api));
        }
        Ok(Response::new(cluster::leave(&self.cluster()?).await?))
    }

    async fn recover_cluster(
        &self,
        request: Request<v1::RecoverClusterRequest>,
    ) -> Result<Response<v1::RecoverClusterResponse>, Status> {
        let request = if request.get_ref().is_agreed {
            self.record_action(request, |request| {
                (CLUSTER_DN, format!("recovery of the cluster from node {}", request.node))
            })
        } else {
            request.into_inner()
        };
        Ok(Response::new(cluster::recover_cluster(&self.own_cluster()?, &request).await?))
    }

    async fn replace_node(
        &self,
        request: Request<v1::ReplaceNodeRequest>,
    ) -> Result<Response<v1::ReplaceNodeResponse>, Status> {
        let request = self
            .record_action(request, |request| (CLUSTER_DN, format!("replacement of node {}", request.node)));
        Ok(Response::new(
            cluster::replace_node(&self.cluster()?, &self.running.plan().config, request).await?,
        ))
    }

    async fn images(
        &self,
        request: Request<v1::ImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        Ok(Response::new(images::list_images(self.running.extension(), &request.into_inner()).await?))
    }

    async fn storage(&self, _: Request<v1::StorageRequest>) -> Result<Response<v1::StorageResponse>, Status> {
        Ok(Response::new(self.storage()?.status().await))
    }

    async fn unlock_storage(
        &self,
        request: Request<v1::UnlockStorageRequest>,
    ) -> Result<Response<v1::UnlockStorageResponse>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "unlock".into()));
        self.storage()?.unlock(request.passphrase).await?;
        Ok(Response::new(v1::UnlockStorageResponse {}))
    }

    async fn rotate_storage_keys(
        &self,
        request: Request<v1::RotateStorageKeysRequest>,
    ) -> Result<Response<v1::RotateStorageKeysResponse>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "rotation of its keys".into()));
        let rotated = self.storage()?.rotate(self.running.extension(), request.passphrase).await?;
        Ok(Response::new(rotated))
    }

    async fn add_recovery_passphrase(
        &self,
        request: Request<v1::AddRecoveryPassphraseRequest>,
    ) -> Result<Response<v1::AddRecoveryPassphraseResponse>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "new recovery passphrase".into()));
        Ok(Response::new(self.storage()?.add_recovery(self.running.extension(), request.passphrase).await?))
    }

    async fn confirm_recovery_passphrase(
        &self,
        request: Request<v1::ConfirmRecoveryPassphraseRequest>,
    ) -> Result<Response<v1::ConfirmRecoveryPassphraseResponse>, Status> {
        let request =
            self.record_action(request, |_| (STORAGE_DN, "confirmation of the recovery passphrase".into()));
        self.storage()?.confirm_recovery(request.passphrase).await?;
        Ok(Response::new(v1::ConfirmRecoveryPassphraseResponse {}))
    }

    async fn trim_storage(
        &self,
        request: Request<v1::TrimStorageRequest>,
    ) -> Result<Response<v1::TrimStorageResponse>, Status> {
        self.record_action(request, |_| (STORAGE_DN, "trim".into()));
        Ok(Response::new(v1::TrimStorageResponse { trimmed_bytes: self.storage()?.trim().await? }))
    }

    async fn acknowledge_storage(
        &self,
        request: Request<v1::AcknowledgeStorageRequest>,
    ) -> Result<Response<v1::AcknowledgeStorageResponse>, Status> {
        self.record_action(request, |_| (STORAGE_DN, "acknowledgement of faults".into()));
        let faults = self.storage()?.acknowledge_faults().await?;
        Ok(Response::new(v1::AcknowledgeStorageResponse { faults }))
    }

    async fn back_up_storage_header(
        &self,
        request: Request<v1::BackUpStorageHeaderRequest>,
    ) -> Result<Response<v1::BackUpStorageHeaderResponse>, Status> {
        self.record_action(request, |_| (STORAGE_DN, "backup of its header".into()));
        Ok(Response::new(self.storage()?.back_up_header().await?))
    }

    async fn restore_storage_header(
        &self,
        request: Request<v1::RestoreStorageHeaderRequest>,
    ) -> Result<Response<v1::RestoreStorageHeaderResponse>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "restore of its header".into()));
        self.storage()?.restore_header(request).await?;
        Ok(Response::new(v1::RestoreStorageHeaderResponse {}))
    }

    type ScrubStorageStream = ResponseStream<v1::StorageScrub>;

    async fn scrub_storage(
        &self,
        request: Request<v1::ScrubStorageRequest>,
    ) -> Result<Response<Self::ScrubStorageStream>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "scrub".into()));
        let reports = self.storage()?.scrub(request.bytes_per_second).await?;
        Ok(Response::new(streams::until_stopped(&self.stop, reports)))
    }

    async fn cancel_storage_scrub(
        &self,
        request: Request<v1::CancelStorageScrubRequest>,
    ) -> Result<Response<v1::CancelStorageScrubResponse>, Status> {
        self.record_action(request, |_| (STORAGE_DN, "cancellation of the scrub".into()));
        self.storage()?.cancel_scrub()?;
        Ok(Response::new(v1::CancelStorageScrubResponse {}))
    }

    type ReencryptStorageStream = ResponseStream<v1::StorageReencryption>;

    async fn reencrypt_storage(
        &self,
        request: Request<v1::ReencryptStorageRequest>,
    ) -> Result<Response<Self::ReencryptStorageStream>, Status> {
        let request = self.record_action(request, |_| (STORAGE_DN, "re-encryption".into()));
        let reports = self.storage()?.reencrypt(self.running.extension(), request).await?;
        Ok(Response::new(streams::until_stopped(&self.stop, reports)))
    }

    async fn erase_storage(
        &self,
        request: Request<v1::EraseStorageRequest>,
    ) -> Result<Response<v1::EraseStorageResponse>, Status> {
        let request =
            self.record_action(request, |request| (STORAGE_DN, format!("erasure of {}", request.token)));
        self.storage()?.erase(&request.token)?;
        Ok(Response::new(v1::EraseStorageResponse {}))
    }

    async fn operators(
        &self,
        _: Request<v1::OperatorsRequest>,
    ) -> Result<Response<v1::OperatorsResponse>, Status> {
        Ok(Response::new(list_operators(&self.running)?))
    }

    async fn add_operator(
        &self,
        request: Request<v1::AddOperatorRequest>,
    ) -> Result<Response<v1::AddOperatorResponse>, Status> {
        let request = self.record_action(request, |request| {
            (CLUSTER_DN, format!("operator {} with the role {}", request.name, request.role))
        });
        Ok(Response::new(add_operator(&self.running, &self.cluster()?, &request).await?))
    }

    async fn remove_operator(
        &self,
        request: Request<v1::RemoveOperatorRequest>,
    ) -> Result<Response<v1::RemoveOperatorResponse>, Status> {
        let request = self
            .record_action(request, |request| (CLUSTER_DN, format!("removal of operator {}", request.name)));
        Ok(Response::new(remove_operator(&self.running, &self.cluster()?, &request.name).await?))
    }

    async fn reset(&self, request: Request<v1::ResetRequest>) -> Result<Response<v1::ResetResponse>, Status> {
        let request = if request.get_ref().agreed.is_empty() {
            request.into_inner()
        } else {
            self.record_action(request, |_| ("root", "reset of the node".into()))
        };
        Ok(Response::new(answer_reset(&self.running, request).await?))
    }

    type WatchImagesStream = ResponseStream<v1::ImagesResponse>;

    async fn watch_images(
        &self,
        request: Request<v1::ImagesRequest>,
    ) -> Result<Response<Self::WatchImagesStream>, Status> {
        let lists = images::watch_images(self.running.extension(), request.into_inner());
        let lists = streams::until_stopped(&self.stop, lists);
        Ok(Response::new(Box::pin(lists.map(Result::flatten))))
    }

    type VerifyImagesStream = ResponseStream<v1::ImageVerification>;

    async fn verify_images(
        &self,
        request: Request<v1::VerifyImagesRequest>,
    ) -> Result<Response<Self::VerifyImagesStream>, Status> {
        let request = self.record_action(request, |request| {
            let act = if request.repair { "repair" } else { "verification" };
            (CONTAINERD_DN, format!("{act} of images in {}", request.namespace))
        });
        let reports = images::verify_images(self.running.extension(), request).await?;
        let reports = streams::until_stopped(&self.stop, reports);
        Ok(Response::new(Box::pin(reports.map(Result::flatten))))
    }

    async fn import_images(
        &self,
        request: Request<v1::ImportImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        let request = self.record_action(request, |request| {
            (CONTAINERD_DN, format!("import of {} into {}", request.path, request.namespace))
        });
        Ok(Response::new(images::import_images(self.running.extension(), &request).await?))
    }
}
