//! Calls to the node: none waits for ever for a node that does not answer, and none outlives whoever reads the output.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_node::client::{self, Client};
use tonic::{Response, Status, Streaming};

use crate::failure::Failure;
use crate::out::ReaderGone;

/// A connection to the node, and how long each of its answers is waited for.
pub(crate) struct Caller {
    client: Client,
    socket: PathBuf,
    patience: Duration,
}

impl Caller {
    pub(crate) async fn connect(socket: &Path, patience: Duration) -> Result<Self, Failure> {
        Ok(Self { client: client::connect(socket).await?, socket: socket.to_owned(), patience })
    }

    /// Begins anew after the node has closed the connection.
    pub(crate) async fn reconnect(&mut self) -> Result<(), Failure> {
        self.client = client::connect(&self.socket).await?;
        Ok(())
    }

    /// Waits at least so long for each answer.
    pub(crate) fn be_patient(&mut self, at_least: Duration) {
        self.patience = self.patience.max(at_least);
    }

    /// Calls, and waits for the answer, or for the beginning of a stream of them.
    pub(crate) async fn ask<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut Client) -> Result<Response<T>, Status>,
    ) -> Result<T, Failure> {
        within(self.patience, call(&mut self.client)).await.map(Response::into_inner)
    }

    /// Calls for a stream in which the node keeps nobody waiting: each of its messages has to come in time.
    pub(crate) async fn read<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut Client) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<Messages<T>, Failure> {
        let stream = self.ask(call).await?;
        Ok(Messages { stream, until: Until::Patience(self.patience) })
    }

    /// Calls for a stream that goes on with what comes, for as long as the output is read.
    pub(crate) async fn follow<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut Client) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<Messages<T>, Failure> {
        let stream = self.ask(call).await?;
        Ok(Messages { stream, until: Until::ReaderGone(ReaderGone::new()) })
    }
}

/// What a stream brings.
pub(crate) struct Messages<T> {
    stream: Streaming<T>,
    until: Until,
}

/// When a message is no longer waited for.
enum Until {
    Patience(Duration),
    ReaderGone(ReaderGone),
}

impl<T> Messages<T> {
    /// The next message; none when the stream has ended.
    pub(crate) async fn next(&mut self) -> Result<Option<T>, Failure> {
        let message = self.stream.message();
        match &mut self.until {
            Until::Patience(patience) => within(*patience, message).await,
            Until::ReaderGone(gone) => tokio::select! {
                message = message => Ok(message?),
                error = gone.wait() => Err(error.into()),
            },
        }
    }
}

async fn within<T>(
    patience: Duration,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::NoAnswer { patience }),
    }
}
