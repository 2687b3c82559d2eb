//! Checks the alerts and the dashboard against the metrics that `/metrics` exports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nodekeel_fsquota::{AuditSummary, Bytes};
use nodekeel_provisioner::agent::{AgentMetrics as _, PrometheusAgentMetrics};
use nodekeel_provisioner::{
    Ability, CapacityPolicy, DiskSpace, StoreIdentity, StoreStatus, VolumeMetrics as _,
};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::golden_test::sample_store;
use crate::metrics::DaemonMetrics;

const ALERTS: &str = include_str!("../../../deploy/monitoring/alerts.yaml");
const DASHBOARD: &str = include_str!("../../../deploy/monitoring/dashboard.json");
const POD_MONITORS: &str = include_str!("../../../deploy/monitoring/podmonitor.yaml");

/// Labels that Prometheus adds to all metrics of a pod; `node` is that of the PodMonitor.
const TARGET_LABELS: [&str; 7] = ["node", "job", "instance", "pod", "namespace", "container", "endpoint"];

/// Metrics of others: Prometheus, the kubelet and kube-state-metrics.
const FOREIGN: [&str; 3] = ["up", "kubelet_volume_stats_", "kube_"];

/// Names of metrics and their labels.
type Metrics = BTreeMap<String, BTreeSet<String>>;

/// All metrics that `/metrics` can export.
fn exported_metrics() -> Metrics {
    let metrics = DaemonMetrics::new();
    for succeeded in [true, false] {
        metrics.meter.record_provision("local", Duration::from_millis(3), succeeded);
        metrics.meter.record_delete("local", Duration::from_millis(3), succeeded);
    }
    metrics.meter.set_orphans(2, 1);
    metrics.meter.set_orphaned_snapshots(1);
    metrics.meter.set_audit(&AuditSummary::default());
    metrics.meter.record_api_error("watch");
    let space = DiskSpace { total: Bytes(8 << 30), free: Bytes(4 << 30) };
    let capacity = CapacityPolicy::default().store_capacity(space, Bytes(0), Bytes(1 << 30));
    let mut store = sample_store(StoreStatus::Served(StoreIdentity::Absent), Ability::Able);
    (store.volumes, store.capacity) = (Some(1), Some(capacity));
    metrics.set_stores(&[store]);
    let text = metrics.encode_text(None, true) + &encode_agent_metrics();
    let mut found = Metrics::new();
    for sample in text.lines().filter(|line| !line.starts_with('#')) {
        let series = sample.rsplit_once(' ').expect("a value").0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let keys = labels.split(',').filter_map(|label| label.split_once('=')).map(|(key, _)| key.to_owned());
        found.entry(name.to_owned()).or_default().extend(keys);
    }
    found
}

fn encode_agent_metrics() -> String {
    let mut registry = Registry::default();
    let metrics = PrometheusAgentMetrics::register_in(&mut registry);
    metrics.set_gone_volumes(&BTreeMap::from([("node-a".to_owned(), 1)]));
    metrics.record_deselection("deleted");
    let mut text = String::new();
    encode(&mut text, &registry).expect("a text");
    text
}

/// A word or a sign of PromQL, without strings, numbers and ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    Sign(char),
}

fn tokenize(expression: &str) -> Vec<Token> {
    let (mut tokens, mut rest) = (Vec::new(), expression.chars().peekable());
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    while let Some(first) = rest.next() {
        match first {
            '"' | '\'' => rest.by_ref().take_while(|&c| c != first).for_each(drop),
            '[' => rest.by_ref().take_while(|&c| c != ']').for_each(drop),
            _ if first.is_whitespace() => {}
            _ if is_word(first) => {
                let mut word = first.to_string();
                while let Some(next) = rest.next_if(|&c| is_word(c) || (first.is_ascii_digit() && c == '.')) {
                    word.push(next);
                }
                if !first.is_ascii_digit() {
                    tokens.push(Token::Word(word));
                }
            }
            _ => tokens.push(Token::Sign(first)),
        }
    }
    tokens
}

/// The metrics that an expression names with the labels that it matches, and the labels that it groups by.
fn named_metrics(expression: &str) -> (Vec<(String, Vec<String>)>, Vec<String>) {
    const GROUPING: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
    const KEYWORDS: [&str; 5] = ["and", "or", "unless", "bool", "offset"];
    let (mut metrics, mut groups, tokens) = (Vec::new(), Vec::new(), tokenize(expression));
    let words_until = |from: usize, end: char| -> (Vec<String>, usize) {
        let length =
            tokens[from..].iter().position(|token| *token == Token::Sign(end)).expect("it is closed");
        let words = tokens[from..from + length].iter().filter_map(|token| match token {
            Token::Word(word) => Some(word.clone()),
            Token::Sign(_) => None,
        });
        (words.collect(), from + length + 1)
    };
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        let Token::Word(word) = token else { continue };
        let next = tokens.get(at);
        if GROUPING.contains(&word.as_str()) {
            let (labels, end) = words_until(at, ')');
            groups.extend(labels);
            at = end;
        } else if next == Some(&Token::Sign('{')) {
            let (labels, end) = words_until(at, '}');
            metrics.push((word.clone(), labels));
            at = end;
        } else if next != Some(&Token::Sign('('))
            && !KEYWORDS.contains(&word.as_str())
            && !is_aggregation(next)
        {
            metrics.push((word.clone(), Vec::new()));
        }
    }
    (metrics, groups)
}

