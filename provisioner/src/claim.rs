//! A claim becomes a volume: what it asks for, the decision, the effect, and its PersistentVolume.

pub(crate) mod apply;
pub(crate) mod attributes;
pub(crate) mod decide;
#[cfg(test)]
mod decide_test;
pub(crate) mod manifest;
pub(crate) mod mount_option;
pub(crate) mod reconcile;
pub(crate) mod size;
pub(crate) mod source;
pub(crate) mod spec;
