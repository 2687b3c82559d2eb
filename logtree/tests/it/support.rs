//! Helpers for all tests.

use nodekeel_logtree::{Dn, EntryBody, Level, LogEntry, LogMessage, LogQuery, LogStore};

pub(crate) fn dn(text: &str) -> Dn {
    text.parse().unwrap()
}

pub(crate) fn append_message(store: &LogStore, to: &str, level: Level, text: impl Into<String>) {
    store.append_message(&dn(to), LogMessage::new(level, text));
}

pub(crate) fn append_info(store: &LogStore, to: &str, text: impl Into<String>) {
    append_message(store, to, Level::Info, text);
}

/// The current backlog of a query.
pub(crate) fn read_backlog(store: &LogStore, query: LogQuery) -> Vec<LogEntry> {
    store.open_reader(query).unwrap().read_backlog()
}

/// The texts of the current backlog of a query.
pub(crate) fn read_texts(store: &LogStore, query: LogQuery) -> Vec<String> {
    entry_texts(&read_backlog(store, query))
}

/// A query for exactly a name.
pub(crate) fn name_query(name: &str) -> LogQuery {
    LogQuery::of_dn(dn(name))
}

/// A query for a name and all names below it.
pub(crate) fn subtree_query(name: &str) -> LogQuery {
    name_query(name).include_descendants()
}

/// The text of an entry; `-N` for N dropped entries, `-N?` for an upper bound.
pub(crate) fn entry_text(entry: &LogEntry) -> String {
    match &entry.body {
        EntryBody::Leveled(leveled) => leveled.message.clone(),
        EntryBody::Raw(raw) => raw.text.clone(),
        EntryBody::Dropped(dropped) => format!("-{}{}", dropped.count, if dropped.exact { "" } else { "?" }),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn entry_texts(entries: &[LogEntry]) -> Vec<String> {
    entries.iter().map(entry_text).collect()
}

pub(crate) fn entry_level(entry: &LogEntry) -> Level {
    match &entry.body {
        EntryBody::Leveled(leveled) => leveled.level,
        other => panic!("{other:?}"),
    }
}