/// True if the word before this token is a function: `sum by (…)`.
fn is_aggregation(next: Option<&Token>) -> bool {
    matches!(next, Some(Token::Word(word)) if word == "by" || word == "without")
}

/// The defects of an expression.
fn find_faults(expression: &str, exported: &Metrics) -> Vec<String> {
    let (metrics, groups) = named_metrics(expression);
    let mut faults = Vec::new();
    let mut known: BTreeSet<&str> = TARGET_LABELS.into();
    let mut is_foreign = false;
    for (name, labels) in &metrics {
        if FOREIGN.iter().any(|prefix| name.starts_with(prefix)) {
            is_foreign = true;
            continue;
        }
        let Some(exported) = exported.get(name) else {
            faults.push(format!("{name} is not exported"));
            continue;
        };
        known.extend(exported.iter().map(String::as_str));
        let is_known = |label: &String| exported.contains(label) || TARGET_LABELS.contains(&label.as_str());
        faults.extend(
            labels.iter().filter(|label| !is_known(label)).map(|label| format!("{name} has no {label}")),
        );
    }
    let groups = groups.iter().filter(|label| !is_foreign && !known.contains(label.as_str()));
    faults.extend(groups.map(|label| format!("no metric has {label}")));
    if metrics.is_empty() {
        faults.push("it names no metric".into());
    }
    faults
}

/// The expressions of the alerts, by name.
fn alert_rules() -> Vec<(String, Value)> {
    let object: Value = serde_saphyr::from_str(ALERTS).expect("YAML");
    let groups = object["spec"]["groups"].as_array().expect("groups").iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().expect("rules"));
    rules.map(|rule| (rule["alert"].as_str().expect("a name").to_owned(), rule.clone())).collect()
}

#[test]
fn every_alert_and_panel_uses_metrics_that_are_exported() {
    let exported = exported_metrics();
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut expressions: Vec<(String, String)> = alert_rules()
        .into_iter()
        .map(|(name, rule)| (name, rule["expr"].as_str().expect("an expression").to_owned()))
        .collect();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let title = panel["title"].as_str().expect("a title").to_owned();
            expressions.push((title, target["expr"].as_str().expect("an expression").to_owned()));
        }
    }
    assert!(expressions.len() > 20, "{expressions:#?}");
    for (name, expression) in &expressions {
        let faults = find_faults(expression, &exported);
        assert!(faults.is_empty(), "{name}: {expression}: {faults:?}");
    }
}

#[test]
fn a_renamed_metric_and_an_unknown_label_are_found() {
    let exported = exported_metrics();
    for (bad, fault) in [
        ("sum(provisionerd_volumes_erased) > 0", "provisionerd_volumes_erased is not exported"),
        ("controller_persistentvolume_orphans{lost=\"volume\"}", "has no lost"),
        ("sum by (clas) (rate(controller_persistentvolume_delete_total[5m]))", "no metric has clas"),
        ("1 > 2", "names no metric"),
    ] {
        let faults = find_faults(bad, &exported).join("; ");
        assert!(faults.contains(fault), "{bad}: {faults}");
    }
    let good = "topk(3, sum by (class) (rate(controller_persistentvolume_delete_total{node=~\"a\"}[5m])) offset 1h) \
                and on (node) up{job=\"b\"} == 1e3";
    assert_eq!(find_faults(good, &exported), Vec::<String>::new());
}

#[test]
fn texts_of_alerts_use_labels_that_their_expression_keeps() {
    let exported = exported_metrics();
    for (name, rule) in alert_rules() {
        let expression = rule["expr"].as_str().expect("an expression");
        let (metrics, _) = named_metrics(expression);
        let labels: BTreeSet<&str> = metrics
            .iter()
            .flat_map(|(metric, _)| exported.get(metric).into_iter().flatten())
            .map(String::as_str)
            .chain(TARGET_LABELS)
            // Of the kubelet's volume metrics.
            .chain(["persistentvolumeclaim"])
            .collect();
        for text in ["summary", "description"] {
            let text = rule["annotations"][text].as_str().unwrap_or_else(|| panic!("{name} has no {text}"));
            for (at, start) in text.match_indices("$labels.") {
                let label = &text[at + start.len()..];
                let label = &label[..label.find(' ').expect("the braces are closed")];
                assert!(labels.contains(label), "{name}: {label}");
            }
        }
        assert!(
            ["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap_or_default()),
            "{name}"
        );
    }
}

#[test]
fn the_pod_monitors_select_the_ports_of_the_pods() {
    let monitors: Vec<Value> = serde_saphyr::from_multiple(POD_MONITORS).expect("YAML");
    let pods = [
        include_str!("../../../deploy/daemonset.yaml"),
        include_str!("../../../deploy/agent/deployment.yaml"),
    ];
    assert_eq!(monitors.len(), pods.len());
    for (monitor, pods) in monitors.iter().zip(pods) {
        let pods: Vec<Value> = serde_saphyr::from_multiple(pods).expect("YAML");
        let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
        assert_eq!(
            endpoint["port"],
            pods[0]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"]
        );
        assert_eq!(monitor["spec"]["selector"]["matchLabels"], pods[0]["spec"]["selector"]["matchLabels"]);
    }
    let label =
        |monitor: &Value| monitor["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["targetLabel"].clone();
    assert_eq!(label(&monitors[0]), "node");
    assert_eq!(label(&monitors[1]), Value::Null, "it would hide the label `node` of the agent's metrics");
}
