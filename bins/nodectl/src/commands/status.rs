//! `status`: why runnables are not ready, and their last exits.

use std::io::Write as _;

use nodekeel_logtree::{Dn, LogEntry, LogQuery, LogStore, WriterOptions, render};
use nodekeel_node::client::log_parser_for;
use nodekeel_node::v1::{StatusRequest, TreeRequest, VersionRequest};
use serde::Serialize;

use super::health::{self, ConditionView, HealthView};
use super::version::VersionView;
use super::{logs, tree};
use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::runnable::{ExitView, RunnableView, health_summary, state_style};
use crate::time::format_age;
use crate::wire::{non_empty, system_time};

/// Number of log entries to print.
const LOG_ENTRIES: u32 = 10;

/// Show why runnables are not ready
///
/// Also shows their last exits. Without a DN, shows the whole node, and exits with 6 unless it is healthy: see
/// health. With one, exits with 6 if the runnable is not ready, or restarts in a crash loop.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// Name in the tree, like root.etcd or etcd
    #[arg(add = complete_dn())]
    dn: Option<String>,
}

#[derive(Debug, Serialize)]
struct NodeStatusView {
    #[serde(flatten)]
    version: VersionView,
    healthy: bool,
    conditions: Vec<ConditionView>,
    nodes: Vec<RunnableView>,
}

#[derive(Debug, Serialize)]
struct RunnableStatusView<'a> {
    node: RunnableView,
    /// What it is doing, and how much of that is done; absent if it reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<String>,
    /// Entries in the format of `logs`.
    log: &'a [serde_json::Value],
}

impl StatusArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        match self.dn {
            None => show_node(api, printer).await,
            Some(dn) => {
                let dn = api.resolve_dn(dn).await?;
                show_runnable(api, dn, printer).await
            }
        }
    }
}

async fn show_node(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.version(VersionRequest {}).await).await?;
    let started = system_time(answer.started);
    let version = VersionView::from(answer);
    let nodes = tree::tree_views(api.call(async |client| client.tree(TreeRequest {}).await).await?.nodes);
    let health = health::read_health(api).await?;
    if printer.is_json {
        let result = health.to_result();
        let HealthView { healthy, conditions } = health;
        printer.print_json(&NodeStatusView { version, healthy, conditions, nodes })?;
        return result;
    }
    let up = started.map(format_age).unwrap_or_default();
    let name = printer.style_text(TextStyle::Strong, &escape_control(&version.name));
    printer.print_line(&format!(
        "{name}: noded {} (pid {}), up {up}, data in {}",
        version.noded, version.pid, version.data
    ))?;
    let (summary, style) = health_summary(&nodes);
    // Skipped services count as healthy. They are listed all the same, with the reason.
    let listed: Vec<_> = nodes.iter().filter(|node| !node.healthy || node.state == "skipped").collect();
    let colon = if listed.is_empty() { "" } else { ":" };
    printer.print_line(&format!("{}{colon}", printer.style_text(style, &summary)))?;
    for node in &listed {
        print_unhealthy(node, printer)?;
    }
    // The conditions of the listed runnables are shown with them.
    let is_listed = |condition: &&ConditionView| listed.iter().any(|node| node.dn == condition.object);
    for condition in health.conditions.iter().filter(|condition| !is_listed(condition)) {
        printer.print_line(&format!("  {}", printer.style_text(condition.style(), &condition.text())))?;
        if let Some(hint) = condition.hint() {
            printer.print_line(&format!("    {hint}"))?;
        }
    }
    health.to_result()
}

fn print_unhealthy(node: &RunnableView, printer: &mut Printer) -> Result<(), CommandError> {
    let state = printer.style_text(state_style(node.state), node.state);
    let why = unhealthy_reason(node);
    let crash_loop = node.crash_loop_text().map(|text| format!(", {text}")).unwrap_or_default();
    printer.print_line(&format!("  {} is {state}{}{crash_loop}", node.dn, escape_control(&why)))?;
    let Some(exit) = node.exits.last() else { return Ok(()) };
    let at = exit.at.as_deref().unwrap_or("?");
    Ok(printer.print_line(&format!("    exited {at}: {}", escape_control(&exit.reason)))?)
}

/// The reason why it is not ready, as the end of a sentence about its state.
pub(super) fn unhealthy_reason(node: &RunnableView) -> String {
    match (node.state, node.waiting_for.as_deref(), node.condition.as_deref()) {
        // These are clauses, which end the sentence by themselves.
        ("skipped", Some(clause), _) | (_, _, Some(clause)) => format!(": {clause}"),
        (_, Some(awaited), None) => format!(", waiting for {awaited}"),
        (_, None, None) => String::new(),
    }
}

/// The error, and with it the exit code, of a runnable that is not healthy.
fn health_result(healthy: bool) -> Result<(), CommandError> {
    if healthy { Ok(()) } else { Err(CommandError::NotHealthy) }
}

async fn show_runnable(api: &mut ApiClient, dn: String, printer: &mut Printer) -> Result<(), CommandError> {
    let request = StatusRequest { dn, log_entries: LOG_ENTRIES };
    let status = api.call(async |client| client.status(request).await).await?;
    let node = RunnableView::from(status.node.unwrap_or_default());
    let progress = non_empty(status.progress);
    let log: Vec<LogEntry> = status.log.into_iter().map(LogEntry::try_from).collect::<Result<_, _>>()?;
    if printer.is_json {
        // An entry has the same JSON as in the output of `logs`.
        let log: Vec<serde_json::Value> = log
            .iter()
            .map(|entry| serde_json::from_str(&render::json_object(entry)))
            .collect::<Result<_, _>>()
            .map_err(std::io::Error::from)?;
        let healthy = node.healthy;
        printer.print_json(&RunnableStatusView { node, progress, log: &log })?;
        return health_result(healthy);
    }
    print_runnable(&node, progress.as_deref(), &log, printer)?;
    health_result(node.healthy)
}

