//! Maps positions in the text to fields and back.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The tables that belong to no part.
pub(crate) const CORE_TABLES: [&str; 6] = ["node", "log", "events", "control", "health", "services"];

/// The text as a tree of values with their spans.
pub(super) struct TomlDocument<'a>(Spanned<DeTable<'a>>);

impl<'a> TomlDocument<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, toml::de::Error> {
        DeTable::parse(text).map(Self)
    }

    /// Finds a table of the file that is not written as a table: its span, its name, and how to write it.
    /// serde would take the values of a list for those of the table's keys, in their order.
    pub(super) fn find_misshapen_table<'p>(
        &self,
        of_parts: impl Iterator<Item = &'p str>,
    ) -> Option<(Range<usize>, String, String)> {
        for path in CORE_TABLES.into_iter().chain(of_parts) {
            if let Some((value, span)) = self.value_at(path)
                && !value.is_table()
            {
                let hint = match path {
                    "services" => "; your services are [[service]]",
                    _ => "",
                };
                let message = format!("must be a table, written [{path}]{hint}");
                return Some((span, path.to_owned(), message));
            }
        }
        // `[[service]]` is the only array of tables, and so has a check of its own.
        let (services, span) = self.value_at("service")?;
        let refuse = |span, path: String, message: &str| Some((span, path, message.to_owned()));
        let tables = services.as_array().filter(|all| all.iter().all(|one| one.get_ref().is_table()));
        let Some(tables) = tables else {
            let message = "must be an array of tables, each written [[service]]";
            return refuse(span, "service".to_owned(), message);
        };
        for (index, service) in tables.iter().enumerate() {
            // serde would read a backoff that is a list as the values of its keys in their order.
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

    /// The span of the value at a path of table keys.
    pub(super) fn span_at(&self, path: &str) -> Option<Range<usize>> {
        self.value_at(path).map(|(_, span)| span)
    }

    /// The value at a path of table keys.
    fn value_at(&self, path: &str) -> Option<(&DeValue<'a>, Range<usize>)> {
        let mut fields = Some(self.0.get_ref());
        let mut found = None;
        // Only tables have keys: a path that leads through another value leads nowhere.
        for step in path.split('.') {
            let (_, value) = fields?.iter().find(|(key, _)| key.get_ref() == step)?;
            fields = value.get_ref().as_table();
            found = Some((value.get_ref(), value.span()));
        }
        found
    }

    /// The path of the innermost field that contains this span, as `service[0].name`.
    pub(super) fn field_path_at(&self, span: Range<usize>) -> String {
        let mut path = String::new();
        let mut table = Some(self.0.get_ref());
        while let Some(fields) = table.take() {
            // The key counts too: the parser's error about an unknown key has the span of the key alone.
            let found = fields
                .iter()
                .find(|(key, value)| encloses_span(&key.span(), &span) || contains_span(value, &span));
            let Some((key, value)) = found else { break };
            push_key(&mut path, key.get_ref());
            // The innermost table wins, so that the path becomes as long as the document allows.
            table = enter_table(value.get_ref(), &span, &mut path);
        }
        path
    }

    /// The span of a field path, as of [`field_path_at`](Self::field_path_at), or of its nearest enclosing
    /// field.
    pub(super) fn span_of_field(&self, path: &str) -> Option<Range<usize>> {
        let mut fields = Some(self.0.get_ref());
        let mut span = None;
        // A missing field has no span of its own: the error is then at the table that should have it.
        for step in path.split('.') {
            let (key, index) = match step.split_once('[') {
                Some((key, index)) => (key, index.trim_end_matches(']').parse::<usize>().ok()),
                None => (step, None),
            };
            let Some((name, value)) = fields.and_then(|f| f.iter().find(|(k, _)| k.get_ref() == key)) else {
                break;
            };
            let (value, value_span) = match (index, value.get_ref()) {
                (Some(index), DeValue::Array(items)) => match items.get(index) {
                    Some(item) => (item.get_ref(), item.span()),
                    None => break,
                },
                // The span of a table may be only its header, and so the error points at the name.
                (_, value @ DeValue::Table(_)) => (value, name.span()),
                (_, inner) => (inner, value.span()),
            };
            span = Some(value_span);
            fields = value.as_table();
        }
        span
    }
}

fn encloses_span(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// The span of a table is only its header, and its keys may be elsewhere: so its values are searched.
fn contains_span(value: &Spanned<DeValue<'_>>, span: &Range<usize>) -> bool {
    encloses_span(&value.span(), span)
        || match value.get_ref() {
            DeValue::Array(items) => items.iter().any(|item| contains_span(item, span)),
            DeValue::Table(fields) => fields
                .iter()
                .any(|(key, value)| encloses_span(&key.span(), span) || contains_span(value, span)),
            _ => false,
        }
}

/// The table to search next; if the value is an array, the index of the item that contains the span is
/// appended.
fn enter_table<'v, 'a>(
    value: &'v DeValue<'a>,
    span: &Range<usize>,
    path: &mut String,
) -> Option<&'v DeTable<'a>> {
    match value {
        DeValue::Table(fields) => Some(fields),
        DeValue::Array(items) => {
            let index = items.iter().position(|item| contains_span(item, span))?;
            path.push_str(&format!("[{index}]"));
            enter_table(items[index].get_ref(), span, path)
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

/// Line and column of the start of a span, from 1, the column in characters.
pub(super) fn line_and_column(text: &str, span: Option<Range<usize>>) -> Option<(usize, usize)> {
    // A span that the text does not have gives no place.
    let before = text.get(..span?.start)?;
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Some((before.matches('\n').count() + 1, before[line_start..].chars().count() + 1))
}

/// The parser's message on one line, since an error is one line; with the key, if the message does not name
/// it.
pub(super) fn one_line_message(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().lines().map(str::trim).collect::<Vec<_>>().join("; ");
    let key = error.span().and_then(|span| text.get(span)).unwrap_or_default();
    match message.as_str() {
        "duplicate key" if !key.is_empty() => format!("duplicate key {key}; remove one of the two"),
        // The parser's message where one of several words is expected.
        "wanted string or table" => "must be text in quotes".to_owned(),
        _ => describe_type_error(&message),
    }
}

/// Translates serde's message about a value of the mismatch type from Rust types to TOML.
fn describe_type_error(message: &str) -> String {
    let mismatch = ["invalid type: ", "invalid value: "].iter().find_map(|start| message.strip_prefix(start));
    let Some((given, expected)) = mismatch.and_then(|mismatch| mismatch.split_once(", expected ")) else {
        return message.to_owned();
    };
    // These texts are those of serde's implementations for the types of the configuration's fields.
    let expected = match expected {
        "a nonzero u16" => "a whole number from 1 to 65535, without quotes",
        "a nonzero usize" | "a nonzero u32" => "a whole number above 0, without quotes",
        "u8" => "a whole number from 0 to 255, without quotes",
        "u16" => "a whole number from 0 to 65535, without quotes",
        "u32" => "a whole number from 0 to 4294967295, without quotes",
        "u64" | "usize" => "a whole number that is not negative, without quotes",
        "i16" => "a whole number from -32768 to 32767, without quotes",
        "a boolean" => "true or false, without quotes",
        "f64" => "a number, without quotes",
        "a string" | "path string" => "text in quotes",
        "a sequence" => "a list in brackets, like [\"a\", \"b\"]",
        "a map" => "a table in braces, like { KEY = \"value\" }",
        other if other.starts_with("struct ") => "a table",
        other => other,
    };
    let given = match given {
        "sequence" => "a list",
        "map" => "a table",
        other => match other.split_once(' ') {
            Some(("string", text)) => text,
            Some(("integer" | "boolean" | "floating", text)) => {
                // serde wraps the value in backticks, and writes "floating point" in two words.
                text.trim_start_matches("point ").trim_matches('`')
            }
            _ => other,
        },
    };
    format!("must be {expected}, not {given}")
}
