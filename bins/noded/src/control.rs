//! The control API, served on a unix socket to the node's own user and to root.

mod cluster;
mod images;
mod names;
mod socket;
mod streams;

pub(crate) use socket::{Socket, probe};

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use nodekeel_logtree::{Backlog, Dn, Kind, Query, QueryError};
use nodekeel_supervisor::{Context, ControlError, Runnable, Supervisor};
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

use crate::client::level_from_wire;
use crate::node::Shared;
use crate::v1::control_server::{Control, ControlServer};
use crate::{v1, wire};

/// Most log entries that one status carries.
const MAX_STATUS_ENTRIES: u32 = 1000;

/// How long calls under way may take when the node stops; streams end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// The runnable that serves the control API.
pub(crate) fn serve(shared: Arc<Shared>, socket: Arc<Socket>) -> impl Runnable {
    let listen = move || {
        let listening = socket.listen().map_err(std::io::Error::other);
        async move { listening }
    };
    let own = nix::unistd::geteuid().as_raw();
    let router = move |ctx: &Context| {
        let api = Api { shared: Arc::clone(&shared), stop: ctx.token() };
        let admitted = InterceptedService::new(ControlServer::new(api), move |request| admit(own, request));
        tonic::transport::Server::builder().add_service(admitted)
    };
    nodekeel_supervisor::serve(listen, router, GRACE)
}

/// Lets in who runs noded, and root.
#[allow(clippy::result_large_err, reason = "tonic's interceptors return its status")]
fn admit(own: u32, request: Request<()>) -> Result<Request<()>, Status> {
    use tonic::transport::server::UdsConnectInfo;
    let credentials = request.extensions().get::<UdsConnectInfo>().and_then(|peer| peer.peer_cred);
    match credentials {
        Some(peer) if peer.uid() == own || peer.uid() == 0 => Ok(request),
        Some(peer) => Err(Status::permission_denied(format!(
            "no permission for uid {}: only uid {own}, which runs noded, and root may use this socket",
            peer.uid()
        ))),
        None => Err(Status::permission_denied("the caller's uid is not known")),
    }
}

struct Api {
    shared: Arc<Shared>,
    /// Ends the streams, without which a graceful stop would wait for their callers.
    stop: CancellationToken,
}

impl Api {
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn act(
        &self,
        dn: &str,
        act: impl FnOnce(&Supervisor, &str) -> Result<(), ControlError>,
    ) -> Result<(), Status> {
        if let Some(skipped) = self.shared.skipped().find(|planned| planned.dn == dn) {
            let reason = skipped.skipped.as_deref().unwrap_or_default();
            return Err(Status::failed_precondition(format!("{dn} is skipped: {reason}")));
        }
        self.shared.ask(|supervisor| act(supervisor, dn)).ok_or_else(stopping)?.map_err(|error| match error {
            ControlError::UnknownDn { dn } => self.unknown(&dn),
            ControlError::ShuttingDown => stopping(),
            other => Status::failed_precondition(other.to_string()),
        })
    }

    /// The answer to a DN that is not there: it says which ones are like it.
    fn unknown(&self, dn: &str) -> Status {
        if self.shared.ask(|_| ()).is_none() {
            return stopping();
        }
        let logged = self.shared.journal.stats().into_iter().map(|stats| stats.dn.to_string());
        let nodes = self.shared.nodes().into_iter().map(|node| node.dn);
        Status::not_found(names::unknown(dn, nodes.chain(logged)))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn log_dn(&self, dn: &str) -> Result<Dn, Status> {
        let parsed: Dn = dn.parse().map_err(|_| self.unknown(dn))?;
        let known = self.shared.nodes().iter().any(|node| node.dn == dn)
            || self.shared.journal.stats().iter().any(|stats| stats.dn.is_within(&parsed));
        if known || parsed.is_root() { Ok(parsed) } else { Err(self.unknown(dn)) }
    }
}

/// What every call gets once the node stops.
fn stopping() -> Status {
    Status::unavailable("the node is stopping")
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Control for Api {
    async fn version(&self, _: Request<v1::VersionRequest>) -> Result<Response<v1::VersionResponse>, Status> {
        let node = &self.shared.plan.config.node;
        Ok(Response::new(v1::VersionResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            name: node.name.clone(),
            pid: std::process::id(),
            started: wire::time(self.shared.started),
            data: node.data.display().to_string(),
        }))
    }

    async fn tree(&self, _: Request<v1::TreeRequest>) -> Result<Response<v1::TreeResponse>, Status> {
        self.shared.ask(|_| ()).ok_or_else(stopping)?;
        Ok(Response::new(v1::TreeResponse { nodes: self.shared.nodes() }))
    }

    type WatchTreeStream = Streamed<v1::TreeResponse>;

    async fn watch_tree(
        &self,
        _: Request<v1::TreeRequest>,
    ) -> Result<Response<Self::WatchTreeStream>, Status> {
        let changes = self.shared.ask(Supervisor::watch).ok_or_else(stopping)?;
        let trees = streams::trees(Arc::clone(&self.shared), changes);
        Ok(Response::new(streams::until(&self.stop, trees)))
    }

    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let v1::StatusRequest { dn, log_entries } = request.into_inner();
        let node = self.shared.nodes().into_iter().find(|node| node.dn == dn);
        let node = node.ok_or_else(|| self.unknown(&dn))?;
        let newest = log_entries.min(MAX_STATUS_ENTRIES) as usize;
        let query = Query::new(self.log_dn(&dn)?).last(newest);
        let mut reader = self.shared.journal.read(query).map_err(bad_query)?;
        let log = reader.backlog().into_iter().map(wire::entry).collect();
        Ok(Response::new(v1::StatusResponse { node: Some(node), log }))
    }

