//! The control API's calls about operators.

use nodekeel_cluster::enrolment::ClusterNode;
use tonic::Status;

use super::config::{ApiConfig, NAME};
use super::records::{self, RecordError};
use super::shared::running_api;
use crate::access::{InvalidKey, InvalidRole, Principal};
use crate::running::RunningNode;
use crate::v1;

/// The answer to a request for the operators.
#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
pub(crate) fn list_operators(running: &RunningNode) -> Result<v1::OperatorsResponse, Status> {
    let off = || {
        Status::failed_precondition(
            "this node has no API for other machines: set api.address in its configuration",
        )
    };
    let api = running_api(running).ok_or_else(off)?;
    let operators = api.identities.list().into_iter().filter_map(|(source, identity, connections)| {
        let Principal::Operator(role) = identity.principal else { return None };
        Some(v1::Operator {
            name: identity.name,
            key: identity.key.to_string(),
            role: role.to_string(),
            source: source.as_str().into(),
            connections: u32::try_from(connections).unwrap_or(u32::MAX),
        })
    });
    Ok(v1::OperatorsResponse {
        address: api.address.to_string(),
        node_key: api.key.public_key().to_string(),
        operators: operators.collect(),
    })
}

/// Records an operator in the cluster, or gives the recorded one another role.
pub(crate) async fn add_operator(
    running: &RunningNode,
    cluster: &ClusterNode,
    request: &v1::AddOperatorRequest,
) -> Result<v1::AddOperatorResponse, Status> {
    let invalid = |error: &dyn std::error::Error| Status::invalid_argument(error.to_string());
    let key = request.key.parse().map_err(|error: InvalidKey| invalid(&error))?;
    let role = request.role.parse().map_err(|error: InvalidRole| invalid(&error))?;
    // A worker doesn't know the keys of other workers, and would admit them as this operator.
    if let Some(node) = running_api(running).and_then(|api| api.records.borrow().find_node(key)) {
        return Err(RecordError::KeyOfNode { node }.into());
    }
    records::add(&*records::store(cluster)?, &request.name, key, role).await?;
    Ok(v1::AddOperatorResponse {})
}

/// Removes the record of an operator from the cluster.
pub(crate) async fn remove_operator(
    running: &RunningNode,
    cluster: &ClusterNode,
    name: &str,
) -> Result<v1::RemoveOperatorResponse, Status> {
    let plan = running.plan();
    let config = plan.config.section::<ApiConfig>(NAME);
    let is_configured = config.is_some_and(|config| config.operators.iter().any(|known| known.name == name));
    records::remove(&*records::store(cluster)?, name, is_configured).await?;
    Ok(v1::RemoveOperatorResponse {})
}
