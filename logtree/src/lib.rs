//! A log store in memory for a host's logs, keyed by hierarchical name: bounded in bytes, read by name or
//! subtree, backlog and live stream without a gap.
//!
//! It does not write to disk, ship logs or raise alerts. A writer never waits for a reader. When space runs
//! out, the oldest entries are dropped, and a count takes their place.
//!
//! ```text
//! tracing events ── LogStoreLayer ───────┐                     ┌── LogReader: backlog, then live
//! child's output ── LineWriter ──────────┤  one ring of bytes  ├── LogReader: node.etcd, warnings
//!     (parsed: klog, JSON, …)            ├─ for each name, one ┤
//! files of others ─ source::FileSource ──┤  order over all     └── render: full, compact, json
//! the kernel ────── source::KmsgSource ──┘
//! ```
//!
//! ```
//! use std::io::Write;
//!
//! use nodekeel_logtree::{Dn, Level, LogQuery, LogStore, WriterOptions, parse, render};
//! use tracing_subscriber::layer::SubscriberExt;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = LogStore::default();
//!     let subscriber = tracing_subscriber::registry().with(store.layer());
//!     tracing::subscriber::with_default(subscriber, || {
//!         let _span = tracing::info_span!("etcd", dn = "node.cluster.etcd").entered();
//!         tracing::info!(attempt = 1, "starting");
//!     });
//!
//!     // The output of a program: one writer for each stream and each start of it.
//!     let etcd: Dn = "node.cluster.etcd".parse()?;
//!     let options = WriterOptions::new("stderr").generation(1).line_parser(parse::etcd_line);
//!     let mut stderr = store.line_writer(&etcd, options);
//!     stderr.write_all(b"2026-11-21 11:26:09.110397 W | embed: no certificates\nbye\n")?;
//!
//!     let query = LogQuery::of_dn("node".parse()?).include_descendants().min_level(Level::Warn);
//!     let mut reader = store.open_reader(query)?;
//!     for entry in reader.read_backlog() {
//!         println!("{}", render::full_text(&entry));
//!         assert!(render::full_text(&entry).ends_with("no certificates package=embed"));
//!     }
//!     assert_eq!(reader.last_seq(), 2);
//!     Ok(())
//! }
//! ```
//!
//! # Order, locks and memory
//!
//! Each name has a ring of records with a separate lock. One atomic counter numbers the records of all
//! names, under the lock of their ring: an entry that was stored before another one has the lower number,
//! also under another name. Writers of two names share nothing but that counter.
//!
//! A reader merges its names by number, and reads up to the number that the counter had when it began. A name
//! that it has read to the end notifies it of the next record that it wants, before that record gets its
//! number: so no record below the reader's limit can be missing, and names and readers that have nothing to
//! do with a record cost its writer nothing. A reader locks one ring at a time, and only to find a block of
//! it with records of the wanted levels; others it skips. It reads the block without the lock, while writers
//! append behind what it reads. Should the ring evict the block in between, it stays until the reader has copied
//! its part: a call of a reader has one such block at a time, of at most 64 KiB or one record.
//!
//! The minimum level of a name is an atomic number next to its ring: a writer reads it before it encodes an entry, and
//! takes a lock only to count one that is not kept. While any level is set, the layer looks up whether one holds for
//! the name of an event.
//!
//! A directory of the names, with a lock for new names and for memory, gives the rings their blocks, and
//! takes them from the names that have most.
//!
//! # Bring your own
//!
//! No trait needs an implementation: the store has a [`tracing_subscriber::Layer`] and [`std::io::Write`]rs,
//! a [`LogReader`] is a [`futures_core::Stream`] of plain [`LogEntry`] values, and a parser is any
//! [`fn`](parse::LineParser) that turns a line into a [`LogMessage`].
//!
//! # Features
//!
//! - `testing` (off): checks over arbitrary input that property tests and fuzz targets share.
//!
//! # Origin
//!
//! The logtree of Monogon OS (`osbase/logtree`, `osbase/logbuffer`), whose names, filters and text formats it
//! keeps; systemd's journal for reading by position; s6-log for line limits that bound memory under a flood.

mod abbreviations;
mod class;
mod clock;
mod content_filter;
mod cursor;
mod decode;
mod directory;
mod dn;
mod entry;
mod eviction_history;
mod follower;
mod forgotten_names;
mod idle_names;
mod layer;
mod level;
mod limits;
mod line;
mod line_budget;
mod line_writer;
mod log_reader;
mod log_store;
mod loss;
mod merge;
mod missed;
mod name_levels;
mod name_log;
pub mod parse;

mod query;
mod record;
pub mod render;
mod ring;
mod segment;
mod shared_store;
pub mod source;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod text;

pub use abbreviations::NameAbbreviations;
pub use content_filter::{PatternError, TextPattern};
pub use dn::{Dn, DnError};
pub use entry::{
    DroppedEntries, EntryBody, FieldValue, LeveledEntry, LogEntry, LogField, LogMessage, RawLine,
    StreamOrigin,
};
pub use layer::LogStoreLayer;
pub use level::{Level, ParseLevelError};
pub use limits::LogLimits;
pub use line_writer::{LineWriter, WriterOptions};
pub use log_reader::LogReader;
pub use log_store::{DnStats, LogStore};
pub use query::{BacklogLimit, KindFilter, LogCursor, LogQuery, ParseCursorError, QueryError};
pub use text::is_unprintable;
