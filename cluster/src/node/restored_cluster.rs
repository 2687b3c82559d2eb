//! The nodes of a cluster that was restored from a snapshot: they were lost, and are no nodes of it any more.

use std::collections::BTreeSet;

use super::ticket_issuer::TICKETS_NAMESPACE;
use super::{NODES_NAMESPACE, NodeId, NodeStore, NodeStoreError};
use crate::consensus::ClusterAccess;
use crate::consensus::kv::KeyRange;
use crate::pki::{CaError, SubjectNames};

/// Takes all nodes but this one out of the cluster: revokes their certificates, deletes unused tickets, and then the records.
/// The keys of their volumes stay: an operator may still open a disk. It can be repeated.
pub(crate) async fn expel_others(access: &ClusterAccess, this: &NodeId) -> Result<(), NodeStoreError> {
    let cluster_ca = access.load_ca().await.map_err(NodeStoreError::Certificates)?;
    let issued = cluster_ca.list_issued().await.map_err(NodeStoreError::Certificates)?;
    let names = issued.iter().filter_map(|issued| SubjectNames::from_certificate(issued).common_name);
    let names: BTreeSet<String> = names.filter(|name| name != this.as_str()).collect();
    for name in names {
        match cluster_ca.revoke_name(&name).await {
            Ok(_) | Err(CaError::UnknownName { .. }) => {}
            Err(error) => return Err(NodeStoreError::Certificates(error)),
        }
    }
    let kv = |(module, namespace)| access.namespaced_kv(module, namespace).expect("fixed names are valid");
    let deleted = kv(TICKETS_NAMESPACE).delete(KeyRange::prefix("/")).await;
    deleted.map_err(|source| NodeStoreError::Kv { id: "all nodes".to_owned(), source })?;
    let nodes = NodeStore::new(kv(NODES_NAMESPACE));
    for node in nodes.list_records().await? {
        if node.id != *this {
            nodes.delete_record(&node.id).await?;
        }
    }
    Ok(())
}
