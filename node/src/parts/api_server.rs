//! Serves the control API to operators on other machines, and to the other nodes of the cluster: each is known by a key, and may
//! what the table of methods says.

mod audit;
mod connections;
mod enrol;
mod gate;
mod node_service;
#[cfg(test)]
mod peer_client_test;
mod peer_watch;
mod rate_limit;
mod strangers;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::tree::LayoutFile;
use thiserror::Error;
use tokio::sync::watch;
use tonic::Extensions;

use self::connections::serve_api;
use super::api::config::{ADDRESS_KEY, ApiConfig, DN, NAME, OperatorConfig};
use super::api::identities::{Identities, Identity, Source};
use super::api::peers::{Peer, PeersFile};
use super::api::{Api, is_on};
use super::cluster::enrolment_sources;
use super::worker::{self, Worker, WorkerConfig, check_worker, is_worker, worker_health};
use crate::access::{InvalidKey, Principal, PrivateKey};
use crate::config::{ConfigSection, ConfigViolation, NodedConfig};
use crate::error_chain::error_chain;
use crate::layout::{ApiLayout, StorageLayout};
use crate::listen_address::ListenAddress;
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};

/// The part of `[api]`.
pub(super) struct ApiPart;

impl Part for ApiPart {
    fn name(&self) -> &str {
        NAME
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![
            ConfigSection::new::<ApiConfig>(NAME),
            // A worker is known to its cluster by its API.
            ConfigSection::new::<WorkerConfig>(worker::NAME),
        ]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        config.section::<ApiConfig>(NAME).map_or(Ok(()), ApiConfig::check)?;
        check_worker(config)
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let unavailable = (!is_on(config)).then_some("which is disabled; set api.address");
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<ApiConfig>(NAME).cloned() else { return };
        let address = config.address;
        let running = planner.running_config().and_then(|running| running.section::<ApiConfig>(NAME));
        // The server that runs releases its port before the new one listens.
        if running.is_some_and(|running| running.address.port() == address.port()) {
            planner.claim_address(ListenAddress::Tcp(address.ip(), address.port()), ADDRESS_KEY);
        } else {
            planner.check_port(address.ip(), address.port(), ADDRESS_KEY);
        }
        let service = PlannedService::new(DN, ApiPlan { is_worker: is_worker(planner.config()), config });
        planner.add(service.node_layout::<ApiLayout>());
    }
}

#[derive(Debug, PartialEq)]
struct ApiPlan {
    config: ApiConfig,
    is_worker: bool,
}

impl ApiPlan {
    fn operators(&self) -> Vec<Identity> {
        let operators = self.config.operators.iter();
        let of_config = |operator: &OperatorConfig| Identity {
            name: operator.name.clone(),
            key: operator.key,
            principal: Principal::Operator(operator.role),
        };
        operators.map(of_config).collect()
    }
}

impl fmt::Display for ApiPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the control API for operators of other machines on {}", self.config.address)?;
        if self.is_worker { f.write_str(", and a worker of a cluster") } else { Ok(()) }
    }
}

impl PlannedRunnable for ApiPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let files = node.create_node_layout::<ApiLayout>()?.api;
        let (key, peers) = (Arc::new(load_key(&files.key)?), PeersFile::new(files.peers));
        let identities = Arc::new(Identities::default());
        identities.replace(Source::Config, self.operators());
        // Until the cluster is there, and while it has no majority.
        let known = peers.read().unwrap_or_else(|error| {
            tracing::warn!(
                dn = DN,
                "no other node is known until the cluster is there: {}",
                error_chain(&error)
            );
            Vec::new()
        });
        let worker = if self.is_worker {
            let state = node.create_node_layout::<StorageLayout>()?.esp;
            let changes = node.health_sources().changes();
            let health = worker_health(Arc::downgrade(node.running()));
            node.health_sources().add("api.worker", health);
            let worker = Arc::new(Worker::new(enrolment_sources(&state), files.membership, changes));
            node.extensions().insert(Arc::clone(&worker));
            Some(worker)
        } else {
            // A worker has nothing that other nodes may ask for.
            identities.replace(Source::Nodes, known.iter().map(Peer::identity).collect());
            None
        };
        let ApiConfig { address, cluster_operators, .. } = self.config;
        let records = watch::Sender::default();
        let worker_joined = worker.as_ref().map(|worker| worker.watch_joined());
        let api = Api { address, key, identities, cluster_operators, peers, records, worker_joined };
        let api = Arc::new(api);
        node.extensions().insert(Arc::clone(&api));
        Ok(PreparedRunnable::new(serve_api(Arc::clone(node.running()), api, worker)))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }

    fn is_applicable(&self, new: &dyn PlannedRunnable) -> bool {
        let new: &dyn std::any::Any = new;
        let with_own = |new: &Self| {
            let operators = self.config.operators.clone();
            Self { config: ApiConfig { operators, ..new.config.clone() }, ..*new }
        };
        new.downcast_ref().is_some_and(|new| with_own(new) == *self)
    }

    fn apply(&self, extensions: &Extensions) {
        if let Some(api) = extensions.get::<Arc<Api>>() {
            api.identities.replace(Source::Config, self.operators());
        }
    }
}

/// The reason why the node has no key for its API.
#[derive(Debug, Error)]
enum NodeKeyError {
    #[error(
        "can't read the key of the API, {}: restore it from a copy, or remove it: then each operator needs the new key of this node",
        path.display()
    )]
    Damaged {
        path: PathBuf,
        #[source]
        source: InvalidKey,
    },
    #[error("can't make a key for the API")]
    Generate(#[source] std::io::Error),
}

/// The key of this node. It is made once: operators know the node by it.
fn load_key(file: &LayoutFile) -> Result<PrivateKey, PrepareError> {
    if let Some(text) = file.read_if_present()? {
        // The allocator of the program erases the text.
        let damaged = |source| NodeKeyError::Damaged { path: file.path().to_owned(), source };
        return Ok(PrivateKey::from_pem(&text).map_err(damaged)?);
    }
    let key = PrivateKey::generate().map_err(NodeKeyError::Generate)?;
    file.write(key.to_pem().as_bytes())?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::Dir;

    use super::*;
    use crate::layout::place_layout;

    #[test]
    fn the_key_is_made_once_and_a_damaged_one_is_not_replaced() {
        let scratch = tempfile::tempdir().expect("a directory");
        let place = || place_layout(Dir::open(scratch.path()).expect("open")).expect("placed");
        let file = || place().add_layout::<ApiLayout>().expect("placed").api.key;
        let key = load_key(&file()).expect("made").public_key();
        assert_eq!(load_key(&file()).expect("read").public_key(), key);
        std::fs::write(file().path(), "no key").expect("written");
        let error = load_key(&file()).expect_err("damaged");
        assert!(error.to_string().contains("api/key: restore it from a copy, or remove it"), "{error}");
        assert_eq!(std::fs::read(file().path()).expect("there"), b"no key");
    }
}
