//! The connections from other machines: what a stranger can hold is bounded, and nothing behind TLS is a stranger's.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt as _, stream};
use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_supervisor::{
    AbortableConnection, Backoff, ChildPolicy, ChildSpec, Context, RunFuture, Runnable, listen_http,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::audit::{Audit, Refusal};
use super::gate::{RemotePeer, admit};
use super::node_service::node_server;
use super::peer_watch::PeerWatch;
use super::strangers::{StrangerPlace, Strangers};
use crate::access::{MismatchedKey, ServerTls, is_enrolling, proved_key};
use crate::control::callers::CallerNames;
use crate::parts::api::Api;
use crate::parts::api::config::ADDRESS_KEY;
use crate::parts::api::identities::{Connection, Identities};
use crate::parts::api::records::RecordWatch;
use crate::parts::control::{GRACE_PERIOD, control_routes, to_router};
use crate::parts::worker::{Worker, WorkerRun};
use crate::running::RunningNode;

/// The handshakes in progress. A further one takes the place of the oldest.
const MAX_HANDSHAKES: usize = 256;

/// The time for a handshake, from the acceptance of the connection on.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The calls of one connection at the same time.
const MAX_CALLS: u32 = 32;

/// The bytes of the headers of a call.
const MAX_HEADER_BYTES: u32 = 16 << 10;

/// The longest pause before the records of the cluster are read again.
const RECORDS_BACKOFF: Duration = Duration::from_secs(1);

/// A connection whose machine has gone is closed after the interval and the timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The runnable that serves the control API to operators on other machines, and other nodes of the cluster.
pub(super) fn serve_api(
    running: Arc<RunningNode>,
    api: Arc<Api>,
    worker: Option<Arc<Worker>>,
) -> impl Runnable {
    let audit = Arc::new(Audit::new(running.log_store.clone()));
    let listen = {
        let (api, audit, running) = (Arc::clone(&api), Arc::clone(&audit), Arc::clone(&running));
        move || {
            // Each part is prepared by now.
            let can_enrol = running.extension::<ClusterNode>().is_some();
            let listening = listen(&api, &audit, can_enrol);
            async move { listening }
        }
    };
    let callers = CallerNames::look_up();
    let (node, served) = (Arc::clone(&running), Arc::clone(&api));
    let router = move |ctx: &Context| {
        let (identities, audit) = (Arc::clone(&served.identities), Arc::clone(&audit));
        let node_service = node_server(&node, &served, ctx);
        let routes = control_routes(&node, callers.clone(), ctx).add_service(node_service);
        // The gate is before all of them.
        let routes = to_router(routes).layer(axum::middleware::from_fn(move |request, next| {
            admit(Arc::clone(&identities), Arc::clone(&audit), request, next)
        }));
        tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_CALLS)
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_routes(routes.into())
    };
    let server = nodekeel_supervisor::serve_grpc(listen, router, GRACE_PERIOD);
    ApiServer { server, running, api, worker }
}

/// The server, and below it the watches of the cluster's nodes and of its operators, or a worker's way into its cluster.
struct ApiServer<S> {
    server: S,
    running: Arc<RunningNode>,
    api: Arc<Api>,
    worker: Option<Arc<Worker>>,
}

