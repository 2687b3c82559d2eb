//! The control API, served on a unix socket to the node's user and to root.

mod cluster;
mod images;
mod log_query;
mod process;
mod socket;
mod streams;
mod suggestions;

pub(crate) use process::ServiceHandles;
pub(crate) use socket::{BindError, ControlSocket, check_socket};

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use nodekeel_logtree::{Dn, LogQuery};
use nodekeel_supervisor::{Context, ControlError, Runnable, Supervisor};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::interceptor::InterceptedService;
use tonic::service::{Interceptor, Routes};
use tonic::{Request, Response, Status};

use crate::node::NodeState;
use crate::part::PrepareError;
use crate::v1::control_server::{Control, ControlServer, SERVICE_NAME};
use crate::{v1, wire};

/// Maximum number of log entries in one status.
const MAX_STATUS_ENTRIES: u32 = 1000;

/// Grace period of calls in progress when the node stops; streams end by themselves.
const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The runnable that serves the control API.
pub(crate) fn serve_control(shared: Arc<NodeState>, socket: Arc<ControlSocket>) -> impl Runnable {
    let listen = move || {
        let listening = socket.listen().map_err(std::io::Error::other);
        async move { listening }
    };
    let router = move |ctx: &Context| {
        let api = ControlService { shared: Arc::clone(&shared), stop: ctx.cancellation_token() };
        let routes = shared.control_services().routes.add_service(require_admission(ControlServer::new(api)));
        tonic::transport::Server::builder().add_routes(routes)
    };
    nodekeel_supervisor::serve_grpc(listen, router, GRACE_PERIOD)
}

/// The gRPC services on the control socket. Each call is admitted as those of the control API: from the user that
/// runs the node, and from root.
#[derive(Debug, Clone, Default)]
pub struct ControlServices {
    routes: Routes,
    /// The names of the services.
    names: Vec<&'static str>,
}

impl ControlServices {
    /// Adds a service, as tonic generates it.
    ///
    /// # Errors
    /// Another service has its name.
    pub fn add_service<S>(&mut self, service: S) -> Result<(), PrepareError>
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        if S::NAME == SERVICE_NAME || self.names.contains(&S::NAME) {
            return Err(format!("duplicate gRPC service {}: only one part can add it", S::NAME).into());
        }
        self.names.push(S::NAME);
        self.routes = std::mem::take(&mut self.routes).add_service(require_admission(service));
        Ok(())
    }
}

/// A service whose calls are admitted by [`authorize_peer`].
fn require_admission<S>(service: S) -> InterceptedService<S, impl Interceptor + Clone> {
    let noded_uid = nix::unistd::geteuid().as_raw();
    InterceptedService::new(service, move |request| authorize_peer(noded_uid, request))
}

/// Admits the user that runs noded, and root.
#[allow(clippy::result_large_err, reason = "tonic's interceptors return its status")]
fn authorize_peer(noded_uid: u32, request: Request<()>) -> Result<Request<()>, Status> {
    use tonic::transport::server::UdsConnectInfo;
    let credentials = request.extensions().get::<UdsConnectInfo>().and_then(|peer| peer.peer_cred);
    match credentials {
        Some(peer) if peer.uid() == noded_uid || peer.uid() == 0 => Ok(request),
        Some(peer) => Err(Status::permission_denied(format!(
            "permission denied for uid {}: only uid {noded_uid}, which runs noded, and root may use this socket",
            peer.uid()
        ))),
        None => Err(Status::permission_denied("unknown uid of the caller")),
    }
}

struct ControlService {
    shared: Arc<NodeState>,
    /// Ends the streams; otherwise a graceful stop would wait for their clients.
    stop: CancellationToken,
}

