//! `status`: why something is not ready, and how it ended before.

use std::io::Write as _;
use std::time::SystemTime;

use nodekeel_logtree::{Dn, Entry, Journal, Query, WriterOptions, render};
use nodekeel_node::client::parser_of;
use nodekeel_node::v1::{StatusRequest, TreeRequest, VersionRequest};

use crate::caller::Caller;
use crate::failure::Failure;
use crate::model::{DnStatus, Exit, Node, NodeStatus, Version};
use crate::out::{Out, Tone, safe};
use crate::time::age;
use crate::{logs, tree};

/// How many log entries are shown.
const LOG_ENTRIES: u32 = 10;

pub(crate) async fn of_node(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let answer = caller.ask(async |client| client.version(VersionRequest {}).await).await?;
    let started: Option<SystemTime> = answer.started.and_then(|time| time.try_into().ok());
    let version = Version::from(answer);
    let nodes = tree::nodes(caller.ask(async |client| client.tree(TreeRequest {}).await).await?.nodes);
    if out.json {
        return Ok(out.json(&NodeStatus { version, nodes })?);
    }
    let up = started.map(age).unwrap_or_default();
    let name = out.paint(Tone::Strong, &safe(&version.name));
    out.line(&format!(
        "{name}: noded {} (pid {}), up {up}, data in {}",
        version.noded, version.pid, version.data
    ))?;
    let amiss: Vec<&Node> = nodes.iter().filter(|node| !node.is_fine()).collect();
    if amiss.is_empty() {
        return Ok(out.line(&format!("all {} runnables are ready", nodes.len()))?);
    }
    out.line(&format!("{} of {} runnables are not ready:", amiss.len(), nodes.len()))?;
    for node in amiss {
        let state = out.paint(tree::tone(node.state), node.state);
        let why = node.waiting_for.as_deref().map_or_else(String::new, |why| format!(", waiting for {why}"));
        let why = if node.state == "skipped" {
            format!(": {}", node.waiting_for.as_deref().unwrap_or_default())
        } else {
            why
        };
        out.line(&format!("  {} is {state}{}", node.dn, safe(&why)))?;
        if let Some(exit) = node.exits.last() {
            out.line(&format!("    ended {}: {}", exit.at.as_deref().unwrap_or("?"), safe(&exit.reason)))?;
        }
    }
    Ok(())
}

pub(crate) async fn of_dn(caller: &mut Caller, dn: String, out: &mut Out) -> Result<(), Failure> {
    let request = StatusRequest { dn, log_entries: LOG_ENTRIES };
    let status = caller.ask(async |client| client.status(request).await).await?;
    let node = Node::from(status.node.unwrap_or_default());
    let log: Vec<Entry> = status.log.into_iter().map(Entry::try_from).collect::<Result<_, _>>()?;
    if out.json {
        let log: Vec<serde_json::Value> = log
            .iter()
            .map(|entry| serde_json::from_str(&render::json(entry)))
            .collect::<Result<_, _>>()
            .map_err(std::io::Error::from)?;
        return Ok(out.json(&DnStatus { node, log: &log })?);
    }
    show(&node, &log, out)
}

fn show(node: &Node, log: &[Entry], out: &mut Out) -> Result<(), Failure> {
    let dn = out.paint(Tone::Strong, &node.dn);
    let state = out.paint(tree::tone(node.state), node.state);
    let since = node.since_time.map(age).unwrap_or_default();
    out.line(&format!("{dn} is {state} for {since}"))?;
    let why = node.waiting_for.as_deref().map(safe);
    match (node.state, why) {
        ("skipped", Some(reason)) => out.line(&format!("  skipped      {reason}"))?,
        (_, Some(reason)) => out.line(&format!("  waiting for  {reason}"))?,
        (_, None) => {}
    }
    if node.state != "skipped" {
        let Node { generation, restarts, failures, .. } = node;
        out.line(&format!("  runs         {generation}, restarts {restarts}, failures in a row {failures}"))?;
    }
    if !node.exits.is_empty() {
        out.line("last ends, the newest last:")?;
    }
    for exit in &node.exits {
        show_exit(&node.dn, exit, out)?;
    }
    if !log.is_empty() {
        out.line("newest log entries:")?;
    }
    for entry in log {
        logs::show(entry, out)?;
    }
    Ok(())
}

fn show_exit(dn: &str, exit: &Exit, out: &mut Out) -> Result<(), Failure> {
    let state = out.paint(tree::tone(exit.state), exit.state);
    let at = exit.at.as_deref().unwrap_or("?");
    out.line(&format!("  {at}  run {}  {state}  {}", exit.generation, safe(&exit.reason)))?;
    for line in &readable(dn, &exit.output) {
        let line = out.paint(Tone::Faint, &format!("      {}", safe(line)));
        out.line(&line)?;
    }
    Ok(())
}

/// The lines of a daemon that writes for programs, as its log shows them.
fn readable(dn: &str, lines: &[String]) -> Vec<String> {
    let Some(parser) = parser_of(dn) else { return lines.to_vec() };
    let (journal, root) = (Journal::default(), Dn::root());
    let mut writer = journal.writer(&root, WriterOptions::new("output").parser(parser));
    let written = lines.iter().try_for_each(|line| writeln!(writer, "{line}"));
    match (written, journal.read(Query::new(root))) {
        (Ok(()), Ok(mut reader)) => reader.backlog().iter().flat_map(logs::texts).collect(),
        _ => lines.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_a_daemon_are_shown_as_its_log_is() {
        let zap =
            r#"{"level":"warn","ts":"2026-11-21T21:20:49.655Z","caller":"a.go:1","msg":"lost","peer":"b"}"#;
        let logfmt = r#"time="2026-11-21T11:26:16Z" level=error msg="no room" disk=a"#;
        for (dn, line, shown) in [
            ("root.etcd", zap, "lost peer=b"),
            ("root.cluster.consensus.etcd", zap, "lost peer=b"),
            ("root.containerd", logfmt, "no room disk=a"),
            ("root.service.web", zap, zap),
        ] {
            assert_eq!(readable(dn, &[line.to_owned()]), [shown], "{dn}");
        }
    }
}
