//! Writes one blob into containerd's content store.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use containerd_client::services::v1::{WriteAction, WriteContentRequest, WriteContentResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::import::ImportLease;
use super::{has_code, store_error};
use crate::Digest;
use crate::store::{BlobWriter, ImageStore as _, ImageStoreError, IncomingBlob, ReadPace};

/// Maximum number of unanswered chunks: containerd answers each one, and blocks if its answers are not read.
const MAX_UNANSWERED: usize = 4;

/// The size up to which existing content is compared with its digest: that of all documents.
const VERIFIED_BYTES: u64 = 4 << 20;

pub(super) struct ContentWriter {
    lease: Arc<ImportLease>,
    blob: IncomingBlob,
    /// containerd's key of the unfinished content.
    reference: String,
    requests: mpsc::Sender<WriteContentRequest>,
    responses: Streaming<WriteContentResponse>,
    offset: u64,
    unanswered: usize,
}

impl std::fmt::Debug for ContentWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("lease", &self.lease.id)
            .field("incoming", &self.blob)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl ContentWriter {
    /// `None` if containerd already has the content; the lease then keeps it. Damaged content is discarded, and written
    /// again.
    pub(super) async fn open(
        lease: &Arc<ImportLease>,
        incoming: &IncomingBlob,
    ) -> Result<Option<Self>, ImageStoreError> {
        match Self::open_stream(lease, incoming).await {
            Err(status) if has_code(&status, Code::AlreadyExists) => {}
            opened => return opened.map_err(|status| write_error(incoming, status)),
        }
        let Some(digest) = &incoming.digest else { return Ok(None) };
        let (images, namespace) = (&lease.images, &lease.namespace);
        // A document is always compared with its digest; of a large layer, that would take as long as to write it.
        let is_compared = incoming.size > 0 && (images.verifies_layers || incoming.size <= VERIFIED_BYTES);
        let is_intact = match is_compared {
            true => images.verify_content(namespace, digest, incoming.size, &ReadPace::new(None)).await?,
            false => images.stat_content(namespace, digest).await? == Some(incoming.size),
        };
        if is_intact {
            return Ok(None);
        }
        images.discard_content(lease, digest).await?;
        Self::open_stream(lease, incoming).await.map_err(|status| write_error(incoming, status))
    }

    async fn open_stream(lease: &Arc<ImportLease>, incoming: &IncomingBlob) -> Result<Option<Self>, Status> {
        let reference = lease.unique_key("content");
        let (to, requests) = mpsc::channel(MAX_UNANSWERED);
        // Sent before the call: containerd answers the stream only once it has received a request.
        let first = content_request(WriteAction::Stat, &reference, incoming);
        to.try_send(first).expect("the channel is empty");
        let stream = lease.leased_request(ReceiverStream::new(requests));
        let mut from = lease.images.content_client().write(stream).await?.into_inner();
        let status = from.message().await?.ok_or_else(|| Status::unknown("no response from containerd"))?;
        // Another namespace has it, and not all of it.
        if status.offset > 0 && u64::try_from(status.offset) != Ok(incoming.size) {
            return Err(Status::already_exists("content of another size"));
        }
        let (lease, incoming) = (Arc::clone(lease), incoming.clone());
        let (offset, unanswered) = (0, 0);
        let mut writer =
            Self { lease, blob: incoming, reference, requests: to, responses: from, offset, unanswered };
        // Another namespace has all of it: committing shares the content with this one.
        let total = writer.blob.size;
        if let Some(digest) = writer.blob.digest
            && total > 0
            && u64::try_from(status.offset) == Ok(total)
        {
            writer.offset = total;
            writer.commit_content(&digest).await?;
            return Ok(None);
        }
        Ok(Some(writer))
    }

    async fn send_request(&mut self, message: WriteContentRequest) -> Result<(), Status> {
        if self.requests.send(message).await.is_err() {
            // containerd closed the stream; the last response has the reason.
            while self.responses.message().await?.is_some() {}
            return Err(Status::unavailable("containerd closed the content stream"));
        }
        self.unanswered += 1;
        while self.unanswered >= MAX_UNANSWERED {
            self.receive_response().await?;
        }
        Ok(())
    }

    async fn receive_response(&mut self) -> Result<WriteContentResponse, Status> {
        let answer = self.responses.message().await?;
        self.unanswered = self.unanswered.saturating_sub(1);
        answer.ok_or_else(|| Status::unavailable("containerd closed the content stream"))
    }

    /// Keeps content that exists already: a commit that finds it adds nothing to the lease.
    ///
    /// *Source:* containerd's `core/metadata/content.go`, `namespacedWriter.commit`: it returns no digest then.
    async fn keep_existing(&self, digest: &Digest) -> Result<(), ImageStoreError> {
        let (lease, images) = (&self.lease, &self.lease.images);
        lease.keep_content(digest).await.map_err(|status| write_error(&self.blob, status))?;
        // Before that, garbage collection may have removed it with an image that was deleted.
        match images.stat_content(&lease.namespace, digest).await? {
            Some(_) => Ok(()),
            None => {
                let gone = Status::aborted("the image that had it was deleted while it was imported");
                Err(write_error(&self.blob, gone))
            }
        }
    }

    async fn commit_content(&mut self, digest: &Digest) -> Result<(), Status> {
        let mut last = content_request(WriteAction::Commit, &self.reference, &self.blob);
        last.expected = digest.to_string();
        last.offset = self.offset.cast_signed();
        self.send_request(last).await?;
        // Answers to earlier chunks come first.
        while self.receive_response().await?.action() != WriteAction::Commit {}
        Ok(())
    }
}

fn content_request(action: WriteAction, reference: &str, incoming: &IncomingBlob) -> WriteContentRequest {
    WriteContentRequest {
        action: action.into(),
        r#ref: reference.to_owned(),
        total: incoming.size.cast_signed(),
        expected: incoming.digest.map(|digest| digest.to_string()).unwrap_or_default(),
        ..WriteContentRequest::default()
    }
}

fn write_error(incoming: &IncomingBlob, status: Status) -> ImageStoreError {
    let write = |source| ImageStoreError::WriteContent { file: incoming.file.clone(), source };
    store_error(status, &incoming.file, write)
}

#[async_trait]
impl BlobWriter for ContentWriter {
    async fn write(&mut self, chunk: Bytes) -> Result<(), ImageStoreError> {
        let mut next = content_request(WriteAction::Write, &self.reference, &self.blob);
        next.offset = self.offset.cast_signed();
        self.offset += chunk.len() as u64;
        next.data = chunk.into();
        self.send_request(next).await.map_err(|status| write_error(&self.blob, status))
    }

    async fn commit(mut self: Box<Self>, digest: &Digest) -> Result<(), ImageStoreError> {
        match self.commit_content(digest).await {
            Err(status) if has_code(&status, Code::AlreadyExists) => self.keep_existing(digest).await,
            committed => committed.map_err(|status| write_error(&self.blob, status)),
        }
    }
}
