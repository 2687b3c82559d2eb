//! The crate as its users see it. Numbers of cases are those of the original's tests, by which its behaviour is known.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod backlog;
mod layer;
mod limits;
mod live;
mod parsed;
mod properties;
mod raw;
mod rendering;
mod sources;
mod support;
