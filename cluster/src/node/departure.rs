//! Completes the removal of nodes that leave: their members are removed first, and then reach nothing any more.

use std::collections::BTreeMap;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure};
use tokio::time::sleep;

use super::node_removal::{DEPARTURES, withdraw_departure};
use super::{NodeId, NodeRemovalError, NodeRemover, RemovalStep};
use crate::consensus::ClusterAccess;
use crate::consensus::kv::{KeyRange, ListWatcher};

/// The pause before the first look at the members while a node leaves; each one is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// The time in which a node whose member is removed learns that from the others, which reject its certificates afterwards.
const FAREWELL: Duration = Duration::from_secs(3);

/// A runnable that removes what is left of nodes that have left: certificates, tickets and records. Each voter runs it, and it
/// sleeps while no node leaves.
pub(crate) async fn complete_departures(ctx: Context, access: ClusterAccess) -> Result<(), Failure> {
    let mut follow = ListWatcher::new(access.root_kv(), KeyRange::prefix(DEPARTURES));
    let remover = NodeRemover::new(access.clone())?;
    ctx.signal_ready()?;
    let (mut announced, mut leaving, mut pause) = (BTreeMap::new(), Vec::<NodeId>::new(), FIRST_PAUSE);
    loop {
        tokio::select! {
            biased;
            canceled = ctx.canceled() => return Err(canceled.into()),
            update = follow.next_update() => {
                update?.apply_to(&mut announced);
                leaving = announced.keys().filter_map(|key| parse_key(key)).collect();
                // If it comes back to its cluster, it withdraws that itself.
                leaving.retain(|node| access.this_member().name.as_deref() != Some(node.as_str()));
                pause = FIRST_PAUSE;
            }
            // Nothing notifies of a change of members.
            () = sleep(pause), if !leaving.is_empty() => pause = LONGEST_PAUSE.min(2 * pause),
        }
        for node in &leaving {
            tokio::select! {
                biased;
                canceled = ctx.canceled() => return Err(canceled.into()),
                // Each step can be repeated, also by several voters at once.
                completed = complete_departure(&access, &remover, node) => if let Err(error) = completed {
                    tracing::debug!("can't remove what is left of {node} yet: {}", Failure::new(error));
                }
            }
        }
    }
}

async fn complete_departure(
    access: &ClusterAccess,
    remover: &NodeRemover,
    node: &NodeId,
) -> Result<(), NodeRemovalError> {
    let members = access.cluster_members().list_members().await;
    let members = members.map_err(|source| NodeRemovalError::Member { node: node.clone(), source })?;
    if members.iter().any(|member| member.name.as_deref() == Some(node.as_str())) {
        return Ok(());
    }
    sleep(FAREWELL).await;
    for step in [RemovalStep::Certificates, RemovalStep::Ticket, RemovalStep::Record] {
        remover.run_step(node, step).await?;
    }
    let withdrawn = withdraw_departure(&*access.root_kv(), node.as_str()).await;
    withdrawn.map_err(|source| NodeRemovalError::Departure { node: node.clone(), source })
}

fn parse_key(key: &[u8]) -> Option<NodeId> {
    std::str::from_utf8(key).ok()?.strip_prefix(DEPARTURES)?.parse().ok()
}
