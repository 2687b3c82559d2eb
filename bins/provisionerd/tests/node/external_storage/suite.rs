//! The suite's program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use testbed::{Kube, command_output, gotool};

use super::definition::driver_definition;
use super::results::{SpecResult, SpecRun};

const FOCUS: &str = r"External.Storage";

/// The suite's program, and what each of its runs needs.
#[derive(Debug)]
pub(super) struct Suite<'a> {
    pub(super) definition: Value,
    program: PathBuf,
    arguments: Vec<String>,
    directory: &'a Path,
    run_count: AtomicUsize,
}

impl<'a> Suite<'a> {
    pub(super) fn new(kube: &Kube, directory: &'a Path) -> Result<Self> {
        let (file, definition) = (directory.join("driver.json"), driver_definition());
        fs::write(&file, definition.to_string()).context("write the driver's definition")?;
        let arguments = vec![
            format!("--kubeconfig={}", kube.kubeconfig_file("admin")?.display()),
            format!("--kubectl-path={}", kube.programs().program_path("kubectl").display()),
            format!("--storage.testdriver={}", file.display()),
            "--provider=skeleton".to_owned(),
            "--ginkgo.no-color".to_owned(),
            "--ginkgo.timeout=1h".to_owned(),
        ];
        let program = gotool::KUBERNETES_E2E.program_path("e2e.test")?;
        Ok(Self { definition, program, arguments, directory, run_count: AtomicUsize::new(0) })
    }

    /// The names of all specs of the driver.
    pub(super) fn list_specs(&self) -> Result<Vec<String>> {
        let reports = self.run_program(&["--ginkgo.dry-run", &format!("--ginkgo.focus={FOCUS}")])?;
        let chosen = reports.iter().filter(|spec| is_spec(spec) && spec["State"] == "passed");
        Ok(chosen.map(spec_name).collect())
    }

    /// Runs specs one after the other, and gives those that have ended.
    pub(super) fn run_specs(&self, names: &[String]) -> Result<Vec<SpecRun>> {
        let patterns: Vec<String> = names.iter().map(|name| quote_pattern(name)).collect();
        let reports = self.run_program(&[&format!("--ginkgo.focus=(?:{})$", patterns.join("|"))])?;
        let runs = reports.iter().filter(|spec| is_spec(spec)).filter_map(spec_run);
        let runs: Vec<_> = runs.filter(|run| names.contains(&run.name)).collect();
        let setup = reports.iter().find(|part| !is_spec(part) && part["State"] == "failed");
        match setup {
            Some(setup) if runs.is_empty() => bail!("the suite did not start: {}", failure_message(setup)),
            _ => Ok(runs),
        }
    }

    /// Runs the program, and gives the reports of its specs. It fails if a spec fails, so the report counts.
    fn run_program(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let number = self.run_count.fetch_add(1, Ordering::SeqCst);
        let report = self.directory.join(format!("report-{number}.json"));
        let mut command = Command::new(&self.program);
        command.current_dir(self.directory).args(&self.arguments).args(arguments);
        command.arg(format!("--ginkgo.json-report={}", report.display()));
        let run = command_output(&mut command);
        let text = match (fs::read(&report), run) {
            (Ok(text), _) => text,
            (Err(_), Err(error)) => return Err(error),
            (Err(error), Ok(_)) => return Err(error).context("the suite wrote no report"),
        };
        fs::remove_file(&report).context("remove the suite's report")?;
        let suites: Vec<Value> = serde_json::from_slice(&text).context("read the suite's report")?;
        let specs = suites.iter().flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
        Ok(specs.cloned().collect())
    }
}

/// True if a part of a report is a spec; others are the suite's setup and its end.
fn is_spec(report: &Value) -> bool {
    report["LeafNodeType"] == "It"
}

/// How a spec has ended; `None` if it was not chosen, or has not run because the process ended early.
fn spec_run(report: &Value) -> Option<SpecRun> {
    let message = failure_message(report);
    let first_line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let result = match report["State"].as_str().unwrap_or_default() {
        "passed" => SpecResult::Passed,
        "skipped" if message.is_empty() => return None,
        "skipped" => SpecResult::Skipped { reason: first_line.to_owned() },
        state => SpecResult::Failed { reason: format!("{state}: {message}") },
    };
    let log = report["CapturedGinkgoWriterOutput"].as_str().unwrap_or_default().to_owned();
    let seconds = report["RunTime"].as_u64().unwrap_or_default() / 1_000_000_000;
    Some(SpecRun { name: spec_name(report), result, seconds, log })
}

fn failure_message(report: &Value) -> &str {
    report["Failure"]["Message"].as_str().unwrap_or_default()
}

/// The name by which the suite's focus finds a spec.
fn spec_name(report: &Value) -> String {
    let texts = report["ContainerHierarchyTexts"].as_array().into_iter().flatten();
    let texts: Vec<&str> = texts.chain([&report["LeafNodeText"]]).filter_map(Value::as_str).collect();
    texts.join(" ")
}

/// A regular expression that only this text matches.
fn quote_pattern(text: &str) -> String {
    let quote = |letter: char| match letter {
        letter if letter.is_ascii_punctuation() => format!("\\{letter}"),
        letter => letter.to_string(),
    };
    text.chars().map(quote).collect()
}
