//! `cargo xtask oci`: a program of the workspace as an image, without a container engine.

mod image;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::Value;

use image::Image;

/// The one program that is made for containers.
const PROGRAMS: [&str; 1] = ["provisionerd"];

/// The need of a test that runs provisionerd from its image, and the variable that names the image's file to it.
pub(crate) const IMAGE_NEED: &str = "provisionerd's image";
pub(crate) const IMAGE_FILE: &str = "NODEKEEL_PROVISIONERD_IMAGE";

/// What is to be made.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The program: provisionerd
    #[arg(value_parser = PROGRAMS)]
    program: String,
    /// Where to; without it, oci/PROGRAM.tar in the target directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Features to build with, for tests
    #[arg(long, value_name = "FEATURES", default_value = "")]
    features: String,
    /// The image's tag; without it, the version
    #[arg(long)]
    tag: Option<String>,
}

/// Makes the image that tests run, and gives its file.
pub(crate) fn for_tests() -> Result<PathBuf> {
    let program = PROGRAMS[0].to_owned();
    run(&Arguments { program, output: None, features: String::new(), tag: None })
}

/// Builds the program as one static file, and an OCI layout around it; gives the layout's file.
pub(crate) fn run(arguments: &Arguments) -> Result<PathBuf> {
    let built = build(&arguments.program, &arguments.features)?;
    let bytes =
        fs::read(&built.executable).with_context(|| format!("read {}", built.executable.display()))?;
    ensure!(!has_interpreter(&bytes)?, "{} is not static", built.executable.display());
    let tag = arguments.tag.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
    let name = format!("docker.io/nodekeel/{}:{tag}", arguments.program);
    let image = Image::new(&arguments.program, &bytes, &name)?;
    let default = || built.target.join("oci").join(format!("{}.tar", arguments.program));
    let output = arguments.output.clone().unwrap_or_else(default);
    if let Some(parent) = output.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::write(&output, image.tar()?).with_context(|| format!("write {}", output.display()))?;
    println!("{name}\n{}  {}", image.digest(), output.display());
    println!("import it: ctr --namespace k8s.io images import {}", output.display());
    Ok(output)
}

struct Built {
    executable: PathBuf,
    target: PathBuf,
}

fn build(program: &str, features: &str) -> Result<Built> {
    let triple = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--release", "--package", program, "--features", features]);
    // With a target of its own, what runs while building (macros) isn't static, which it couldn't be.
    cargo.args(["--target", &triple, "--message-format", "json-render-diagnostics"]);
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    let output = cargo.stderr(Stdio::inherit()).output().context("execute cargo")?;
    ensure!(output.status.success(), "building {program} failed ({})", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let executable =
        executable(&text, program).with_context(|| format!("cargo named no executable {program}"))?;
    // TARGET/TRIPLE/release/PROGRAM
    let target = executable.ancestors().nth(3).context("an executable is below the target directory")?;
    Ok(Built { target: target.to_owned(), executable })
}

/// The path of the program among cargo's messages.
fn executable(messages: &str, program: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ours = messages
        .filter(|message| message["reason"] == "compiler-artifact" && message["target"]["name"] == program);
    ours.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back()
}

/// Whether an ELF file asks for a dynamic linker.
///
/// *Source:* elf(5): `e_phoff` at 32, `e_phentsize` at 54, `e_phnum` at 56; `PT_INTERP` is 3.
fn has_interpreter(elf: &[u8]) -> Result<bool> {
    if elf.get(..5) != Some(b"\x7fELF\x02") {
        bail!("no 64-bit ELF file");
    }
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at + length).context("the ELF file is cut off")?;
        Ok::<_, anyhow::Error>(bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for entry in 0..count {
        if number(usize::try_from(table + entry * size)?, 4)? == 3 {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_executable_is_found_among_cargos_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"a\"},\"executable\":\"/x/a\"}\nnoise\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"b\"},\"executable\":\"/x/b\"}\n\
            {\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(executable(messages, "b").as_deref(), Some(Path::new("/x/b")));
        assert_eq!(executable(messages, "c"), None);
    }

    #[test]
    fn a_dynamic_program_is_told_from_others() {
        // Tests are linked dynamically.
        let this = fs::read(env::current_exe().unwrap()).unwrap();
        assert!(has_interpreter(&this).unwrap());
        assert!(has_interpreter(b"#!/bin/sh\n").is_err());
        assert!(has_interpreter(&this[..60]).is_err());
    }
}
