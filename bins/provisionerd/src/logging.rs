//! Logging to stderr.

use std::fmt as std_fmt;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::{LookupSpan, SpanRef};
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use crate::config::{LogConfig, LogFormat};

pub(crate) fn init_logging(log: &LogConfig) -> Result<()> {
    // kube logs every failed call, which this program reports once.
    let filter = EnvFilter::try_new(format!("kube_client::client::builder=off,{}", log.level))
        .with_context(|| format!("can't parse log level {:?}", log.level))?;
    // Collectors of logs would store the color codes.
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match log.format {
        LogFormat::Compact => lines.compact().boxed(),
        LogFormat::Json => lines.fmt_fields(JsonFields::new()).event_format(JsonLine).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).context("can't start logging")
}

/// One JSON object per line: `timestamp`, `level`, `target`, `spans` inside of spans, and the fields of the event.
///
/// tracing-subscriber's own format writes a key twice if a field has the name of one of the first four, and
/// parsers keep one of the two, or reject the line. Here such a field gets the prefix `field_`.
#[derive(Debug)]
struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std_fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let (level, target) = (event.metadata().level().as_str(), event.metadata().target());
        let fixed = [("timestamp", time.as_str()), ("level", level), ("target", target)];
        let mut line =
            JsonObject(fixed.map(|(key, value)| (key.to_owned(), value.into())).into_iter().collect());
        if let Some(scope) = context.event_scope() {
            line.0.insert("spans".into(), scope.from_root().map(|span| span_fields::<S, N>(&span)).collect());
        }
        event.record(&mut line);
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

/// The name and the fields of a span.
fn span_fields<S, N>(span: &SpanRef<'_, S>) -> Value
where
    S: for<'a> LookupSpan<'a>,
    N: 'static,
{
    let extensions = span.extensions();
    let fields = extensions.get::<FormattedFields<N>>().map(|fields| fields.as_str()).unwrap_or_default();
    let mut fields: Map<String, Value> = serde_json::from_str(fields).unwrap_or_default();
    fields.entry("name").or_insert_with(|| span.name().into());
    fields.into()
}

struct JsonObject(Map<String, Value>);

impl JsonObject {
    fn insert_field(&mut self, field: &Field, value: Value) {
        let mut key = field.name().to_owned();
        while self.0.contains_key(&key) {
            key.insert_str(0, "field_");
        }
        self.0.insert(key, value);
    }
}

impl Visit for JsonObject {
    fn record_debug(&mut self, field: &Field, value: &dyn std_fmt::Debug) {
        self.insert_field(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert_field(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert_field(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert_field(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert_field(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert_field(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The keys of a JSON object of scalars, as a strict parser sees them.
    fn keys_in_order(line: &str) -> Vec<String> {
        struct Keys(Vec<String>);
        impl<'de> serde::Deserialize<'de> for Keys {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct KeyVisitor;
                impl<'de> serde::de::Visitor<'de> for KeyVisitor {
                    type Value = Keys;

                    fn expecting(&self, f: &mut std_fmt::Formatter<'_>) -> std_fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                        let mut keys = Vec::new();
                        while let Some((key, _)) = map.next_entry::<String, Value>()? {
                            keys.push(key);
                        }
                        Ok(Keys(keys))
                    }
                }
                deserializer.deserialize_map(KeyVisitor)
            }
        }
        serde_json::from_str::<Keys>(line).expect("a JSON object").0
    }

    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn no_line_of_a_json_log_has_a_key_twice() {
        let buffer = SharedBuffer::default();
        let writer = buffer.clone();
        let layer = fmt::layer().with_writer(move || writer.clone());
        let layer = layer.fmt_fields(JsonFields::new()).event_format(JsonLine);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let _span = tracing::info_span!("runnable", dn = "root.csi", name = "x").entered();
            tracing::info!(target = %"pods/u/mount", level = 7, timestamp = true, count = 3_u64, "published \"v\"");
        });
        let text = String::from_utf8(buffer.0.lock().expect("not poisoned").clone()).expect("UTF-8");
        let mut keys = keys_in_order(&text);
        keys.sort();
        let expected = [
            "count",
            "field_level",
            "field_target",
            "field_timestamp",
            "level",
            "message",
            "spans",
            "target",
            "timestamp",
        ];
        assert_eq!(keys, expected, "{text}");
        let line: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&line["level"], &line["field_target"]), (&"INFO".into(), &"pods/u/mount".into()));
        assert_eq!(line["spans"], serde_json::json!([{ "dn": "root.csi", "name": "x" }]));
        assert_eq!((&line["message"], &line["count"]), (&"published \"v\"".into(), &3.into()));
    }
}
