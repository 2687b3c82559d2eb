//! `cargo xtask check`: format, lints, docs, packages, and dependencies.

use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::report::Report;
use crate::run::Log;
use crate::setup;
use crate::test::lanes::{Job, Lane, run_job};
use crate::test::sample::{SHARE, Sample};
use crate::workspace::{self, Package, cargo, root, target_directory};

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

/// Runs every check, also after one has failed. The crates alone, whose builds are the most, run beside the others in a
/// separate target directory: one build leaves much of two processors idle.
pub(crate) fn run() -> Result<ExitCode> {
    setup::install()?;
    let packages = workspace::read_metadata()?.packages;
    let mut report = Report::new(Log::default());
    let (alone, left_out) = alone_steps(&packages, Sample::of_run()?);
    left_out.iter().for_each(|step| report.log.line(&format!("not in the sample: {}", step.name())));
    let shared = Mutex::new(&mut report);
    thread::scope(|scope| {
        for jobs in [workspace_jobs(&packages), alone.into_iter().map(AloneStep::job).collect()] {
            scope.spawn(|| jobs.into_iter().for_each(|job| run_job(job, &shared)));
        }
    });
    Ok(report.finish())
}

fn workspace_jobs(packages: &[Package]) -> Vec<Job<'_>> {
    let mut docs = cargo_line("doc --workspace --no-deps --all-features --keep-going");
    docs.env("RUSTDOCFLAGS", "-D warnings");
    let mut package = cargo_line("package --no-verify --allow-dirty");
    let published = packages.iter().filter(|package| package.is_published());
    package.args(published.flat_map(|package| ["-p", &package.name]));
    vec![
        step("format", cargo_line("fmt --all --check")),
        step(
            "clippy",
            cargo_line("clippy --workspace --all-targets --all-features --keep-going -- -D warnings"),
        ),
        step("docs", docs),
        step("package", package),
        Job::new("cargo-deny", Lane::Computing, check_dependencies),
    ]
}

fn check_dependencies(report: &mut Report) {
    const NAME: &str = "cargo-deny";
    match setup::install_cargo_tool("deny", CARGO_DENY, &["--no-default-features"]) {
        Ok(()) => {
            let deny = cargo_line("deny --all-features check bans licenses sources");
            report.run_check(NAME, deny, STEP_WITHIN);
        }
        Err(error) => report.could_not_run(NAME, &format!("{error:#}")),
    }
}

/// A crate with some features, as a dependent gets it.
#[derive(Debug)]
struct AloneStep<'a> {
    package: &'a Package,
    features: Vec<&'a str>,
}

impl<'a> AloneStep<'a> {
    fn name(&self) -> String {
        format!("{} alone {}", self.package.name, self.features.join(" ")).trim_end().to_owned()
    }

    fn job(self) -> Job<'a> {
        step(&self.name(), check_alone(self.package, &self.features))
    }
}

/// Half of the crates by default, and fewer of the other sets of features, in the order of the packages: one after another
/// they share what they depend on. The rest is left out, and is another one for each commit.
fn alone_steps(packages: &[Package], sample: Sample) -> (Vec<AloneStep<'_>>, Vec<AloneStep<'_>>) {
    let of_package =
        |package| feature_sets(package).into_iter().map(move |features| AloneStep { package, features });
    let (by_default, others): (Vec<_>, Vec<_>) =
        packages.iter().flat_map(of_package).partition(|step| step.features.is_empty());
    let (mut chosen, mut left_out) = sample.split(by_default, 2, AloneStep::name);
    let (sampled, others) = sample.split(others, SHARE, AloneStep::name);
    chosen.extend(sampled);
    left_out.extend(others);
    chosen.sort_by_key(|step| packages.iter().position(|package| package.name == step.package.name));
    (chosen, left_out)
}

fn step<'a>(name: &str, command: Command) -> Job<'a> {
    let of_report = name.to_owned();
    Job::new(name, Lane::Computing, move |report| report.run_check(&of_report, command, STEP_WITHIN))
}

fn cargo_line(line: &str) -> Command {
    cargo(&line.split(' ').collect::<Vec<_>>())
}

/// As a dependent gets it: by default, without defaults where there are some, and with each other feature alone. A build
/// of the workspace unites the features of all members and so hides a missing one.
fn feature_sets(package: &Package) -> Vec<Vec<&str>> {
    let mut sets = vec![vec![]];
    if package.features.contains_key("default") {
        sets.push(vec!["--no-default-features"]);
    }
    let is_default = |feature: &str| package.features.get("default") == Some(&json!([feature]));
    let others = package.features.keys().filter(|feature| *feature != "default" && !is_default(feature));
    sets.extend(others.map(|feature| vec!["--no-default-features", "--features", feature]));
    sets
}

fn check_alone(package: &Package, features: &[&str]) -> Command {
    let mut command = cargo(&["clippy", "-p", &package.name]);
    command.env("CARGO_TARGET_DIR", target_directory().join("alone"));
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

    fn package(name: &str, features: serde_json::Value) -> Package {
        let manifest = root().join(name).join("Cargo.toml");
        let package = json!({"name": name, "manifest_path": manifest, "features": features});
        serde_json::from_value(package).unwrap()
    }

    #[test]
    fn each_feature_is_checked_alone_and_each_set_once() {
        let sets = |features: serde_json::Value| -> Vec<String> {
            feature_sets(&package("a", features)).iter().map(|set| set.join(" ")).collect()
        };
        let alone = "--no-default-features --features tonic";
        assert_eq!(sets(json!({})), [""]);
        assert_eq!(sets(json!({"tonic": []})), ["", alone]);
        let with_default = json!({"default": ["full"], "full": [], "tonic": []});
        assert_eq!(sets(with_default), ["", "--no-default-features", alone]);
    }

    #[test]
    fn libraries_neither_print_nor_read_the_environment() {
        let lints = |name: &str| {
            let command = check_alone(&package(name, json!({})), &[]);
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
