//! Low numbers for the descriptors of a child.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{DupFlags, dup3, fcntl_dupfd_cloexec};

use super::check_result;

/// Three descriptors with low numbers, which stand for a child's standard input, output and error while it is created.
///
/// A child can share this program's table of descriptors until it has a copy of those below a number. With the slots,
/// these are few. A copy of all takes milliseconds in a program with thousands, as one with a thousand child processes
/// is, and closing them in the child again as long.
#[derive(Debug)]
pub(crate) struct StdioSlots {
    slots: [OwnedFd; 3],
    /// The content of the slots between two children.
    placeholder: OwnedFd,
}

impl StdioSlots {
    /// Takes the lowest free numbers: for that, it is called early.
    ///
    /// # Errors
    /// No descriptors are available, or a child could not leave the shared table.
    pub(crate) fn open() -> io::Result<Self> {
        // A child that shares the table needs this call to leave it, so its absence must show before the first start.
        probe_close_range()?;
        let placeholder = eventfd(0, EventfdFlags::CLOEXEC)?;
        let slot = || fcntl_dupfd_cloexec(&placeholder, 3);
        Ok(Self { slots: [slot()?, slot()?, slot()?], placeholder })
    }

    /// Puts the descriptors of a child into the slots; returns their numbers.
    pub(super) fn fill(&mut self, stdio: &[OwnedFd; 3]) -> io::Result<[RawFd; 3]> {
        for (slot, fd) in self.slots.iter_mut().zip(stdio) {
            dup3(fd, slot, DupFlags::CLOEXEC)?;
        }
        Ok(self.slots.each_ref().map(|slot| slot.as_raw_fd()))
    }

    /// Empties the slots: a pipe's reader waits until all of its writers are closed.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.slots.iter_mut().try_for_each(|slot| Ok(dup3(&self.placeholder, slot, DupFlags::CLOEXEC)?))
    }
}

/// Fails where the kernel is older than 5.9, or where a container's filter of system calls is older than the call: such
/// filters may forbid unshare(2), too.
fn probe_close_range() -> io::Result<()> {
    let none = libc::c_uint::MAX;
    // SAFETY: no memory is passed, and no descriptor has this number.
    check_result(unsafe { libc::syscall(libc::SYS_close_range, none, none, 0) })
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::retry_on_intr;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn slots_have_numbers_above_standard_error_and_keep_no_pipe_open() {
        let mut slots = StdioSlots::open().expect("descriptors are available");
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let copy = || fcntl_dupfd_cloexec(&writer, 3).expect("a copy");
        let stdio = [copy(), copy(), copy()];
        let numbers = slots.fill(&stdio).expect("filled");
        assert_eq!(numbers, slots.fill(&stdio).expect("filled again"));
        assert!(numbers.iter().all(|number| *number > 2), "{numbers:?}");
        drop((writer, stdio));
        let count_ended = |tv_sec| {
            let within = Timespec { tv_sec, tv_nsec: 0 };
            let mut watched = [PollFd::new(&reader, PollFlags::IN)];
            retry_on_intr(|| poll(&mut watched, Some(&within))).expect("polled")
        };
        assert_eq!(count_ended(0), 0, "the slots are writers");
        slots.clear().expect("emptied");
        // A child of another test may have a copy until its exec.
        assert_eq!(count_ended(60), 1);
    }
}
