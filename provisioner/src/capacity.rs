//! The capacity that a node promises to volumes, and the objects that tell the scheduler.

pub(crate) mod objects;
#[cfg(test)]
mod objects_test;
pub(crate) mod policy;
#[cfg(test)]
mod policy_test;
pub(crate) mod publisher;
