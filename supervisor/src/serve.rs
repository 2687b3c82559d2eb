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

use crate::context::Context;
use crate::machine::SignalError;
use crate::runnable::{Cancelled, RunFuture, Runnable};

/// Why a gRPC server ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Its listener could not be made.
    #[error("listen for gRPC")]
    Listen(#[source] io::Error),
    /// It stopped serving by itself.
    #[error("serve gRPC")]
    Serve(#[source] tonic::transport::Error),
    /// The listener ended, which it should not.
    #[error("the gRPC listener ended")]
    ListenerEnded,
    /// The tree did not take the ready signal.
    #[error("signal ready")]
    Signal(#[source] SignalError),
    /// It was told to stop, and did.
    #[error("serving ended")]
    Cancelled(#[source] Cancelled),
}

/// Serves a tonic router: ready once its listener is bound, stopped gracefully when cancelled. Requests under way may
/// finish within `grace`; then, and also when the server fails, every connection it had accepted is cut, so that none
/// outlives the run that made it.
///
/// `listen` makes the stream of accepted connections, anew for each start, for example a
/// `tokio_stream::wrappers::UnixListenerStream`; `router` makes what is served.
pub fn serve<L, F, S, I, R>(listen: L, router: R, grace: Duration) -> Serve<L, R>
where
    L: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: Stream<Item = io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    R: Fn(&Context) -> Router + Send + Sync + 'static,
{
    Serve { listen, router, grace }
}

/// See [`serve`].
#[derive(Debug)]
pub struct Serve<L, R> {
    listen: L,
    router: R,
    grace: Duration,
}

impl<L, F, S, I, R> Runnable for Serve<L, R>
where
    L: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: Stream<Item = io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    R: Fn(&Context) -> Router + Send + Sync + 'static,
{
    fn run(&self, ctx: Context) -> RunFuture {
        let (listening, router, grace) = ((self.listen)(), (self.router)(&ctx), self.grace);
        Box::pin(async move {
            let connections = listening.await.map_err(ServeError::Listen)?;
            serve_until_cancelled(&ctx, connections, router, grace).await.map_err(Into::into)
        })
    }

    fn stop_within(&self) -> Option<Duration> {
        Some(self.grace.saturating_add(Duration::from_secs(1)))
    }
}

async fn serve_until_cancelled<S, I>(
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
    // Cuts the connections however this function is left: tonic serves each of them in a task of its own.
    let _cut_at_the_end = cut.clone().drop_guard();
    let connections = Box::pin(connections).map(move |accepted| {
        accepted.map(|io| Cuttable { io, cut: Box::pin(cut.clone().cancelled_owned()), is_cut: false })
    });
    let serving = router.serve_with_incoming_shutdown(connections, ctx.token().cancelled_owned());
    ctx.ready().map_err(ServeError::Signal)?;
    let mut serving = std::pin::pin!(serving);
    let served = tokio::select! {
        served = &mut serving => served,
        cancelled = ctx.cancelled() => {
            let _ = tokio::time::timeout(grace, serving).await;
            return Err(ServeError::Cancelled(cancelled));
        }
    };
    served.map_err(ServeError::Serve)?;
    // Both may have come true at once.
    Err(if ctx.is_cancelled() { ServeError::Cancelled(Cancelled) } else { ServeError::ListenerEnded })
}

/// A connection that reads and writes nothing any more once it is cut.
struct Cuttable<I> {
    io: I,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    is_cut: bool,
}

impl<I> Cuttable<I> {
    /// An error where the connection is cut; otherwise the task is woken when it will be.
    fn check(&mut self, cx: &mut TaskContext<'_>) -> io::Result<()> {
        self.is_cut = self.is_cut || self.cut.as_mut().poll(cx).is_ready();
        match self.is_cut {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the server has stopped")),
            false => Ok(()),
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Cuttable<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        Pin::new(&mut this.io).poll_read(cx, buf)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Cuttable<I> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check(cx)?;
        Pin::new(&mut this.io).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

impl<I: Connected> Connected for Cuttable<I> {
    type ConnectInfo = I::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}
