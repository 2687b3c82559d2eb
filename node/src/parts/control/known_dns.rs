//! The DNs that requests name.

use nodekeel_logtree::Dn;
use tonic::Status;

use super::api::ControlService;
use super::suggestions::unknown_dn_message;
use crate::control::stopping_status;

impl ControlService {
    /// The status for an unknown DN: it suggests similar ones.
    pub(crate) fn unknown_dn(&self, dn: &str) -> Status {
        if self.shared.with_supervisor(|_| ()).is_none() {
            return stopping_status();
        }
        let logged = self.shared.log_store.dn_stats().into_iter().map(|stats| stats.dn.to_string());
        let nodes = self.shared.tree_nodes().into_iter().map(|node| node.dn);
        Status::not_found(unknown_dn_message(dn, nodes.chain(logged)))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    pub(crate) fn parse_log_dn(&self, dn: &str) -> Result<Dn, Status> {
        match dn.parse() {
            Ok(parsed) if self.is_known_dn(dn) => Ok(parsed),
            _ => Err(self.unknown_dn(dn)),
        }
    }

    /// Whether a DN is the root of the log, in the tree, or that of a log entry or above one.
    pub(crate) fn is_known_dn(&self, dn: &str) -> bool {
        let Ok(dn) = dn.parse::<Dn>() else { return false };
        dn.is_root()
            || self.shared.tree_nodes().iter().any(|node| node.dn == dn.as_str())
            || self.shared.log_store.dn_stats().iter().any(|stats| stats.dn.is_within(&dn))
    }
}
