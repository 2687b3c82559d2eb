//! Calls to the node: each has a timeout, and a stream ends when the reader of the output closes the pipe.

use std::time::Duration;

use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::v1::ResolveDnRequest;
use tokio::time::timeout;
use tonic::{Code, Response, Status, Streaming};

use crate::contexts::NodeEndpoint;
use crate::error::CommandError;
use crate::output::ReaderHangup;

/// A connection to the node, with a timeout for each request.
pub(crate) struct ApiClient {
    client: NodeClient,
    endpoint: NodeEndpoint,
    timeout: Duration,
}

impl ApiClient {
    pub(crate) async fn connect(endpoint: NodeEndpoint, timeout: Duration) -> Result<Self, CommandError> {
        Ok(Self { client: connect(&endpoint, timeout).await?, endpoint, timeout })
    }

    /// Connects again after the node has closed the connection.
    pub(crate) async fn reconnect(&mut self) -> Result<(), CommandError> {
        self.client = connect(&self.endpoint, self.timeout).await?;
        Ok(())
    }

    /// Raises the timeout to at least this value.
    pub(crate) fn raise_timeout(&mut self, at_least: Duration) {
        self.timeout = self.timeout.max(at_least);
    }

    /// Sends a request, and waits for the response or the start of a stream.
    pub(crate) async fn call<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut NodeClient) -> Result<Response<T>, Status>,
    ) -> Result<T, CommandError> {
        with_timeout(self.timeout, call(&mut self.client)).await.map(Response::into_inner)
    }

    /// The DN that an operator means by a DN or its last components.
    pub(crate) async fn resolve_dn(&mut self, name: String) -> Result<String, CommandError> {
        // A whole DN needs no call; the node answers the command itself with similar ones.
        if name.is_empty() || name == "root" || name.starts_with("root.") {
            return Ok(name);
        }
        let request = ResolveDnRequest { name: name.clone() };
        match self.call(async |client| client.resolve_dn(request).await).await {
            Ok(answer) => Ok(answer.dn),
            Err(CommandError::Call(status)) if status.code() == Code::InvalidArgument => {
                Err(CommandError::AmbiguousDn(status))
            }
            // A node of an earlier release knows whole DNs alone.
            Err(CommandError::Call(status)) if status.code() == Code::Unimplemented => Ok(name),
            Err(error) => Err(error),
        }
    }

    /// The same for an optional one.
    pub(crate) async fn resolve_optional(
        &mut self,
        name: Option<String>,
    ) -> Result<Option<String>, CommandError> {
        match name {
            Some(name) => self.resolve_dn(name).await.map(Some),
            None => Ok(None),
        }
    }

    /// Opens a stream of available messages: each must arrive within the timeout.
    pub(crate) async fn open_stream<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut NodeClient) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<MessageStream<T>, CommandError> {
        let stream = self.call(call).await?;
        // The timeout is that of each message: a long log may take longer as a whole.
        Ok(MessageStream { stream, limit: StreamLimit::Timeout(self.timeout) })
    }

    /// Opens a stream that waits for new messages until the reader of the output closes the pipe.
    pub(crate) async fn follow_stream<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut NodeClient) -> Result<Response<Streaming<T>>, Status>,
    ) -> Result<MessageStream<T>, CommandError> {
        let stream = self.call(call).await?;
        // A wait has no timeout. Without the watch, nodectl would notice a closed pipe only at its next write.
        Ok(MessageStream { stream, limit: StreamLimit::ReaderHangup(ReaderHangup::new()) })
    }
}

pub(crate) struct MessageStream<T> {
    stream: Streaming<T>,
    limit: StreamLimit,
}

/// When to stop waiting for a message.
enum StreamLimit {
    Timeout(Duration),
    ReaderHangup(ReaderHangup),
}

impl<T> MessageStream<T> {
    /// The next message; `None` when the stream has ended.
    pub(crate) async fn next_message(&mut self) -> Result<Option<T>, CommandError> {
        let message = self.stream.message();
        match &mut self.limit {
            StreamLimit::Timeout(timeout) => with_timeout(*timeout, message).await,
            StreamLimit::ReaderHangup(hangup) => tokio::select! {
                message = message => Ok(message?),
                error = hangup.wait() => Err(error.into()),
            },
        }
    }
}

async fn connect(endpoint: &NodeEndpoint, limit: Duration) -> Result<NodeClient, CommandError> {
    match endpoint {
        NodeEndpoint::Socket(socket) => Ok(client::connect(socket).await?),
        NodeEndpoint::Remote(node) => {
            let unreachable = |_| CommandError::Timeout { timeout: limit };
            Ok(timeout(limit, client::connect_remote(node)).await.map_err(unreachable)??)
        }
    }
}

async fn with_timeout<T>(
    timeout: Duration,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<T, CommandError> {
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(CommandError::Timeout { timeout }),
    }
}
