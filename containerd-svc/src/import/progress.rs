//! How far the file of an archive is read.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The fraction of a file after which another notification is sent.
const STEPS: u64 = 100;

/// The bytes of a file that were read, and those that it has; notifies as it goes on.
pub(crate) struct ReadProgress {
    total: u64,
    done: AtomicU64,
    notify: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for ReadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReadProgress").field(&self.bytes()).finish()
    }
}

impl ReadProgress {
    pub(crate) fn new(total: u64, notify: impl Fn() + Send + Sync + 'static) -> Self {
        Self { total, done: AtomicU64::new(0), notify: Box::new(notify) }
    }

    /// The bytes that were read, and all.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed).min(self.total), self.total)
    }

    fn begin(&self) {
        self.done.store(0, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        let step = |bytes: u64| bytes.saturating_mul(STEPS) / self.total.max(1);
        if step(before) != step(before + bytes) {
            (self.notify)();
        }
    }
}

/// A file that reports what is read of it.
pub(super) struct ProgressReader {
    file: File,
    progress: Option<Arc<ReadProgress>>,
}

impl ProgressReader {
    pub(super) fn new(file: File, progress: Option<Arc<ReadProgress>>) -> Self {
        if let Some(progress) = &progress {
            progress.begin();
        }
        Self { file, progress }
    }
}

impl Read for ProgressReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        if let Some(progress) = &self.progress {
            progress.add(read as u64);
        }
        Ok(read)
    }
}
