//! From places in the text to fields and back.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The text as a tree of values that know their places.
pub(super) struct Document<'a>(Spanned<DeTable<'a>>);

impl<'a> Document<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, toml::de::Error> {
        DeTable::parse(text).map(Self)
    }

    /// The innermost field that holds this place, as `service[0].name`.
    pub(super) fn path_at(&self, place: Range<usize>) -> String {
        let mut path = String::new();
        let mut table = Some(self.0.get_ref());
        while let Some(fields) = table.take() {
            let found =
                fields.iter().find(|(key, value)| encloses(&key.span(), &place) || contains(value, &place));
            let Some((key, value)) = found else { break };
            push_key(&mut path, key.get_ref());
            table = descend(value.get_ref(), &place, &mut path);
        }
        path
    }

    /// Where the field stands that [`path_at`](Self::path_at) would call so, or else the nearest one that encloses it.
    pub(super) fn span_of(&self, path: &str) -> Option<Range<usize>> {
        let mut fields = Some(self.0.get_ref());
        let mut span = None;
        for step in path.split('.') {
            let (key, index) = match step.split_once('[') {
                Some((key, index)) => (key, index.trim_end_matches(']').parse::<usize>().ok()),
                None => (step, None),
            };
            let Some((name, value)) = fields.and_then(|f| f.iter().find(|(k, _)| k.get_ref() == key)) else {
                break;
            };
            let (value, place) = match (index, value.get_ref()) {
                (Some(index), DeValue::Array(items)) => match items.get(index) {
                    Some(item) => (item.get_ref(), item.span()),
                    None => break,
                },
                (_, value @ DeValue::Table(_)) => (value, name.span()),
                (_, inner) => (inner, value.span()),
            };
            span = Some(place);
            fields = value.as_table();
        }
        span
    }
}

fn encloses(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// The span of a table is only its header, or the keys that lie in it are elsewhere: so it is asked for its values.
fn contains(value: &Spanned<DeValue<'_>>, place: &Range<usize>) -> bool {
    encloses(&value.span(), place)
        || match value.get_ref() {
            DeValue::Array(items) => items.iter().any(|item| contains(item, place)),
            DeValue::Table(fields) => {
                fields.iter().any(|(key, value)| encloses(&key.span(), place) || contains(value, place))
            }
            _ => false,
        }
}

/// The table to go on in, after the index of the item that holds the place, if the value is an array.
fn descend<'v, 'a>(
    value: &'v DeValue<'a>,
    place: &Range<usize>,
    path: &mut String,
) -> Option<&'v DeTable<'a>> {
    match value {
        DeValue::Table(fields) => Some(fields),
        DeValue::Array(items) => {
            let index = items.iter().position(|item| contains(item, place))?;
            path.push_str(&format!("[{index}]"));
            descend(items[index].get_ref(), place, path)
        }
        _ => None,
    }
}

fn push_key(path: &mut String, key: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(key);
}

/// Line and column of the place's beginning, from 1, the column in characters.
pub(super) fn position(text: &str, place: Option<Range<usize>>) -> Option<(usize, usize)> {
    let before = text.get(..place?.start)?;
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Some((before.matches('\n').count() + 1, before[line_start..].chars().count() + 1))
}

/// The parser's message without line breaks: everything about one fault is to be one line.
pub(super) fn one_line(error: &toml::de::Error) -> String {
    error.message().lines().map(str::trim).collect::<Vec<_>>().join("; ")
}
