//! `provisionerd volumes`: the volumes of the node.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use nodekeel_provisioner::format_chain;
use serde::Serialize;

use crate::config::{ConfigFlags, DaemonConfig};
use crate::inventory::{NodeInventory, RowState, VolumeRow};
use crate::move_cmd::{DrainFlags, MoveFlags};
use crate::move_node::{ReceiveFlags, SendFlags, SettleFlags};
use crate::{move_cmd, move_node, print_stdout, start_runtime};

/// How to print.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct VolumesFlags {
    #[command(subcommand)]
    command: Option<VolumesCommand>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Subcommand)]
enum VolumesCommand {
    /// Move the volume of a claim to another node
    ///
    /// Runs where kubectl does. No pod may use the claim. It can be interrupted, and repeated with the same arguments.
    Move(MoveFlags),
    /// Move all volumes of a node
    ///
    /// Runs where kubectl does. Volumes that pods use are left there, and named.
    Drain(DrainFlags),
    /// Write a volume to stdout, for `volumes move`
    #[command(hide = true)]
    Send(SendFlags),
    /// Make a volume from stdin, for `volumes move`
    #[command(hide = true)]
    Receive(ReceiveFlags),
    /// End a move on this node: keep the volume or remove it, as its PersistentVolume says
    #[command(hide = true)]
    Settle(SettleFlags),
}

/// The output of `volumes --json`; with several stores, a list of these.
#[derive(Debug, Serialize)]
struct VolumeList {
    directory: String,
    /// The name of the store, one of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    store: Option<String>,
    /// The reason why the API server could not be asked.
    api_error: Option<String>,
    /// The reason why the store could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    volumes: Vec<VolumeRow>,
}

pub(crate) fn run_volumes(flags: VolumesFlags) -> Result<ExitCode> {
    match flags.command {
        Some(VolumesCommand::Move(flags)) => return move_cmd::run_move(flags),
        Some(VolumesCommand::Drain(flags)) => return move_cmd::run_drain(flags),
        Some(VolumesCommand::Send(flags)) => return move_node::run_send(flags),
        Some(VolumesCommand::Receive(flags)) => return move_node::run_receive(flags),
        Some(VolumesCommand::Settle(flags)) => return move_node::run_settle(flags),
        None => {}
    }
    let config = flags.config.load_config()?;
    let stores = start_runtime()?.block_on(NodeInventory::read_all(&config));
    let (mut text, mut lists, mut failed) = (String::new(), Vec::new(), Vec::new());
    for (config, inventory) in stores {
        match inventory {
            Ok(inventory) if flags.json => lists.push(VolumeList::new(&config, &inventory)),
            Ok(inventory) => text += &store_text(&config, &inventory),
            // A store that can't be read does not hide the others.
            Err(error) => {
                lists.extend(flags.json.then(|| VolumeList::unreadable(&config, &error)));
                failed.push(error);
            }
        }
    }
    if flags.json {
        // One store as ever; several are a list.
        let json = match &lists[..] {
            [only] if config.stores.is_empty() => serde_json::to_string_pretty(only),
            lists => serde_json::to_string_pretty(lists),
        };
        text = json.context("can't format the volumes as JSON")? + "\n";
    }
    let printed = print_stdout(&text);
    let mut failed = failed.into_iter();
    let Some(first) = failed.next() else { return Ok(printed) };
    failed.for_each(|error| drop(writeln!(std::io::stderr(), "provisionerd: {}", format_chain(&*error))));
    Err(first)
}

fn store_text(config: &DaemonConfig, inventory: &NodeInventory) -> String {
    let rows = inventory.rows(config);
    let api_error = inventory.owners.as_ref().err().map(|error| format_chain(&**error));
    let store = inventory.store.as_ref().map(|store| store.as_str());
    let store = store.unwrap_or("none: the disk may not be mounted");
    let mut text = format!("{} is store {store}\n", config.store_label());
    if let Some(error) = &api_error {
        text += &format!("can't ask the API server, so claims are unknown: {error}\n");
    }
    text + &format_table(&rows)
}