impl<S: Runnable> Runnable for ApiServer<S> {
    fn run(&self, ctx: Context) -> RunFuture {
        let serving = self.server.run(ctx.clone());
        // Each part is prepared by now.
        let cluster = self.running.extension::<ClusterNode>();
        // A node that was cut off learns of a removal soon after it is back.
        let policy = || ChildPolicy {
            backoff: Backoff { max: RECORDS_BACKOFF, ..Backoff::default() },
            ..ChildPolicy::default()
        };
        let peers = cluster.clone().map(|cluster| {
            let (api, volume) = (Arc::clone(&self.api), self.running.volume.clone());
            ChildSpec::new("peers", PeerWatch { api, cluster, volume }).policy(policy())
        });
        let records = cluster.map(|cluster| {
            let watch = RecordWatch { api: Arc::clone(&self.api), cluster };
            ChildSpec::new("records", watch).policy(policy())
        });
        let worker = self.worker.clone().map(|worker| {
            let run = WorkerRun { api: Arc::clone(&self.api), worker };
            ChildSpec::new("worker", run).policy(policy())
        });
        Box::pin(async move {
            for watch in peers.into_iter().chain(records).chain(worker) {
                ctx.run_child_with(watch)?;
            }
            serving.await
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.server.stop_timeout()
    }
}

type Connections = Pin<Box<dyn Stream<Item = io::Result<AbortableConnection<ApiConnection>>> + Send>>;

pub(super) fn listen(api: &Api, audit: &Arc<Audit>, can_enrol: bool) -> io::Result<Connections> {
    let address = api.address;
    let refused = |source: io::Error| {
        let text =
            format!("can't listen on {address}: {source}; set {ADDRESS_KEY} to another address or port");
        io::Error::new(source.kind(), text)
    };
    let listener = listen_http(address).and_then(TcpListener::from_std).map_err(refused)?;
    let tls = ServerTls::new(&api.key, Arc::clone(&api.identities) as _, can_enrol);
    let accepting = Accepting {
        listener,
        tls: tls.map_err(io::Error::other)?,
        strangers: Strangers::default(),
        identities: Arc::clone(&api.identities),
        audit: Arc::clone(audit),
        handshakes: FuturesUnordered::new(),
        places: BTreeMap::new(),
        next_number: 0,
    };
    Ok(Box::pin(stream::unfold(accepting, |mut accepting| async move {
        // An error does not end the stream: a later accept can succeed.
        Some((accepting.next_connection().await, accepting))
    })))
}

/// A handshake that has ended.
struct Ended {
    number: u64,
    address: SocketAddr,
    result: io::Result<TlsStream<TcpStream>>,
}

/// The listener, and the handshakes in progress.
struct Accepting {
    listener: TcpListener,
    tls: ServerTls,
    strangers: Strangers,
    identities: Arc<Identities>,
    audit: Arc<Audit>,
    handshakes: FuturesUnordered<Pin<Box<dyn Future<Output = Ended> + Send>>>,
    /// By number: the oldest is the first. Canceled when it loses its place.
    places: BTreeMap<u64, CancellationToken>,
    next_number: u64,
}

impl Accepting {
    /// The next connection whose client has proved a key that is admitted.
    async fn next_connection(&mut self) -> io::Result<AbortableConnection<ApiConnection>> {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => {
                    let (tcp, address) = accepted?;
                    self.begin_handshake(tcp, address);
                }
                () = self.strangers.close_late() => {}
                Some(ended) = self.handshakes.next() => {
                    self.places.remove(&ended.number);
                    let address = ended.address;
                    match self.admit(ended) {
                        Ok(connection) => return Ok(connection),
                        Err(refusal) => self.audit.refused(address, &refusal),
                    }
                }
            }
        }
    }

    fn begin_handshake(&mut self, tcp: TcpStream, address: SocketAddr) {
        if self.places.len() >= MAX_HANDSHAKES
            && let Some((_, oldest)) = self.places.pop_first()
        {
            oldest.cancel();
        }
        let (number, place) = (self.next_number, CancellationToken::new());
        self.next_number += 1;
        self.places.insert(number, place.clone());
        // Messages are small, and most of them are waited for.
        let _ = tcp.set_nodelay(true);
        let tls = self.tls.clone();
        self.handshakes.push(Box::pin(async move {
            let handshake = timeout(HANDSHAKE_TIMEOUT, tls.accept(tcp));
            let result = tokio::select! {
                ended = handshake => ended.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
                () = place.cancelled() => Err(io::ErrorKind::ConnectionAborted.into()),
            };
            Ended { number, address, result }
        }));
    }

    fn admit(
        &mut self,
        Ended { address, result, .. }: Ended,
    ) -> Result<AbortableConnection<ApiConnection>, Refusal> {
        let tls = result.map_err(|error| match MismatchedKey::of_error(&error) {
            Some(key) => Refusal::UnknownKey(key),
            None => Refusal::Handshake(error),
        })?;
        let no_key = || Refusal::Handshake(io::ErrorKind::InvalidData.into());
        let key = proved_key(tls.get_ref().1).ok_or_else(no_key)?;
        let place = if is_enrolling(tls.get_ref().1) {
            Place::Stranger(self.strangers.connect(key, address.ip()))
        } else {
            // Its record may have been removed during the handshake.
            Place::Known(self.identities.connect(key).ok_or(Refusal::UnknownKey(key))?)
        };
        let closed = place.closed();
        Ok(AbortableConnection::new(ApiConnection { tls, address, place }, closed))
    }
}

/// A connection whose client has proved its key.
#[derive(Debug)]
pub(super) struct ApiConnection {
    tls: TlsStream<TcpStream>,
    address: SocketAddr,
    place: Place,
}

/// Its place among the open connections, until it is dropped.
#[derive(Debug)]
enum Place {
    Known(Connection),
    /// Of a machine that came to enrol.
    Stranger(StrangerPlace),
}

impl Place {
    fn closed(&self) -> CancellationToken {
        match self {
            Self::Known(connection) => connection.closed(),
            Self::Stranger(place) => place.closed.clone(),
        }
    }
}

impl Connected for ApiConnection {
    type ConnectInfo = RemotePeer;

    fn connect_info(&self) -> RemotePeer {
        let (key, is_stranger) = match &self.place {
            Place::Known(connection) => (connection.key(), false),
            Place::Stranger(place) => (place.key, true),
        };
        RemotePeer { is_stranger, key, address: self.address }
    }
}

impl AsyncRead for ApiConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ApiConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}
