//! Minimum levels of log entries, set while the node runs.

use serde_json::json;

use crate::harness::{NO_DAEMONS, NodedProcess, service_config, sleep_config};

/// Prints a line of each kind at each start.
const SCRIPT: &str = "echo a raw line; echo 'I1121 11:26:08.703131 1 a.go:1] an info'; \
    echo 'E1121 11:26:08.703131 1 a.go:1] an error'; exec sleep 1000";

const WEB: &str = "root.service.web";

/// The texts of the service's entries, once those of an incarnation have arrived.
fn texts_until(node: &NodedProcess, generation: u64) -> Vec<String> {
    let is_last = |entry: &serde_json::Value| {
        entry["message"] == "an error" && entry["generation"].as_u64() == Some(generation)
    };
    node.follow(&["logs", WEB, "-f"]).find_value(is_last);
    let entries = node.ask(&["-o", "json", "logs", WEB]);
    let text = |line: &str| {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        entry["message"].as_str().or(entry["text"].as_str()).map(str::to_owned)
    };
    entries.lines().filter_map(text).collect()
}

#[test]
fn a_level_holds_until_it_is_reset_and_what_it_excludes_is_counted() {
    let levels = format!("[log]\nlevels = {{ {WEB:?} = \"error\" }}\n");
    let config = format!("{NO_DAEMONS}{levels}{}", service_config("web", SCRIPT, "log = \"klog\""));
    let node = NodedProcess::start(&config);
    assert_eq!(texts_until(&node, 1), ["a raw line", "an error"]);
    let from_file =
        json!({ "dn": WEB, "level": "error", "set_for": WEB, "configured": true, "suppressed": 1 });
    assert_eq!(node.ask_json(&["log-level"]), json!([from_file]));
    assert_eq!(node.ask_json(&["log-level", WEB]), from_file);
    let table = node.ask(&["log-level"]);
    assert!(table.contains("root.service.web  error         1  configuration"), "{table}");

    let said = node.ask(&["log-level", WEB, "debug"]);
    assert!(
        said.starts_with("root.service.web: minimum level debug (request); 1 entry was not kept"),
        "{said}"
    );
    assert!(said.contains("until noded exits") && said.contains("Raw lines have no level"), "{said}");
    node.ask(&["restart", "--wait", WEB]);
    assert_eq!(texts_until(&node, 2), ["a raw line", "an error", "a raw line", "an info", "an error"]);

    node.ask(&["log-level", "root", "fatal"]);
    node.ask(&["log-level", "--reset", WEB]);
    let below = node.ask_json(&["log-level", "root.service"]);
    assert_eq!((&below["level"], &below["set_for"]), (&json!("fatal"), &json!("root")));
    assert_eq!(node.ask_json(&["log-level", WEB]), from_file);
    node.ask(&["log-level", "--reset"]);
    let rows = node.ask_json(&["log-level"]);
    // Entries of noded itself may have been below fatal.
    assert!(rows.as_array().unwrap().iter().all(|row| row["level"].is_null() || *row == from_file), "{rows}");

    for (args, code, reason) in [
        (&["log-level", "root.servic", "warn"][..], 4, "did you mean root.service"),
        (&["log-level", WEB, "loud"], 2, "unknown level"),
        (&["log-level", WEB, "warn", "--reset"], 2, "cannot be used with"),
    ] {
        node.nodectl(args).assert_fails(code, reason);
    }
    node.stop();
}

#[test]
fn debug_events_of_noded_are_kept_where_a_level_asks_for_them() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("a", "")));
    node.ask(&["restart", "--wait", "root.service.a"]);
    let all = node.ask(&["-o", "json", "logs"]);
    assert!(!all.contains("\"level\":\"debug\""), "{all}");
    node.ask(&["log-level", "", "debug"]);
    node.ask(&["restart", "--wait", "root.service.a"]);
    let is_change = |entry: &serde_json::Value| entry["dn"] == "supervisor" && entry["level"] == "debug";
    node.follow(&["logs", "-f"]).find_value(is_change);
    node.stop();
}
