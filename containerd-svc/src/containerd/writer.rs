//! One blob into containerd's content.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use containerd_client::services::v1::{WriteAction, WriteContentRequest, WriteContentResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::import::Lease;
use super::{failed, is};
use crate::Digest;
use crate::store::{BlobWriter, Incoming, StoreError};

/// How many chunks are under way: containerd answers each of them, and who doesn't read its answers makes it wait.
const UNDER_WAY: usize = 4;

pub(super) struct Writer {
    lease: Arc<Lease>,
    incoming: Incoming,
    /// What containerd calls the content before it is whole.
    reference: String,
    to: mpsc::Sender<WriteContentRequest>,
    from: Streaming<WriteContentResponse>,
    offset: u64,
    unanswered: usize,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("lease", &self.lease.id)
            .field("incoming", &self.incoming)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// `None` where containerd has the content; the lease keeps it then.
    pub(super) async fn open(lease: &Arc<Lease>, incoming: &Incoming) -> Result<Option<Self>, StoreError> {
        match Self::begin(lease, incoming).await {
            Ok(writer) => Ok(writer),
            Err(status) if is(&status, Code::AlreadyExists) => Ok(None),
            Err(status) => Err(wrong(incoming, status)),
        }
    }

    async fn begin(lease: &Arc<Lease>, incoming: &Incoming) -> Result<Option<Self>, Status> {
        let reference = lease.unique("content");
        let (to, requests) = mpsc::channel(UNDER_WAY);
        let first = message(WriteAction::Stat, &reference, incoming);
        to.try_send(first).expect("the channel is empty");
        let stream = lease.request(ReceiverStream::new(requests));
        let mut from = lease.images.content().write(stream).await?.into_inner();
        let status = from.message().await?.ok_or_else(|| Status::unknown("containerd doesn't answer"))?;
        let (lease, incoming) = (Arc::clone(lease), incoming.clone());
        let (offset, unanswered) = (0, 0);
        let mut writer = Self { lease, incoming, reference, to, from, offset, unanswered };
        // Another namespace has it all: it only needs to be said that this one wants it, too.
        let total = writer.incoming.size;
        if let Some(digest) = writer.incoming.digest
            && total > 0
            && u64::try_from(status.offset) == Ok(total)
        {
            writer.offset = total;
            writer.finish(&digest).await?;
            return Ok(None);
        }
        Ok(Some(writer))
    }

    async fn send(&mut self, message: WriteContentRequest) -> Result<(), Status> {
        if self.to.send(message).await.is_err() {
            // It has hung up; why, is in its last answer.
            while self.from.message().await?.is_some() {}
            return Err(Status::unavailable("containerd has ended the transfer"));
        }
        self.unanswered += 1;
        while self.unanswered >= UNDER_WAY {
            self.answer().await?;
        }
        Ok(())
    }

    async fn answer(&mut self) -> Result<WriteContentResponse, Status> {
        let answer = self.from.message().await?;
        self.unanswered = self.unanswered.saturating_sub(1);
        answer.ok_or_else(|| Status::unavailable("containerd has ended the transfer"))
    }

    async fn finish(&mut self, digest: &Digest) -> Result<(), Status> {
        let mut last = message(WriteAction::Commit, &self.reference, &self.incoming);
        last.expected = digest.to_string();
        last.offset = self.offset.cast_signed();
        self.send(last).await?;
        while self.answer().await?.action() != WriteAction::Commit {}
        Ok(())
    }
}

fn message(action: WriteAction, reference: &str, incoming: &Incoming) -> WriteContentRequest {
    WriteContentRequest {
        action: action.into(),
        r#ref: reference.to_owned(),
        total: incoming.size.cast_signed(),
        expected: incoming.digest.map(|digest| digest.to_string()).unwrap_or_default(),
        ..WriteContentRequest::default()
    }
}

fn wrong(incoming: &Incoming, status: Status) -> StoreError {
    let write = |source| StoreError::Write { file: incoming.file.clone(), source };
    failed(status, &incoming.file, write)
}

#[async_trait]
impl BlobWriter for Writer {
    async fn write(&mut self, chunk: Bytes) -> Result<(), StoreError> {
        let mut next = message(WriteAction::Write, &self.reference, &self.incoming);
        next.offset = self.offset.cast_signed();
        self.offset += chunk.len() as u64;
        next.data = chunk.into();
        self.send(next).await.map_err(|status| wrong(&self.incoming, status))
    }

    async fn commit(mut self: Box<Self>, digest: &Digest) -> Result<(), StoreError> {
        match self.finish(digest).await {
            Err(status) if !is(&status, Code::AlreadyExists) => Err(wrong(&self.incoming, status)),
            _ => Ok(()),
        }
    }
}
