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

    /// A table of the file that is written as something else: where, its name, and how it is written instead. The
    /// parser would take the values of a list for those of the table's keys, in their order.
    pub(super) fn misshapen(&self) -> Option<(Range<usize>, String, String)> {
        for path in [
            "node",
            "log",
            "events",
            "control",
            "services",
            "services.etcd",
            "services.containerd",
            "services.containerd.cri",
            "services.containerd.cri.runsc",
            "cluster",
            "provisioner",
        ] {
            if let Some((value, span)) = self.value_at(path)
                && !value.is_table()
            {
                let hint = match path {
                    "services" => "; a service of your own is a [[service]]",
                    _ => "",
                };
                let message = format!("must be a table, written [{path}]{hint}");
                return Some((span, path.to_owned(), message));
            }
        }
        let (services, span) = self.value_at("service")?;
        let refuse = |span, path: String, message: &str| Some((span, path, message.to_owned()));
        let tables = services.as_array().filter(|all| all.iter().all(|one| one.get_ref().is_table()));
        let Some(tables) = tables else {
            let message = "there may be several services, so each is written [[service]], in two brackets";
            return refuse(span, "service".to_owned(), message);
        };
        for (index, service) in tables.iter().enumerate() {
            let mut fields = service.get_ref().as_table()?.iter();
            if let Some((_, backoff)) = fields.find(|(key, _)| key.get_ref() == "backoff")
                && !backoff.get_ref().is_table()
            {
                let message = "must be a table in braces, like { initial = \"500ms\", max = \"60s\" }";
                return refuse(backoff.span(), format!("service[{index}].backoff"), message);
            }
        }
        None
    }

    /// The value of a key that lies in tables alone.
    fn value_at(&self, path: &str) -> Option<(&DeValue<'a>, Range<usize>)> {
        let mut fields = Some(self.0.get_ref());
        let mut found = None;
        for step in path.split('.') {
            let (_, value) = fields?.iter().find(|(key, _)| key.get_ref() == step)?;
            fields = value.get_ref().as_table();
            found = Some((value.get_ref(), value.span()));
        }
        found
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

/// The parser's message without line breaks, for everything about one fault is to be one line; and the key that it is
/// about, if it does not name it.
pub(super) fn one_line(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().lines().map(str::trim).collect::<Vec<_>>().join("; ");
    let place = error.span().and_then(|span| text.get(span)).unwrap_or_default();
    match message.as_str() {
        "duplicate key" if !place.is_empty() => {
            format!("the key {place} is given twice in the same table; remove one of them")
        }
        // What it says where it expected one word of several.
        "wanted string or table" => "must be text in quotes".to_owned(),
        _ => in_words(&message),
    }
}

/// What serde says about a value of the wrong type, in words of a person who writes such files.
fn in_words(message: &str) -> String {
    let wrong = ["invalid type: ", "invalid value: "].iter().find_map(|start| message.strip_prefix(start));
    let Some((given, expected)) = wrong.and_then(|wrong| wrong.split_once(", expected ")) else {
        return message.to_owned();
    };
    let expected = match expected {
        "a nonzero u16" => "a whole number from 1 to 65535, without quotes",
        "a nonzero usize" => "a whole number above 0, without quotes",
        "a boolean" => "true or false, without quotes",
        "f64" => "a number, without quotes",
        "a string" | "path string" => "text in quotes",
        "a sequence" => "a list in brackets, like [\"a\", \"b\"]",
        "a map" => "a table in braces, like { KEY = \"value\" }",
        other if other.starts_with("struct ") => "a table with keys of its own",
        other => other,
    };
    let given = match given {
        "sequence" => "a list",
        "map" => "a table",
        other => match other.split_once(' ') {
            Some(("string", text)) => text,
            Some(("integer" | "boolean" | "floating", text)) => {
                text.trim_start_matches("point ").trim_matches('`')
            }
            _ => other,
        },
    };
    format!("must be {expected}, not {given}")
}
