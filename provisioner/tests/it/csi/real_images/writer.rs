//! A pod that writes into a block or strict volume.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use nodekeel_provisioner::ImageFormat;

use super::MIB;

/// A pod that writes one block after the other and reads it again, until it is stopped.
pub(super) struct Writer {
    is_stopped: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// It writes into the device, or into a file in the file system.
    pub(super) fn start(target: &Path, format: ImageFormat) -> Self {
        let path = if format == ImageFormat::Block { target.to_owned() } else { target.join("writer") };
        let (is_stopped, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop, count) = (Arc::clone(&is_stopped), Arc::clone(&written));
        let thread = std::thread::spawn(move || {
            let is_new = format != ImageFormat::Block;
            let file = File::options().read(true).write(true).create(is_new).truncate(false).open(path);
            let mut file = file.expect("open");
            while !stop.load(Ordering::SeqCst) {
                let number = count.load(Ordering::SeqCst);
                // The second half of the first 8 MiB.
                let at = 4 * MIB + number % 1024 * 4096;
                let block = [u8::try_from(number % 251).expect("small"); 4096];
                file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(&block)).expect("write");
                file.sync_data().expect("sync");
                let mut read = [0; 4096];
                file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut read)).expect("read");
                assert!(read == block);
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { is_stopped, written, thread }
    }

    /// Waits until it has written more.
    pub(super) fn wait_progress(&self) {
        let before = self.written.load(Ordering::SeqCst);
        while self.written.load(Ordering::SeqCst) < before + 2 {
            assert!(!self.thread.is_finished(), "the writer failed");
            std::thread::yield_now();
        }
    }

    pub(super) fn stop(self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.thread.join().expect("every write succeeded");
    }
}

/// Writes a text that a pod finds again: at the start of the device, or in a file.
pub(super) fn write_mark(target: &Path, format: ImageFormat, text: &str) {
    let path = if format == ImageFormat::Block { target.to_owned() } else { target.join("mark") };
    let mut file =
        File::options().write(true).create(format != ImageFormat::Block).truncate(false).open(path);
    let file = file.as_mut().expect("open");
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).expect("write");
}

pub(super) fn read_mark(target: &Path, format: ImageFormat, length: usize) -> String {
    let path = if format == ImageFormat::Block { target.to_owned() } else { target.join("mark") };
    let mut text = vec![0; length];
    File::open(path).and_then(|mut file| file.read_exact(&mut text)).expect("read");
    String::from_utf8(text).expect("a text")
}

pub(super) fn size_of(target: &Path, format: ImageFormat) -> u64 {
    match format {
        ImageFormat::Block => {
            File::open(target).and_then(|mut device| device.seek(SeekFrom::End(0))).expect("a size")
        }
        _ => rustix::fs::statvfs(target).map(|stat| stat.f_blocks * stat.f_frsize).expect("a file system"),
    }
}
