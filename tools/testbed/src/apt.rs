//! Debian's packages: downloaded as any user, and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{command_output, tools};

/// apt with private package lists, for which no package is installed yet.
#[derive(Debug)]
pub struct AptClient {
    work: PathBuf,
    options: Vec<String>,
}

impl AptClient {
    /// Fetches the package lists of a processor, such as `arm64`, into a new directory for its files.
    ///
    /// # Errors
    /// apt is missing, or the lists can't be fetched.
    pub fn new(work: PathBuf, architecture: &str) -> Result<Self> {
        for below in ["state/lists/partial", "cache/archives/partial"] {
            let directory = work.join(below);
            fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        }
        let status = work.join("status");
        fs::write(&status, "").with_context(|| format!("write {}", status.display()))?;
        let options = vec![
            format!("-oAPT::Architecture={architecture}"),
            format!("-oDir::State={}", work.join("state").display()),
            format!("-oDir::State::status={}", status.display()),
            format!("-oDir::Cache={}", work.join("cache").display()),
            // Otherwise root's apt downloads as a user that can't enter this directory.
            "-oAPT::Sandbox::User=root".to_owned(),
        ];
        let client = Self { work, options };
        client.run_program("apt-get", &["update"])?;
        Ok(client)
    }

    /// Runs `apt-get` or `apt-cache`, and gives its output.
    ///
    /// # Errors
    /// It fails.
    pub fn run_program(&self, program: &'static str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(tools::find_tool(tools::Tool { name: program, package: "apt" })?);
        command.args(&self.options).args(arguments).current_dir(self.archives()).env("LC_ALL", "C");
        command_output(&mut command)
    }

    /// What the downloaded packages have: a line `NAME VERSION PATH` for each file and link, with its path below the root.
    ///
    /// # Errors
    /// A package can't be read.
    pub fn list_contents(&self) -> Result<String> {
        let dpkg = tools::find_tool(tools::Tool { name: "dpkg-deb", package: "dpkg" })?;
        let mut contents = String::new();
        for package in self.downloads()? {
            let mut show = Command::new(&dpkg);
            show.args(["--show", "--showformat", "${Package} ${Version}"]).arg(&package);
            let package_words = command_output(&mut show)?;
            // Such as `-rwxr-xr-x root/root 1 2023-01-01 00:00 ./sbin/mkfs`; ` -> TARGET` follows a link.
            let listed = command_output(Command::new(&dpkg).arg("--contents").arg(&package))?;
            for (_, path) in listed.lines().filter_map(|line| line.split_once(" ./")) {
                let path = path.split(" -> ").next().unwrap_or(path);
                contents += &format!("{package_words} {path}\n");
            }
        }
        Ok(contents)
    }

    /// Unpacks all that was downloaded, and removes the directory of its files.
    ///
    /// # Errors
    /// A package can't be unpacked.
    pub fn unpack_into(self, directory: &Path) -> Result<()> {
        let dpkg = tools::find_tool(tools::Tool { name: "dpkg", package: "dpkg" })?;
        for package in self.downloads()? {
            command_output(Command::new(&dpkg).arg("-x").arg(&package).arg(directory))?;
        }
        fs::remove_dir_all(&self.work).with_context(|| format!("remove {}", self.work.display()))
    }

    fn downloads(&self) -> Result<Vec<PathBuf>> {
        let mut packages = Vec::new();
        for entry in fs::read_dir(self.archives()).context("list the downloads")? {
            packages.push(entry.context("list the downloads")?.path());
        }
        packages.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
        Ok(packages)
    }

    fn archives(&self) -> PathBuf {
        self.work.join("cache/archives")
    }
}
