//! How many requests the API server has answered, by its own count.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use testbed::{Kube, wait_until};

use crate::scene::SOON;

/// What was asked: verb, API group and resource.
type Asked = (String, String, String);

/// Requests by what was asked.
#[derive(Debug, Default)]
pub(crate) struct Requests(BTreeMap<Asked, f64>);

/// *Source:* kube-apiserver's metrics: `apiserver_request_total{…,group="",resource="events",verb="POST"} 12`.
const COUNTER: &str = "apiserver_request_total{";

/// The group of the events that provisioners write; the controller manager writes those of the core group.
const EVENTS: &str = "events.k8s.io";

impl Requests {
    pub(crate) fn read(kube: &Kube) -> Result<Self> {
        let text = testbed::output(kube.kubectl().args(["get", "--raw", "/metrics"]))?;
        let mut counts = BTreeMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix(COUNTER)) {
            let (labels, count) = line.rsplit_once("} ").context("read the API server's metrics")?;
            let asked = (label(labels, "verb"), label(labels, "group"), label(labels, "resource"));
            *counts.entry(asked).or_default() += count.parse::<f64>().context("read a counter")?;
        }
        Ok(Self(counts))
    }

    /// What has been asked since then, once so many events have been written, too.
    pub(crate) fn since(kube: &Kube, before: &Self, events: usize) -> Result<Self> {
        wait_until(SOON, "the last event", || {
            let mut now = Self::read(kube)?;
            for (asked, count) in &mut now.0 {
                *count -= before.0.get(asked).copied().unwrap_or_default();
            }
            let told = now.count("POST", EVENTS, "events");
            ensure!(told >= events as f64, "{told} of {events} were written");
            Ok(now)
        })
    }

    fn count(&self, verb: &str, group: &str, resource: &str) -> f64 {
        let asked = (verb.to_owned(), group.to_owned(), resource.to_owned());
        self.0.get(&asked).copied().unwrap_or_default()
    }

    /// What a provisioner writes: volumes and their events, and what it patches or deletes. The controller manager updates
    /// (PUT), and writes events of the other group; this program makes and deletes claims.
    pub(crate) fn own_writes(&self) -> f64 {
        let volumes: f64 =
            ["POST", "PATCH", "DELETE"].map(|verb| self.count(verb, "", "persistentvolumes")).iter().sum();
        let events: f64 = ["POST", "PATCH"].map(|verb| self.count(verb, EVENTS, "events")).iter().sum();
        volumes + events + self.count("PATCH", "", "persistentvolumeclaims")
    }

    /// All that was written about claims, volumes and events by anybody, the claims themselves included.
    pub(crate) fn all_writes(&self) -> f64 {
        self.storage(|verb| matches!(verb, "POST" | "PUT" | "PATCH" | "DELETE"))
    }

    /// All single objects of these that anybody has read.
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

/// The value of a label; none is empty.
fn label(labels: &str, name: &str) -> String {
    let values = labels.split(',').filter_map(|label| label.split_once('='));
    let mut named = values.filter(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"'));
    named.next().unwrap_or_default().to_owned()
}
