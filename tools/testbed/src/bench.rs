//! Rows of measurements: one JSON shape and one table for every bench of the workspace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::command_output;
use crate::table::Table;

/// One measured thing.
///
/// As JSON: `{id, work, unit, ours, peer, limit, goal, goal_met, command}`, with `null` for absent values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchRow {
    /// A short stable name within its bench, such as `restart`.
    pub id: String,
    /// The work, described so that a reader can repeat it.
    pub work: String,
    /// The unit of `ours`, of the peer's value, of `limit` and of `goal`.
    pub unit: String,
    /// Our figure.
    pub ours: f64,
    /// The peer, measured in the same run.
    pub peer: Option<PeerFigure>,
    /// The best that this machine can do, measured or known (a bare fork and exec, a memcpy).
    pub limit: Option<f64>,
    /// The figure to reach.
    pub goal: Option<f64>,
    /// Whether `ours` reached `goal`; `None` where no goal is set.
    pub goal_met: Option<bool>,
    /// The command that measures it again; filled in when it is written.
    pub command: String,
}

/// The figure of another program or library for the same work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerFigure {
    /// Its name.
    pub name: String,
    /// The version that it reports.
    pub version: String,
    /// Its figure, in the row's unit.
    pub value: f64,
}

impl BenchRow {
    /// A row without peer, limit and goal.
    pub fn new(id: impl Into<String>, work: impl Into<String>, unit: impl Into<String>, ours: f64) -> Self {
        Self {
            id: id.into(),
            work: work.into(),
            unit: unit.into(),
            ours,
            peer: None,
            limit: None,
            goal: None,
            goal_met: None,
            command: String::new(),
        }
    }

    /// Adds the peer that was measured in the same run.
    #[must_use]
    pub fn peer(mut self, name: impl Into<String>, version: impl Into<String>, value: f64) -> Self {
        self.peer = Some(PeerFigure { name: name.into(), version: version.into(), value });
        self
    }

    /// Adds the best that this machine can do.
    #[must_use]
    pub fn limit(mut self, limit: f64) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Sets a goal for a figure that is better when it is smaller.
    #[must_use]
    pub fn goal_at_most(mut self, goal: f64) -> Self {
        self.goal = Some(goal);
        self.goal_met = Some(self.ours <= goal);
        self
    }

    /// Sets a goal for a figure that is better when it is larger.
    #[must_use]
    pub fn goal_at_least(mut self, goal: f64) -> Self {
        self.goal = Some(goal);
        self.goal_met = Some(self.ours >= goal);
        self
    }
}

/// Writes `rows` to `target/bench/NAME.json` as one array and prints them as a table.
///
/// # Errors
/// The file can't be written.
pub fn write_rows(name: &str, rows: &[BenchRow]) -> Result<PathBuf> {
    let path = write_rows_to(&rows_directory(), name, rows)?;
    println!("{}", format_table(rows));
    println!("{}", path.display());
    Ok(path)
}

/// Writes rows as they are measured, so that a bench that fails keeps those before.
#[derive(Debug)]
pub struct RowWriter {
    name: String,
    rows: Vec<BenchRow>,
}

impl RowWriter {
    /// A writer without rows for `target/bench/NAME.json`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), rows: Vec::new() }
    }

    /// Adds rows to the file, and prints them.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn add_rows(&mut self, rows: impl IntoIterator<Item = BenchRow>) -> Result<()> {
        let before = self.rows.len();
        self.rows.extend(rows);
        println!("{}", format_table(&self.rows[before..]));
        write_rows_to(&rows_directory(), &self.name, &self.rows).map(drop)
    }

    /// Prints all of them as one table, as [`write_rows()`] does.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn finish(self) -> Result<PathBuf> {
        write_rows(&self.name, &self.rows)
    }
}

/// The directory of the rows: `bench` in cargo's target directory.
pub fn rows_directory() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().nth(2).unwrap_or(package);
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    root.join(target).join("bench")
}

