//! `tree`: all runnables with their states.

use std::collections::BTreeMap;

use nodekeel_node::v1::TreeRequest;

use crate::caller::Caller;
use crate::failure::Failure;
use crate::model::Node;
use crate::out::{Out, Tone, safe};
use crate::time::age;

pub(crate) async fn once(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let nodes = nodes(caller.ask(async |client| client.tree(TreeRequest {}).await).await?.nodes);
    show(&nodes, out, When::Age)
}

pub(crate) async fn watch(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let mut trees = caller.follow(async |client| client.watch_tree(TreeRequest {}).await).await?;
    while let Some(tree) = trees.next().await? {
        if !out.json {
            out.clear()?;
        }
        // An age would grow old on the screen until the next change.
        show(&nodes(tree.nodes), out, When::Time)?;
        if !out.json && !out.is_terminal {
            out.line("")?;
        }
        out.flush()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum When {
    Age,
    Time,
}

pub(crate) fn nodes(nodes: Vec<nodekeel_node::v1::Node>) -> Vec<Node> {
    nodes.into_iter().map(Node::from).collect()
}

pub(crate) fn tone(state: &str) -> Tone {
    match state {
        "ready" | "done" => Tone::Good,
        "new" | "waiting" => Tone::Pending,
        "dead" => Tone::Bad,
        _ => Tone::Faint,
    }
}

fn show(nodes: &[Node], out: &mut Out, when: When) -> Result<(), Failure> {
    if out.json {
        return Ok(out.json(&nodes)?);
    }
    let drawn = draw(nodes);
    let width = drawn.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0).max(4);
    let header = format!("{:width$}  {:8}  {:9}  {:>8}  WHY NOT READY", "NAME", "STATE", "SINCE", "RESTARTS");
    let header = out.paint(Tone::Strong, &header);
    out.line(&header)?;
    for (label, node) in drawn {
        let state = out.paint(tone(node.state), &format!("{:8}", node.state));
        let since = match (when, node.since_time) {
            (When::Age, Some(since)) => age(since),
            (When::Time, Some(_)) => {
                node.since.as_ref().map(|text| text[11..19].to_owned()).unwrap_or_default()
            }
            (_, None) => String::new(),
        };
        let why = why(node);
        let line = format!("{label:width$}  {state}  {since:9}  {:>8}  {why}", node.restarts);
        out.line(line.trim_end())?;
    }
    Ok(())
}

/// Why a node is not ready; how its last run ended, if that is why.
fn why(node: &Node) -> String {
    let waits = node.waiting_for.as_deref().unwrap_or_default();
    let ended = node
        .exits
        .last()
        .filter(|_| matches!(node.state, "dead" | "waiting"))
        .map(|exit| brief(&exit.reason));
    let parts = [Some(safe(waits)), ended].into_iter().flatten().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("; ")
}

/// The beginning of a reason, which may be as long as its errors please.
fn brief(reason: &str) -> String {
    const CHARS: usize = 60;
    let line = safe(reason.lines().next().unwrap_or_default());
    match line.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Each node after its parent, with the lines that lead to it.
fn draw(nodes: &[Node]) -> Vec<(String, &Node)> {
    let mut children: BTreeMap<&str, Vec<&Node>> = BTreeMap::new();
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
        descend(top, "", &children, &mut drawn);
    }
    drawn
}

fn descend<'a>(
    parent: &Node,
    indent: &str,
    children: &BTreeMap<&str, Vec<&'a Node>>,
    drawn: &mut Vec<(String, &'a Node)>,
) {
    let below = children.get(parent.dn.as_str()).map_or(&[][..], Vec::as_slice);
    for (index, child) in below.iter().enumerate() {
        let (branch, trunk) =
            if index + 1 == below.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let name = child.dn.rsplit('.').next().unwrap_or_default();
        drawn.push((format!("{indent}{branch}{name}"), child));
        descend(child, &format!("{indent}{trunk}"), children, drawn);
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_node::v1;

    use super::*;

    #[test]
    fn why_tells_the_last_end_of_what_failed_and_of_nothing_else() {
        let node = |state: v1::State, reason: &str| {
            let exits = vec![v1::Exit { reason: reason.into(), ..Default::default() }];
            let waiting_for = "its backoff".into();
            Node::from(v1::Node { state: state.into(), waiting_for, exits, ..Default::default() })
        };
        assert_eq!(
            why(&node(v1::State::Waiting, "exited with code 3\nmore")),
            "its backoff; exited with code 3"
        );
        assert_eq!(why(&node(v1::State::New, "exited with code 3")), "its backoff");
        assert_eq!(
            why(&node(v1::State::Dead, &"x".repeat(61))),
            format!("its backoff; {}...", "x".repeat(60))
        );
    }

    #[test]
    fn children_hang_below_their_parents() {
        let node = |dn: &str| Node::from(nodekeel_node::v1::Node { dn: dn.into(), ..Default::default() });
        let nodes =
            ["root", "root.a", "root.a.x", "root.a.x.y", "root.b", "root.a.z", "lost.child"].map(node);
        let labels: Vec<_> = draw(&nodes).into_iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["root", "├─ a", "│  ├─ x", "│  │  └─ y", "│  └─ z", "└─ b", "lost.child"]);
    }
}
