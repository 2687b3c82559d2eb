//! HTTP for probes and scrapers, on a socket that strangers reach: what they can hold is bounded.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt as _};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::accept::pause_after_errors;

/// The number of connections that are served at once: a quarter of the 1,024 descriptors that a program has by default.
const MAX_CONNECTIONS: usize = 256;

/// The time for a whole connection, from its acceptance to the last byte of its answer: a health check takes up to 5 s,
/// and Prometheus waits 10 s.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The bytes of a request's head: the least that hyper reads into.
const HEAD_BYTES: usize = 8192;

/// The connections that the kernel keeps until they are accepted; it allows `net.core.somaxconn`, 4,096 by default.
const BACKLOG: i32 = 4096;

/// Listens on a TCP port for [`serve_http`]: the socket does not block, as tokio's `from_std` requires, and the kernel
/// queues up to 4,096 connections.
///
/// # Errors
/// Those of bind(2) and listen(2).
pub fn listen_http(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // The standard library queues 128. A connection beyond is tried again by the client's kernel, after a second.
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Serves a router to any number of clients, none of them trusted. It returns when the stream of connections ends; dropped
/// before, it closes all of them.
///
/// - A connection has one request. It is closed 10 s after its acceptance, whatever was sent or read until then.
/// - 256 connections are open at once. A further one takes the place of the oldest that waits for its client, to send
///   the request or to read the answer. While all of them wait for the router, it waits in the kernel's queue.
/// - The head of a request has at most 8 KiB; a longer one gets the status 431.
/// - After an error of the stream, such as of accept(2) without a free descriptor, it pauses for 100 ms.
///
/// All connections are served in the caller's task: the router's futures must not block it.
pub async fn serve_http<S, I>(connections: S, router: Router)
where
    S: Stream<Item = io::Result<I>>,
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut connections = pin!(pause_after_errors(connections));
    let mut served = FuturesUnordered::new();
    // The oldest is the first.
    let mut places = BTreeMap::<u64, Arc<Place>>::new();
    let mut numbers = 0..;
    loop {
        let accepted = std::future::poll_fn(|cx| {
            // First, so that a client whose request is there already is answered before it can lose its place.
            while let Poll::Ready(Some(number)) = served.poll_next_unpin(cx) {
                places.remove(&number);
            }
            // One more than there are places: an evicted client may not be closed yet.
            let is_open = places.len() < MAX_CONNECTIONS || oldest_waiting(&places).is_some();
            if is_open && served.len() <= MAX_CONNECTIONS {
                connections.poll_next_unpin(cx)
            } else {
                // Each progress of a connection wakes this task, too.
                Poll::Pending
            }
        });
        let connection = match accepted.await {
            Some(Ok(connection)) => connection,
            Some(Err(_)) => continue,
            None => break,
        };
        if places.len() == MAX_CONNECTIONS
            && let Some(place) = oldest_waiting(&places).and_then(|number| places.remove(&number))
        {
            place.is_taken.cancel();
        }
        let (place, number) = (Arc::<Place>::default(), numbers.next().expect("64 bits suffice"));
        places.insert(number, Arc::clone(&place));
        let router = router.clone();
        served.push(async move {
            serve_connection(connection, router, &place).await;
            number
        });
    }
    while served.next().await.is_some() {}
}

/// A connection, as the others see it.
#[derive(Debug)]
struct Place {
    /// False while the router answers its request.
    waits_for_client: AtomicBool,
    /// Canceled when it loses its place.
    is_taken: CancellationToken,
}

impl Default for Place {
    fn default() -> Self {
        Self { waits_for_client: AtomicBool::new(true), is_taken: CancellationToken::new() }
    }
}

fn oldest_waiting(places: &BTreeMap<u64, Arc<Place>>) -> Option<u64> {
    let mut waiting = places.iter().filter(|(_, place)| place.waits_for_client.load(Ordering::Relaxed));
    waiting.next().map(|(number, _)| *number)
}

