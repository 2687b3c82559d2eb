//! Log formats of the node's daemons.

use nodekeel_logtree::parse::{self, LineParser};

/// The parser for the log format of the runnable with this DN; `None` if the format is unknown: its lines
/// stay raw.
pub fn log_parser_for(dn: &str) -> Option<LineParser> {
    match dn {
        // With [cluster], etcd runs below the cluster's consensus and writes the same format.
        "root.etcd" | "root.cluster.consensus.etcd" => Some(parse::etcd_line),
        "root.containerd" => Some(parse::logfmt_line),
        // containerd's own lines are logfmt; the other daemons have no format that this crate knows.
        _ => None,
    }
}
