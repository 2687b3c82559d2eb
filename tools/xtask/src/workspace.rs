//! What cargo knows of the workspace's packages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

/// *Source:* `cargo metadata --no-deps`, format 1.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_directory: PathBuf,
}

/// A member of the workspace.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) version: String,
    pub(crate) manifest_path: PathBuf,
    /// The registries that accept it; absent where any does.
    #[serde(default)]
    publish: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Value>,
    #[serde(default)]
    pub(crate) dependencies: Vec<Dependency>,
    #[serde(default)]
    pub(crate) targets: Vec<Target>,
    /// The manifest's `[package.metadata]`.
    #[serde(default)]
    pub(crate) metadata: Value,
}

/// A package that another one names in its manifest.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `dev`, `build`, or nothing for a normal one.
    #[serde(default)]
    pub(crate) kind: Option<String>,
}

/// A library, program, test, example or bench of a package.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
    #[serde(default, rename = "required-features")]
    pub(crate) required_features: Vec<String>,
}

impl Package {
    pub(crate) fn directory(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(&self.manifest_path)
    }

    /// Whether users may add it as a dependency.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }

    pub(crate) fn is_library(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "lib"))
    }
}

/// Reads the workspace's metadata.
///
/// # Errors
/// A manifest is invalid.
pub(crate) fn read_metadata() -> Result<Metadata> {
    let text = testbed::command_output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("parse cargo metadata")
}

/// A cargo of the toolchain that runs this program, in the workspace's root.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    // The outer cargo has set these; build scripts that watch them would run again, with all that depends on
    // them.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Builds noded and nodectl; gives their directory.
///
/// # Errors
/// The build fails, with its output on standard error.
pub(crate) fn build_node_programs() -> Result<PathBuf> {
    println!("build noded and nodectl (a few minutes the first time)");
    let mut cargo = cargo(&["build", "--package", "noded", "--package", "nodectl"]);
    let status = cargo.status().context("execute cargo")?;
    ensure!(status.success(), "the build failed ({status})");
    Ok(read_metadata()?.target_directory.join("debug"))
}

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    path.ancestors().nth(2).unwrap_or(path).to_owned()
}

/// Cargo's target directory.
pub(crate) fn target_directory() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}
