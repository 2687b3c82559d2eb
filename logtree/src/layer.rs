//! `tracing` events into the journal.

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

use crate::journal::Shared;
use crate::record::{Record, now, source_file};
use crate::state::Address;
use crate::{Dn, Level, Value};

/// The field of a span or an event that names where its entries go.
const DN: &str = "dn";

thread_local! {
    /// The buffer of the last event of this thread. It is taken while in use, for the `Debug` of a value may log too; and it
    /// may be gone already, for what a thread keeps may log when that is dropped, and there a panic is the program's end.
    static RECORD: Cell<Record> = Cell::default();
}

/// Stores `tracing` events. Made by [`Journal::layer`](crate::Journal::layer).
///
/// An event goes to the name in its own field `dn`; else to that of the innermost span around it that has such a field;
/// else to the default name. A `dn` that is no name is kept as an ordinary field. Events below the least level of their
/// name are not formatted. Spans themselves are not stored.
///
/// It gives no hint of the least level it needs: that would hold for all layers of the subscriber, and a span below that
/// level could name no more. Where libraries trace much, filter the layer alone, with
/// [`Layer::with_filter`](tracing_subscriber::Layer::with_filter): what no layer wants is then not even built.
#[derive(Debug)]
pub struct JournalLayer {
    shared: Arc<Shared>,
    default: Address,
    min_level: Level,
}

/// The name a span gives to what happens in it.
struct SpanDn(Arc<Address>);

impl JournalLayer {
    pub(crate) fn new(shared: Arc<Shared>) -> JournalLayer {
        JournalLayer { shared, default: Address::new(Dn::root()), min_level: Level::Info }
    }

    /// Sets the name for events outside of all named spans; the root by default.
    pub fn default_dn(mut self, dn: Dn) -> JournalLayer {
        self.default = Address::new(dn);
        self
    }

    /// Sets the least level stored for names without [one of their own](crate::Journal::set_level); `Info` by default.
    pub fn min_level(mut self, level: Level) -> JournalLayer {
        self.min_level = level;
        self
    }

    fn store(&self, event: &Event<'_>, to: &Address, level: Level) {
        let least = if self.shared.has_levels() { self.shared.level(&to.dn) } else { None };
        if level < least.unwrap_or(self.min_level) {
            return;
        }
        let mut record = RECORD.try_with(Cell::take).unwrap_or_default();
        let metadata = event.metadata();
        let file = source_file(metadata.file().unwrap_or_default());
        let line = metadata.line().unwrap_or_default();
        record.leveled(level, now(), file, line, self.shared.limits.message_bytes);
        event.record(&mut Recorder(&mut record));
        record.end_leveled(None);
        self.shared.append(to, &mut record);
        let _ = RECORD.try_with(|kept| kept.set(record));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for JournalLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        name_span(attributes.metadata(), |name| attributes.record(name), id, &context);
    }

    fn on_record(&self, id: &Id, values: &tracing::span::Record<'_>, context: Context<'_, S>) {
        if let Some(metadata) = context.metadata(id) {
            name_span(metadata, |name| values.record(name), id, &context);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let level = Level::from(*event.metadata().level());
        if level < self.min_level && !self.shared.has_levels() {
            return;
        }
        if let Some(dn) = dn_in(event.metadata(), |name| event.record(name)) {
            return self.store(event, &Address::new(dn), level);
        }
        let named = context
            .event_scope(event)
            .and_then(|mut scope| scope.find_map(|span| Some(span.extensions().get::<SpanDn>()?.0.clone())));
        self.store(event, named.as_deref().unwrap_or(&self.default), level);
    }
}

fn name_span<S: Subscriber + for<'a> LookupSpan<'a>>(
    metadata: &Metadata<'_>,
    record: impl FnOnce(&mut DnFinder),
    id: &Id,
    context: &Context<'_, S>,
) {
    if let (Some(dn), Some(span)) = (dn_in(metadata, record), context.span(id)) {
        span.extensions_mut().replace(SpanDn(Arc::new(Address::new(dn))));
    }
}

fn dn_in(metadata: &Metadata<'_>, record: impl FnOnce(&mut DnFinder)) -> Option<Dn> {
    metadata.fields().field(DN)?;
    let mut finder = DnFinder(None);
    record(&mut finder);
    finder.0
}

/// Finds the name among values.
struct DnFinder(Option<Dn>);

impl Visit for DnFinder {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == DN {
            self.0 = value.parse().ok();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == DN {
            self.0 = format!("{value:?}").parse().ok();
        }
    }
}

/// Writes the values of an event into a record.
struct Recorder<'a>(&'a mut Record);

impl Recorder<'_> {
    fn put(&mut self, field: &Field, text: fmt::Arguments<'_>) {
        match field.name() {
            "message" => self.0.message(text),
            // It has said where the event goes, unless it is no name.
            DN if text.to_string().parse::<Dn>().is_ok() => {}
            name => self.0.text(name, |record| record.push_args(text)),
        }
    }
}

impl Visit for Recorder<'_> {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.field(field.name(), &Value::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.field(field.name(), &Value::Uint(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.field(field.name(), &Value::Float(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.field(field.name(), &Value::Bool(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" | DN => self.put(field, format_args!("{value}")),
            name => self.0.text(name, |record| record.push_text(value)),
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.put(field, format_args!("{}", Chain(value)));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format_args!("{value:?}"));
    }
}

/// An error with all its sources.
struct Chain<'a>(&'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        std::iter::successors(self.0.source(), |&error| error.source())
            .try_for_each(|source| write!(f, ": {source}"))
    }
}
