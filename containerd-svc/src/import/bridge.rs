//! Between the archive, which is read by a thread that may block, and the store, which is asynchronous.

use std::convert::Infallible;
use std::fs::File;
use std::future::Future;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::archive::{self, Contents, ReadError, Sink};
use crate::error::{ImageError, Wrong};
use crate::store::{BlobWriter, Import, Incoming};
use crate::{Digest, Limits, StoreError};

/// Reads an archive into an import, on a thread of its own. When this future is dropped, the thread stops at its next
/// chunk, and the import is dropped.
pub(super) async fn read(
    file: File,
    limits: Limits,
    import: Box<dyn Import>,
) -> (Option<Box<dyn Import>>, Result<Contents, Wrong>) {
    let (_going_on, stopped) = oneshot::channel::<Infallible>();
    let runtime = Handle::current();
    let reading = spawn_blocking(move || {
        let mut bridge = Bridge { runtime, stopped, import, writer: None };
        let read = archive::read(file, &limits, &mut bridge);
        (bridge.import, read)
    });
    match reading.await {
        Ok((import, read)) => (Some(import), read.map_err(wrong)),
        Err(panicked) => (None, Err(StoreError::Begin(panicked.into()).into())),
    }
}

fn wrong(error: ReadError<StoreError>) -> Wrong {
    match error {
        ReadError::Stream(error) => Wrong::Stream(error),
        ReadError::Digest { name: file, found } => ImageError::Digest { file, found }.into(),
        ReadError::Sink(error) => error.into(),
    }
}

struct Bridge {
    runtime: Handle,
    /// Resolves when nobody waits for the result any more.
    stopped: oneshot::Receiver<Infallible>,
    import: Box<dyn Import>,
    writer: Option<Box<dyn BlobWriter>>,
}

/// Waits for the store; fails when nobody waits for the result any more.
fn wait<T>(
    runtime: &Handle,
    stopped: &mut oneshot::Receiver<Infallible>,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    runtime.block_on(async {
        tokio::select! {
            biased;
            _ = stopped => Err(StoreError::Begin("the import has been given up".into())),
            done = work => done,
        }
    })
}

impl Sink for Bridge {
    type Error = StoreError;

    fn begin(&mut self, blob: Incoming) -> Result<bool, StoreError> {
        let writer = wait(&self.runtime, &mut self.stopped, self.import.blob(&blob))?;
        self.writer = writer;
        Ok(self.writer.is_some())
    }

    fn write(&mut self, chunk: Bytes) -> Result<(), StoreError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        wait(&self.runtime, &mut self.stopped, writer.write(chunk))
    }

    fn commit(&mut self, digest: Digest) -> Result<(), StoreError> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        wait(&self.runtime, &mut self.stopped, writer.commit(&digest))
    }
}
