//! `cargo xtask oci`: a program of the workspace as an image, without a container engine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use testbed::{ContainerImage, tools};

use crate::run::{self, Log};
use crate::test::binaries;
use crate::workspace::{cargo, root, target_directory};

use formatters::{ElfNeeds, Formatters};

mod formatters;
mod sbom;

/// The one program that is made for containers, and its package.
pub(crate) const PACKAGE: &str = "provisionerd";

/// The need of a test that runs provisionerd from its image, and the variable that names the image's file to
/// it.
pub(crate) const IMAGE_NEED: &str = "provisionerd's image";
pub(crate) const IMAGE_FILE: &str = "NODEKEEL_PROVISIONERD_IMAGE";

/// Files that the program may look up: it runs as root, and the image has no others.
const FILES: [(&str, &str); 2] = [("etc/group", "root:x:0:\n"), ("etc/passwd", "root:x:0:0:root:/:/\n")];
/// Where scanners look for the bill of materials.
const SBOM_DIR: &str = "usr/share/sbom";
const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);

/// Cargo's profiles for an image: of a release, and the one that cargo builds in seconds after a change.
pub(crate) const RELEASE_PROFILE: &str = "release";
pub(crate) const TEST_PROFILE: &str = "image";

/// A processor of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Platform {
    #[value(name = "linux/amd64")]
    Amd64,
    #[value(name = "linux/arm64")]
    Arm64,
}

impl Platform {
    const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// This machine's.
    fn native() -> Result<Self> {
        let native = Self::ALL.into_iter().find(|platform| platform.processor() == env::consts::ARCH);
        native.with_context(|| format!("images are for amd64 and arm64, not for {}", env::consts::ARCH))
    }

    /// As Rust and GNU call it.
    fn processor(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// As Go, OCI and Debian call it.
    fn architecture(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Rust's target; with glibc, whose compiler Debian has for both.
    fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.processor())
    }

    /// The C compiler for it: it links the program, and compiles the C in some crates.
    fn compiler(self) -> Result<String> {
        if Self::native()? == self {
            return Ok(tools::CC.name.to_owned());
        }
        let name = format!("{}-linux-gnu-gcc", self.processor());
        let packages = format!(
            "gcc-{0}-linux-gnu libc6-dev-{1}-cross",
            self.processor().replace('_', "-"),
            self.architecture()
        );
        let is_found = env::var_os("PATH")
            .is_some_and(|path| env::split_paths(&path).any(|directory| directory.join(&name).is_file()));
        ensure!(
            is_found,
            "{name} is missing, which links programs for {}: `apt-get install {packages}`, or choose another \
             --platform",
            self.architecture()
        );
        Ok(name)
    }
}

/// The image to build.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Program: provisionerd
    #[arg(value_parser = [PACKAGE])]
    program: String,
    /// Output file; oci/PROGRAM.tar in the target directory by default
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Image tag; the version by default
    #[arg(long)]
    tag: Option<String>,
    /// Platforms, separated by commas
    #[arg(
        long,
        value_name = "PLATFORMS",
        value_delimiter = ',',
        default_values = ["linux/amd64", "linux/arm64"]
    )]
    platform: Vec<Platform>,
}

/// Builds the image that tests run by a profile of cargo, and gives its file.
pub(crate) fn build_for_tests(profile: &str, log: &Log) -> Result<(PathBuf, Duration)> {
    let (start, platform) = (Instant::now(), vec![Platform::native()?]);
    let arguments = Arguments { program: PACKAGE.to_owned(), output: None, tag: None, platform };
    Ok((build_image(&arguments, profile, log)?, start.elapsed()))
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let file = build_image(arguments, RELEASE_PROFILE, &Log::default())?;
    println!("import it: ctr --namespace k8s.io images import {}", file.display());
    Ok(())
}

/// Builds the program as one static file for each platform, and an OCI layout around them, with the programs that make file
/// systems, and its bill of materials, which stands beside the output, too.
fn build_image(arguments: &Arguments, profile: &str, log: &Log) -> Result<PathBuf> {
    let program = &arguments.program;
    let tag = arguments.tag.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
    let name = format!("docker.io/nodekeel/{program}:{tag}");
    let default = || target_directory().join("oci").join(format!("{program}.tar"));
    let output = arguments.output.clone().unwrap_or_else(default);
    if let Some(parent) = output.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    let mut images = Vec::new();
    for platform in &arguments.platform {
        let executable = build(program, *platform, profile, log)?;
        let needs = ElfNeeds::read(&executable)?;
        ensure!(needs.loader.is_none(), "{} is not static", executable.display());
        let image = ContainerImage::new(&name)
            .for_architecture(platform.architecture())
            .add_file(program, executable)
            .with_entrypoint([format!("/{program}")]);
        let formatters = Formatters::find(*platform, log)?;
        let sbom = output.with_extension(format!("{}.cdx.json", platform.architecture()));
        fs::write(&sbom, sbom::describe_image(program, *platform, &formatters.packages)?)
            .with_context(|| format!("write {}", sbom.display()))?;
        let image =
            formatters.add_to(image).add_file(Path::new(SBOM_DIR).join(format!("{program}.cdx.json")), sbom);
        images.push(FILES.into_iter().fold(image, |image, (at, text)| image.add_text(at, text)));
    }
    let digest = match &images[..] {
        [image] => image.write_archive(&output)?,
        images => ContainerImage::write_multi_platform(images, &output)?,
    };
    log.line(&format!("{name}\n{digest}  {}", output.display()));
    Ok(output)
}

fn build(program: &str, platform: Platform, profile: &str, log: &Log) -> Result<PathBuf> {
    let (target, compiler) = (platform.target(), platform.compiler()?);
    let mut command = cargo(&["build", "--package", program, "--profile", profile]);
    // With an explicit target, proc macros are not built as static, which they can't be.
    command.args(["--target", &target, "--message-format", "json-render-diagnostics"]);
    // Messages of panics name files: with the names of directories left out, each machine builds the same program.
    let cargo_home = env::var_os("CARGO_HOME")
        .map_or_else(|| env::home_dir().unwrap_or_default().join(".cargo"), PathBuf::from);
    let flags = ["-Ctarget-feature=+crt-static".to_owned(), "-Cstrip=symbols".to_owned()];
    let remapped = [(cargo_home.as_path(), "cargo"), (&root(), "nodekeel")]
        .map(|(directory, name)| format!("--remap-path-prefix={}={name}", directory.display()));
    command.env("CARGO_ENCODED_RUSTFLAGS", [flags, remapped].concat().join("\x1f"));
    if Platform::native()? != platform {
        let variable = target.replace('-', "_");
        command.env(format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()), &compiler);
        command.env(format!("CC_{variable}"), &compiler);
    }
    let outcome = run::run_command(command, log, run::hide_line, BUILD_WITHIN)?;
    if let Some(problem) = outcome.problem {
        let hint = match Platform::native()? == platform {
            true => String::new(),
            false => format!("; it needs `rustup target add {target}`, or choose another --platform"),
        };
        bail!("building {program} for {} failed ({problem}){hint}", platform.architecture());
    }
    let built = outcome.lines.iter().filter_map(|line| binaries::parse_artifact(line));
    let executable = built.map(|built| built.path).next_back();
    executable.with_context(|| format!("find the executable {program} in cargo's messages"))
}
