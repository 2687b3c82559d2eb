//! The keys that a node admits, those of operators and of other nodes, and their open connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::access::{AdmittedKeys, Principal, PublicKey};

/// The connections that one key can have open. A further one closes the oldest.
const MAX_CONNECTIONS: usize = 32;

/// Where a key is recorded. A key that more than one has is what the first of them says: the key of a node may call nothing else
/// because the cluster has it as an operator's, too, and no record of a node shuts out an operator of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// In `api.operators` of the configuration.
    Config,
    /// In the cluster's store, as the key of one of its nodes.
    Nodes,
    /// In the cluster's store, as that of an operator of all of its nodes.
    Cluster,
}

impl Source {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Nodes => "nodes",
            Self::Cluster => "cluster",
        }
    }
}

/// A key that is admitted, and what it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// That of the operator, or the id of the node.
    pub(crate) name: String,
    pub(crate) key: PublicKey,
    pub(crate) principal: Principal,
}

impl Identity {
    /// Of a key that may be in no record.
    pub(crate) fn stranger(key: PublicKey) -> Self {
        Self { name: key.to_string(), key, principal: Principal::Stranger }
    }
}

/// The identities that a node admits, by their keys. A change of one closes its connections.
#[derive(Debug, Default)]
pub(crate) struct Identities(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    recorded: BTreeMap<Source, Vec<Identity>>,
    /// By number: the oldest is the first.
    connections: BTreeMap<PublicKey, BTreeMap<u64, CancellationToken>>,
    next_number: u64,
}

impl State {
    fn find(&self, key: &PublicKey) -> Option<&Identity> {
        self.recorded.values().flatten().find(|identity| identity.key == *key)
    }
}

impl Identities {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the identities of a source. Connections of one that is gone, or that is not the same, are closed.
    pub(crate) fn replace(&self, source: Source, identities: Vec<Identity>) {
        let mut state = self.lock();
        let of_connections = |state: &State| -> Vec<_> {
            state.connections.keys().map(|key| (*key, state.find(key).cloned())).collect()
        };
        let before = of_connections(&state);
        state.recorded.insert(source, identities);
        for (key, identity) in before {
            if state.find(&key) != identity.as_ref() {
                // They leave the map when they are dropped.
                state
                    .connections
                    .get(&key)
                    .into_iter()
                    .flatten()
                    .for_each(|(_, connection)| connection.cancel());
            }
        }
    }

    /// The identity with this key, at this moment.
    pub(crate) fn find(&self, key: &PublicKey) -> Option<Identity> {
        self.lock().find(key).cloned()
    }

    /// Returns whether a source has any.
    pub(crate) fn has_some_of(&self, source: Source) -> bool {
        self.lock().recorded.get(&source).is_some_and(|recorded| !recorded.is_empty())
    }

    /// All identities, with where they are recorded and the number of their connections.
    pub(crate) fn list(&self) -> Vec<(Source, Identity, usize)> {
        let state = self.lock();
        let count = |identity: &Identity| state.connections.get(&identity.key).map_or(0, BTreeMap::len);
        let recorded =
            state.recorded.iter().flat_map(|(source, all)| all.iter().map(|identity| (*source, identity)));
        recorded.map(|(source, identity)| (source, identity.clone(), count(identity))).collect()
    }

    /// Adds a connection whose client has proved this key; `None` if the key is not admitted any more.
    pub(crate) fn connect(self: &Arc<Self>, key: PublicKey) -> Option<Connection> {
        let mut state = self.lock();
        state.find(&key)?;
        let number = state.next_number;
        state.next_number += 1;
        let (closed, open) = (CancellationToken::new(), state.connections.entry(key).or_default());
        let is_open = |connection: &&CancellationToken| !connection.is_cancelled();
        if open.values().filter(is_open).count() >= MAX_CONNECTIONS
            && let Some(oldest) = open.values().find(is_open)
        {
            oldest.cancel();
        }
        open.insert(number, closed.clone());
        drop(state);
        Some(Connection { identities: Arc::clone(self), key, number, closed })
    }
}

impl AdmittedKeys for Identities {
    fn is_admitted(&self, key: &PublicKey) -> bool {
        self.lock().find(key).is_some()
    }
}

