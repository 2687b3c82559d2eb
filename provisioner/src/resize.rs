//! A bound claim gets the size and the VolumeAttributesClass that it asks for.

pub(crate) mod apply;
pub(crate) mod bound_claim;
pub(crate) mod claim_status;
pub(crate) mod expansion;
#[cfg(test)]
mod expansion_test;
pub(crate) mod modification;
#[cfg(test)]
mod modification_test;
pub(crate) mod reconcile;
#[cfg(test)]
mod resize_test;
