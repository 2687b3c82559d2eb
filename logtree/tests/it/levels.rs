//! Minimum levels that are set while the store is in use.

use std::collections::BTreeMap;
use std::io::Write;

use nodekeel_logtree::parse::LogFormat;
use nodekeel_logtree::{Level, LogLimits, LogStore, WriterOptions};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::*;

const NAMES: [&str; 7] = ["", "a", "a.b", "a.b.c", "a.bc", "d", "d.e"];

#[derive(Clone, Debug)]
enum Step {
    Set(usize, usize),
    Reset(usize),
    Append(usize, usize),
    AppendRaw(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (name, level) = (0..NAMES.len(), 0..Level::ALL.len());
    prop_oneof![
        1 => (name.clone(), level.clone()).prop_map(|(name, level)| Step::Set(name, level)),
        1 => name.clone().prop_map(Step::Reset),
        4 => (name.clone(), level).prop_map(|(name, level)| Step::Append(name, level)),
        1 => name.prop_map(Step::AppendRaw),
    ]
}

/// The level of the longest name that is set, and that this one is or is below.
fn expected_level(set: &BTreeMap<&'static str, Level>, name: &str) -> Option<Level> {
    let is_within = |above: &str| above.is_empty() || name == above || name.starts_with(&format!("{above}."));
    set.iter().filter(|(above, _)| is_within(above)).max_by_key(|(above, _)| above.len()).map(|(_, l)| *l)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn each_entry_is_kept_or_counted_by_the_level_of_its_name(steps in vec(step(), 0..80)) {
        let store = LogStore::default();
        let mut writers: Vec<_> =
            NAMES.iter().map(|name| store.line_writer(&dn(name), WriterOptions::new("stdout"))).collect();
        let mut set = BTreeMap::new();
        let (mut kept, mut suppressed) = (Vec::new(), BTreeMap::<&str, u64>::new());
        for (number, step) in steps.into_iter().enumerate() {
            let text = number.to_string();
            match step {
                Step::Set(name, level) => {
                    store.set_level(&dn(NAMES[name]), Level::ALL[level]);
                    set.insert(NAMES[name], Level::ALL[level]);
                }
                Step::Reset(name) => {
                    store.reset_level(&dn(NAMES[name]));
                    set.remove(NAMES[name]);
                }
                Step::Append(name, level) => {
                    let (name, level) = (NAMES[name], Level::ALL[level]);
                    append_message(&store, name, level, &text);
                    if expected_level(&set, name).is_none_or(|minimum| level >= minimum) {
                        kept.push(text);
                    } else {
                        *suppressed.entry(name).or_default() += 1;
                    }
                }
                Step::AppendRaw(name) => {
                    writers[name].write_all(format!("{text}\n").as_bytes()).unwrap();
                    kept.push(text);
                }
            }
            for name in NAMES {
                let found = store.level(&dn(name));
                prop_assert_eq!(found.map(|(_, level)| level), expected_level(&set, name));
            }
        }
        prop_assert_eq!(read_texts(&store, subtree_query("")), kept);
        for stats in store.dn_stats() {
            prop_assert_eq!(stats.suppressed, suppressed.remove(stats.dn.as_str()).unwrap_or(0));
        }
        prop_assert!(suppressed.is_empty());
        let levels: Vec<_> = store.levels().into_iter().map(|(dn, level)| (dn.to_string(), level)).collect();
        prop_assert!(levels.iter().all(|(name, level)| set.get(name.as_str()) == Some(level)));
        prop_assert_eq!((levels.len(), store.lowest_level()), (set.len(), set.values().copied().min()));
    }
}

#[test]
fn lines_below_the_level_are_counted_with_those_that_continue_them_and_raw_lines_stay() {
    let store = LogStore::default();
    let mut writer = store.line_writer(&dn("kubelet"), WriterOptions::new("stderr").format(LogFormat::Klog));
    writer.write_all(b"without a level\nI1121 11:26:08.703131 1 a.go:1] kept\n").unwrap();
    store.set_level(&dn("kubelet"), Level::Warn);
    writer.write_all(b"I1121 11:26:08.703131 1 a.go:1] not kept\n its second line\n").unwrap();
    writer.write_all(b"E1121 11:26:08.703131 1 a.go:1] an error\n its second line\n").unwrap();
    let kept = read_texts(&store, subtree_query(""));
    assert_eq!(kept, ["without a level", "kept", "an error", " its second line"]);
    assert_eq!(store.dn_stats()[1].suppressed, 2);
}

#[test]
fn names_whose_entries_are_all_below_their_level_stay_within_the_budget() {
    let limits = LogLimits { bytes_per_dn: 64 << 10, total_bytes: 1 << 20, ..LogLimits::default() };
    let store = LogStore::new(limits);
    store.set_level(&dn("a"), Level::Warn);
    for number in 0..20_000 {
        append_info(&store, &format!("a.{number}"), "x");
    }
    let stats = store.dn_stats();
    // Each name takes some hundred bytes.
    assert!(stats.len() < 10_000, "{}", stats.len());
    assert_eq!(stats.iter().map(|name| name.suppressed).sum::<u64>(), 20_000);
    append_message(&store, "a.0", Level::Warn, "kept");
    assert_eq!(read_texts(&store, subtree_query("a.0")), ["kept"]);
}

#[test]
fn a_level_holds_for_a_name_that_is_created_later_and_for_one_that_was_forgotten() {
    let limits = LogLimits { max_names: 2, ..LogLimits::default() };
    let store = LogStore::new(limits);
    let mut writer = store.line_writer(&dn("a.b"), WriterOptions::new("stderr").format(LogFormat::Klog));
    let mut write = |text: &str| writer.write_all(text.as_bytes()).unwrap();
    write("I1121 11:26:08.703131 1 a.go:1] kept\n");
    // More names than the store remembers.
    (0..20).for_each(|number| append_info(&store, &format!("n.{number}"), "x"));
    store.set_level(&dn("a"), Level::Warn);
    write("I1121 11:26:08.703131 1 a.go:1] not kept\n");
    write("W1121 11:26:08.703131 1 a.go:1] a warning\n");
    let warnings = read_backlog(&store, subtree_query("a").min_level(Level::Warn));
    assert_eq!(entry_texts(&warnings), ["a warning"]);
    assert_eq!(store.dn_stats().iter().map(|name| name.suppressed).sum::<u64>(), 1);
}
