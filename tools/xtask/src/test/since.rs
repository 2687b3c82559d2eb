//! Which packages a change concerns, and how deeply each of them is tested.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::workspace::{self, Dependency, Package};

/// Programs that a package's tests run, which cargo's metadata doesn't say: the package, and that of the
/// program.
pub(super) const RUNS: [(&str, &str); 1] = [("noded", "nodectl")];
/// Outside of the packages, every test may depend on a file but for words and these.
const WITHOUT_TESTS: [&str; 3] = [".gitignore", "LICENSE", "docs"];
/// Tests of all packages run on it.
const TESTBED: &str = "testbed";
/// Checks the workspace's documents.
const XTASK: &str = "xtask";

/// How much of a package's tests runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// What `cargo test` runs.
    Quick,
    /// Every test, as every user and in guests, with whole counts.
    Whole,
}

/// The packages that are tested; others are not.
pub(crate) type TestPlan = BTreeMap<String, Tier>;

/// Every package whole.
pub(crate) fn plan_everything(packages: &[Package]) -> TestPlan {
    packages.iter().map(|package| (package.name.clone(), Tier::Whole)).collect()
}

/// Packages with a changed file run whole, and those that depend on them quickly.
pub(crate) fn plan(files: &[PathBuf], packages: &[Package], root: &Path) -> TestPlan {
    let mut changed = BTreeSet::new();
    let mut plan = TestPlan::new();
    for file in files {
        match find_owner(&root.join(file), packages) {
            Some(package) if package.name == TESTBED => return plan_everything(packages),
            Some(package) => drop(changed.insert(package.name.as_str())),
            None if is_without_tests(file) => drop(plan.insert(XTASK.to_owned(), Tier::Quick)),
            None => return plan_everything(packages),
        }
    }
    plan.extend(find_dependents(&changed, packages).into_iter().map(|name| (name.to_owned(), Tier::Quick)));
    plan.extend(changed.into_iter().map(|name| (name.to_owned(), Tier::Whole)));
    plan
}

fn is_without_tests(file: &Path) -> bool {
    let first = file.components().next().map(|first| first.as_os_str().to_string_lossy());
    let is_listed = first.is_some_and(|first| WITHOUT_TESTS.iter().any(|known| first.starts_with(known)));
    is_listed || file.extension().is_some_and(|extension| extension == "md")
}

/// The package with the innermost directory: the workspace's root may be one's directory, too.
fn find_owner<'a>(file: &Path, packages: &'a [Package]) -> Option<&'a Package> {
    let owners = packages.iter().filter(|package| file.starts_with(package.directory()));
    owners.max_by_key(|package| package.directory().components().count())
}

/// The packages whose build or tests contain one of these. What only a package's tests depend on goes no
/// further.
fn find_dependents<'a>(changed: &BTreeSet<&str>, packages: &'a [Package]) -> BTreeSet<&'a str> {
    let depends = |package: &Package, with_tests: bool, names: &BTreeSet<&str>| {
        let is_used = |used: &Dependency| with_tests || used.kind.as_deref() != Some("dev");
        let is_run = |run: &str| with_tests && RUNS.contains(&(&*package.name, run));
        package.dependencies.iter().any(|used| is_used(used) && names.contains(&*used.name))
            || names.iter().any(|name| is_run(name))
    };
    let names = |is_chosen: &dyn Fn(&Package) -> bool| -> BTreeSet<&'a str> {
        packages.iter().filter(|package| is_chosen(package)).map(|package| &*package.name).collect()
    };
    let mut linked = names(&|package| changed.contains(&*package.name));
    loop {
        let more = names(&|package| linked.contains(&*package.name) || depends(package, false, &linked));
        if more == linked {
            break;
        }
        linked = more;
    }
    names(&|package| linked.contains(&*package.name) || depends(package, true, &linked))
}

