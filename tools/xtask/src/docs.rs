//! `cargo xtask docs`: man pages and shell completions of the programs, generated from their command lines.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::setup;
use crate::workspace::{cargo, target_directory};

/// Each program and its package.
pub(crate) const PROGRAMS: [(&str, &str); 4] =
    [("noded", "noded"), ("nodectl", "nodectl"), ("provisionerd", "provisionerd"), ("dirquota", "dirquota")];
/// Each shell, and what its completion files are called.
const SHELLS: [(&str, &str, &str); 3] = [("bash", "", ""), ("zsh", "_", ""), ("fish", "", ".fish")];

/// Builds the programs, and writes below `target/docs`: `man/*.1` and `completions/SHELL/*`.
///
/// # Errors
/// A program can't be built, or a file not written.
pub(crate) fn run() -> Result<()> {
    setup::install()?;
    let packages: Vec<&str> = PROGRAMS.iter().flat_map(|(_, package)| ["-p", package]).collect();
    let built = cargo(&[&["build", "--bins"], &packages[..]].concat()).status().context("execute cargo")?;
    ensure!(built.success(), "the programs can't be built ({built})");
    let (docs, built) = (target_directory().join("docs"), target_directory().join("debug"));
    let man = docs.join("man");
    write_man_pages(&built, &man)?;
    for (shell, ..) in SHELLS {
        write_completions(&built, shell, &docs.join("completions").join(shell))?;
    }
    let pages = fs::read_dir(&man).with_context(|| format!("list {}", man.display()))?.count();
    println!("{pages} man pages in {}; completions beside them", man.display());
    Ok(())
}

/// Writes the man pages of the programs in a directory into another one.
pub(crate) fn write_man_pages(built: &Path, man: &Path) -> Result<()> {
    create_dir(man)?;
    PROGRAMS.iter().try_for_each(|(program, _)| {
        testbed::command_output(Command::new(built.join(program)).arg("man").arg(man)).map(drop)
    })
}

/// Writes the completions of the programs in a directory into another one, under the names that a shell expects.
pub(crate) fn write_completions(built: &Path, shell: &str, directory: &Path) -> Result<()> {
    create_dir(directory)?;
    let (_, prefix, suffix) =
        SHELLS.into_iter().find(|(name, ..)| *name == shell).context("an unknown shell")?;
    for (program, _) in PROGRAMS {
        let script = testbed::command_output(Command::new(built.join(program)).args(["completion", shell]))?;
        let file = directory.join(format!("{prefix}{program}{suffix}"));
        fs::write(&file, script).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}
