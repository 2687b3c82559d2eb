//! Connects the archive, which a blocking thread reads, with the asynchronous store.

use std::convert::Infallible;
use std::future::Future;
use std::io::Read;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::archive::{self, ArchiveContents, BlobSink, ReadError, WantedFiles};
use crate::error::BundleError;
use crate::store::{BlobWriter, ImportSession, IncomingBlob};
use crate::{Digest, DiskUsage, ImageStoreError, ImportLimits};

/// An archive that a dedicated thread reads into an import session. When this is dropped, the thread stops at its next
/// chunk and drops the session.
#[derive(Debug)]
pub(super) struct ArchiveReading {
    read: JoinHandle<(Box<dyn ImportSession>, Result<ArchiveContents, BundleError>)>,
    /// Dropped with this value, which ends the thread's next wait for the store.
    _keep_reading: oneshot::Sender<Infallible>,
}

impl ArchiveReading {
    pub(super) fn start(
        file: impl Read + Send + 'static,
        limits: ImportLimits,
        wanted: WantedFiles,
        import: Box<dyn ImportSession>,
    ) -> Self {
        let (_keep_reading, stopped) = oneshot::channel();
        let runtime = Handle::current();
        let read = spawn_blocking(move || {
            let mut bridge = StoreBridge { runtime, cancelled: stopped, import, writer: None };
            let read = archive::read_archive(file, &limits, &wanted, &mut bridge);
            (bridge.import, read.map_err(bundle_error))
        });
        Self { read, _keep_reading }
    }

    /// Waits for its end; the session comes back with the result.
    pub(super) async fn finish(
        self,
    ) -> (Option<Box<dyn ImportSession>>, Result<ArchiveContents, BundleError>) {
        match self.read.await {
            Ok((import, read)) => (Some(import), read),
            Err(panicked) => (None, Err(ImageStoreError::BeginImport(panicked.into()).into())),
        }
    }
}

fn bundle_error(error: ReadError<ImageStoreError>) -> BundleError {
    match error {
        ReadError::Archive(error) => BundleError::Archive(error),
        ReadError::Sink(error) => error.into(),
    }
}

struct StoreBridge {
    runtime: Handle,
    /// Resolves when the reading future is dropped.
    cancelled: oneshot::Receiver<Infallible>,
    import: Box<dyn ImportSession>,
    writer: Option<Box<dyn BlobWriter>>,
}

/// Waits for the store; fails when the reading future is dropped.
pub(crate) fn wait_for_store<T>(
    runtime: &Handle,
    stopped: &mut oneshot::Receiver<Infallible>,
    work: impl Future<Output = Result<T, ImageStoreError>>,
) -> Result<T, ImageStoreError> {
    // On a thread for blocking work, which may wait for asynchronous calls.
    runtime.block_on(async {
        tokio::select! {
            biased;
            _ = stopped => Err(ImageStoreError::BeginImport("the import was cancelled".into())),
            done = work => done,
        }
    })
}

impl BlobSink for StoreBridge {
    type Error = ImageStoreError;

    fn begin(&mut self, blob: IncomingBlob) -> Result<bool, ImageStoreError> {
        let writer = wait_for_store(&self.runtime, &mut self.cancelled, self.import.open_writer(&blob))?;
        if writer.is_some()
            && let Some(space) = wait_for_store(&self.runtime, &mut self.cancelled, self.import.disk_space())?
        {
            // Other programs write to the disk too, and the size of a compressed archive may be unknown.
            space.check_fits(DiskUsage::of_file(blob.size), &blob.file)?;
        }
        self.writer = writer;
        Ok(self.writer.is_some())
    }

    fn write(&mut self, chunk: Bytes) -> Result<(), ImageStoreError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        wait_for_store(&self.runtime, &mut self.cancelled, writer.write(chunk))
    }

    fn commit(&mut self, digest: Digest) -> Result<(), ImageStoreError> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        wait_for_store(&self.runtime, &mut self.cancelled, writer.commit(&digest))
    }

    fn discard(&mut self) {
        self.writer = None;
    }
}
