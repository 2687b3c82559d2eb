//! The tracing events that reach the log.

use nodekeel_logtree::{Level, LogStore};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};

use crate::program_name::program_name;

/// Sends tracing events to the log store: those of nodekeel and of the program's crate down to the level that the console
/// shows or that is set for a DN, those of libraries from `info` on. Below `info`, libraries would trace the delivery of log entries to their
/// readers, in an endless loop.
pub(crate) fn log_subscriber(log_store: &LogStore, console: Option<Level>) -> impl Subscriber {
    // The log keeps `info` also if the console shows less.
    let level = console.unwrap_or(Level::Info).min(Level::Info);
    let filter =
        EventFilter { log_store: log_store.clone(), own_target: program_name().replace('-', "_"), level };
    tracing_subscriber::registry().with(log_store.layer().min_level(level).with_filter(filter))
}

/// Enables events by their target. tracing asks it again when a level is set in the log store.
struct EventFilter {
    log_store: LogStore,
    /// The crate of the program: its name, with `_` for `-`.
    own_target: String,
    /// Minimum level of nodekeel's events, if none is set for a DN.
    level: Level,
}

impl EventFilter {
    /// The most verbose level of nodekeel's events.
    fn nodekeel_level(&self) -> LevelFilter {
        match self.log_store.lowest_level().unwrap_or(Level::Info).min(self.level) {
            Level::Trace => LevelFilter::TRACE,
            Level::Debug => LevelFilter::DEBUG,
            _ => LevelFilter::INFO,
        }
    }

    fn is_enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        let level = match target {
            // Each failed call to the API server; its caller logs it with the reason.
            _ if target.starts_with("kube_client::client::builder") => LevelFilter::OFF,
            _ if target.starts_with("nodekeel") || target.starts_with(&self.own_target) => {
                self.nodekeel_level()
            }
            _ => LevelFilter::INFO,
        };
        *metadata.level() <= level
    }
}

impl<S> Filter<S> for EventFilter {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.is_enabled(metadata)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.is_enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.nodekeel_level())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use nodekeel_logtree::{Dn, LogQuery, render};

    use super::*;

    /// Runs with this subscriber, and no other one: tracing remembers for all threads what any subscriber enables.
    fn with_subscriber(subscriber: impl Subscriber + Send + Sync + 'static, work: impl FnOnce()) {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        tracing::subscriber::with_default(subscriber, work);
    }

    /// The messages of a DN.
    fn messages(log_store: &LogStore, dn: &str) -> Vec<String> {
        let query = LogQuery::of_dn(dn.parse().expect("a name"));
        let entries = log_store.open_reader(query).expect("a valid query").read_backlog();
        let message = |line: String| line.rsplit("] ").next().unwrap_or_default().to_owned();
        entries.iter().map(|entry| message(render::full_text(entry))).collect()
    }

    #[test]
    fn debug_spans_of_libraries_are_neither_built_nor_stored() {
        for (console, hint, stored) in [
            (None, LevelFilter::INFO, &[][..]),
            (Some(Level::Error), LevelFilter::INFO, &[]),
            (Some(Level::Debug), LevelFilter::DEBUG, &["nodekeel debug"]),
            (Some(Level::Trace), LevelFilter::TRACE, &["nodekeel trace", "nodekeel debug"]),
        ] {
            let log_store = LogStore::default();
            let subscriber = log_subscriber(&log_store, console);
            assert_eq!(subscriber.max_level_hint(), Some(hint), "{console:?}");
            with_subscriber(subscriber, || {
                let library = tracing::trace_span!(target: "h2::proto", "poll");
                assert!(library.is_disabled());
                let span = tracing::info_span!(target: "nodekeel_supervisor", "run", dn = "a").entered();
                assert!(!span.is_disabled());
                tracing::trace!(target: "nodekeel_supervisor", "nodekeel trace");
                tracing::debug!(target: "noded", "nodekeel debug");
                tracing::debug!(target: "h2::codec", "sent");
            });
            assert_eq!(messages(&log_store, "a"), stored, "{console:?}");
        }
    }

    #[test]
    fn a_level_that_is_set_at_run_time_shows_debug_events_of_its_name_alone() {
        let log_store = LogStore::default();
        let a: Dn = "a".parse().expect("a name");
        // The same place in the program each time, since tracing remembers what is enabled there.
        let log = |number: u32| {
            for dn in ["a", "b"] {
                let _span = tracing::info_span!(target: "nodekeel_supervisor", "run", dn).entered();
                tracing::debug!(target: "nodekeel_supervisor", "debug {number}");
                tracing::debug!(target: "h2::codec", "library {number}");
                tracing::info!(target: "nodekeel_supervisor", "info {number}");
            }
        };
        with_subscriber(log_subscriber(&log_store, None), || {
            log(1);
            log_store.set_level(&a, Level::Debug);
            log(2);
            log_store.set_level(&a, Level::Warn);
            log(3);
            log_store.reset_level(&a);
            log(4);
        });
        assert_eq!(messages(&log_store, "a"), ["info 1", "debug 2", "info 2", "info 4"]);
        assert_eq!(messages(&log_store, "b"), ["info 1", "info 2", "info 3", "info 4"]);
        let suppressed = log_store.dn_stats().iter().map(|stats| stats.suppressed).sum::<u64>();
        assert_eq!(suppressed, 1, "debug events that are not enabled are not built");
    }
}
