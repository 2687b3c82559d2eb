//! The operators that a node admits, and their open connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::access::{AdmittedKeys, PrivateKey, PublicKey, Role};

/// The connections that one operator can have open. A further one closes the oldest.
const MAX_CONNECTIONS: usize = 32;

/// Where an operator is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OperatorSource {
    /// In `api.operators` of the configuration.
    Config,
    /// In the cluster's store, for all of its nodes.
    Cluster,
}

impl OperatorSource {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Cluster => "cluster",
        }
    }
}

/// An operator: a key, and what it may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operator {
    pub(super) name: String,
    pub(super) key: PublicKey,
    pub(super) role: Role,
    pub(super) source: OperatorSource,
}

/// The operators of a node, by their keys. A change of one closes its connections.
#[derive(Debug, Default)]
pub(crate) struct Operators(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    recorded: BTreeMap<OperatorSource, Vec<Operator>>,
    /// By number: the oldest is the first.
    connections: BTreeMap<PublicKey, BTreeMap<u64, CancellationToken>>,
    next_number: u64,
}

impl State {
    /// The operator with this key. One of the configuration comes before one of the cluster.
    fn find(&self, key: &PublicKey) -> Option<&Operator> {
        self.recorded.values().flatten().find(|operator| operator.key == *key)
    }
}

impl Operators {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the operators of a source. Connections of an operator that is gone, or that is not the same, are closed.
    pub(super) fn replace(&self, source: OperatorSource, operators: Vec<Operator>) {
        let mut state = self.lock();
        let of_connections = |state: &State| -> Vec<_> {
            state.connections.keys().map(|key| (*key, state.find(key).cloned())).collect()
        };
        let before = of_connections(&state);
        state.recorded.insert(source, operators);
        for (key, operator) in before {
            if state.find(&key) != operator.as_ref() {
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

    /// The operator with this key, at this moment.
    pub(super) fn find(&self, key: &PublicKey) -> Option<Operator> {
        self.lock().find(key).cloned()
    }

    /// All operators, with the number of their connections.
    pub(super) fn list(&self) -> Vec<(Operator, usize)> {
        let state = self.lock();
        let count = |operator: &Operator| state.connections.get(&operator.key).map_or(0, BTreeMap::len);
        state.recorded.values().flatten().map(|operator| (operator.clone(), count(operator))).collect()
    }

    /// Adds a connection whose client has proved this key; `None` if the key is not admitted any more.
    pub(super) fn connect(self: &Arc<Self>, key: PublicKey) -> Option<Connection> {
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
        Some(Connection { operators: Arc::clone(self), key, number, closed })
    }
}

impl AdmittedKeys for Operators {
    fn is_admitted(&self, key: &PublicKey) -> bool {
        self.lock().find(key).is_some()
    }
}

/// A connection of an operator, until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    operators: Arc<Operators>,
    key: PublicKey,
    number: u64,
    closed: CancellationToken,
}

impl Connection {
    /// Canceled when it must be closed.
    pub(super) fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }

    pub(super) fn key(&self) -> PublicKey {
        self.key
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut state = self.operators.lock();
        if let Some(connections) = state.connections.get_mut(&self.key) {
            connections.remove(&self.number);
            if connections.is_empty() {
                state.connections.remove(&self.key);
            }
        }
    }
}

/// The API for other machines, as its parts and the control API share it.
#[derive(Debug)]
pub(crate) struct Api {
    pub(super) address: SocketAddr,
    pub(super) key: Arc<PrivateKey>,
    pub(super) operators: Arc<Operators>,
    pub(super) cluster_operators: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> PublicKey {
        PrivateKey::generate().expect("random numbers").public_key()
    }

    fn operator(name: &str, key: PublicKey, role: Role) -> Operator {
        Operator { name: name.into(), key, role, source: OperatorSource::Config }
    }

    #[test]
    fn a_change_of_an_operator_closes_its_connections_and_no_others() {
        let (alice, bob, carol) = (key(), key(), key());
        let operators = Arc::new(Operators::default());
        let set = |list: &[(&str, PublicKey, Role)]| {
            let list = list.iter().map(|(name, key, role)| operator(name, *key, *role)).collect();
            operators.replace(OperatorSource::Config, list);
        };
        set(&[("alice", alice, Role::Admin), ("bob", bob, Role::Admin), ("carol", carol, Role::Reader)]);
        let open = || [alice, bob, carol].map(|key| operators.connect(key).expect("admitted"));
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
        assert!(operators.connect(bob).is_none() && !operators.is_admitted(&bob));
        assert_eq!(operators.find(&alice).map(|operator| operator.role), Some(Role::Reader));
        drop(first);
        assert!(operators.lock().connections.is_empty(), "what is closed is forgotten");
    }

    #[test]
    fn the_oldest_connection_of_an_operator_makes_room_for_its_newest() {
        let (alice, bob) = (key(), key());
        let operators = Arc::new(Operators::default());
        let list = vec![operator("alice", alice, Role::Reader), operator("bob", bob, Role::Reader)];
        operators.replace(OperatorSource::Config, list);
        let of_bob = operators.connect(bob).expect("admitted");
        let of_alice: Vec<_> =
            (0..MAX_CONNECTIONS + 2).map(|_| operators.connect(alice).expect("admitted")).collect();
        let closed = of_alice.iter().filter(|connection| connection.closed().is_cancelled()).count();
        assert_eq!(closed, 2);
        assert!(of_alice[0].closed().is_cancelled() && of_alice[1].closed().is_cancelled());
        assert!(!of_bob.closed().is_cancelled());
        assert_eq!(operators.list()[1].1, 1);
    }
}
