//! `tree`: all runnables with their states.

use std::collections::BTreeMap;

use nodekeel_node::v1::TreeRequest;

use crate::api_client::ApiClient;
use crate::command_error::CommandError;
use crate::model::RunnableView;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::format_age;

pub(crate) async fn show_tree(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let nodes = tree_views(api.call(async |client| client.tree(TreeRequest {}).await).await?.nodes);
    print_tree(&nodes, printer, SinceColumn::Age)
}

pub(crate) async fn watch_tree(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let mut trees = api.follow_stream(async |client| client.watch_tree(TreeRequest {}).await).await?;
    while let Some(tree) = trees.next_message().await? {
        if !printer.is_json {
            printer.clear_screen()?;
        }
        // An age would be outdated on the screen until the next change.
        print_tree(&tree_views(tree.nodes), printer, SinceColumn::Clock)?;
        if !printer.is_json && !printer.is_terminal {
            printer.print_line("")?;
        }
        printer.flush()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum SinceColumn {
    Age,
    Clock,
}

pub(crate) fn tree_views(nodes: Vec<nodekeel_node::v1::Node>) -> Vec<RunnableView> {
    nodes.into_iter().map(RunnableView::from).collect()
}

pub(crate) fn state_style(state: &str) -> TextStyle {
    match state {
        "ready" | "done" => TextStyle::Good,
        "new" | "waiting" => TextStyle::Pending,
        "dead" => TextStyle::Bad,
        _ => TextStyle::Faint,
    }
}

fn print_tree(nodes: &[RunnableView], printer: &mut Printer, when: SinceColumn) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&nodes)?);
    }
    let drawn = draw_tree(nodes);
    let width = drawn.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0).max(4);
    let header = format!("{:width$}  {:8}  {:9}  {:>8}  WHY NOT READY", "NAME", "STATE", "SINCE", "RESTARTS");
    let header = printer.style_text(TextStyle::Strong, &header);
    printer.print_line(&header)?;
    for (label, node) in drawn {
        let state = printer.style_text(state_style(node.state), &format!("{:8}", node.state));
        let since = match (when, node.since_time) {
            (SinceColumn::Age, Some(since)) => format_age(since),
            (SinceColumn::Clock, Some(_)) => {
                node.since.as_ref().map(|text| text[11..19].to_owned()).unwrap_or_default()
            }
            (_, None) => String::new(),
        };
        let why = not_ready_reason(node);
        let line = format!("{label:width$}  {state}  {since:9}  {:>8}  {why}", node.restarts);
        printer.print_line(line.trim_end())?;
    }
    Ok(())
}

/// Why a runnable is not ready, with its last exit if that is the reason.
fn not_ready_reason(node: &RunnableView) -> String {
    let waits = node.waiting_for.as_deref().unwrap_or_default();
    let ended = node
        .exits
        .last()
        .filter(|_| matches!(node.state, "dead" | "waiting"))
        .map(|exit| shorten_reason(&exit.reason));
    let parts = [Some(escape_control(waits)), ended].into_iter().flatten().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("; ")
}

/// The start of a reason, which can be long.
fn shorten_reason(reason: &str) -> String {
    const CHARS: usize = 60;
    let line = escape_control(reason.lines().next().unwrap_or_default());
    match line.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// The runnables in tree order, with their branch lines.
fn draw_tree(nodes: &[RunnableView]) -> Vec<(String, &RunnableView)> {
    let mut children: BTreeMap<&str, Vec<&RunnableView>> = BTreeMap::new();
    let mut tops = Vec::new();
    for node in nodes {
        match node.dn.rsplit_once('.').filter(|(parent, _)| nodes.iter().any(|other| other.dn == *parent)) {
            Some((parent, _)) => children.entry(parent).or_default().push(node),
            None => tops.push(node),
        }
    }
    let mut drawn = Vec::new();
    for top in tops {
        drawn.push((top.dn.clone(), top));
        draw_children(top, "", &children, &mut drawn);
    }
    drawn
}

fn draw_children<'a>(
    parent: &RunnableView,
    indent: &str,
    children: &BTreeMap<&str, Vec<&'a RunnableView>>,
    drawn: &mut Vec<(String, &'a RunnableView)>,
) {
    let below = children.get(parent.dn.as_str()).map_or(&[][..], Vec::as_slice);
    for (index, child) in below.iter().enumerate() {
        let (branch, trunk) =
            if index + 1 == below.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let name = child.dn.rsplit('.').next().unwrap_or_default();
        drawn.push((format!("{indent}{branch}{name}"), child));
        draw_children(child, &format!("{indent}{trunk}"), children, drawn);
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_node::v1;

    use super::*;

    #[test]
    fn the_reason_names_the_last_exit_of_failed_runnables_only() {
        let node = |state: v1::State, reason: &str| {
            let exits = vec![v1::Exit { reason: reason.into(), ..Default::default() }];
            let waiting_for = "its backoff".into();
            RunnableView::from(v1::Node { state: state.into(), waiting_for, exits, ..Default::default() })
        };
        assert_eq!(
            not_ready_reason(&node(v1::State::Waiting, "exited with code 3\nmore")),
            "its backoff; exited with code 3"
        );
        assert_eq!(not_ready_reason(&node(v1::State::New, "exited with code 3")), "its backoff");
        assert_eq!(
            not_ready_reason(&node(v1::State::Dead, &"x".repeat(61))),
            format!("its backoff; {}...", "x".repeat(60))
        );
    }

    #[test]
    fn children_are_drawn_below_their_parents() {
        let node =
            |dn: &str| RunnableView::from(nodekeel_node::v1::Node { dn: dn.into(), ..Default::default() });
        let nodes =
            ["root", "root.a", "root.a.x", "root.a.x.y", "root.b", "root.a.z", "lost.child"].map(node);
        let labels: Vec<_> = draw_tree(&nodes).into_iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["root", "├─ a", "│  ├─ x", "│  │  └─ y", "│  └─ z", "└─ b", "lost.child"]);
    }
}
