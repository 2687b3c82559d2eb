//! The wipe of a new authenticated volume: each block is written once, so that it can be read. It resumes where it was.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::reading::Buffer;
use crate::syscalls;

/// The parts of a device between two records: what a kill costs at most.
const RECORDS: u64 = 100;
/// The longest part, a second or a few of a disk's time.
const MAX_RECORD_BYTES: u64 = 256 << 20;

/// Receives the progress of a wipe, and cancels it by `Break`.
pub(super) type WipeHook = Arc<dyn Fn(WipeProgress) -> ControlFlow<()> + Send + Sync>;

/// The progress of the wipe of an authenticated volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WipeProgress {
    /// The bytes that are written, also by an earlier call.
    pub done_bytes: u64,
    /// The bytes to write.
    pub total_bytes: u64,
}

/// Writes zeros from an offset, a multiple of the block size, to the end. `record` is given offsets up to which all is
/// on the disk: the last one is where a canceled wipe, or one that was killed, resumes.
pub(super) fn wipe_device<E>(
    device: &File,
    start: u64,
    mut report: impl FnMut(WipeProgress) -> ControlFlow<()>,
    mut record: impl FnMut(u64) -> Result<(), E>,
    to_error: impl Fn(io::Error) -> E,
) -> Result<ControlFlow<()>, E> {
    let mut device_end = device;
    let total = device_end.seek(SeekFrom::End(0)).map_err(&to_error)?;
    let step = (total / RECORDS).min(MAX_RECORD_BYTES);
    let zeros = Buffer::new();
    let mut offset = start.min(total);
    let mut recorded = offset;
    loop {
        let flow = report(WipeProgress { done_bytes: offset, total_bytes: total });
        let is_complete = offset == total;
        if is_complete || flow.is_break() || offset - recorded >= step {
            // Written past the cache of the kernel, but not past that of the disk.
            syscalls::sync(device).map_err(|errno| to_error(errno.into()))?;
            record(offset)?;
            recorded = offset;
        }
        if is_complete {
            return Ok(ControlFlow::Continue(()));
        }
        if flow.is_break() {
            return Ok(flow);
        }
        let length = zeros.len().min(usize::try_from(total - offset).unwrap_or(usize::MAX));
        syscalls::write_at(device, &zeros[..length], offset).map_err(|errno| to_error(errno.into()))?;
        offset += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::FileExt as _;
    use std::rc::Rc;

    use super::*;
    use crate::failpoints::{SyscallAction, with_failpoint_hook};

    const BYTES: u64 = 9 << 20;

    /// Runs a wipe that is canceled at this progress; returns the offset of its first report.
    fn wipe(device: &File, recorded: &mut u64, until: u64) -> io::Result<(Option<u64>, ControlFlow<()>)> {
        let (mut first, start) = (None, *recorded);
        let report = |wipe: WipeProgress| {
            assert_eq!(wipe.total_bytes, BYTES);
            first.get_or_insert(wipe.done_bytes);
            if wipe.done_bytes >= until { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let record = |offset| {
            *recorded = offset;
            Ok(())
        };
        let flow = wipe_device(device, start, report, record, |error| error)?;
        Ok((first, flow))
    }

    #[test]
    fn a_wipe_that_is_stopped_at_any_call_goes_on_where_it_was_and_leaves_no_block() {
        for kill in 0..8 {
            let device = tempfile::tempfile().unwrap();
            device.write_all_at(&vec![1; BYTES as usize], 0).unwrap();
            let mut recorded = 0;
            // A stop after the first chunk.
            let (_, flow) = wipe(&device, &mut recorded, 1).unwrap();
            assert!(flow.is_break() && recorded > 0, "{recorded}");
            let stopped = recorded;
            let (mut calls, durable) = (0, Rc::new(Cell::new(stopped)));
            let (written, synced) = (device.try_clone().unwrap(), Rc::clone(&durable));
            let fail = move |call: &'static str| {
                calls += 1;
                if calls > kill {
                    return SyscallAction::Fail(5);
                }
                if call == "fsync" {
                    let mut bytes = vec![1; BYTES as usize];
                    written.read_exact_at(&mut bytes, 0).unwrap();
                    synced.set(bytes.iter().position(|byte| *byte == 1).unwrap_or(bytes.len()) as u64);
                }
                SyscallAction::Proceed
            };
            let killed = with_failpoint_hook(fail, || wipe(&device, &mut recorded, u64::MAX));
            assert_eq!(recorded, durable.get(), "{kill}: what is durable is recorded, and nothing else");
            assert!(killed.is_ok() || recorded < BYTES);
            let resumed = recorded;
            let (first, flow) = wipe(&device, &mut recorded, u64::MAX).unwrap();
            assert!(first == Some(resumed) && flow.is_continue(), "{kill}: {first:?}");
            let mut bytes = vec![1; BYTES as usize];
            device.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "{kill}: a block was left out");
        }
    }
}