/// A connection of an identity, until it is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    identities: Arc<Identities>,
    key: PublicKey,
    number: u64,
    closed: CancellationToken,
}

impl Connection {
    /// Canceled when it must be closed.
    pub(crate) fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }

    pub(crate) fn key(&self) -> PublicKey {
        self.key
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut state = self.identities.lock();
        if let Some(connections) = state.connections.get_mut(&self.key) {
            connections.remove(&self.number);
            if connections.is_empty() {
                state.connections.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::PrivateKey;
    use crate::access::Role;

    fn key() -> PublicKey {
        PrivateKey::generate().expect("random numbers").public_key()
    }

    fn operator(name: &str, key: PublicKey, role: Role) -> Identity {
        Identity { name: name.into(), key, principal: Principal::Operator(role) }
    }

    #[test]
    fn a_change_of_an_operator_closes_its_connections_and_no_others() {
        let (alice, bob, carol) = (key(), key(), key());
        let identities = Arc::new(Identities::default());
        let set = |list: &[(&str, PublicKey, Role)]| {
            let list = list.iter().map(|(name, key, role)| operator(name, *key, *role)).collect();
            identities.replace(Source::Config, list);
        };
        set(&[("alice", alice, Role::Admin), ("bob", bob, Role::Admin), ("carol", carol, Role::Reader)]);
        let open = || [alice, bob, carol].map(|key| identities.connect(key).expect("admitted"));
        let is_closed =
            |connections: &[Connection; 3]| connections.each_ref().map(|one| one.closed().is_cancelled());
        let first = open();
        // Another order, and one more operator, change nobody.
        set(&[
            ("bob", bob, Role::Admin),
            ("alice", alice, Role::Admin),
            ("carol", carol, Role::Reader),
            ("d", key(), Role::Reader),
        ]);
        assert_eq!(is_closed(&first), [false; 3]);
        set(&[("alice", alice, Role::Reader), ("carol", carol, Role::Reader)]);
        assert_eq!(is_closed(&first), [true, true, false]);
        assert!(identities.connect(bob).is_none() && !identities.is_admitted(&bob));
        assert_eq!(
            identities.find(&alice).map(|alice| alice.principal),
            Some(Principal::Operator(Role::Reader))
        );
        drop(first);
        assert!(identities.lock().connections.is_empty(), "what is closed is forgotten");
    }

    #[test]
    fn the_oldest_connection_of_an_operator_makes_room_for_its_newest() {
        let (alice, bob) = (key(), key());
        let identities = Arc::new(Identities::default());
        let list = vec![operator("alice", alice, Role::Reader), operator("bob", bob, Role::Reader)];
        identities.replace(Source::Config, list);
        let of_bob = identities.connect(bob).expect("admitted");
        let of_alice: Vec<_> =
            (0..MAX_CONNECTIONS + 2).map(|_| identities.connect(alice).expect("admitted")).collect();
        let closed = of_alice.iter().filter(|connection| connection.closed().is_cancelled()).count();
        assert_eq!(closed, 2);
        assert!(of_alice[0].closed().is_cancelled() && of_alice[1].closed().is_cancelled());
        assert!(!of_bob.closed().is_cancelled());
        assert_eq!(identities.list()[1].2, 1);
    }

    #[test]
    fn the_key_of_a_node_is_no_operator_of_the_cluster_and_shuts_out_none_of_the_configuration() {
        let (node, alice) = (key(), key());
        let identities = Identities::default();
        let of = |principal, source, keys: &[PublicKey]| {
            let identity = |key: &PublicKey| Identity { name: "n".into(), key: *key, principal };
            identities.replace(source, keys.iter().map(identity).collect());
        };
        of(Principal::Operator(Role::Admin), Source::Cluster, &[node]);
        of(Principal::Node, Source::Nodes, &[node, alice]);
        of(Principal::Operator(Role::Reader), Source::Config, &[alice]);
        let found = |key| identities.find(&key).map(|identity| identity.principal);
        assert_eq!(found(node), Some(Principal::Node));
        assert_eq!(found(alice), Some(Principal::Operator(Role::Reader)));
        of(Principal::Node, Source::Nodes, &[]);
        assert_eq!(found(node), Some(Principal::Operator(Role::Admin)));
    }
}
