//! A runnable of the tree as `-o json` and the tables show it; docs/nodectl.md describes the schema.

use std::time::SystemTime;

use nodekeel_node::v1;
use serde::Serialize;

use crate::output::TextStyle;
use crate::wire::{non_empty, system_time, time_text};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RunnableView {
    pub(crate) dn: String,
    pub(crate) state: &'static str,
    pub(crate) since: Option<String>,
    pub(crate) generation: u64,
    pub(crate) restarts: u64,
    pub(crate) failures: u32,
    /// True if it should run, but has failed, and has not been ready since for the time that clears its failures.
    pub(crate) crash_looping: bool,
    /// True if it is ready or done and not in a crash loop, or not part of this run.
    pub(crate) healthy: bool,
    /// Absent if it is ready or done.
    pub(crate) waiting_for: Option<String>,
    pub(crate) waiting_on: Vec<String>,
    /// Absent unless it waits for its backoff.
    pub(crate) backoff_until: Option<String>,
    pub(crate) exits: Vec<ExitView>,
    /// Absent unless it is a service whose process is running.
    pub(crate) pid: Option<u32>,
    pub(crate) process_since: Option<String>,
    /// Absent unless the host had nothing left to probe it.
    pub(crate) probe_problem: Option<String>,
    /// The same as `waiting_for`, if that is a clause.
    #[serde(skip)]
    pub(crate) condition: Option<String>,
    #[serde(skip)]
    pub(crate) since_time: Option<SystemTime>,
    #[serde(skip)]
    pub(crate) process_since_time: Option<SystemTime>,
    #[serde(skip)]
    pub(crate) backoff_end: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ExitView {
    pub(crate) at: Option<String>,
    pub(crate) generation: u64,
    pub(crate) state: &'static str,
    pub(crate) reason: String,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) output: Vec<String>,
}

impl RunnableView {
    pub(crate) fn is_ready_or_done(&self) -> bool {
        matches!(self.state, "ready" | "done")
    }

    /// The number of its failures, if it is in a crash loop.
    pub(crate) fn crash_loop_text(&self) -> Option<String> {
        self.crash_looping.then(|| format!("crash-loops: {} consecutive failures", self.failures))
    }
}

/// A line about all runnables, and its style.
pub(crate) fn health_summary(nodes: &[RunnableView]) -> (String, TextStyle) {
    let skipped = nodes.iter().filter(|node| node.state == "skipped").count();
    // Skipped services are not part of this run, and are counted apart.
    let planned = nodes.len() - skipped;
    let (summary, style) = match nodes.iter().filter(|node| !node.healthy).count() {
        0 => (format!("all {planned} runnables are ready"), TextStyle::Good),
        1 => (format!("1 of {planned} runnables is not healthy"), TextStyle::Bad),
        count => (format!("{count} of {planned} runnables are not healthy"), TextStyle::Bad),
    };
    let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    (format!("{summary}{skipped}"), style)
}

pub(crate) fn state_name(state: v1::State) -> Option<&'static str> {
    Some(match state {
        v1::State::Unspecified => return None,
        v1::State::Waiting => "waiting",
        v1::State::New => "new",
        v1::State::Ready => "ready",
        v1::State::Done => "done",
        v1::State::Dead => "dead",
        v1::State::Canceled => "canceled",
        v1::State::Stopped => "stopped",
        v1::State::Skipped => "skipped",
    })
}

impl From<v1::Node> for RunnableView {
    fn from(node: v1::Node) -> Self {
        // A newer node may have states that this nodectl does not know.
        let state = state_name(node.state()).unwrap_or("unknown");
        Self {
            state,
            crash_looping: node.is_crash_looping(),
            healthy: node.is_healthy(),
            backoff_until: time_text(node.backoff_until),
            condition: non_empty(node.condition),
            backoff_end: system_time(node.backoff_until),
            since: time_text(node.since),
            since_time: system_time(node.since),
            pid: node.pid,
            process_since: time_text(node.process_since),
            process_since_time: system_time(node.process_since),
            probe_problem: non_empty(node.probe_problem),
            generation: node.generation,
            restarts: node.restarts,
            failures: node.failures,
            waiting_for: non_empty(node.waiting_for),
            waiting_on: node.waiting_on,
            exits: node.exits.into_iter().map(ExitView::from).collect(),
            dn: node.dn,
        }
    }
}

impl From<v1::Exit> for ExitView {
    fn from(exit: v1::Exit) -> Self {
        Self {
            at: time_text(exit.at),
            generation: exit.generation,
            state: state_name(exit.state()).unwrap_or("unknown"),
            code: exit.code,
            signal: exit.signal,
            reason: exit.reason,
            output: exit.output,
        }
    }
}

pub(crate) fn state_style(state: &str) -> TextStyle {
    match state {
        "ready" | "done" => TextStyle::Good,
        "new" | "waiting" => TextStyle::Pending,
        "dead" => TextStyle::Bad,
        _ => TextStyle::Faint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(state: v1::State, failures: u32) -> RunnableView {
        RunnableView::from(v1::Node { state: state.into(), failures, ..Default::default() })
    }

    #[test]
    fn a_crash_loop_says_how_often_it_has_failed() {
        assert_eq!(
            view(v1::State::New, 2).crash_loop_text().as_deref(),
            Some("crash-loops: 2 consecutive failures")
        );
        assert_eq!(view(v1::State::Ready, 1).crash_loop_text(), None, "it has recovered");
        assert_eq!(view(v1::State::Ready, 0).crash_loop_text(), None);
    }

    #[test]
    fn the_summary_counts_what_is_part_of_the_run() {
        let summary = |states: &[v1::State]| {
            health_summary(&states.iter().map(|state| view(*state, 0)).collect::<Vec<_>>()).0
        };
        use v1::State::{Done, New, Ready, Skipped, Stopped};
        assert_eq!(summary(&[Ready, Done]), "all 2 runnables are ready");
        assert_eq!(summary(&[Ready, Skipped, Skipped, Ready]), "all 2 runnables are ready, 2 skipped");
        assert_eq!(summary(&[Ready, New]), "1 of 2 runnables is not healthy");
        assert_eq!(summary(&[Stopped, Skipped, New]), "2 of 2 runnables are not healthy, 1 skipped");
    }
}
