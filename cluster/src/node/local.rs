//! What this system is told about itself: its hostname, `/etc/hosts`, its machine id.

use std::io;
use std::net::IpAddr;

use nodekeel_localstorage::tree::File;
use thiserror::Error;

use super::NodeId;

nodekeel_localstorage::layout! {
    /// Beside what lasts until the next boot: [extend](nodekeel_localstorage::tree::Directory::extend) it. The system's
    /// image has a link from `/etc/hosts` to it, as it has for the machine's id.
    pub struct EphemeralHosts {
        /// Names of hosts.
        pub hosts: File = "hosts", 0o644;
    }
}

/// Where a system is told its name. What is none is left alone.
#[derive(Clone, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "plain settings; a field is added with a new thing to tell")]
pub struct LocalNames {
    /// `/etc/hosts`, or what that links to.
    pub hosts: Option<File>,
    /// `/etc/machine-id`, or what that links to.
    pub machine_id: Option<File>,
    /// Whether the kernel is told its hostname: that takes `CAP_SYS_ADMIN`.
    pub set_hostname: bool,
}

/// What a system could not be told.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalError {
    /// A file can't be read or written.
    #[error("write the names of this system")]
    File(#[source] nodekeel_localstorage::Error),
    /// The kernel doesn't take the hostname: run with `CAP_SYS_ADMIN`, or don't have it set.
    #[error("set the hostname to {name}")]
    Hostname {
        /// The name.
        name: NodeId,
        /// Why.
        source: io::Error,
    },
}

impl LocalNames {
    /// Tells the system that it is this node, at this address. Files that say so are left alone. It blocks.
    ///
    /// # Errors
    /// [`LocalError`].
    pub fn tell(&self, node: &NodeId, address: IpAddr) -> Result<(), LocalError> {
        if let Some(file) = &self.hosts {
            ensure(file, &hosts(node, address))?;
        }
        if let Some(file) = &self.machine_id {
            ensure(file, &machine_id(node))?;
        }
        if self.set_hostname {
            rustix::system::sethostname(node.as_str().as_bytes())
                .map_err(|error| LocalError::Hostname { name: node.clone(), source: error.into() })?;
        }
        Ok(())
    }
}

fn ensure(file: &File, content: &str) -> Result<(), LocalError> {
    if file.read_if_present().map_err(LocalError::File)?.as_deref() == Some(content.as_bytes()) {
        return Ok(());
    }
    file.write(content.as_bytes()).map_err(LocalError::File)
}

/// Localhost, and the node at the address where others reach it. The original wrote one line without an end, `127.0.0.1
/// NAME`: programs that look for localhost found none, those that read lines lost the only one, and a server that
/// listens where its own name leads was reached by nobody else. *Source:* hosts(5), RFC 6761 section 6.3.
fn hosts(node: &NodeId, address: IpAddr) -> String {
    format!("127.0.0.1 localhost\n::1 localhost\n{address} {node}\n")
}

/// 32 hexadecimal digits and the end of the line, which the original left out. *Source:* machine-id(5).
fn machine_id(node: &NodeId) -> String {
    format!("{}\n", node.bare())
}
