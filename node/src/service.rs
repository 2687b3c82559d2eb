//! The operator's services.

pub(crate) mod user;
