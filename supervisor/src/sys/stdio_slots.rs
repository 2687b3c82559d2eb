//! Low numbers for the descriptors of a child.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{DupFlags, dup3, fcntl_dupfd_cloexec};

/// Three descriptors with low numbers, which stand for a child's standard input, output and error while it is created.
///
/// A child can share this program's table of descriptors until it has a copy of those below a number. With the slots, these
/// are few. A copy of all takes milliseconds in a program with thousands, as one with a thousand child processes is, and
/// closing them in the child again as long.
#[derive(Debug)]
pub(crate) struct StdioSlots {
    slots: [OwnedFd; 3],
    /// What is in the slots between two children.
    placeholder: OwnedFd,
}

impl StdioSlots {
    /// Takes the lowest free numbers: for that, it is called early.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn open() -> io::Result<Self> {
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
