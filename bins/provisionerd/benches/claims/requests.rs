//! Requests that the API server has answered, by its metrics.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use testbed::{Kube, wait_until};

use crate::bench_cluster::EVENT_TIMEOUT;

/// A kind of request: verb, API group and resource.
type RequestKind = (String, String, String);

/// Numbers of requests by kind.
#[derive(Debug, Default)]
pub(crate) struct RequestCounts(BTreeMap<RequestKind, f64>);

/// *Source:* kube-apiserver's metrics, as `apiserver_request_total{…,group="",resource="events",verb="POST"}
/// 12`.
const COUNTER: &str = "apiserver_request_total{";

/// The group of the events that provisioners write; the controller manager uses the core group.
const EVENTS: &str = "events.k8s.io";

impl RequestCounts {
    pub(crate) fn read(kube: &Kube) -> Result<Self> {
        let text = testbed::command_output(kube.kubectl_command().args(["get", "--raw", "/metrics"]))?;
        let mut counts = BTreeMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix(COUNTER)) {
            let (labels, count) = line.rsplit_once("} ").context("read the API server's metrics")?;
            let kind =
                (label_value(labels, "verb"), label_value(labels, "group"), label_value(labels, "resource"));
            *counts.entry(kind).or_default() += count.parse::<f64>().context("read a counter")?;
        }
        Ok(Self(counts))
    }

    /// The requests since then, once this many events are written.
    pub(crate) fn since(kube: &Kube, before: &Self, events: usize) -> Result<Self> {
        wait_until(EVENT_TIMEOUT, "the last event", || {
            let mut now = Self::read(kube)?;
            for (kind, count) in &mut now.0 {
                *count -= before.0.get(kind).copied().unwrap_or_default();
            }
            let written = now.count("POST", EVENTS, "events");
            ensure!(written >= events as f64, "{written} of {events} were written");
            Ok(now)
        })
    }

    fn count(&self, verb: &str, group: &str, resource: &str) -> f64 {
        let kind = (verb.to_owned(), group.to_owned(), resource.to_owned());
        self.0.get(&kind).copied().unwrap_or_default()
    }

    /// Writes of a provisioner: volumes, their events, and its patches and deletes. The controller manager
    /// updates (PUT), and writes events of the other group; this program creates and deletes claims.
    pub(crate) fn provisioner_writes(&self) -> f64 {
        let volumes: f64 =
            ["POST", "PATCH", "DELETE"].map(|verb| self.count(verb, "", "persistentvolumes")).iter().sum();
        let events: f64 = ["POST", "PATCH"].map(|verb| self.count(verb, EVENTS, "events")).iter().sum();
        volumes + events + self.count("PATCH", "", "persistentvolumeclaims")
    }

    /// Writes of all clients to claims, volumes and events, including the claims themselves.
    pub(crate) fn all_writes(&self) -> f64 {
        self.storage(|verb| matches!(verb, "POST" | "PUT" | "PATCH" | "DELETE"))
    }

    /// Reads of single claims, volumes and events by all clients.
    pub(crate) fn all_reads(&self) -> f64 {
        self.storage(|verb| verb == "GET")
    }

    fn storage(&self, is_meant: impl Fn(&str) -> bool) -> f64 {
        let resources = ["persistentvolumes", "persistentvolumeclaims", "events"];
        let meant = self
            .0
            .iter()
            .filter(|((verb, _, resource), _)| is_meant(verb) && resources.contains(&resource.as_str()));
        meant.map(|(_, count)| count).sum()
    }
}

/// The value of a label; empty if it is missing.
fn label_value(labels: &str, name: &str) -> String {
    let values = labels.split(',').filter_map(|label| label.split_once('='));
    let mut named = values.filter(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"'));
    named.next().unwrap_or_default().to_owned()
}