/// The files that differ from a commit's, with those that git doesn't know yet.
///
/// # Errors
/// Git isn't installed, or doesn't know the commit.
pub(crate) fn changed_files(commit: &str) -> Result<Vec<PathBuf>> {
    let git = |arguments: &[&str]| {
        testbed::command_output(Command::new("git").args(arguments).current_dir(workspace::root()))
    };
    let tracked = git(&["diff", "--name-only", commit, "--"])?;
    let untracked = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(tracked.lines().chain(untracked.lines()).map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Metadata;

    /// A leaf, a service on it, programs on that, and the test tools.
    fn packages() -> Vec<Package> {
        let package = |directory: &str, name: &str, dependencies: &[(&str, Option<&str>)]| {
            let dependencies: Vec<_> = dependencies
                .iter()
                .map(|(name, kind)| serde_json::json!({"name": name, "kind": kind}))
                .collect();
            let manifest = format!("/w/{directory}/Cargo.toml");
            serde_json::json!({"name": name, "manifest_path": manifest, "dependencies": dependencies})
        };
        let tests = (TESTBED, Some("dev"));
        let metadata = serde_json::json!({"target_directory": "/w/target", "packages": [
            package("fsquota", "nodekeel-fsquota", &[("nix", None), tests]),
            package("logtree", "nodekeel-logtree", &[tests]),
            package("provisioner", "nodekeel-provisioner", &[("nodekeel-fsquota", None), tests]),
            package("node", "nodekeel-node", &[("nodekeel-provisioner", None), tests]),
            package("bins/noded", "noded", &[("nodekeel-node", None), tests]),
            package("bins/nodectl", "nodectl", &[("nodekeel-node", None), ("nodekeel-logtree", Some("dev"))]),
            package("examples", "examples", &[("nodectl", Some("dev"))]),
            package("tools/testbed", TESTBED, &[]),
            package("tools/xtask", XTASK, &[(TESTBED, None)]),
        ]});
        serde_json::from_value::<Metadata>(metadata).unwrap().packages
    }

    fn plan_for(files: &[&str]) -> Vec<(String, Tier)> {
        let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
        plan(&files, &packages(), Path::new("/w")).into_iter().collect()
    }

    fn quick(names: &[&str]) -> Vec<(String, Tier)> {
        names.iter().map(|name| ((*name).to_owned(), Tier::Quick)).collect()
    }

    #[test]
    fn a_changed_leaf_runs_whole_and_its_dependents_quickly() {
        let mut expected = quick(&[
            "examples",
            "nodectl",
            "noded",
            "nodekeel-fsquota",
            "nodekeel-node",
            "nodekeel-provisioner",
        ]);
        expected[3].1 = Tier::Whole;
        assert_eq!(plan_for(&["fsquota/src/lib.rs"]), expected);
    }

    #[test]
    fn a_dependency_of_tests_alone_goes_no_further() {
        // nodectl's tests use logtree; examples use nodectl, which is the same as before. noded's tests run
        // nodectl.
        let plan = plan_for(&["logtree/src/lib.rs"]);
        assert_eq!(plan, [("nodectl".to_owned(), Tier::Quick), ("nodekeel-logtree".to_owned(), Tier::Whole)]);
        let plan = plan_for(&["bins/nodectl/src/main.rs"]);
        assert_eq!(plan[1..], [("nodectl".to_owned(), Tier::Whole), ("noded".to_owned(), Tier::Quick)]);
    }

    #[test]
    fn documents_alone_run_what_checks_documents() {
        assert_eq!(plan_for(&["docs/noded.md", "README.md", "LICENSE-MIT", ".gitignore"]), quick(&[XTASK]));
        assert_eq!(plan_for(&[]), []);
    }

    #[test]
    fn a_file_that_every_package_may_depend_on_runs_everything() {
        for file in
            ["Cargo.toml", "Cargo.lock", ".cargo/config.toml", "tools/testbed/src/lib.rs", "deploy/rbac.yaml"]
        {
            let plan = plan_for(&["README.md", file]);
            assert!(
                plan.len() == packages().len() && plan.iter().all(|(_, tier)| *tier == Tier::Whole),
                "{file}"
            );
        }
    }
}
