//! `docs/bench.md`, written whole from the rows of all benches.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use testbed::bench::{self, BenchRow, MeasurementContext, format_figure};
use testbed::command_output;

use crate::workspace::root;

const HEADER: &str = "# Benches

`cargo xtask bench --report` writes this page from `target/bench/*.json`. Each peer is measured in the same run as ours.
The ratio is ours to the peer's; the limit is what the machine could do at best.
";

/// Writes the page. Rows without machine and commit, which a bench leaves that cargo ran, are skipped and named.
///
/// # Errors
/// No bench has left rows, a file of rows is unreadable, or the page can't be written.
pub(super) fn write_page(directory: &Path, page: &Path) -> Result<()> {
    let mut sections = String::new();
    for name in row_files(directory) {
        match section(&name, &bench::read_rows_from(directory, &name)?) {
            Some(section) => sections += &section,
            None => eprintln!("skip {name}: measured outside of `cargo xtask bench`"),
        }
    }
    let place = directory.display();
    ensure!(!sections.is_empty(), "no rows of benches in {place}: run `cargo xtask bench` first");
    fs::write(page, format!("{HEADER}{sections}")).with_context(|| format!("write {}", page.display()))
}

/// The names of the files of rows, sorted.
pub(super) fn row_files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names =
        entries.filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned()));
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// `None` for rows without the circumstances of their measurement.
fn section(name: &str, rows: &[BenchRow]) -> Option<String> {
    let BenchRow { command, measured, .. } = rows.first()?;
    let MeasurementContext { machine, date, commit } = measured.as_ref()?;
    let mut text = format!("\n## {name}\n\n`{command}` at commit {commit} on {date}, on {machine}.\n\n");
    text += "| id | what | unit | ours | peer | ratio | limit | goal | met |\n|---|---|---|---|---|---|---|---|---|\n";
    rows.iter().for_each(|row| text += &table_row(row));
    Some(text)
}

fn table_row(row: &BenchRow) -> String {
    let peer = row.peer.as_ref();
    let number = |number: Option<f64>| number.map(format_figure).unwrap_or_default();
    let met = match row.goal_met {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    };
    let cells = [
        row.id.clone(),
        row.work.clone(),
        row.unit.clone(),
        format_figure(row.ours),
        peer.map(|peer| format!("{} ({} {})", format_figure(peer.value), peer.name, peer.version))
            .unwrap_or_default(),
        number(peer.map(|peer| row.ours / peer.value)),
        number(row.limit),
        number(row.goal),
        met.to_owned(),
    ];
    format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|").replace('\n', " ")).join(" | "))
}

/// What the rows of a run that just ended were measured on.
pub(super) fn describe_run() -> MeasurementContext {
    let text = |command: &mut Command| {
        command_output(command).map_or_else(|_| "?".into(), |text| text.trim().to_owned())
    };
    let git = |arguments: &[&str]| text(Command::new("git").args(arguments).current_dir(root()));
    let mark = if git(&["status", "--porcelain", "--untracked-files=no"]).is_empty() { "" } else { "+" };
    MeasurementContext {
        machine: describe_machine(),
        date: text(Command::new("date").args(["-u", "+%Y-%m-%d"])),
        commit: format!("{}{mark}", git(&["rev-parse", "--short", "HEAD"])),
    }
}

fn describe_machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (processors, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let gib = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() >> 20;
    let kernel = read("/proc/sys/kernel/osrelease");
    let model = model.map_or("unknown processors", |(_, model)| model);
    format!("{count} × {model}, {gib} GiB of memory, Linux {}", kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_section_for_each_file_and_a_row_for_each_figure() {
        let directory = tempfile::tempdir().unwrap();
        let page = directory.path().join("bench.md");
        assert!(write_page(directory.path(), &page).unwrap_err().to_string().contains("cargo xtask bench"));
        let mut row =
            BenchRow::new("restart", "kill | exec", "ms", 3.0).peer("runit", "2.1.2", 1.5).goal_at_most(2.0);
        let machine = "2 × x".to_owned();
        row.measured = Some(MeasurementContext { machine, date: "2026-01-31".into(), commit: "abc+".into() });
        bench::write_rows_to(directory.path(), "supervisor", &[row, BenchRow::new("b", "w", "ns", 1.0)])
            .unwrap();
        bench::write_rows_to(directory.path(), "by-cargo", &[BenchRow::new("c", "w", "ns", 1.0)]).unwrap();
        write_page(directory.path(), &page).unwrap();
        let text = fs::read_to_string(page).unwrap();
        assert!(!text.contains("by-cargo"), "{text}");
        for expected in [
            "## supervisor\n\n`cargo xtask bench supervisor` at commit abc+ on 2026-01-31, on 2 × x.\n",
            "\n| restart | kill \\| exec | ms | 3.00 | 1.50 (runit 2.1.2) | 2.00 |  | 2.00 | no |\n",
            "\n| b | w | ns | 1.00 |  |  |  |  |  |\n",
        ] {
            assert!(text.contains(expected), "{expected:?} in {text}");
        }
    }

    #[test]
    fn a_run_is_described_by_machine_day_and_commit() {
        let MeasurementContext { machine, date, commit } = describe_run();
        assert!(machine.contains(" GiB of memory, Linux ") && date.len() == 10 && !commit.is_empty());
    }
}
