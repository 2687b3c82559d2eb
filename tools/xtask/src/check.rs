//! `cargo xtask check`: format, lints, docs, packages, and dependencies.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Result;

use crate::report::Report;
use crate::run::Log;
use crate::setup;
use crate::workspace::{self, Package, cargo, root};

const STEP_WITHIN: Duration = Duration::from_secs(30 * 60);
/// The newest that is known to build with this workspace's toolchain. Without its default features it leaves
/// out what fetches advisories, which aren't asked for.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// Lints of libraries beside the workspace's: only programs print, exit, and read the environment.
const LIBRARY_LINTS: [&str; 5] = [
    "clippy::print_stdout",
    "clippy::print_stderr",
    "clippy::dbg_macro",
    "clippy::exit",
    "clippy::disallowed_methods",
];
/// The directory of the clippy.toml that names the disallowed methods of libraries.
const LIBRARY_CLIPPY: &str = "tools/xtask/library-clippy";

/// Runs every check, also after one has failed.
pub(crate) fn run() -> Result<ExitCode> {
    setup::install()?;
    let packages = workspace::read_metadata()?.packages;
    let mut report = Report::new(Log::default());
    let mut step = |name: &str, command: Command| report.run_check(name, command, STEP_WITHIN);
    step("format", cargo_line("fmt --all --check"));
    step("clippy", cargo_line("clippy --workspace --all-targets --all-features --keep-going -- -D warnings"));
    let mut docs = cargo_line("doc --workspace --no-deps --all-features --keep-going");
    docs.env("RUSTDOCFLAGS", "-D warnings");
    step("docs", docs);
    let mut package = cargo_line("package --no-verify --allow-dirty");
    let published = packages.iter().filter(|package| package.is_published());
    package.args(published.flat_map(|package| ["-p", &package.name]));
    step("package", package);
    for package in &packages {
        for features in feature_sets(package) {
            let name = format!("{} alone {}", package.name, features.join(" "));
            step(name.trim_end(), check_alone(package, &features));
        }
    }
    match setup::install_cargo_tool("deny", CARGO_DENY, &["--no-default-features"]) {
        Ok(()) => step("cargo-deny", cargo_line("deny --all-features check bans licenses sources")),
        Err(error) => report.could_not_run("cargo-deny", &format!("{error:#}")),
    }
    Ok(report.finish())
}

fn cargo_line(line: &str) -> Command {
    cargo(&line.split(' ').collect::<Vec<_>>())
}

/// As a dependent gets it: by default, without defaults, and with each feature alone. A build of the
/// workspace unites the features of all members and so hides a missing one.
fn feature_sets(package: &Package) -> Vec<Vec<&str>> {
    let mut sets = vec![vec![]];
    if !package.features.is_empty() {
        sets.push(vec!["--no-default-features"]);
    }
    let features = package.features.keys().filter(|feature| *feature != "default");
    sets.extend(features.map(|feature| vec!["--no-default-features", "--features", feature]));
    sets
}

fn check_alone(package: &Package, features: &[&str]) -> Command {
    let mut command = cargo(&["clippy", "-p", &package.name]);
    command.args(features).args(["--", "-D", "warnings"]);
    if is_library(package) {
        command.args(LIBRARY_LINTS.iter().flat_map(|lint| ["-D", lint]));
        command.env("CLIPPY_CONF_DIR", root().join(LIBRARY_CLIPPY));
    }
    command
}

/// A member outside of `bins` and `examples`.
fn is_library(package: &Package) -> bool {
    let directory = package.directory().strip_prefix(root()).unwrap_or(package.directory());
    directory.components().count() == 1 && !directory.ends_with("examples")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, features: &[&str]) -> Package {
        let features: serde_json::Map<_, _> =
            features.iter().map(|feature| ((*feature).to_owned(), serde_json::json!([]))).collect();
        let manifest = root().join(name).join("Cargo.toml");
        let package = serde_json::json!({"name": name, "manifest_path": manifest, "features": features});
        serde_json::from_value(package).unwrap()
    }

    #[test]
    fn each_feature_is_checked_alone() {
        let package = package("a", &["default", "tonic"]);
        let sets: Vec<String> = feature_sets(&package).iter().map(|set| set.join(" ")).collect();
        assert_eq!(sets, ["", "--no-default-features", "--no-default-features --features tonic"]);
    }

    #[test]
    fn a_package_without_features_is_checked_once() {
        assert_eq!(feature_sets(&package("a", &[])).len(), 1);
    }

    #[test]
    fn libraries_neither_print_nor_read_the_environment() {
        let lints = |name: &str| {
            let command = check_alone(&package(name, &[]), &[]);
            let arguments: Vec<_> =
                command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            LIBRARY_LINTS.iter().all(|lint| arguments.iter().any(|word| word == lint))
        };
        for library in ["supervisor", "logtree", "localstorage", "fsquota", "provisioner", "cluster"] {
            assert!(lints(library), "{library}");
        }
        assert!(lints("containerd-svc") && !lints("bins/noded") && !lints("examples"));
        let forbidden = std::fs::read_to_string(root().join(LIBRARY_CLIPPY).join("clippy.toml")).unwrap();
        for call in ["env::var", "env::args", "env::current_dir", "env::temp_dir", "thread::sleep"] {
            assert!(forbidden.contains(&format!("std::{call}\"")), "{call}");
        }
    }
}
