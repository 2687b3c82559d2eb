//! A journal in memory for a machine's logs, filed by hierarchical name: bounded in bytes, read by name or subtree,
//! backlog and live stream without a gap.
//!
//! It stores nothing on disk, sends nothing anywhere, and decides nothing: a writer never waits for a reader, and what does
//! not fit is dropped oldest first and counted where it was.
//!
//! ```text
//! tracing events ── JournalLayer ──┐                     ┌── Reader: backlog, then live
//! child's output ── LineWriter ────┤  one ring of bytes  ├── Reader: node.etcd, warnings
//!     (parsed: klog, zap, logfmt)  ├─ for each name, one ┤
//! FIFOs ─────────── source::Fifo ──┤  order over all     └── render: full, compact, json
//! the kernel ────── source::Kmsg ──┘
//! ```
//!
//! ```
//! use std::io::Write;
//! use nodekeel_logtree::{Dn, Journal, Level, Query, WriterOptions, parse, render};
//! use tracing_subscriber::layer::SubscriberExt;
//!
//! let journal = Journal::default();
//! let subscriber = tracing_subscriber::registry().with(journal.layer());
//! tracing::subscriber::with_default(subscriber, || {
//!     let _span = tracing::info_span!("etcd", dn = "node.cluster.etcd").entered();
//!     tracing::info!(attempt = 1, "starting");
//! });
//!
//! // The output of a program, one writer for each of its streams and starts.
//! let etcd: Dn = "node.cluster.etcd".parse()?;
//! let options = WriterOptions::new("stderr").generation(1).parser(parse::etcd);
//! let mut stderr = journal.writer(&etcd, options);
//! stderr.write_all(b"2026-11-21 11:26:09.110397 W | embed: no certificates\nbye\n")?;
//!
//! let mut reader = journal.read(Query::new("node".parse()?).children().min_level(Level::Warn))?;
//! for entry in reader.backlog() {
//!     assert!(render::full(&entry).ends_with("no certificates package=embed"));
//! }
//! # assert_eq!(reader.position(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Bring your own
//!
//! There is nothing to implement: the journal *is* a [`tracing_subscriber::Layer`] and hands out [`std::io::Write`]rs, a
//! [`Reader`] is a [`futures_core::Stream`] of plain [`Entry`] values, and a parser is any [`fn`](parse::Parser) that
//! makes a [`Message`] of a line.
//!
//! # Features
//!
//! - `testing` (off): the checks over arbitrary input that the property tests and the fuzz targets share.
//!
//! # Origin
//!
//! The logtree of Monogon OS (`osbase/logtree`, `osbase/logbuffer`), whose names, filters and text formats it keeps;
//! systemd's journal for reading by position; s6-log for lines that no flood can take the memory for.

mod cursor;
mod decode;
mod dn;
mod entry;
mod journal;
mod layer;
mod level;
mod line;
pub mod parse;
mod query;
mod raw;
mod read;
mod record;
pub mod render;
mod ring;
mod shorten;
pub mod source;
mod state;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod text;

pub use dn::{Dn, DnError};
pub use entry::{Body, Dropped, Entry, Field, Leveled, Message, Origin, Raw, Value};
pub use journal::{DnStats, Journal, Limits};
pub use layer::JournalLayer;
pub use level::{Level, UnknownLevel};
pub use query::{Backlog, Kind, Query, QueryError};
pub use raw::{LineWriter, WriterOptions};
pub use read::Reader;
pub use shorten::Dictionary;
