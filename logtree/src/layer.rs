//! Stores `tracing` events in the log store.

use std::cell::Cell;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::clock::now_nanos;
use crate::name_log::RingAddress;
use crate::record::{RecordBuffer, short_source_path};
use crate::shared_store::SharedLogStore;
use crate::text::floor_char_boundary;
use crate::{Dn, FieldValue, Level, LogField};

/// The field of a span or an event that contains the name for its entries.
const DN_FIELD: &str = "dn";

thread_local! {
    /// The buffer of the last event of this thread. It is taken out while in use, because the `Debug` of a
    /// value may log, too. It may be destroyed already, because the destructor of another thread-local may
    /// log; a panic there would abort the program.
    static RECORD: Cell<RecordBuffer> = Cell::default();
}

/// Stores `tracing` events. Created by [`LogStore::layer`](crate::LogStore::layer).
///
/// An event is stored under the name in its field `dn`; otherwise under the name of the innermost enclosing
/// span with that field; otherwise under the default name. A `dn` that is not a valid name is stored as an
/// ordinary field. Events below the minimum level of their name, or else of the layer, are not formatted.
///
/// Spans themselves are not stored, but their fields are, with each event in them: after the fields of the
/// event, those of the innermost span first. Of two fields with the same name, the inner one is stored. Spans
/// below the layer's minimum level have no fields, unless a [level](crate::LogStore::set_level) is set for any
/// name.
///
/// The layer gives no hint of its maximum verbosity: the hint would apply to all layers of the subscriber,
/// and spans below that level could no longer carry a name. If libraries trace a lot, filter this layer
/// alone, with [`Layer::with_filter`](tracing_subscriber::Layer::with_filter): events that no layer wants are
/// then not even built.
#[derive(Debug)]
pub struct LogStoreLayer {
    shared: Arc<SharedLogStore>,
    default_address: RingAddress,
    min_level: Level,
}

/// The name that a span assigns to the events in it.
struct SpanDn(Arc<RingAddress>);

/// The fields of a span, without its name.
#[derive(Default)]
struct SpanFields(Arc<Vec<LogField>>);

impl LogStoreLayer {
    pub(crate) fn new(shared: Arc<SharedLogStore>) -> LogStoreLayer {
        LogStoreLayer { shared, default_address: RingAddress::new(Dn::root()), min_level: Level::Info }
    }

    /// Sets the name for events outside of all spans with a name; the root by default.
    pub fn default_dn(mut self, dn: Dn) -> LogStoreLayer {
        self.default_address = RingAddress::new(dn);
        self
    }

    /// Sets the minimum level for names without [a level](crate::LogStore::set_level); `Info` by default.
    pub fn min_level(mut self, level: Level) -> LogStoreLayer {
        self.min_level = level;
        self
    }

    /// Returns whether a level is set for any name.
    fn has_levels(&self) -> bool {
        self.shared.lowest_level.get().is_some()
    }

    fn store_event(&self, event: &Event<'_>, to: &RingAddress, level: Level, spans: &[Arc<Vec<LogField>>]) {
        // A level that is set for the name replaces that of the layer.
        // Without any level, no event pays for the lookup.
        let keeps_level = match self.has_levels().then(|| self.shared.level(&to.dn)).flatten() {
            Some(_) => self.shared.keeps_level(to, level),
            None => level >= self.min_level,
        };
        if !keeps_level {
            return;
        }
        // The buffer of this thread; a new one while another event is being recorded, or at the thread's end.
        let mut record = RECORD.try_with(Cell::take).unwrap_or_default();
        let metadata = event.metadata();
        let file = short_source_path(metadata.file().unwrap_or_default());
        let line = metadata.line().unwrap_or_default();
        record.start_leveled(level, now_nanos(), file, line, self.shared.limits.message_bytes);
        event.record(&mut EventRecorder(&mut record));
        for (depth, fields) in spans.iter().enumerate() {
            let is_hidden = |name: &str| {
                metadata.fields().field(name).is_some_and(|field| has_value(event, &field))
                    || spans[..depth].iter().any(|inner| inner.iter().any(|field| field.name == name))
            };
            for field in fields.iter().filter(|field| !is_hidden(&field.name)) {
                record.push_field(&field.name, &field.value);
            }
        }
        record.finish_leveled(None);
        self.shared.append_record(to, &mut record);
        // If the thread is ending, the buffer is gone, and this one is dropped.
        let _ = RECORD.try_with(|kept| kept.set(record));
    }

