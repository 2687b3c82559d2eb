//! The volume of a deleted claim, or one that is released, is deleted: the decision, the effect, and what prevents it.

pub(crate) mod apply;
pub(crate) mod decide;
#[cfg(test)]
mod decide_test;
pub(crate) mod live_claims;
pub(crate) mod reconcile;
pub(crate) mod reservation;
