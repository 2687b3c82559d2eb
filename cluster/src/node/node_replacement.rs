//! Replaces a node of a cluster by another.

use tokio::time::Instant;

use super::node_removal::{RETRY_WITHIN, retry_until};
use super::{GoldenTicket, GoldenTicketIssuer, NodeId, NodeRemovalError, NodeRemover, RemovalStep};
use crate::consensus::PeerUrl;

/// Takes nodes out of the cluster, and issues the tickets of their successors.
///
/// Whom a ticket replaces is recorded before anything is removed, until the successor has joined: a replacement that was
/// interrupted is completed by another, on any node, and a repeated one returns the same ticket.
#[derive(Clone, Debug)]
pub struct NodeReplacer {
    remover: NodeRemover,
    tickets: GoldenTicketIssuer,
}

impl NodeReplacer {
    /// Replaces nodes of the cluster of these.
    pub fn new(remover: NodeRemover, tickets: GoldenTicketIssuer) -> Self {
        Self { remover, tickets }
    }

    /// Removes a node as [`NodeRemover::remove_node`] does, and returns the ticket of its successor, which the others will
    /// reach at this URL; by default, at that of the node.
    ///
    /// # Errors
    /// [`NodeRemovalError`]. If the cluster refuses to remove the member, nothing is changed.
    pub async fn replace_node(
        &self,
        node: &NodeId,
        successor: Option<&PeerUrl>,
    ) -> Result<GoldenTicket, NodeRemovalError> {
        self.remover.check_other(node)?;
        let deadline = Instant::now() + RETRY_WITHIN;
        let url = retry_until(deadline, || self.choose_successor(node, successor)).await?;
        retry_until(deadline, || self.record_successor(node, &url)).await?;
        for step in RemovalStep::ALL {
            let done = retry_until(deadline, || self.remover.run_step(node, step)).await;
            if let (RemovalStep::Member, Err(refused)) = (step, &done)
                && !refused.is_retryable()
            {
                // Nothing was removed. If this fails, another call finds the same successor.
                let _ = self.remover.forget_replacement(node).await;
            }
            done?;
        }
        retry_until(deadline, || self.issue_ticket(node, &url)).await
    }

    /// The recorded URL, or the given one, or that of the node.
    async fn choose_successor(
        &self,
        node: &NodeId,
        given: Option<&PeerUrl>,
    ) -> Result<PeerUrl, NodeRemovalError> {
        let failed = |source| NodeRemovalError::Successor { node: node.clone(), source };
        if let Some(recorded) = self.tickets.find_replacement(node).await.map_err(failed)? {
            return match given {
                Some(given) if *given != recorded => {
                    Err(NodeRemovalError::OtherSuccessor { node: node.clone(), successor: recorded })
                }
                _ => Ok(recorded),
            };
        }
        if !self.remover.is_known(node).await? {
            return Err(NodeRemovalError::Unknown { node: node.clone() });
        }
        if self.remover.is_worker(node).await? {
            return Err(NodeRemovalError::Worker { node: node.clone() });
        }
        let own = self.remover.find_peer_url(node).await?;
        match given {
            // Before anything is removed: the ticket would be refused afterwards.
            Some(given) if own.as_ref() != Some(given) => {
                self.tickets.check_free(given).await.map_err(failed)?;
                Ok(given.clone())
            }
            _ => own.ok_or_else(|| NodeRemovalError::NoAddress { node: node.clone() }),
        }
    }

    /// Runs the first step of a replacement: records the URL of the successor. Those of the removal follow, and the last one
    /// issues the ticket.
    ///
    /// # Errors
    /// [`NodeRemovalError::Successor`].
    pub async fn record_successor(&self, node: &NodeId, url: &PeerUrl) -> Result<(), NodeRemovalError> {
        let recorded = self.tickets.record_replacement(node, url).await;
        recorded.map_err(|source| NodeRemovalError::Successor { node: node.clone(), source })
    }

    async fn issue_ticket(&self, node: &NodeId, url: &PeerUrl) -> Result<GoldenTicket, NodeRemovalError> {
        let issued = self.tickets.issue_ticket(url).await;
        issued.map_err(|source| NodeRemovalError::Successor { node: node.clone(), source })
    }
}
