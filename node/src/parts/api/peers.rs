//! The other nodes of the cluster, with the keys and the addresses of their APIs, and the file of them.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use nodekeel_cluster::node::{InvalidNodeId, KnownNode, NodeId};
use nodekeel_localstorage::tree::LayoutFile;
use thiserror::Error;

use super::identities::Identity;
use crate::access::{InvalidKey, Principal, PublicKey};

/// Another node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) id: NodeId,
    pub(crate) key: PublicKey,
    pub(crate) address: SocketAddr,
    /// True if it is a worker: it may call, and is not asked for anything.
    pub(crate) is_worker: bool,
}

/// The last field of the line of a worker.
const WORKER: &str = "worker";

impl Peer {
    pub(crate) fn identity(&self) -> Identity {
        let name = self.id.to_string();
        Identity { name, key: self.key, principal: Principal::Node }
    }

    pub(crate) fn of(node: &KnownNode) -> Result<Self, InvalidKey> {
        let KnownNode { id, is_worker, api, .. } = node;
        let (id, key) = (id.clone(), PublicKey::new(api.key)?);
        Ok(Self { id, key, address: api.address, is_worker: *is_worker })
    }

    fn parse(line: &str) -> Result<Self, InvalidPeer> {
        let (id, key, address, is_worker) = match line.split(' ').collect::<Vec<_>>()[..] {
            [id, key, address] => (id, key, address, false),
            [id, key, address, WORKER] => (id, key, address, true),
            _ => return Err(InvalidPeer::Fields),
        };
        Ok(Self {
            id: id.parse().map_err(InvalidPeer::Id)?,
            key: key.parse().map_err(InvalidPeer::Key)?,
            address: address.parse().map_err(|_| InvalidPeer::Address)?,
            is_worker,
        })
    }
}

/// A line of the file: id, key and address, and of a worker that word, with a space between them.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.id, self.key, self.address)?;
        if self.is_worker { write!(f, " {WORKER}") } else { Ok(()) }
    }
}

/// The reason why a line of the file is not one of a peer.
#[derive(Debug, Error)]
enum InvalidPeer {
    #[error("expected an id, a key and an address")]
    Fields,
    #[error(transparent)]
    Id(InvalidNodeId),
    #[error(transparent)]
    Key(InvalidKey),
    #[error("invalid address")]
    Address,
}

/// The other nodes of the cluster, outside of the volume. The node writes it anew when it is in its cluster.
#[derive(Debug, Clone)]
pub(crate) struct PeersFile(LayoutFile);

impl PeersFile {
    pub(crate) fn new(file: LayoutFile) -> Self {
        Self(file)
    }

    /// The peers that were written last; none if there were none. It blocks.
    pub(crate) fn read(&self) -> io::Result<Vec<Peer>> {
        let bytes = self.0.read_if_present().map_err(io::Error::other)?.unwrap_or_default();
        parse_peers(&bytes).map_err(|source| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {source}", self.0.path().display()))
        })
    }

    /// Writes them, if they are others. It blocks.
    pub(crate) fn write(&self, peers: &[Peer]) -> io::Result<()> {
        let text: String = peers.iter().map(|peer| format!("{peer}\n")).collect();
        if self.0.read_if_present().is_ok_and(|found| found.unwrap_or_default() == text.as_bytes()) {
            return Ok(());
        }
        self.0.write(text.as_bytes()).map_err(io::Error::other)
    }
}

fn parse_peers(bytes: &[u8]) -> Result<Vec<Peer>, InvalidPeer> {
    let text = std::str::from_utf8(bytes).map_err(|_| InvalidPeer::Fields)?;
    text.lines().map(Peer::parse).collect()
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::Dir;
    use proptest::prelude::*;

    use super::*;
    use crate::access::PrivateKey;
    use crate::layout::{ApiLayout, place_layout};

    #[test]
    fn the_peers_that_are_read_are_those_that_were_written() {
        let scratch = tempfile::tempdir().expect("a directory");
        let root = place_layout(Dir::open(scratch.path()).expect("open")).expect("placed");
        let file = PeersFile::new(root.add_layout::<ApiLayout>().expect("placed").api.peers);
        assert_eq!(file.read().expect("none"), []);
        let peer = |digit: &str, address: &str| Peer {
            id: format!("nodekeel-{}", digit.repeat(32)).parse().expect("an id"),
            key: PrivateKey::generate().expect("random numbers").public_key(),
            address: address.parse().expect("an address"),
            is_worker: digit == "2",
        };
        let peers = [peer("1", "192.0.2.1:7001"), peer("2", "[2001:db8::2]:7001")];
        file.write(&peers).expect("written");
        assert_eq!(file.read().expect("read"), peers);
        std::fs::write(file.0.path(), "nodekeel-1 ed25519:A 192.0.2.1:7001\n").expect("written");
        let damaged = file.read().expect_err("damaged").to_string();
        assert!(damaged.contains("api/peers: invalid node name"), "{damaged}");
        file.write(&[]).expect("written");
        assert_eq!(file.read().expect("read"), []);
    }

    proptest! {
        #[test]
        fn a_line_with_another_byte_is_an_error_or_is_written_as_it_was(at in 0..109_usize, byte: u8) {
            let key = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";
            let mut bytes = format!("nodekeel-{} {key} 192.0.2.1:7001\n", "1".repeat(32)).into_bytes();
            bytes[at] = byte;
            if let Ok(peers) = parse_peers(&bytes) {
                let again: String = peers.iter().map(|peer| format!("{peer}\n")).collect();
                prop_assert_eq!(parse_peers(again.as_bytes()).expect("written by us"), peers);
            }
        }
    }
}
