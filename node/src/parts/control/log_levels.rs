//! The minimum levels of log entries.

use std::collections::{BTreeMap, BTreeSet};

use nodekeel_logtree::{Dn, Level, LogStore};

use crate::client::{level_from_wire, level_to_wire};
use crate::v1;

/// The levels of the configuration, by name.
type ConfiguredLevels = BTreeMap<Dn, Level>;

/// The DN of a request, and the action, for the events.
pub(super) fn describe_request(request: &v1::SetLogLevelRequest) -> (&str, String) {
    let action = match level_from_wire(request.level()) {
        Some(level) => format!("log level {level}"),
        None => "reset of the log level".into(),
    };
    (request.dn(), action)
}

/// Applies the levels of a configuration after another one. A level that a request has set stays.
pub(crate) fn set_configured_levels(
    log_store: &LogStore,
    before: &ConfiguredLevels,
    after: &ConfiguredLevels,
) {
    // A level that differs from the former configuration was set by a request.
    let is_unchanged = |dn: &Dn| {
        // `level` also finds the level of a name above, which is not that of this name.
        log_store.level(dn).filter(|(set_for, _)| set_for == dn).map(|(_, level)| level)
            == before.get(dn).copied()
    };
    for dn in before.keys().chain(after.keys()).filter(|dn| is_unchanged(dn)) {
        match after.get(dn) {
            Some(level) => log_store.set_level(dn, *level),
            None => log_store.reset_level(dn),
        }
    }
}

/// The level of one name; or of all names for which one is set, and of those with entries that were not kept.
pub(super) fn list_levels(
    log_store: &LogStore,
    configured: &ConfiguredLevels,
    only: Option<&Dn>,
) -> Vec<v1::LogLevel> {
    let suppressed: BTreeMap<_, _> =
        log_store.dn_stats().into_iter().map(|stats| (stats.dn, stats.suppressed)).collect();
    let names = match only {
        Some(dn) => BTreeSet::from([dn.clone()]),
        None => {
            let with_loss = suppressed.iter().filter(|(_, count)| **count > 0).map(|(dn, _)| dn.clone());
            log_store.levels().into_iter().map(|(dn, _)| dn).chain(with_loss).collect()
        }
    };
    let row = |dn: Dn| {
        let found = log_store.level(&dn);
        let is_configured = |(set_for, level): &(Dn, Level)| configured.get(set_for) == Some(level);
        v1::LogLevel {
            level: found.as_ref().map_or(v1::Level::Unspecified, |(_, level)| level_to_wire(*level)).into(),
            configured: found.as_ref().is_some_and(is_configured),
            set_for: found.map(|(set_for, _)| set_for.to_string()),
            suppressed: suppressed.get(&dn).copied().unwrap_or_default(),
            dn: dn.to_string(),
        }
    };
    names.into_iter().map(row).collect()
}

/// Gives one name, or all, the level of the configuration.
pub(super) fn reset_levels(log_store: &LogStore, configured: &ConfiguredLevels, only: Option<&Dn>) {
    let names: BTreeSet<_> = match only {
        Some(dn) => BTreeSet::from([dn.clone()]),
        None => log_store.levels().into_iter().map(|(dn, _)| dn).chain(configured.keys().cloned()).collect(),
    };
    for dn in names {
        match configured.get(&dn) {
            Some(level) => log_store.set_level(&dn, *level),
            None => log_store.reset_level(&dn),
        }
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_logtree::LogMessage;

    use super::*;

    fn dn(text: &str) -> Dn {
        text.parse().expect("a valid name")
    }

    /// Name, level, the name for which it is set, whether it is the configuration's, and the entries that were not kept.
    type Row = (String, v1::Level, Option<String>, bool, u64);

    fn rows(log_store: &LogStore, configured: &ConfiguredLevels, only: Option<&Dn>) -> Vec<Row> {
        list_levels(log_store, configured, only)
            .into_iter()
            .map(|row| (row.dn.clone(), row.level(), row.set_for, row.configured, row.suppressed))
            .collect()
    }

    #[test]
    fn a_reset_returns_to_the_configuration_and_counts_stay() {
        let log_store = LogStore::default();
        let configured = BTreeMap::from([(dn("a"), Level::Warn), (dn("b"), Level::Error)]);
        set_configured_levels(&log_store, &BTreeMap::new(), &configured);
        log_store.append_message(&dn("a.c"), LogMessage::new(Level::Info, "not kept"));
        log_store.append_message(&dn("d"), LogMessage::new(Level::Info, "kept"));
        let row = |name: &str, level, set_for: Option<&str>, configured, count| -> Row {
            (name.into(), level, set_for.map(str::to_owned), configured, count)
        };
        use v1::Level::{Debug, Error, Unspecified, Warning};
        let from_file = [
            row("a", Warning, Some("a"), true, 0),
            row("a.c", Warning, Some("a"), true, 1),
            row("b", Error, Some("b"), true, 0),
        ];
        assert_eq!(rows(&log_store, &configured, None), from_file);

        log_store.set_level(&dn("a"), Level::Debug);
        log_store.set_level(&dn("d"), Level::Debug);
        assert_eq!(
            rows(&log_store, &configured, None),
            [
                row("a", Debug, Some("a"), false, 0),
                row("a.c", Debug, Some("a"), false, 1),
                row("b", Error, Some("b"), true, 0),
                row("d", Debug, Some("d"), false, 0),
            ]
        );
        assert_eq!(rows(&log_store, &configured, Some(&dn("e"))), [row("e", Unspecified, None, false, 0)]);

        reset_levels(&log_store, &configured, Some(&dn("a")));
        assert_eq!(rows(&log_store, &configured, Some(&dn("a"))), [row("a", Warning, Some("a"), true, 0)]);
        assert_eq!(log_store.level(&dn("d")), Some((dn("d"), Level::Debug)));
        reset_levels(&log_store, &configured, None);
        assert_eq!(rows(&log_store, &configured, None), from_file);
    }

    #[test]
    fn another_configuration_keeps_what_requests_have_set() {
        let log_store = LogStore::default();
        let before = BTreeMap::from([(dn("a"), Level::Warn), (dn("b"), Level::Warn), (dn("c"), Level::Warn)]);
        set_configured_levels(&log_store, &BTreeMap::new(), &before);
        log_store.set_level(&dn("a"), Level::Debug);
        let after =
            BTreeMap::from([(dn("a"), Level::Info), (dn("c"), Level::Error), (dn("d"), Level::Error)]);
        set_configured_levels(&log_store, &before, &after);
        let expected = [("a", Level::Debug), ("c", Level::Error), ("d", Level::Error)];
        assert_eq!(log_store.levels(), expected.map(|(name, level)| (dn(name), level)));
    }
}
