//! The connections of the metrics server: a bounded number, of which none hangs.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use futures_util::StreamExt as _;
use nix::unistd::geteuid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use crate::control::socket::ConnectionStream;

/// The number of connections that are open at once; others wait. Each takes a descriptor of noded, and each scrape asks
/// every part.
const MAX_CONNECTIONS: usize = 64;

/// The time for which a connection without traffic stays open: longer than an answer takes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A listener whose connections are bounded in number and in idleness: any program may connect to a port.
pub(super) struct BoundedListener<L> {
    listener: L,
    permits: Arc<Semaphore>,
}

impl<L> BoundedListener<L> {
    pub(super) fn new(listener: L) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }
}

impl<L: Listener> Listener for BoundedListener<L> {
    type Io = BoundedConnection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, L::Addr) {
        // The permit comes before the connection: further clients wait in the kernel's queue.
        let permit = Arc::clone(&self.permits).acquire_owned().await.expect("nothing closes the semaphore");
        let (connection, address) = self.listener.accept().await;
        (BoundedConnection { connection, idle: Box::pin(sleep(IDLE_TIMEOUT)), _permit: permit }, address)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that fails after [`IDLE_TIMEOUT`] without traffic.
pub(super) struct BoundedConnection<C> {
    connection: C,
    idle: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl<C> BoundedConnection<C> {
    /// The result of a read or write, or the timeout.
    fn or_timeout<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            // Each byte in either direction starts the time again.
            self.idle.as_mut().reset(Instant::now() + IDLE_TIMEOUT);
            return polled;
        }
        ready!(self.idle.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for BoundedConnection<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.connection).poll_read(cx, buffer);
        self.or_timeout(polled, cx)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for BoundedConnection<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.connection).poll_write(cx, bytes);
        self.or_timeout(polled, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}

/// The connections of a unix socket.
pub(super) struct SocketListener(pub(super) ConnectionStream);

impl Listener for SocketListener {
    type Io = UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (UnixStream, ()) {
        loop {
            // After an error the stream pauses by itself, and it never ends.
            if let Some(Ok(connection)) = self.0.next().await
                && is_admitted(&connection)
            {
                return (connection, ());
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether the client is of the node's user or root. The mode of the file ensures the same, but only from
/// just after its creation on.
fn is_admitted(connection: &UnixStream) -> bool {
    connection.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn idle_clients_are_bounded_in_number_and_disconnected_so_that_others_are_served() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new().route("/", get(|| std::future::ready("ok\n")));
        tokio::spawn(axum::serve(BoundedListener::new(listener), router).into_future());
        let started = Instant::now();
        let mut clients = Vec::new();
        for number in 0..MAX_CONNECTIONS {
            let mut client = TcpStream::connect(address).await.expect("connected");
            if number % 2 == 0 {
                client.write_all(b"GET / HTT").await.expect("written");
            }
            clients.push(client);
        }
        let mut last = TcpStream::connect(address).await.expect("connected");
        last.write_all(b"GET / HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").await.expect("written");
        let mut answer = String::new();
        last.read_to_string(&mut answer).await.expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("ok\n"), "{answer}");
        assert!(started.elapsed() >= IDLE_TIMEOUT, "it waited for a place");
        for mut client in clients {
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("closed");
            assert!(!answer.starts_with(b"HTTP/1.1 200"));
        }
    }
}
