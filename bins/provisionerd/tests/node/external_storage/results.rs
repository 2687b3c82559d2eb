//! The results of the suite's specs, in a file.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::deployment::image_file;

/// How a spec has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub(super) enum SpecResult {
    Passed,
    Skipped { reason: String },
    Failed { reason: String },
}

/// A spec that has run.
#[derive(Debug)]
pub(super) struct SpecRun {
    pub(super) name: String,
    pub(super) result: SpecResult,
    pub(super) seconds: u64,
    /// The log of the suite.
    pub(super) log: String,
}

/// The results of specs by their names.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SpecResults {
    /// Identifies the image and the definition that they are of.
    subject: u64,
    pub(super) specs: BTreeMap<String, SpecResult>,
}

impl SpecResults {
    /// The results of this image with this definition; none if they are of others.
    pub(super) fn load(definition: &Value) -> Result<Self> {
        fs::create_dir_all(results_directory()).context("create the directory of the results")?;
        let mut hasher = DefaultHasher::new();
        fs::read(image_file()?).context("read the image")?.hash(&mut hasher);
        definition.to_string().hash(&mut hasher);
        let subject = hasher.finish();
        let stored = fs::read(results_directory().join("results.json")).unwrap_or_default();
        let stored: Option<Self> = serde_json::from_slice(&stored).ok();
        let stored = stored.filter(|stored| stored.subject == subject);
        Ok(stored.unwrap_or(Self { subject, specs: BTreeMap::new() }))
    }

    /// True if a spec still has to run.
    pub(super) fn is_pending(&self, spec: &str) -> bool {
        !matches!(self.specs.get(spec), Some(SpecResult::Passed | SpecResult::Skipped { .. }))
    }

    /// Prints and stores how specs have ended; the logs of those that failed become files.
    pub(super) fn record_runs(&mut self, runs: Vec<SpecRun>) -> Result<()> {
        for SpecRun { name, result, seconds, log } in runs {
            let word = match &result {
                SpecResult::Passed => "passed".to_owned(),
                SpecResult::Skipped { reason } => format!("skipped: {reason}"),
                SpecResult::Failed { reason } => {
                    let path = results_directory().join(format!("{}.log", file_name(&name)));
                    fs::write(&path, log).context("write the log of a spec")?;
                    format!("FAILED, see {}: {reason}", path.display())
                }
            };
            println!("    {name}: {word} ({seconds} s)");
            self.specs.insert(name, result);
        }
        self.save()
    }

    /// Replaces the file at once, as the run can be interrupted at any time.
    fn save(&self) -> Result<()> {
        let path = results_directory().join("results.json");
        let partial = path.with_extension("partial");
        fs::write(&partial, serde_json::to_vec_pretty(self)?).context("write the results")?;
        fs::rename(&partial, &path).context("replace the results")
    }
}

fn results_directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("external-storage")
}

/// The end of a spec's name, which differs most, as the name of a file.
fn file_name(spec: &str) -> String {
    const LONGEST: usize = 120;
    let letters = spec.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' });
    let name: String = letters.collect();
    name[name.len().saturating_sub(LONGEST)..].to_owned()
}
