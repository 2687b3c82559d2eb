//! Short words for what all tests do.

use nodekeel_logtree::{Body, Dn, Entry, Journal, Level, Message, Query};

pub(crate) fn dn(text: &str) -> Dn {
    text.parse().unwrap()
}

pub(crate) fn log(journal: &Journal, to: &str, level: Level, text: impl Into<String>) {
    journal.append(&dn(to), Message::new(level, text));
}

pub(crate) fn info(journal: &Journal, to: &str, text: impl Into<String>) {
    log(journal, to, Level::Info, text);
}

/// Everything a query finds now.
pub(crate) fn read(journal: &Journal, query: Query) -> Vec<Entry> {
    journal.read(query).unwrap().backlog()
}

/// A name and all within it.
pub(crate) fn within(name: &str) -> Query {
    Query::new(dn(name)).children()
}

/// What an entry says; `-N` for N dropped entries.
pub(crate) fn text(entry: &Entry) -> String {
    match &entry.body {
        Body::Leveled(leveled) => leveled.message.clone(),
        Body::Raw(raw) => raw.text.clone(),
        Body::Dropped(dropped) => format!("-{}{}", dropped.count, if dropped.exact { "" } else { "?" }),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn texts(entries: &[Entry]) -> Vec<String> {
    entries.iter().map(text).collect()
}

pub(crate) fn level(entry: &Entry) -> Level {
    match &entry.body {
        Body::Leveled(leveled) => leveled.level,
        other => panic!("{other:?}"),
    }
}
