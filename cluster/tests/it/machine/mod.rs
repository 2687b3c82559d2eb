//! A node's way into its cluster.

mod bed;
mod cuts;
#[cfg(feature = "etcd")]
mod etcd;
mod flows;
mod kills;
mod refusals;

pub(crate) use bed::{Bed, founder, ip, said};