/// Answers one request, until the time is over or the place is taken.
async fn serve_connection(
    connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    place: &Place,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        place.waits_for_client.store(false, Ordering::Relaxed);
        let answering = router.call(request);
        async move {
            let answer = answering.await;
            place.waits_for_client.store(true, Ordering::Relaxed);
            Ok::<_, Infallible>(answer.unwrap_or_else(|never| match never {}))
        }
    });
    let mut http = http1::Builder::new();
    http.keep_alive(false).max_buf_size(HEAD_BYTES);
    let connection = http.serve_connection(TokioIo::new(connection), service);
    tokio::select! {
        () = place.is_taken.cancelled() => {}
        // A client that misbehaves gets no more than the close.
        _ = timeout(CONNECTION_TIMEOUT, connection) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::{Semaphore, mpsc};
    use tokio::time::{Instant, sleep};
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: node\r\n\r\n";

    /// A server in virtual time, whose connections are pipes.
    struct TestServer {
        connections: mpsc::UnboundedSender<io::Result<DuplexStream>>,
        _serving: tokio_util::task::AbortOnDropHandle<()>,
    }

    impl TestServer {
        fn start(router: Router) -> Self {
            let (connections, accepted) = mpsc::unbounded_channel();
            let serving = tokio::spawn(serve_http(UnboundedReceiverStream::new(accepted), router));
            Self { connections, _serving: tokio_util::task::AbortOnDropHandle::new(serving) }
        }

        async fn connect(&self, sent: &[u8]) -> DuplexStream {
            let (mut client, server) = duplex(4096);
            self.connections.send(Ok(server)).expect("it serves");
            client.write_all(sent).await.expect("sent");
            client
        }
    }

    fn ok_router() -> Router {
        Router::new().route("/", get(|| std::future::ready("ok\n")))
    }

    /// All that the client gets until the server closes the connection.
    async fn read_answer(mut client: DuplexStream) -> String {
        let mut answer = Vec::new();
        // Data that the server has not read make it an error.
        let _ = client.read_to_end(&mut answer).await;
        String::from_utf8(answer).expect("text")
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_idle_client_loses_its_place_to_a_new_one_at_once() {
        let server = TestServer::start(ok_router());
        let started = Instant::now();
        let mut strangers = Vec::new();
        for number in 0..3 * MAX_CONNECTIONS {
            strangers.push(server.connect(if number % 2 == 0 { b"" } else { b"GET / HTT" }).await);
        }
        let answer = read_answer(server.connect(REQUEST).await).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("ok\n"), "{answer}");
        let kept = strangers.split_off(2 * MAX_CONNECTIONS + 1);
        for stranger in strangers {
            assert_eq!(read_answer(stranger).await, "");
        }
        assert_eq!(started.elapsed(), Duration::ZERO);
        for stranger in kept {
            assert_eq!(read_answer(stranger).await, "");
        }
        assert_eq!(started.elapsed(), CONNECTION_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_renew_no_deadline() {
        let server = TestServer::start(ok_router());
        let started = Instant::now();
        let head = server.connect(b"GET / HTTP/1.1\r\nHost: node\r\nX: ").await;
        let body = server.connect(b"POST / HTTP/1.1\r\nHost: node\r\nContent-Length: 99\r\n\r\n").await;
        assert!(read_answer(body).await.starts_with("HTTP/1.1 405 "), "a body is not waited for");
        let (mut reading, mut writing) = tokio::io::split(head);
        tokio::spawn(async move {
            while writing.write_all(b"a").await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        assert_eq!(reading.read(&mut [0]).await.expect("closed"), 0);
        assert_eq!(started.elapsed(), CONNECTION_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_beyond_8_kib_is_refused() {
        let server = TestServer::start(ok_router());
        let answer = async |bytes: usize| {
            let head = format!("GET / HTTP/1.1\r\nHost: node\r\nX: {}\r\n\r\n", "a".repeat(bytes));
            let (mut client, connection) = duplex(2 * HEAD_BYTES);
            client.write_all(head.as_bytes()).await.expect("it fits");
            server.connections.send(Ok(connection)).expect("it serves");
            read_answer(client).await
        };
        assert!(answer(HEAD_BYTES - 100).await.starts_with("HTTP/1.1 200 "));
        assert!(answer(HEAD_BYTES).await.starts_with("HTTP/1.1 431 "));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_being_answered_keeps_its_place_and_one_that_does_not_read_loses_it() {
        let gate = Arc::new(Semaphore::new(0));
        let wait = {
            let gate = Arc::clone(&gate);
            async move || drop(gate.acquire().await)
        };
        let router = ok_router()
            .route("/wait", get(wait))
            .route("/large", get(|| std::future::ready("a".repeat(1 << 20))));
        let server = TestServer::start(router);
        let mut waiting = Vec::new();
        for _ in 0..MAX_CONNECTIONS - 1 {
            waiting.push(server.connect(b"GET /wait HTTP/1.1\r\nHost: node\r\n\r\n").await);
        }
        let unread = server.connect(b"GET /large HTTP/1.1\r\nHost: node\r\n\r\n").await;
        let started = Instant::now();
        for _ in 0..MAX_CONNECTIONS {
            assert!(read_answer(server.connect(REQUEST).await).await.ends_with("ok\n"));
        }
        assert!(read_answer(unread).await.len() < 1 << 20, "it was closed before it could read all");
        gate.add_permits(1);
        for client in waiting {
            assert!(read_answer(client).await.starts_with("HTTP/1.1 200 "));
        }
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn an_accept_that_fails_is_tried_ten_times_a_second_while_clients_are_answered() {
        let tries = Arc::new(AtomicU32::new(0));
        let (mut client, connection) = duplex(4096);
        let mut first = Some(connection);
        let counted = Arc::clone(&tries);
        let connections = futures_util::stream::poll_fn(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            let full = || io::Error::from(rustix::io::Errno::MFILE);
            Poll::Ready(Some(first.take().map_or_else(|| Err(full()), Ok)))
        });
        let serving = tokio::spawn(serve_http(connections, ok_router()));
        sleep(Duration::from_secs(1)).await;
        client.write_all(REQUEST).await.expect("it is open");
        assert!(read_answer(client).await.ends_with("ok\n"));
        serving.abort();
        assert!((10..=12).contains(&tries.load(Ordering::Relaxed)), "{tries:?}");
    }
}
