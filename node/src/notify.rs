//! Notifies the service manager that started noded of its state.
//!
//! *Source:* sd_notify(3): a datagram of `KEY=VALUE` lines to the socket that `NOTIFY_SOCKET` names, where a
//! leading `@` stands for the abstract namespace.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use nix::sys::time::TimeValLike as _;
use nix::time::{ClockId, clock_gettime};

/// Timeout for a manager that does not read its messages.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The message at the start of a reload; `READY=1` ends it.
///
/// *Source:* sd_notify(3): `MONOTONIC_USEC` is the time of CLOCK_MONOTONIC, by which the manager tells reloads apart.
pub fn reloading_message() -> String {
    match clock_gettime(ClockId::CLOCK_MONOTONIC) {
        Ok(now) => format!("RELOADING=1\nMONOTONIC_USEC={}", now.num_microseconds()),
        Err(_) => "RELOADING=1".to_owned(),
    }
}

/// Sends one message to the socket of this name.
///
/// # Errors
/// The socket does not exist, or does not accept the message within a second.
pub fn sd_notify(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(SEND_TIMEOUT))?;
    sender.send_to_addr(message.as_bytes(), &address).map(drop)
}
