//! What an operator reads of a volume that does not open, and types.

use anyhow::{Result, ensure};
use nodekeel_node::v1::{HealthRequest, StorageRequest, StorageResponse, TreeRequest};
use nodekeel_supervisor::{RunnableState, RunnableStatus, WaitReason};
use tokio::time::{Duration, timeout};

use crate::harness::TEST_TIMEOUT;
use crate::storage_device::DeviceNode;

/// What became of a start.
#[derive(Debug)]
pub(super) enum Settled {
    Open,
    /// The status and the health of the volume, in the order in which they are read.
    Condition {
        name: String,
        texts: Vec<String>,
    },
}

/// Waits until the volume is open or locked, or until three attempts have failed: what heals by itself is no condition.
pub(super) async fn settle(node: &mut DeviceNode) -> Result<Settled> {
    let mut changes = node.client.watch_tree(TreeRequest {}).await?.into_inner();
    let settled = async {
        let mut failed_since = None;
        loop {
            let status = node.client.storage(StorageRequest {}).await?.into_inner();
            let generation = generation(node);
            let failed = *failed_since.get_or_insert(generation);
            match status.state.as_str() {
                // One that opened just before a command restarts it is closed again.
                "open" if is_ready(node) => return anyhow::Ok(None),
                "open" => failed_since = None,
                "locked" => return Ok(Some(status)),
                // It works, however long that takes.
                _ if status.wiped_bytes.is_some() || status.detail.is_empty() => failed_since = None,
                _ if generation >= failed + 2 => return Ok(Some(status)),
                _ => {}
            }
            // Its status changes with the tree, or a moment later.
            let _ = timeout(Duration::from_millis(200), changes.message()).await;
        }
    };
    let status = timeout(5 * TEST_TIMEOUT, settled).await;
    ensure!(status.is_ok(), "it does not settle: {:#?}", node.client.storage(StorageRequest {}).await);
    match status?? {
        None => Ok(Settled::Open),
        Some(status) => describe_condition(node, status).await,
    }
}

fn generation(node: &DeviceNode) -> u64 {
    let tree = node.node.snapshot();
    tree.iter().find(|status| &*status.dn == "root.storage").map_or(0, |status| status.generation)
}

fn is_ready(node: &DeviceNode) -> bool {
    let is = |status: &RunnableStatus| {
        let is_up = status.state == RunnableState::Ready && status.waiting_for == WaitReason::Nothing;
        &*status.dn == "root.storage" && is_up
    };
    node.node.snapshot().iter().any(is)
}

async fn describe_condition(node: &mut DeviceNode, status: StorageResponse) -> Result<Settled> {
    let health = node.client.health(HealthRequest::default()).await?.into_inner();
    let found = health.conditions.into_iter().find(|condition| condition.object == "root.storage");
    ensure!(found.is_some(), "nodectl health does not name what status does: {status:?}");
    let mut texts = vec![status.detail];
    texts.extend(found.into_iter().flat_map(|condition| [condition.problem, condition.hint]));
    let name = texts.iter().find(|text| !text.is_empty()).cloned().unwrap_or_default();
    let name = name.split([',', ';']).next().unwrap_or_default().splitn(3, ": ").take(2);
    let name = name.collect::<Vec<_>>().join(": ");
    Ok(Settled::Condition { name, texts })
}

/// The first command of these texts that an operator types whose volume has data that are needed, or none.
pub(super) fn choose_command(texts: &[String], has_data: bool) -> Option<String> {
    let gives_up = |command: &String| {
        command.starts_with("nodectl reset") || command.starts_with("nodectl storage erase")
    };
    let only_shows = |command: &String| {
        ["nodectl logs", "nodectl storage status"].iter().any(|start| command.starts_with(start))
    };
    let commands = texts.iter().flat_map(|text| find_commands(text));
    commands.filter(|command| !only_shows(command)).find(|command| !(has_data && gives_up(command)))
}

/// The commands of a text: within backticks, or behind "type".
fn find_commands(text: &str) -> Vec<String> {
    const ENDS: [&str; 10] = ["`", ";", ",", ")", " (", ": ", " if ", " and ", " or ", "\n"];
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((at, start)) = ["nodectl ", "`"]
        .into_iter()
        .filter_map(|start| Some((rest.find(start)?, start)))
        .min_by_key(|(at, _)| *at)
    {
        let from = if start == "`" { &rest[at + 1..] } else { &rest[at..] };
        let ends: &[&str] = if start == "`" { &ENDS[..1] } else { &ENDS };
        let end = ends.iter().filter_map(|end| from.find(end)).min().unwrap_or(from.len());
        found.push(from[..end].trim().to_owned());
        rest = from[end..].strip_prefix('`').filter(|_| start == "`").unwrap_or(&from[end..]);
    }
    found
}

#[test]
fn commands_are_read_as_an_operator_reads_them() {
    for (text, commands) in [
        (
            "is damaged or gone: restore the header, type: nodectl storage header restore FILE; or attach it; if there is no \
             backup, its data are lost: nodectl reset",
            &["nodectl storage header restore FILE", "nodectl reset"][..],
        ),
        (
            "restore its newer header (nodectl storage header restore FILE), or, if this one is to stay, type nodectl storage \
             unlock, and then nodectl storage rotate --recovery",
            &[
                "nodectl storage header restore FILE",
                "nodectl storage unlock",
                "nodectl storage rotate --recovery",
            ],
        ),
        ("wait, or, if nobody needs it, `nodectl storage erase xfs-1`", &["nodectl storage erase xfs-1"]),
        ("type: nodectl storage erase luks-2 (a token of every byte)", &["nodectl storage erase luks-2"]),
        ("mounted on /srv: `umount /srv`, or `true`", &["umount /srv", "true"]),
        ("attach the node's own disk", &[]),
    ] {
        assert_eq!(find_commands(text), commands, "{text}");
    }
    let texts = ["data are lost: nodectl reset".to_owned(), "`nodectl storage unlock`".to_owned()];
    assert_eq!(choose_command(&texts, true).as_deref(), Some("nodectl storage unlock"));
    assert_eq!(choose_command(&texts, false).as_deref(), Some("nodectl reset"));
}
