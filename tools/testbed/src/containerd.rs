//! A real containerd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, ScratchDir, command_output, gotool, tools};

/// A containerd with its state, root and socket in a private directory; it answers when [`Containerd::start`]
/// returns. Without a CRI plugin, it touches nothing outside its directory.
#[derive(Debug)]
pub struct Containerd {
    daemon: Daemon,
    socket_path: PathBuf,
    ctr_path: PathBuf,
}

impl Containerd {
    /// Starts Debian's, and waits until it answers Version.
    ///
    /// # Errors
    /// The caller isn't root, which containerd must be; [`tools::MissingTool`] where it isn't installed; else
    /// why it did not start, with its last output.
    pub fn start() -> Result<Self> {
        Self::start_programs(&tools::find_tool(tools::CONTAINERD)?, tools::find_tool(tools::CTR)?)
    }

    /// Starts the newest release, and waits until it answers Version.
    ///
    /// # Errors
    /// As [`Containerd::start()`].
    pub fn start_newest() -> Result<Self> {
        let programs = gotool::CONTAINERD.program_directory()?;
        Self::start_programs(&programs.join("containerd"), programs.join("ctr"))
    }

    fn start_programs(containerd: &Path, ctr: PathBuf) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "containerd needs root");
        let scratch = ScratchDir::new()?;
        let socket = scratch.path().join("containerd.sock");
        let file = scratch.path().join("config.toml");
        fs::write(&file, config_text(scratch.path())).with_context(|| format!("write {}", file.display()))?;
        let mut command = Command::new(containerd);
        command.arg("--config").arg(file).current_dir(scratch.path());
        let daemon = Daemon::start(command, scratch, || {
            command_output(ctr_client(&ctr, &socket).arg("version")).map(drop)
        })?;
        Ok(Self { daemon, socket_path: socket, ctr_path: ctr })
    }

    /// The socket of its API.
    pub fn socket_path(&self) -> &Path {
        &self.socket_path
    }

    /// The directory of its content and of what it unpacks.
    pub fn root_path(&self) -> PathBuf {
        self.daemon.directory_path().join("root")
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// A `ctr` that calls this daemon.
    pub fn ctr_command(&self) -> Command {
        ctr_client(&self.ctr_path, &self.socket_path)
    }
}

fn ctr_client(ctr: &Path, socket: &Path) -> Command {
    let mut command = Command::new(ctr);
    command.arg("--address").arg(socket);
    command
}

/// *Source:* containerd-config.toml(5), version 2, which 1.6 and 2.x read alike.
fn config_text(directory: &Path) -> String {
    let at = |name: &str| directory.join(name).display().to_string();
    format!(
        r#"version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{socket}"
[ttrpc]
address = "{socket}.ttrpc"
# Without this it creates /opt/containerd.
[plugins."io.containerd.internal.v1.opt"]
path = "{opt}"
"#,
        root = at("root"),
        state = at("state"),
        socket = at("containerd.sock"),
        opt = at("opt"),
    )
}
