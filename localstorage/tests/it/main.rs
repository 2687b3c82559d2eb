//! Tests of the crate as others see it.

mod dir;
mod placement;