impl VolumeList {
    fn new(config: &DaemonConfig, inventory: &NodeInventory) -> Self {
        Self {
            directory: config.directory.display().to_string(),
            name: config.store.as_ref().map(ToString::to_string),
            store: inventory.store.as_ref().map(ToString::to_string),
            api_error: inventory.owners.as_ref().err().map(|error| format_chain(&**error)),
            error: None,
            volumes: inventory.rows(config),
        }
    }

    fn unreadable(config: &DaemonConfig, error: &anyhow::Error) -> Self {
        Self {
            directory: config.directory.display().to_string(),
            name: config.store.as_ref().map(ToString::to_string),
            store: None,
            api_error: None,
            error: Some(format_chain(&**error)),
            volumes: Vec::new(),
        }
    }
}

/// A table with one line for each volume.
pub(crate) fn format_table(rows: &[VolumeRow]) -> String {
    let header = ["VOLUME", "STATE", "KIND", "CLAIM", "PHASE", "USED", "LIMIT", "FILES", "AGE", "MOUNTS"];
    let mut cells = vec![header.map(str::to_owned)];
    cells.extend(rows.iter().map(row_cells));
    let mut widths = [0; 10];
    for row in &cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &cells {
        let line: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        // Writing into a string cannot fail.
        let _ = writeln!(text, "{}", line.join("  ").trim_end());
    }
    text
}

fn row_cells(row: &VolumeRow) -> [String; 10] {
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let is_stored = row.state != RowState::Missing;
    // The limit of a missing volume is unknown, and not "none".
    let limit = row.limit_bytes.map_or_else(|| if is_stored { "none" } else { "-" }.to_owned(), format_bytes);
    let mounts = match row.mounts.len() {
        0 => "-".to_owned(),
        count => count.to_string(),
    };
    [
        row.id.clone(),
        row.state.as_str().to_owned(),
        text(&row.kind),
        text(&row.claim),
        text(&row.phase),
        row.used_bytes.map_or_else(|| "-".to_owned(), format_bytes),
        limit,
        row.used_inodes.map_or_else(|| "-".to_owned(), |inodes| inodes.to_string()),
        row.age_seconds.map_or_else(|| "-".to_owned(), format_age),
        mounts,
    ]
}

/// Bytes in the largest binary unit that leaves a whole number of at least one, rounded down.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 1024 && unit + 1 < units.len() {
        (value, unit) = (value / 1024, unit + 1);
    }
    format!("{value}{}", units[unit])
}

/// Seconds in their largest unit, rounded down.
fn format_age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_one_aligned_line_for_each_volume() {
        let row = |state, used: Option<u64>| VolumeRow {
            id: "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f".to_owned(),
            state,
            kind: used.map(|_| "directory".to_owned()),
            claim: Some("default/data".to_owned()),
            phase: None,
            limit_bytes: used.map(|_| 8 << 20),
            used_bytes: used,
            limit_inodes: used.map(|_| 1024),
            used_inodes: used.map(|_| 3),
            mounts: Vec::new(),
            age_seconds: used.map(|_| 90),
        };
        let text = format_table(&[row(RowState::Ok, Some(4096)), row(RowState::Missing, None)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[1].contains("ok       directory  default/data  -      4Ki   8Mi    3      1m   -"),
            "{text}"
        );
        assert!(lines[2].contains("missing  -          default/data"), "{text}");
        assert_eq!(lines[0].find("CLAIM"), lines[1].find("default/data"));
    }

    #[test]
    fn sizes_and_ages_are_rounded_down_to_their_unit() {
        let bytes = [0, 1023, 1024, (5 << 20) - 1, u64::MAX].map(format_bytes);
        assert_eq!(bytes, ["0", "1023", "1Ki", "4Mi", "15Ei"]);
        assert_eq!([0, 59, 3599, 86_399, 200_000].map(format_age), ["0s", "59s", "59m", "23h", "2d"]);
    }
}
