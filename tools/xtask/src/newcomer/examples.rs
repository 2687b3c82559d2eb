//! The example of each library, run by a program outside the workspace that depends on the packaged crates.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::markdown;
use crate::report::Report;
use crate::run::{run_command, show_line};
use crate::workspace::{self, Package, cargo};

const BUILD_WITHIN: Duration = Duration::from_secs(20 * 60);
const RUN_WITHIN: Duration = Duration::from_secs(60);

/// Packages every publishable member, and runs its example in an empty crate with the dependencies that its README names:
/// the packages lie where the README's reader has the workspace, in `../nodekeel`.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    let metadata = workspace::read_metadata()?;
    let members: Vec<Package> = metadata.packages.into_iter().filter(Package::is_published).collect();
    let target = workspace::target_directory();
    let home = target.join("newcomer");
    let mut package = cargo(&["package", "--no-verify", "--allow-dirty"]);
    package.args(members.iter().flat_map(|member| ["-p", &member.name]));
    report.run_check("package the workspace", package, BUILD_WITHIN);
    for member in &members {
        let archive = target.join(format!("package/{}-{}.crate", member.name, member.version));
        unpack(&archive, &home.join("nodekeel").join(directory_name(member)))?;
    }
    for member in &members {
        let (name, program) = (format!("the example of {}", member.name), home.join(&member.name));
        match prepare_program(member, &members, &program) {
            Ok(()) => run_example(&name, &program, &home.join("target"), report)?,
            Err(error) => report.could_not_run(&name, &format!("{error:#}")),
        }
    }
    Ok(())
}

fn directory_name(member: &Package) -> String {
    member.directory().file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn unpack(archive: &Path, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let mut tar = Command::new("tar");
    tar.args(["--strip-components=1", "-xzf"]).arg(archive).arg("-C").arg(directory);
    testbed::command_output(&mut tar).map(drop)
}

/// Makes an empty crate with the example, and runs the README's `cargo add` lines in it.
fn prepare_program(member: &Package, members: &[Package], program: &Path) -> Result<()> {
    let source = fs::read_to_string(member.directory().join("src/lib.rs")).context("read the library")?;
    let readme = fs::read_to_string(member.directory().join("README.md")).context("read the README")?;
    let example =
        markdown::first_program(&source).context("its documentation has no program with `fn main`")?;
    // The packages stand in for those of crates.io, for each other too.
    let patches = members
        .iter()
        .map(|member| format!("{} = {{ path = \"../nodekeel/{}\" }}\n", member.name, directory_name(member)));
    let manifest = format!(
        "[package]\nname = \"newcomer\"\nedition = \"2024\"\n\n[workspace]\n\n[patch.crates-io]\n{}",
        patches.collect::<String>()
    );
    fs::create_dir_all(program.join("src")).with_context(|| format!("create {}", program.display()))?;
    fs::write(program.join("src/main.rs"), example).context("write the program")?;
    fs::write(program.join("Cargo.toml"), manifest).context("write the manifest")?;
    let mut lines = markdown::shell_commands(&readme);
    lines.retain(|line| line.starts_with("cargo add "));
    ensure!(!lines.is_empty(), "its README has no `cargo add` line");
    for line in lines {
        testbed::command_output(Command::new("sh").args(["-c", &line]).current_dir(program))?;
    }
    Ok(())
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
    let has_panicked = outcome.lines.iter().any(|line| line.contains("panicked at"));
    let has_error = outcome.lines.iter().any(|line| line.to_lowercase().starts_with("error: "));
    report.add_check(name, outcome.elapsed, outcome.problem.filter(|_| has_panicked || !has_error));
    empty.close()
}
