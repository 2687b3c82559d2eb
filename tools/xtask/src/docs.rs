//! `cargo xtask docs`: man pages and shell completions of the programs, generated from their command lines.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::setup;
use crate::workspace::{cargo, target_directory};

/// Each program and its package.
const PROGRAMS: [(&str, &str); 4] =
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
    let docs = target_directory().join("docs");
    let man = docs.join("man");
    create_dir(&man)?;
    for (program, _) in PROGRAMS {
        let path = target_directory().join("debug").join(program);
        testbed::command_output(std::process::Command::new(&path).arg("man").arg(&man))?;
        for (shell, prefix, suffix) in SHELLS {
            let directory = docs.join("completions").join(shell);
            create_dir(&directory)?;
            let script =
                testbed::command_output(std::process::Command::new(&path).args(["completion", shell]))?;
            let file = directory.join(format!("{prefix}{program}{suffix}"));
            fs::write(&file, script).with_context(|| format!("write {}", file.display()))?;
        }
    }
    let pages = fs::read_dir(&man).with_context(|| format!("list {}", man.display()))?.count();
    println!("{pages} man pages in {}; completions beside them", man.display());
    Ok(())
}

fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}