fn write_rows_to(directory: &Path, name: &str, rows: &[BenchRow]) -> Result<PathBuf> {
    let mut rows = rows.to_vec();
    rows.iter_mut().for_each(|row| row.command = format!("cargo xtask bench {name}"));
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let path = directory.join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&rows)? + "\n";
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// The rows as a table.
fn format_table(rows: &[BenchRow]) -> Table {
    let mut table = Table::new(["id", "ours", "peer", "limit", "goal", "unit", "work"]);
    for row in rows {
        let peer = row
            .peer
            .as_ref()
            .map(|peer| format!("{} ({} {})", format_figure(peer.value), peer.name, peer.version));
        let goal = row.goal.map(|goal| match row.goal_met {
            Some(true) => format!("{} met", format_figure(goal)),
            _ => format!("{} MISSED", format_figure(goal)),
        });
        table.add_row([
            row.id.clone(),
            format_figure(row.ours),
            peer.unwrap_or_else(|| "-".into()),
            row.limit.map_or_else(|| "-".into(), format_figure),
            goal.unwrap_or_else(|| "-".into()),
            row.unit.clone(),
            row.work.clone(),
        ]);
    }
    table
}

/// A figure with three significant digits below a thousand, and whole above.
fn format_figure(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

/// The release of this etcd.
///
/// # Errors
/// It can't be run.
pub fn etcd_version(etcd: &Path) -> Result<String> {
    let printed = command_output(Command::new(etcd).arg("--version"))?;
    let version = printed.lines().next().and_then(|line| line.split(": ").nth(1));
    version.map(str::to_owned).context("the version in the output of etcd --version")
}

/// The median of the samples; of an even count, the mean of the two in the middle.
///
/// # Panics
/// `samples` is empty.
pub fn median(samples: &[f64]) -> f64 {
    percentile(samples, 50.0)
}

/// The value below which `percent` of the samples lie, interpolated between neighbours.
///
/// # Panics
/// `samples` is empty, or `percent` is not in `[0, 100]`.
pub fn percentile(samples: &[f64], percent: f64) -> f64 {
    assert!(!samples.is_empty(), "a percentile needs a sample");
    assert!((0.0..=100.0).contains(&percent), "{percent} is not a percentage");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = percent / 100.0 * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

/// Samples of ours and of a peer, taken in turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InterleavedSamples {
    /// Our figures, in the order of the rounds.
    pub ours: Vec<f64>,
    /// The peer's figures.
    pub peer: Vec<f64>,
}

/// Measures ours and a peer in turns, so that a slow minute of the machine hits both alike.
/// The side that is measured first alternates.
///
/// # Errors
/// The first error of either side.
pub fn measure_interleaved(
    rounds: usize,
    mut ours: impl FnMut() -> Result<f64>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<InterleavedSamples> {
    let mut samples = InterleavedSamples::default();
    for round in 0..rounds {
        if round % 2 == 0 {
            samples.ours.push(ours()?);
            samples.peer.push(peer()?);
        } else {
            samples.peer.push(peer()?);
            samples.ours.push(ours()?);
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_rows_have_every_field_and_null_for_what_is_absent() {
        let directory = tempfile::tempdir().unwrap();
        let rows = [
            BenchRow::new("restart", "kill -9 to exec", "ms", 1.5)
                .peer("runit", "2.1.2", 4.0)
                .goal_at_most(2.0),
            BenchRow::new("a", "b", "c", 1.0).goal_at_least(2.0),
        ];
        let path = write_rows_to(directory.path(), "x", &rows).unwrap();
        let written: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let command = "cargo xtask bench x";
        let expected = serde_json::json!([
            {
                "id": "restart", "work": "kill -9 to exec", "unit": "ms", "ours": 1.5,
                "peer": {"name": "runit", "version": "2.1.2", "value": 4.0},
                "limit": null, "goal": 2.0, "goal_met": true, "command": command,
            },
            {
                "id": "a", "work": "b", "unit": "c", "ours": 1.0, "peer": null,
                "limit": null, "goal": 2.0, "goal_met": false, "command": command,
            },
        ]);
        assert_eq!(written, expected);
        assert!(format_table(&rows).to_string().contains("2.00 MISSED"));
    }

    #[test]
    fn percentiles_interpolate_and_ignore_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], 100.0), 5.0);
        assert_eq!(percentile(&[1.0, 2.0], 25.0), 1.25);
    }

    #[test]
    fn the_first_side_alternates() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name: char| {
            order.borrow_mut().push(name);
            Ok(1.0)
        };
        measure_interleaved(2, || side('o'), || side('p')).unwrap();
        assert_eq!(*order.borrow(), "oppo");
    }
}
