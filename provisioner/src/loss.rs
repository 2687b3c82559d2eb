//! Volumes that no pod can use: the store is lost or another one, or a volume is missing in it.

pub(crate) mod condition;
pub(crate) mod guard;
pub(crate) mod reporter;
pub(crate) mod status;
pub(crate) mod store;
#[cfg(test)]
mod store_test;
