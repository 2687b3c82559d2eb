//! A node as a program that embeds the library has it: nodes in this process, and parts of the tests.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod api;
mod harness;
mod logs;
mod long_requests;
mod parts;
mod reload;
mod volume;