    type LogsStream = Streamed<v1::LogsResponse>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let query = query(self.log_dn(&request.dn)?, &request);
        let reader = self.shared.journal.read(query).map_err(bad_query)?;
        Ok(Response::new(streams::until(&self.stop, streams::logs(reader))))
    }

    type EventsStream = Streamed<v1::EventsResponse>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let v1::EventsRequest { backlog, follow } = request.into_inner();
        let events = streams::events(self.shared.history.read(backlog), follow);
        Ok(Response::new(streams::until(&self.stop, events)))
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Result<Response<v1::StartResponse>, Status> {
        self.act(&request.into_inner().dn, Supervisor::start)?;
        Ok(Response::new(v1::StartResponse {}))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        let dn = request.into_inner().dn;
        if dn == "root.control" {
            let why = "root.control can't be stopped: nobody could start it again; restart it instead";
            return Err(Status::failed_precondition(why));
        }
        self.act(&dn, Supervisor::stop)?;
        Ok(Response::new(v1::StopResponse {}))
    }

    async fn restart(
        &self,
        request: Request<v1::RestartRequest>,
    ) -> Result<Response<v1::RestartResponse>, Status> {
        self.act(&request.into_inner().dn, Supervisor::restart)?;
        Ok(Response::new(v1::RestartResponse {}))
    }

    async fn cluster(&self, _: Request<v1::ClusterRequest>) -> Result<Response<v1::ClusterResponse>, Status> {
        Ok(Response::new(cluster::status(&self.shared)?))
    }

    async fn members(&self, _: Request<v1::MembersRequest>) -> Result<Response<v1::MembersResponse>, Status> {
        Ok(Response::new(cluster::members(&self.shared).await?))
    }

    async fn create_golden_ticket(
        &self,
        request: Request<v1::CreateGoldenTicketRequest>,
    ) -> Result<Response<v1::CreateGoldenTicketResponse>, Status> {
        Ok(Response::new(cluster::golden_ticket(&self.shared, request.into_inner()).await?))
    }

    async fn withdraw_golden_ticket(
        &self,
        request: Request<v1::WithdrawGoldenTicketRequest>,
    ) -> Result<Response<v1::WithdrawGoldenTicketResponse>, Status> {
        Ok(Response::new(cluster::withdraw(&self.shared, request.into_inner()).await?))
    }

    async fn images(
        &self,
        request: Request<v1::ImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        Ok(Response::new(images::list(&self.shared, &request.into_inner()).await?))
    }

    async fn import_images(
        &self,
        request: Request<v1::ImportImagesRequest>,
    ) -> Result<Response<v1::ImagesResponse>, Status> {
        Ok(Response::new(images::import(&self.shared, &request.into_inner()).await?))
    }
}

fn query(dn: Dn, request: &v1::LogsRequest) -> Query {
    let backlog = match request.backlog {
        None => Backlog::All,
        Some(0) => Backlog::None,
        Some(newest) => Backlog::Last(usize::try_from(newest).unwrap_or(usize::MAX)),
    };
    let kind = match request.kind() {
        v1::logs_request::Kind::Unspecified => Kind::All,
        v1::logs_request::Kind::Leveled => Kind::Leveled,
        v1::logs_request::Kind::Raw => Kind::Raw,
    };
    let mut query = Query::new(dn).backlog(backlog).kind(kind);
    if request.children {
        query = query.children();
    }
    if request.follow {
        query = query.follow();
    }
    if let Some(level) = level_from_wire(request.min_level()) {
        query = query.min_level(level);
    }
    query
}

fn bad_query(error: QueryError) -> Status {
    Status::invalid_argument(error.to_string())
}