fn print_runnable(
    node: &RunnableView,
    progress: Option<&str>,
    log: &[LogEntry],
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let dn = printer.style_text(TextStyle::Strong, &node.dn);
    let state = printer.style_text(state_style(node.state), node.state);
    let since = node.since_time.map(format_age).unwrap_or_default();
    printer.print_line(&format!("{dn} is {state} for {since}"))?;
    if let Some(progress) = progress {
        printer.print_line(&format!("  {}", escape_control(progress)))?;
    }
    let why = node.waiting_for.as_deref().map(escape_control);
    match (node.state, why) {
        ("skipped", Some(reason)) => printer.print_line(&format!("  skipped      {reason}"))?,
        (_, Some(reason)) if node.condition.is_some() => {
            printer.print_line(&format!("  not ready    {reason}"))?;
        }
        (_, Some(reason)) => printer.print_line(&format!("  waiting for  {reason}"))?,
        (_, None) => {}
    }
    if node.state != "skipped" {
        let RunnableView { generation, restarts, failures, .. } = node;
        printer.print_line(&format!(
            "  runs         {generation}, restarts {restarts}, consecutive failures {failures}"
        ))?;
    }
    if let (Some(pid), Some(since)) = (node.pid, node.process_since_time) {
        printer.print_line(&format!("  process      {pid}, running for {}", format_age(since)))?;
    }
    if let Some(problem) = &node.probe_problem {
        printer.print_line(&format!("  probe        {}", escape_control(problem)))?;
    }
    if node.crash_looping {
        printer.print_line("  crash-loops  until it has been ready for 10 s")?;
    } else if node.state == "dead" {
        printer.print_line(&format!(
            "  restart      none by itself; when its cause is mended: nodectl restart {}",
            node.dn
        ))?;
    }
    if !node.exits.is_empty() {
        printer.print_line("last exits, the newest last:")?;
    }
    for exit in &node.exits {
        print_exit(&node.dn, exit, printer)?;
    }
    if !log.is_empty() {
        printer.print_line("newest log entries:")?;
    }
    for entry in log {
        logs::print_entry(entry, printer)?;
    }
    Ok(())
}

fn print_exit(dn: &str, exit: &ExitView, printer: &mut Printer) -> Result<(), CommandError> {
    let state = printer.style_text(state_style(exit.state), exit.state);
    let at = exit.at.as_deref().unwrap_or("?");
    printer.print_line(&format!(
        "  {at}  run {}  {state}  {}",
        exit.generation,
        escape_control(&exit.reason)
    ))?;
    for line in &readable_output(dn, &exit.output) {
        let line = printer.style_text(TextStyle::Faint, &format!("      {}", escape_control(line)));
        printer.print_line(&line)?;
    }
    Ok(())
}

/// Parses the output of a daemon with a known log format, and prints it like its log.
fn readable_output(dn: &str, lines: &[String]) -> Vec<String> {
    let Some(parser) = log_parser_for(dn) else { return lines.to_vec() };
    // A log store of its own parses and renders the lines as that of noded does.
    let (log_store, root) = (LogStore::default(), Dn::root());
    let mut writer = log_store.line_writer(&root, WriterOptions::new("output").line_parser(parser));
    let written = lines.iter().try_for_each(|line| writeln!(writer, "{line}"));
    match (written, log_store.open_reader(LogQuery::of_dn(root))) {
        (Ok(()), Ok(mut reader)) => reader.read_backlog().iter().flat_map(logs::entry_texts).collect(),
        _ => lines.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_node::v1;

    use super::*;

    #[test]
    fn the_reason_of_what_is_not_ready_is_one_sentence() {
        let clause = "waits for a majority: 1 of 3 members reachable";
        let cases = [
            ("its backoff", "", ", waiting for its backoff"),
            (clause, clause, ": waits for a majority: 1 of 3 members reachable"),
            ("", "", ""),
        ];
        for (waiting_for, condition, expected) in cases {
            let (waiting_for, condition) = (waiting_for.to_owned(), condition.to_owned());
            let node =
                v1::Node { state: v1::State::New.into(), waiting_for, condition, ..Default::default() };
            assert_eq!(unhealthy_reason(&RunnableView::from(node)), expected);
        }
    }

    #[test]
    fn the_last_lines_of_a_daemon_are_shown_like_its_log() {
        let zap =
            r#"{"level":"warn","ts":"2026-11-21T21:20:49.655Z","caller":"a.go:1","msg":"lost","peer":"b"}"#;
        let logfmt = r#"time="2026-11-21T11:26:16Z" level=error msg="no room" disk=a"#;
        for (dn, line, shown) in [
            ("root.etcd", zap, "lost peer=b"),
            ("root.cluster.consensus.etcd", zap, "lost peer=b"),
            ("root.containerd", logfmt, "no room disk=a"),
            ("root.service.web", zap, zap),
        ] {
            assert_eq!(readable_output(dn, &[line.to_owned()]), [shown], "{dn}");
        }
    }
}
