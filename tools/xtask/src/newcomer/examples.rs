//! The example of each library, run by a program outside the workspace that depends on the packaged crates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::markdown;
use crate::report::Report;
use crate::run::{run_command, show_line};
use crate::workspace::{self, Package, cargo};

const BUILD_WITHIN: Duration = Duration::from_secs(20 * 60);
const RUN_WITHIN: Duration = Duration::from_secs(60);

/// Packages every publishable member, and runs its example in an empty crate with the dependencies that its README names.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    let metadata = workspace::read_metadata()?;
    let members: Vec<Package> = metadata.packages.into_iter().filter(Package::is_published).collect();
    let home = workspace::target_directory().join("newcomer");
    let crates = home.join("crates");
    report.run_check("package the workspace", package_command(&members), BUILD_WITHIN);
    unpack_all(&workspace::target_directory().join("package"), &members, &crates)?;
    for member in &members {
        let program = home.join("programs").join(&member.name);
        let name = format!("the example of {}", member.name);
        match prepare_program(member, &crates, &program) {
            Ok(()) => run_example(&name, &program, &home.join("target"), report)?,
            Err(error) => report.could_not_run(&name, &format!("{error:#}")),
        }
    }
    Ok(())
}

fn package_command(members: &[Package]) -> Command {
    let mut command = cargo(&["package", "--no-verify", "--allow-dirty"]);
    command.args(members.iter().flat_map(|member| ["-p", &member.name]));
    command
}

fn unpack_all(packages: &Path, members: &[Package], crates: &Path) -> Result<()> {
    fs::create_dir_all(crates).with_context(|| format!("create {}", crates.display()))?;
    for member in members {
        let archive = packages.join(format!("{}-{}.crate", member.name, member.version));
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(&archive).arg("-C").arg(crates);
        testbed::command_output(&mut tar).with_context(|| format!("unpack {}", archive.display()))?;
    }
    Ok(())
}

/// Makes an empty crate, and adds what the README adds: its `cargo add` lines, with the paths of the packages.
fn prepare_program(member: &Package, crates: &Path, program: &Path) -> Result<()> {
    let source = fs::read_to_string(member.directory().join("src/lib.rs")).context("read the library")?;
    let readme = fs::read_to_string(member.directory().join("README.md")).context("read the README")?;
    let example =
        markdown::first_program(&source).context("its documentation has no program with `fn main`")?;
    fs::create_dir_all(program.join("src")).with_context(|| format!("create {}", program.display()))?;
    fs::write(program.join("src/main.rs"), example).context("write the program")?;
    fs::write(program.join("Cargo.toml"), manifest(crates)?).context("write the manifest")?;
    let added: Vec<_> =
        markdown::shell_commands(&readme).into_iter().filter(|line| line.starts_with("cargo add ")).collect();
    ensure!(!added.is_empty(), "its README has no `cargo add` line");
    for line in added {
        let words = with_packages(&line, crates)?;
        let mut add = cargo(&words.iter().map(String::as_str).collect::<Vec<_>>());
        testbed::command_output(add.current_dir(program)).with_context(|| line.clone())?;
    }
    Ok(())
}

/// The packaged crates stand in for those of crates.io, for each other too.
fn manifest(crates: &Path) -> Result<String> {
    let mut text = String::from(
        "[package]\nname = \"newcomer\"\nedition = \"2024\"\n\n[workspace]\n\n[patch.crates-io]\n",
    );
    for entry in fs::read_dir(crates).context("list the packages")? {
        let path = entry.context("list the packages")?.path();
        let name = package_name(&path);
        text.push_str(&format!("{name} = {{ path = {path:?} }}\n"));
    }
    Ok(text)
}

/// `nodekeel-node` of `…/nodekeel-node-0.1.0`.
fn package_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.rsplit_once('-').map_or(name.clone(), |(name, _)| name.to_owned())
}

/// The arguments of a `cargo add` line, with the package in place of the directory in the workspace.
fn with_packages(line: &str, crates: &Path) -> Result<Vec<String>> {
    let mut words: Vec<String> = line.split_whitespace().skip(1).map(str::to_owned).collect();
    if let Some(at) = words.iter().position(|word| word == "--path") {
        let given = words.get(at + 1).context("--path without a directory")?;
        words[at + 1] = packaged(given, crates)?.display().to_string();
    }
    Ok(words)
}

fn packaged(given: &str, crates: &Path) -> Result<PathBuf> {
    let directory = given.rsplit('/').next().unwrap_or(given);
    let name = format!("nodekeel-{directory}");
    let entries = fs::read_dir(crates).context("list the packages")?.flatten().map(|entry| entry.path());
    let mut found = entries.filter(|path| package_name(path) == name);
    found.next().with_context(|| format!("no package is called {name}"))
}

/// Builds the program, then runs it in an empty directory: it exits with 0, or prints the error that names what is missing.
fn run_example(name: &str, program: &Path, target: &Path, report: &mut Report) -> Result<()> {
    let mut build = cargo(&["build"]);
    build.current_dir(program).env("CARGO_TARGET_DIR", target);
    report.run_check(&format!("build {name}"), build, BUILD_WITHIN);
    let empty = testbed::ScratchDir::new()?;
    let mut run = Command::new("sh");
    // Its error belongs to its output, and both to the log.
    run.args(["-c", "\"$0\" 2>&1"]).arg(target.join("debug/newcomer")).current_dir(empty.path());
    let outcome = run_command(run, &report.log, show_line, RUN_WITHIN)?;
    let problem = outcome.problem.filter(|_| !is_typed_error(&outcome.lines));
    report.add_check(name, outcome.elapsed, problem);
    empty.close()
}

/// Whether the last line is a program's error, and nothing panicked.
fn is_typed_error(lines: &[String]) -> bool {
    let has_panicked = lines.iter().any(|line| line.contains("panicked at"));
    !has_panicked && lines.iter().any(|line| line.starts_with("Error: ") || line.starts_with("error: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_workspace_becomes_the_package_of_that_directory() {
        let crates = tempfile::tempdir().unwrap();
        fs::create_dir(crates.path().join("nodekeel-containerd-svc-0.1.0")).unwrap();
        let words =
            with_packages("cargo add --path ../nodekeel/containerd-svc --features testing", crates.path())
                .unwrap();
        assert!(
            words[2].ends_with("nodekeel-containerd-svc-0.1.0") && words[3..] == ["--features", "testing"],
            "{words:?}"
        );
        assert!(with_packages("cargo add --path ../nodekeel/absent", crates.path()).is_err());
        assert_eq!(with_packages("cargo add tokio", crates.path()).unwrap(), ["add", "tokio"]);
    }

    #[test]
    fn a_panic_is_not_a_typed_error() {
        assert!(is_typed_error(&["Error: containerd is missing".into()]));
        assert!(!is_typed_error(&["thread 'main' panicked at src/main.rs".into(), "Error: x".into()]));
        assert!(!is_typed_error(&["Segmentation fault".into()]));
    }
}
