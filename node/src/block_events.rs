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

/// What has happened to a block device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BlockAction {
    /// It has changed, such as its size.
    Change,
    /// It has gone.
    Remove,
}

/// A subscription, which needs no privileges: the kernel alone sends to it.
#[derive(Debug)]
pub(crate) struct BlockEvents {
    socket: AsyncFd<OwnedFd>,
    action: BlockAction,
}

impl BlockEvents {
    /// Subscribes to one action in the runtime of the caller.
    pub(crate) fn subscribe(action: BlockAction) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Datagram, flags, protocol)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
        Ok(Self { socket: sys::register_fd(socket, Interest::READABLE)?, action })
    }

    /// Waits for the action on any block device. Several may be announced as one.
    ///
    /// # Cancel safety
    /// None is lost: what was announced before is announced to the next call.
    pub(crate) async fn next(&mut self) -> io::Result<()> {
        let mut message = [0; MAX_MESSAGE_BYTES];
        loop {
            let mut ready = self.socket.readable().await?;
            match recv(ready.get_inner().as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
                Ok(length) if is_block_action(&message[..length], self.action) => return Ok(()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => ready.clear_ready(),
                // Messages were dropped, and any of them may have been one.
                Err(Errno::ENOBUFS) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns whether a message is of an action on a block device: `ACTION@PATH`, and variables, each with a NUL behind it.
fn is_block_action(message: &[u8], action: BlockAction) -> bool {
    let head: &[u8] = match action {
        BlockAction::Change => b"change@",
        BlockAction::Remove => b"remove@",
    };
    message.starts_with(head)
        && message.split(|byte| *byte == 0).any(|variable| variable == b"SUBSYSTEM=block")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_on_a_block_device_is_told_from_other_messages() {
        let resized = "change@/devices/pci0/virtio1/block/vdb\0ACTION=change\0DEVPATH=/devices/pci0/virtio1/block/vdb\0SUBSYSTEM=block\0RESIZE=1\0MAJOR=254\0";
        for (message, is_change, is_removal) in [
            (resized.to_owned(), true, false),
            (resized.replace("change", "remove"), false, true),
            (resized.replace("change@", "add@"), false, false),
            (resized.replace("SUBSYSTEM=block", "SUBSYSTEM=net"), false, false),
            ("change@/devices/SUBSYSTEM=block".to_owned(), false, false),
            ("libudev\0\u{fe}".to_owned(), false, false),
            (String::new(), false, false),
        ] {
            assert_eq!(is_block_action(message.as_bytes(), BlockAction::Change), is_change, "{message:?}");
            assert_eq!(is_block_action(message.as_bytes(), BlockAction::Remove), is_removal, "{message:?}");
        }
    }
}
