//! Metrics and health for programs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;

use testbed::{ScratchDir, reserve_port};

use super::wait_healthy;
use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess, http_get, sleep_config};

#[test]
fn metrics_and_health_are_served_on_a_port_or_a_socket_and_not_by_default() {
    let scratch = ScratchDir::new().unwrap();
    let port = reserve_port().unwrap();
    let socket = scratch.path().join("metrics.sock");
    let tcp = format!("127.0.0.1:{}", port.number());
    for address in [tcp.clone(), socket.display().to_string()] {
        let service = sleep_config("a", "");
        let config = format!("{NO_DAEMONS}{NO_DISKS}[metrics]\naddress = {address:?}\n{service}");
        let noded = NodedProcess::start(&config);
        wait_healthy(&noded);
        let get = |path: &str| {
            if address.starts_with('/') {
                http_get(UnixStream::connect(&address).unwrap(), path)
            } else {
                http_get(TcpStream::connect(&address).unwrap(), path)
            }
        };
        let (status, text) = get("/metrics");
        assert_eq!(status, "HTTP/1.1 200 OK");
        for line in [
            "nodekeel_healthy 1".to_owned(),
            "nodekeel_runnables{state=\"dead\"} 0".to_owned(),
            "nodekeel_restarts_total{dn=\"root.service.a\"} 0".to_owned(),
            "nodekeel_crash_loops 0".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(
            text.contains(&format!("nodekeel_disk_size_bytes{{path=\"{}\"}}", noded.data().display())),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert_eq!(get("/healthz"), ("HTTP/1.1 200 OK".into(), "ok\n".into()));
        let (status, text) = get("/readyz");
        assert!(status == "HTTP/1.1 200 OK" && text.starts_with("ready\n"), "{status} {text}");
        noded.ask(&["stop", "--wait", "root.service.a"]);
        let (status, text) = get("/readyz");
        assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
        assert!(text.contains("problem: root.service.a: was stopped by an operator\n"), "{text}");
        assert!(get("/metrics").1.contains("\nnodekeel_healthy 0\n"));
        noded.ask(&["restart", "--wait", "root.metrics"]);
        assert_eq!(get("/healthz").0, "HTTP/1.1 200 OK");
        noded.stop();
    }
    assert!(!socket.exists());
    let noded = NodedProcess::start(NO_DAEMONS);
    assert!(!noded.ask(&["tree"]).contains("metrics"));
    assert!(TcpStream::connect(tcp).is_err());
    noded.stop();
}

/// The samples of a text of metrics, with the keys of their labels.
fn samples(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for sample in text.lines().filter(|line| !line.starts_with('#')) {
        let series = sample.rsplit_once(' ').unwrap().0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let keys = labels.split(',').filter_map(|label| label.split_once('=')).map(|(key, _)| key.to_owned());
        found.entry(name.to_owned()).or_default().extend(keys);
    }
    found
}

/// The words in an expression or text that begin with a prefix.
fn words<'a>(text: &'a str, prefix: &str) -> Vec<&'a str> {
    let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let starts = text.match_indices(prefix).map(|(at, _)| &text[at..]);
    starts
        .map(|rest| rest[prefix.len()..].find(is_end).map_or(rest, |end| &rest[..prefix.len() + end]))
        .collect()
}

#[test]
fn every_alert_for_nodes_names_metrics_and_labels_that_a_node_has() {
    let port = reserve_port().unwrap();
    let address = format!("127.0.0.1:{}", port.number());
    // A stopped service is a condition, and any node has a service and a disk.
    let noded = NodedProcess::start(&format!(
        "{NO_DAEMONS}[metrics]\naddress = {address:?}\n{}",
        sleep_config("a", "")
    ));
    noded.wait_ready("root.metrics");
    noded.ask(&["stop", "--wait", "a"]);
    let exported = samples(&http_get(TcpStream::connect(&address).unwrap(), "/metrics").1);
    noded.stop();
    let printed = testbed::command_output(Command::new(env!("CARGO_BIN_EXE_noded")).arg("alerts")).unwrap();
    let alerts: Vec<_> = printed.split("- alert: ").skip(1).collect();
    assert!(alerts.len() > 5, "the alerts were read");
    for alert in alerts {
        let expression = alert.lines().find_map(|line| line.trim().strip_prefix("expr: ")).expect(alert);
        let metrics = words(expression, "nodekeel_");
        assert!(!metrics.is_empty() || expression.starts_with("up{job=\"noded\"}"), "{expression}");
        let mut labels: BTreeSet<&str> = ["instance", "job"].into();
        for metric in metrics {
            let keys = exported.get(metric).unwrap_or_else(|| panic!("{metric} is not among {exported:#?}"));
            labels.extend(keys.iter().map(String::as_str));
        }
        for label in words(alert, "$labels.") {
            assert!(labels.contains(&label["$labels.".len()..]), "{label} in {alert}");
        }
    }
}

#[test]
fn a_reload_moves_the_metrics_to_another_address_with_their_port() {
    let port = reserve_port().unwrap();
    let config = |ip: &str| format!("{NO_DAEMONS}[metrics]\naddress = \"{ip}:{}\"\n", port.number());
    let noded = NodedProcess::start(&config("127.0.0.1"));
    noded.wait_ready("root.metrics");
    noded.write_config(&config("0.0.0.0"));
    assert_eq!(noded.ask(&["reload"]), "reloaded:\n  restart root.metrics: metrics.address\n");
    noded.wait_ready("root.metrics");
    let (status, _) = http_get(TcpStream::connect(("127.0.0.1", port.number())).unwrap(), "/healthz");
    assert_eq!(status, "HTTP/1.1 200 OK");
    noded.stop();
}
