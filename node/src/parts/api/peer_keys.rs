//! The keys of the other nodes' volumes, as this node answers them: a copy on its own volume of what the cluster has.
//!
//! After a power cut at all nodes, no etcd starts before a majority of the volumes is open. So what opens them can't be asked of etcd.

use std::io;

use nodekeel_cluster::node::KnownNode;
use nodekeel_localstorage::{Dir, FileMode};
use prost::Message;

use crate::access::PublicKey;
use crate::layout::CLUSTER_DIR;

/// The file in the directory of the cluster, whose etcd has the same keys.
const FILE: &str = "peer-keys";
const MODE: FileMode = FileMode::new(0o600);

/// The volume keys of the other nodes of the cluster.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(crate) struct PeerKeys {
    #[prost(message, repeated, tag = "1")]
    keys: Vec<PeerKey>,
}

/// A key of a node's volume.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
struct PeerKey {
    /// The public key of the node's API.
    #[prost(bytes = "vec", tag = "1")]
    node: Vec<u8>,
    /// The UUID of the volume.
    #[prost(string, tag = "2")]
    volume: String,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
}

impl PeerKeys {
    pub(crate) fn of(nodes: &[KnownNode]) -> Self {
        let of_node = |node: &KnownNode| {
            let api = node.api.key;
            let keys = node.unlock_keys.clone().into_iter();
            keys.map(move |(volume, key)| PeerKey {
                node: api.to_vec(),
                volume,
                key: key.expose_bytes().to_vec(),
            })
        };
        Self { keys: nodes.iter().flat_map(of_node).collect() }
    }

    /// The keys of this volume of the node with this key, the oldest first. Those of other nodes are not returned.
    pub(crate) fn into_keys(self, node: PublicKey, volume: &str) -> Vec<Vec<u8>> {
        let is_asked = |key: &PeerKey| key.node == node.to_bytes() && key.volume == volume;
        self.keys.into_iter().filter(is_asked).map(|key| key.key).collect()
    }

    /// Reads the file on this volume; there are no keys without it. It blocks.
    pub(crate) fn read(volume: &Dir) -> io::Result<Self> {
        let read = volume.open_dir(CLUSTER_DIR).and_then(|dir| dir.read(FILE));
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(error) if error.is_not_found() => return Ok(Self::default()),
            Err(error) => return Err(io::Error::other(error)),
        };
        Self::decode(&*bytes).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{CLUSTER_DIR}/{FILE} is damaged"))
        })
    }

    /// Writes the file, if it is another. It blocks.
    pub(crate) fn write(&self, volume: &Dir) -> io::Result<()> {
        if Self::read(volume).is_ok_and(|found| found == *self) {
            return Ok(());
        }
        let dir = match volume.open_dir(CLUSTER_DIR) {
            Ok(dir) => dir,
            // A cluster in memory has no peers.
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(io::Error::other(error)),
        };
        dir.write(FILE, &self.encode_to_vec(), MODE).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_cluster::node::{NodeApi, SecretBytes};

    use super::*;
    use crate::access::PrivateKey;

    #[test]
    fn a_node_gets_the_keys_of_its_own_volume_alone() {
        let scratch = tempfile::tempdir().expect("a directory");
        let volume = Dir::open(scratch.path()).expect("open");
        let [one, two] = [(); 2].map(|()| PrivateKey::generate().expect("random numbers").public_key());
        let node = |digit: &str, key: PublicKey, keys: &[(&str, u8)]| KnownNode {
            id: format!("nodekeel-{}", digit.repeat(32)).parse().expect("an id"),
            is_worker: false,
            api: NodeApi { key: key.to_bytes(), address: ([192, 0, 2, 1], 7001).into() },
            unlock_keys: keys
                .iter()
                .map(|(of, key)| ((*of).into(), SecretBytes::new(vec![*key; 32])))
                .collect(),
        };
        let nodes = [node("1", one, &[("a", 1), ("a", 2), ("b", 3)]), node("2", two, &[("a", 4)])];
        PeerKeys::of(&nodes).write(&volume).expect("without a cluster there is nothing to write");
        assert_eq!(PeerKeys::read(&volume).expect("none").into_keys(one, "a"), [[0_u8; 0]; 0]);
        std::fs::create_dir(scratch.path().join(CLUSTER_DIR)).expect("made");
        PeerKeys::of(&nodes).write(&volume).expect("written");
        let read = |node, volume_id| PeerKeys::read(&volume).expect("read").into_keys(node, volume_id);
        assert_eq!(read(one, "a"), [[1; 32], [2; 32]]);
        assert_eq!(read(one, "b"), [[3; 32]]);
        assert_eq!(read(two, "a"), [[4; 32]]);
        assert_eq!(read(two, "b"), [[0_u8; 0]; 0]);
        // A node that was removed.
        PeerKeys::of(&nodes[..1]).write(&volume).expect("written");
        assert_eq!(read(two, "a"), [[0_u8; 0]; 0]);
        std::fs::write(scratch.path().join(CLUSTER_DIR).join(FILE), b"\xff").expect("written");
        assert!(PeerKeys::read(&volume).is_err());
    }
}
