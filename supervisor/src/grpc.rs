//! A runnable that serves gRPC.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, Router};

use crate::accept::pause_after_errors;
use crate::context::Context;
use crate::failure::CanceledError;
use crate::fsm::LifecycleSignalError;
use crate::runnable::{RunFuture, Runnable};

/// The reason why a gRPC server ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listener could not be created.
    #[error("can't listen for gRPC connections")]
    Listen(#[source] io::Error),
    /// The server failed.
    #[error("the gRPC server failed")]
    Serve(#[source] tonic::transport::Error),
    /// The listener ended unexpectedly.
    #[error("the gRPC listener closed, so the server accepts no more connections")]
    ListenerEnded,
    /// The tree rejected the ready signal.
    #[error("can't signal to the supervisor that the gRPC server is ready")]
    Signal(#[source] LifecycleSignalError),
    /// The server was canceled, and stopped.
    #[error("the gRPC server stopped on request")]
    Canceled(#[source] CanceledError),
}

/// Serves a tonic router. It is ready once its listener is bound, and stops gracefully when canceled: pending
/// requests may finish within `grace_period`. After that, and also when the server fails, it closes every
/// accepted connection, so that no connection outlives its run.
///
/// `listen` creates the stream of accepted connections for each start, for example a
/// `tokio_stream::wrappers::UnixListenerStream`; `router` creates the served router.
pub fn serve_grpc<L, F, S, I, R>(listen: L, router: R, grace: Duration) -> GrpcServer<L, R>
where
    L: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: Stream<Item = io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    R: Fn(&Context) -> Router + Send + Sync + 'static,
{
    GrpcServer { listen, router, grace_period: grace }
}

/// A gRPC server as a runnable, see [`serve_grpc`].
#[derive(Debug)]
pub struct GrpcServer<L, R> {
    listen: L,
    router: R,
    grace_period: Duration,
}

impl<L, F, S, I, R> Runnable for GrpcServer<L, R>
where
    L: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: Stream<Item = io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    R: Fn(&Context) -> Router + Send + Sync + 'static,
{
    fn run(&self, ctx: Context) -> RunFuture {
        let (listening, router, grace) = ((self.listen)(), (self.router)(&ctx), self.grace_period);
        Box::pin(async move {
            let connections = listening.await.map_err(ServeError::Listen)?;
            serve_until_canceled(&ctx, connections, router, grace).await.map_err(Into::into)
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        // After the grace period it only closes connections, which takes far less than a second.
        Some(self.grace_period.saturating_add(Duration::from_secs(1)))
    }
}

async fn serve_until_canceled<S, I>(
    ctx: &Context,
    connections: S,
    router: Router,
    grace: Duration,
) -> Result<(), ServeError>
where
    S: Stream<Item = io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let cut = CancellationToken::new();
    // Closes the connections on every exit of this function: tonic serves each connection in a separate task.
    let _cut_at_the_end = cut.clone().drop_guard();
    // tonic tries again at once.
    let connections = Box::pin(pause_after_errors(connections))
        .map(move |accepted| accepted.map(|io| AbortableConnection::new(io, cut.clone())));
    let serving =
        router.serve_with_incoming_shutdown(connections, ctx.cancellation_token().cancelled_owned());
    // The listener is bound: the kernel queues connections until the server accepts them.
    ctx.signal_ready().map_err(ServeError::Signal)?;
    let mut serving = std::pin::pin!(serving);
    let served = tokio::select! {
        served = &mut serving => served,
        canceled = ctx.canceled() => {
            // Its result no longer matters: the guard closes the connections that are left.
            let _ = tokio::time::timeout(grace, serving).await;
            return Err(ServeError::Canceled(canceled));
        }
    };
    served.map_err(ServeError::Serve)?;
    // The cancellation and the end of the listener can coincide.
    Err(if ctx.is_canceled() { ServeError::Canceled(CanceledError) } else { ServeError::ListenerEnded })
}

/// A connection whose reads and writes fail once a token is canceled: a server that gets the error drops the connection, and
/// every call on it.
#[derive(Debug)]
pub struct AbortableConnection<I> {
    io: I,
    abort: Pin<Box<WaitForCancellationFutureOwned>>,
    is_aborted: bool,
}

impl<I> AbortableConnection<I> {
    /// The connection, until this token is canceled.
    pub fn new(io: I, abort: CancellationToken) -> Self {
        Self { io, abort: Box::pin(abort.cancelled_owned()), is_aborted: false }
    }

    /// Fails if the connection is aborted; otherwise registers the task to be woken when that happens.
    fn check_open(&mut self, cx: &mut TaskContext<'_>) -> io::Result<()> {
        // A future must not be polled again after it has resolved.
        self.is_aborted = self.is_aborted || self.abort.as_mut().poll(cx).is_ready();
        if self.is_aborted {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the server has closed the connection",
            ));
        }
        Ok(())
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for AbortableConnection<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check_open(cx)?;
        Pin::new(&mut this.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for AbortableConnection<I> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check_open(cx)?;
        Pin::new(&mut this.io).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

impl<I: Connected> Connected for AbortableConnection<I> {
    type ConnectInfo = I::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}
