//! In which formats the node's own daemons log.

use nodekeel_logtree::parse::{self, Parser};

/// The format in which the runnable of this DN prints; `None` for one that the node does not know, whose lines are raw.
pub fn parser_of(dn: &str) -> Option<Parser> {
    match dn {
        "root.etcd" | "root.cluster.consensus.etcd" => Some(parse::etcd),
        "root.containerd" => Some(parse::logfmt),
        _ => None,
    }
}