impl ControlService {
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn run_action(
        &self,
        dn: &str,
        act: impl FnOnce(&Supervisor, &str) -> Result<(), ControlError>,
    ) -> Result<(), Status> {
        self.check_not_skipped(dn)?;
        self.shared.with_supervisor(|supervisor| act(supervisor, dn)).ok_or_else(stopping_status)?.map_err(
            |error| match error {
                ControlError::UnknownDn { dn } => self.unknown_dn(&dn),
                ControlError::ShuttingDown => stopping_status(),
                other => Status::failed_precondition(other.to_string()),
            },
        )
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn check_not_skipped(&self, dn: &str) -> Result<(), Status> {
        match self.shared.skipped_services().find(|planned| planned.dn == dn) {
            None => Ok(()),
            Some(skipped) => {
                let reason = skipped.skip_reason.as_deref().unwrap_or_default();
                Err(Status::failed_precondition(format!("{dn} is skipped: {reason}")))
            }
        }
    }

    /// The status for an unknown DN: it suggests similar ones.
    fn unknown_dn(&self, dn: &str) -> Status {
        if self.shared.with_supervisor(|_| ()).is_none() {
            return stopping_status();
        }
        let logged = self.shared.log_store.dn_stats().into_iter().map(|stats| stats.dn.to_string());
        let nodes = self.shared.tree_nodes().into_iter().map(|node| node.dn);
        Status::not_found(suggestions::unknown_dn_message(dn, nodes.chain(logged)))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn parse_log_dn(&self, dn: &str) -> Result<Dn, Status> {
        let parsed: Dn = dn.parse().map_err(|_| self.unknown_dn(dn))?;
        let known = self.shared.tree_nodes().iter().any(|node| node.dn == dn)
            || self.shared.log_store.dn_stats().iter().any(|stats| stats.dn.is_within(&parsed));
        if known || parsed.is_root() { Ok(parsed) } else { Err(self.unknown_dn(dn)) }
    }
}

/// The status of every call during shutdown.
fn stopping_status() -> Status {
    Status::unavailable("the node is stopping")
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Control for ControlService {
    async fn version(&self, _: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        let node = &self.shared.plan.config.node;
        Ok(Response::new(v1::VersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            name: node.name.clone(),
            pid: std::process::id(),
            started: wire::timestamp(self.shared.started_at),
            data: node.data.display().to_string(),
        }))
    }

    async fn tree(&self, _: Request<v1::TreeRequest>) -> Result<Response<v1::TreeResponse>, Status> {
        self.shared.with_supervisor(|_| ()).ok_or_else(stopping_status)?;
        Ok(Response::new(v1::TreeResponse { nodes: self.shared.tree_nodes() }))
    }

    type WatchTreeStream = ResponseStream<v1::TreeResponse>;

    async fn watch_tree(
        &self,
        _: Request<v1::TreeRequest>,
    ) -> Result<Response<Self::WatchTreeStream>, Status> {
        let changes = self.shared.with_supervisor(Supervisor::watch_changes).ok_or_else(stopping_status)?;
        let trees = streams::tree_stream(Arc::clone(&self.shared), changes);
        Ok(Response::new(streams::until_stopped(&self.stop, trees)))
    }

    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let v1::StatusRequest { dn, log_entries } = request.into_inner();
        let node = self.shared.tree_nodes().into_iter().find(|node| node.dn == dn);
        let node = node.ok_or_else(|| self.unknown_dn(&dn))?;
        let newest = log_entries.min(MAX_STATUS_ENTRIES) as usize;
        let query = LogQuery::of_dn(self.parse_log_dn(&dn)?).last_entries(newest);
        let mut reader = self.shared.log_store.open_reader(query).map_err(log_query::invalid_query)?;
        let log = reader.read_backlog().into_iter().map(wire::entry_to_wire).collect();
        Ok(Response::new(v1::StatusResponse { node: Some(node), log }))
    }

    type LogsStream = ResponseStream<v1::LogsResponse>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let query = log_query::from_request(self.parse_log_dn(&request.dn)?, &request)?;
        let reader = self.shared.log_store.open_reader(query).map_err(log_query::invalid_query)?;
        Ok(Response::new(streams::until_stopped(&self.stop, streams::log_stream(reader))))
    }

    type EventsStream = ResponseStream<v1::EventsResponse>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let v1::EventsRequest { backlog, follow } = request.into_inner();
        let events = streams::event_stream(self.shared.history.read_events(backlog), follow);
        Ok(Response::new(streams::until_stopped(&self.stop, events)))
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Result<Response<v1::StartResponse>, Status> {
        self.run_action(&request.into_inner().dn, Supervisor::start_runnable)?;
        Ok(Response::new(v1::StartResponse {}))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        let dn = request.into_inner().dn;
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
        self.run_action(&request.into_inner().dn, Supervisor::restart_runnable)?;
        Ok(Response::new(v1::RestartResponse {}))
    }

    async fn signal(
        &self,
        request: Request<v1::SignalRequest>,
    ) -> Result<Response<v1::SignalResponse>, Status> {
        let v1::SignalRequest { dn, signal } = request.into_inner();
        self.signal_process(&dn, &signal)?;
        Ok(Response::new(v1::SignalResponse {}))
    }

    async fn reload(
        &self,
        request: Request<v1::ReloadRequest>,
    ) -> Result<Response<v1::ReloadResponse>, Status> {
        self.reload_process(&request.into_inner().dn).await?;
        Ok(Response::new(v1::ReloadResponse {}))
    }

    async fn cluster(&self, _: Request<v1::ClusterRequest>) -> Result<Response<v1::ClusterResponse>, Status> {
        Ok(Response::new(cluster::cluster_status(&self.shared)?))
    }

    async fn bootstrap(
        &self,
        _: Request<v1::BootstrapRequest>,
    ) -> Result<Response<v1::BootstrapResponse>, Status> {
        Ok(Response::new(cluster::bootstrap(&self.shared)?))
    }

    async fn members(&self, _: Request<v1::MembersRequest>) -> Result<Response<v1::MembersResponse>, Status> {
        Ok(Response::new(cluster::list_members(&self.shared).await?))
    }

    async fn create_golden_ticket(
        &self,
        request: Request<v1::CreateGoldenTicketRequest>,
    ) -> Result<Response<v1::CreateGoldenTicketResponse>, Status> {
        Ok(Response::new(cluster::create_ticket(&self.shared, request.into_inner()).await?))
    }

    async fn withdraw_golden_ticket(
        &self,
        request: Request<v1::WithdrawGoldenTicketRequest>,
    ) -> Result<Response<v1::WithdrawGoldenTicketResponse>, Status> {
        Ok(Response::new(cluster::revoke_ticket(&self.shared, request.into_inner()).await?))
    }

    async fn images(
        &self,
        request: Request<v1::ImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        Ok(Response::new(images::list_images(&self.shared, &request.into_inner()).await?))
    }

    async fn import_images(
        &self,
        request: Request<v1::ImportImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        Ok(Response::new(images::import_images(&self.shared, &request.into_inner()).await?))
    }
}