    /// Keeps the name and the fields of a span, or their new values.
    fn keep_span<S: Subscriber + for<'a> LookupSpan<'a>>(
        &self,
        metadata: &Metadata<'_>,
        record: impl Fn(&mut dyn Visit),
        id: &Id,
        context: &Context<'_, S>,
    ) {
        let dn = find_dn(metadata, |finder| record(finder));
        let level = Level::from(*metadata.level());
        let mut recorder = SpanRecorder { fields: Vec::new(), room: self.shared.limits.message_bytes };
        if metadata.fields().len() > usize::from(dn.is_some())
            && (level >= self.min_level || self.has_levels())
        {
            record(&mut recorder);
        }
        if dn.is_none() && recorder.fields.is_empty() {
            return;
        }
        let Some(span) = context.span(id) else { return };
        // Locked only now: recording runs the `Debug` of values, which may log within the same span.
        let mut extensions = span.extensions_mut();
        if let Some(dn) = dn {
            extensions.replace(SpanDn(Arc::new(RingAddress::new(dn))));
        }
        if !recorder.fields.is_empty() {
            let mut kept = extensions.remove::<SpanFields>().unwrap_or_default();
            // An event on another thread may still use the former fields.
            let fields = Arc::make_mut(&mut kept.0);
            fields.retain(|old| recorder.fields.iter().all(|new| new.name != old.name));
            fields.append(&mut recorder.fields);
            extensions.insert(kept);
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for LogStoreLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.keep_span(attributes.metadata(), |visit| attributes.record(visit), id, &context);
    }

    fn on_record(&self, id: &Id, values: &tracing::span::Record<'_>, context: Context<'_, S>) {
        if let Some(metadata) = context.metadata(id) {
            self.keep_span(metadata, |visit| values.record(visit), id, &context);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let level = Level::from(*event.metadata().level());
        // Only the level of a name can keep an event that is below the layer's.
        if level < self.min_level && !self.has_levels() {
            return;
        }
        let own = find_dn(event.metadata(), |finder| event.record(finder));
        let mut address = own.map(|dn| Arc::new(RingAddress::new(dn)));
        let mut fields = Vec::new();
        for span in context.event_scope(event).into_iter().flatten() {
            let extensions = span.extensions();
            if address.is_none() {
                address = extensions.get::<SpanDn>().map(|named| Arc::clone(&named.0));
            }
            fields.extend(extensions.get::<SpanFields>().map(|kept| Arc::clone(&kept.0)));
        }
        self.store_event(event, address.as_deref().unwrap_or(&self.default_address), level, &fields);
    }
}

fn find_dn(metadata: &Metadata<'_>, record: impl FnOnce(&mut dyn Visit)) -> Option<Dn> {
    metadata.fields().field(DN_FIELD)?;
    let mut finder = DnFinder(None);
    record(&mut finder);
    finder.0
}

/// Finds the name among the values of a span or an event.
struct DnFinder(Option<Dn>);

impl Visit for DnFinder {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == DN_FIELD {
            self.0 = value.parse().ok();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == DN_FIELD {
            // A field written as `dn = %name` comes as a `Debug` value, too.
            self.0 = format!("{value:?}").parse().ok();
        }
    }
}

/// Keeps the values of a span. Texts are cut at a number of bytes, so that spans stay small.
struct SpanRecorder {
    fields: Vec<LogField>,
    room: usize,
}

impl SpanRecorder {
    fn push_field(&mut self, field: &Field, mut value: FieldValue) {
        self.room = self.room.saturating_sub(field.name().len());
        if let FieldValue::Text(text) = &mut value {
            let kept = floor_char_boundary(text, self.room);
            self.room -= kept;
            if kept < text.len() {
                text.truncate(kept);
                text.push_str("...");
            }
        }
        self.fields.push(LogField { name: field.name().to_owned(), value });
    }

    fn push_formatted(&mut self, field: &Field, text: String) {
        // Used as the span's name already.
        if field.name() != DN_FIELD || text.parse::<Dn>().is_err() {
            self.push_field(field, FieldValue::Text(text));
        }
    }
}

impl Visit for SpanRecorder {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push_field(field, FieldValue::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push_field(field, FieldValue::Uint(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push_field(field, FieldValue::Float(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push_field(field, FieldValue::Bool(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push_formatted(field, value.to_owned());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.push_formatted(field, ErrorChain(value).to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push_formatted(field, format!("{value:?}"));
    }
}

/// Returns whether an event has a value for one of its fields. One that is empty or `None` has not.
fn has_value(event: &Event<'_>, field: &Field) -> bool {
    let mut finder = ValueFinder { field, found: false };
    event.record(&mut finder);
    finder.found
}

struct ValueFinder<'a> {
    field: &'a Field,
    found: bool,
}

impl Visit for ValueFinder<'_> {
    fn record_debug(&mut self, field: &Field, _: &dyn fmt::Debug) {
        self.found |= field == self.field;
    }
}

/// Writes the values of an event into a record.
struct EventRecorder<'a>(&'a mut RecordBuffer);

impl EventRecorder<'_> {
    fn push_formatted(&mut self, field: &Field, text: fmt::Arguments<'_>) {
        match field.name() {
            "message" => self.0.push_message(text),
            // Used as the event's name already; stored as a field only if it is invalid.
            DN_FIELD if text.to_string().parse::<Dn>().is_ok() => {}
            name => self.0.push_text_field(name, |record| record.push_args(text)),
        }
    }
}

impl Visit for EventRecorder<'_> {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.push_field(field.name(), &FieldValue::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.push_field(field.name(), &FieldValue::Uint(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.push_field(field.name(), &FieldValue::Float(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.push_field(field.name(), &FieldValue::Bool(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" | DN_FIELD => self.push_formatted(field, format_args!("{value}")),
            name => self.0.push_text_field(name, |record| record.push_text(value)),
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.push_formatted(field, format_args!("{}", ErrorChain(value)));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push_formatted(field, format_args!("{value:?}"));
    }
}

/// An error with all its sources.
struct ErrorChain<'a>(&'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        std::iter::successors(self.0.source(), |&error| error.source())
            .try_for_each(|source| write!(f, ": {source}"))
    }
}
