//! The local names of a host: its hostname, `/etc/hosts`, its machine id.

use std::io;
use std::net::IpAddr;

use nodekeel_localstorage::tree::LayoutFile;
use thiserror::Error;

use super::NodeId;

nodekeel_localstorage::layout! {
    /// The local names of a host, as targets of symbolic links from `/etc`.
    pub struct LocalNamesDir {
        /// As `/etc/hosts`.
        pub hosts: LayoutFile = "hosts", 0o644;
        /// As `/etc/machine-id`.
        pub machine_id: LayoutFile = "machine-id", 0o644;
    }
}

/// The files with a host's local names. A location that is `None` is skipped.
#[derive(Clone, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "plain settings; each new location is a new field")]
pub struct LocalNames {
    /// `/etc/hosts`, or what that links to.
    pub hosts: Option<LayoutFile>,
    /// `/etc/machine-id`, or what that links to.
    pub machine_id: Option<LayoutFile>,
    /// True if the kernel's hostname is set: requires `CAP_SYS_ADMIN`.
    pub set_hostname: bool,
}

/// A failure to set a local name.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalNamesError {
    /// A file can't be read or written.
    #[error("can't write the node's name into /etc/hosts or /etc/machine-id")]
    File(#[source] nodekeel_localstorage::Error),
    /// The kernel rejects the hostname: run with `CAP_SYS_ADMIN`, or disable setting it.
    #[error("can't set this host's hostname to {name}")]
    Hostname {
        /// The name.
        name: NodeId,
        /// The cause.
        source: io::Error,
    },
}

impl LocalNames {
    /// Sets the host's names to this node's, at this address. Files that already have the content are
    /// skipped. It blocks.
    ///
    /// # Errors
    /// [`LocalNamesError`].
    pub fn apply_names(&self, node: &NodeId, address: IpAddr) -> Result<(), LocalNamesError> {
        if let Some(file) = &self.hosts {
            write_if_changed(file, &hosts_content(node, address))?;
        }
        if let Some(file) = &self.machine_id {
            write_if_changed(file, &machine_id_content(node))?;
        }
        if self.set_hostname {
            rustix::system::sethostname(node.as_str().as_bytes())
                .map_err(|error| LocalNamesError::Hostname { name: node.clone(), source: error.into() })?;
        }
        Ok(())
    }
}

fn write_if_changed(file: &LayoutFile, content: &str) -> Result<(), LocalNamesError> {
    if file.read_if_present().map_err(LocalNamesError::File)?.as_deref() == Some(content.as_bytes()) {
        return Ok(());
    }
    file.write(content.as_bytes()).map_err(LocalNamesError::File)
}

/// Localhost, and the node at the address where others reach it. The original wrote one unterminated line,
/// `127.0.0.1 NAME`: programs did not find localhost, programs that read lines missed the only one, and a
/// server listening on its own name's address was reachable by no other host. *Source:* hosts(5), RFC 6761
/// section 6.3.
fn hosts_content(node: &NodeId, address: IpAddr) -> String {
    format!("127.0.0.1 localhost\n::1 localhost\n{address} {node}\n")
}

/// 32 hexadecimal digits and the newline that the original left out. *Source:* machine-id(5).
fn machine_id_content(node: &NodeId) -> String {
    format!("{}\n", node.hex_digits())
}
