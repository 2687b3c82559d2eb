//! Three and five voters, each in a private network namespace, with both releases of etcd.

mod checker;
mod health;
mod history;
mod joins;
mod membership;
mod network;
mod recovery;
mod replacement;
mod restore;
mod voter;
