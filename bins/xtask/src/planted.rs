//! Plants known bugs into a copy of a crate, one by one, and looks whether its tests find them.
//!
//! A test of invariants that never fails proves nothing: each invariant has a bug here that breaks it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::report::Report;
use crate::run::{self, Echo};

/// A crate whose machine gets the bugs of its `testdata/planted.toml`.
struct Crate {
    /// Its directory.
    dir: &'static str,
    package: &'static str,
    features: &'static [&'static str],
    /// The test that has to find them.
    test: &'static str,
    /// It, and what else of the workspace its tests are built of.
    members: &'static [&'static str],
}

const CRATES: [Crate; 2] = [
    Crate {
        dir: "supervisor",
        package: "nodekeel-supervisor",
        features: &["--all-features"],
        test: "random_operations_keep_the_invariants",
        members: &["supervisor", "bins/testbed"],
    },
    Crate {
        dir: "cluster",
        package: "nodekeel-cluster",
        // The machine needs no etcd, and so the bugs need no protoc.
        features: &["--features", "testing"],
        test: "random_lives_keep_the_invariants",
        members: &["cluster", "supervisor", "localstorage", "bins/testbed"],
    },
];
const WITHIN: Duration = Duration::from_secs(600);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Planted {
    bug: Vec<Bug>,
}

/// One bug: a text of a file, and what stands there instead.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bug {
    /// What it breaks.
    invariant: String,
    /// The file, from the crate's directory.
    file: PathBuf,
    old: String,
    new: String,
}

/// Plants all of them; one that is not found is a failure.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    CRATES.iter().try_for_each(|one| plant_all(one, report))
}

fn plant_all(one: &Crate, report: &mut Report) -> Result<()> {
    run::headline(&format!("planted bugs: {}", one.dir));
    let list = run::root().join(one.dir).join("testdata/planted.toml");
    let text = fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
    let planted: Planted = toml::from_str(&text).with_context(|| format!("parse {}", list.display()))?;
    let copy = copy_workspace(one)?;
    for bug in &planted.bug {
        plant(one, &copy, bug, report).with_context(|| format!("plant a bug against {:?}", bug.invariant))?;
    }
    Ok(())
}

fn plant(one: &Crate, copy: &Path, bug: &Bug, report: &mut Report) -> Result<()> {
    let file = copy.join(one.dir).join(&bug.file);
    let sound = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    ensure!(
        sound.matches(&bug.old).count() == 1,
        "{} does not hold exactly once: {}",
        bug.file.display(),
        bug.old
    );
    fs::write(&file, sound.replacen(&bug.old, &bug.new, 1))?;
    let mut command = run::cargo(&["test", "-p", one.package, "--lib"]);
    command.args(one.features).args(["--", one.test]);
    command.current_dir(copy).env("CARGO_TARGET_DIR", target()).env("RUST_BACKTRACE", "0");
    let ran = run::stream(command, Echo::Hidden, WITHIN);
    fs::write(&file, sound)?;
    let ran = ran?;
    let found = ran.lines.iter().any(|line| line.starts_with("test result: FAILED"));
    let problem = match found {
        true => None,
        false if ran.problem.is_none() => Some("the tests do not find it".to_owned()),
        false => Some("it does not compile".to_owned()),
    };
    println!("{}  {}", if found { "found " } else { "MISSED" }, bug.invariant);
    report.checked(&format!("planted bug: {}", bug.invariant), ran.took, problem);
    Ok(())
}

/// A workspace of its own that holds the crate and what it is tested with, beside the build that it shares.
fn copy_workspace(one: &Crate) -> Result<PathBuf> {
    let (root, copy) = (run::root(), target().join("planted"));
    if copy.exists() {
        fs::remove_dir_all(&copy).with_context(|| format!("remove {}", copy.display()))?;
    }
    for member in one.members {
        copy_tree(&root.join(member), &copy.join(member))?;
    }
    fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock"))?;
    let mut manifest: toml::Table = toml::from_str(&fs::read_to_string(root.join("Cargo.toml"))?)?;
    let workspace =
        manifest.get_mut("workspace").and_then(toml::Value::as_table_mut).context("it is a workspace")?;
    workspace.remove("default-members");
    let members: Vec<_> = one.members.iter().map(|member| toml::Value::from(*member)).collect();
    workspace.insert("members".into(), members.into());
    fs::write(copy.join("Cargo.toml"), toml::to_string(&manifest)?)?;
    Ok(copy)
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let (entry, to) = entry.map(|entry| (entry.path(), to.join(entry.file_name())))?;
        if entry.is_dir() {
            copy_tree(&entry, &to)?;
        } else {
            fs::copy(&entry, &to).with_context(|| format!("copy {}", entry.display()))?;
        }
    }
    Ok(())
}

fn target() -> PathBuf {
    run::root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}
