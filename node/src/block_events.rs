//! Changes of block devices, as the kernel announces them to every program.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys;

/// The group of the kernel's own messages; udev repeats them in another one. *Source:* Linux `lib/kobject_uevent.c`.
const KERNEL_GROUP: u32 = 1;
/// Longer than any message. *Source:* Linux `UEVENT_BUFFER_SIZE`, and the path before it.
const MAX_MESSAGE_BYTES: usize = 8192;

/// A subscription, which needs no privileges: the kernel alone sends to it.
#[derive(Debug)]
pub(crate) struct BlockEvents(AsyncFd<OwnedFd>);

impl BlockEvents {
    /// Subscribes in the runtime of the caller.
    pub(crate) fn subscribe() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Datagram, flags, protocol)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
        sys::register_fd(socket, Interest::READABLE).map(Self)
    }

    /// Waits until a block device has changed, such as its size. Several changes may be one.
    ///
    /// # Cancel safety
    /// No change is lost: what was announced before is announced to the next call.
    pub(crate) async fn changed(&mut self) -> io::Result<()> {
        let mut message = [0; MAX_MESSAGE_BYTES];
        loop {
            let mut ready = self.0.readable().await?;
            match recv(ready.get_inner().as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
                Ok(length) if is_block_change(&message[..length]) => return Ok(()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => ready.clear_ready(),
                // Messages were dropped, and any of them may have been one.
                Err(Errno::ENOBUFS) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns whether a message is of a change of a block device: `change@PATH`, and variables, each with a NUL behind it.
fn is_block_change(message: &[u8]) -> bool {
    let mut variables = message.split(|byte| *byte == 0);
    variables.next().is_some_and(|head| head.starts_with(b"change@"))
        && variables.any(|variable| variable == b"SUBSYSTEM=block")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_a_block_device_is_told_from_other_messages() {
        let resized = "change@/devices/pci0/virtio1/block/vdb\0ACTION=change\0DEVPATH=/devices/pci0/virtio1/block/vdb\0SUBSYSTEM=block\0RESIZE=1\0MAJOR=254\0";
        for (message, is_change) in [
            (resized.to_owned(), true),
            (resized.replace("change@", "add@"), false),
            (resized.replace("SUBSYSTEM=block", "SUBSYSTEM=net"), false),
            ("change@/devices/SUBSYSTEM=block".to_owned(), false),
            ("libudev\0\u{fe}".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_block_change(message.as_bytes()), is_change, "{message:?}");
        }
    }
}
