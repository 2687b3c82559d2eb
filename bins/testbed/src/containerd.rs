//! A real containerd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, Scratch, output, tools};

/// A containerd with its state, root and socket in a private directory, answering when [`Containerd::start`] returns.
/// It has no CRI plugin: nothing of it reaches out of its directory.
#[derive(Debug)]
pub struct Containerd {
    daemon: Daemon,
    socket: PathBuf,
    ctr_path: PathBuf,
}

impl Containerd {
    /// Starts it and waits until it answers Version.
    ///
    /// # Errors
    /// When the caller isn't root, which containerd must be; [`tools::Missing`] where it isn't installed; else why it
    /// did not come up, with its last output.
    pub fn start() -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "containerd needs root");
        let (containerd, ctr) = (tools::find(tools::CONTAINERD)?, tools::find(tools::CTR)?);
        let scratch = Scratch::new()?;
        let socket = scratch.path().join("containerd.sock");
        let file = scratch.path().join("config.toml");
        fs::write(&file, config(scratch.path())).with_context(|| format!("write {}", file.display()))?;
        let mut command = Command::new(containerd);
        command.arg("--config").arg(file).current_dir(scratch.path());
        let daemon =
            Daemon::start(command, scratch, || output(client(&ctr, &socket).arg("version")).map(drop))?;
        Ok(Self { daemon, socket, ctr_path: ctr })
    }

    /// The socket of its API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The daemon below.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// A `ctr` that speaks with this daemon.
    pub fn ctr(&self) -> Command {
        client(&self.ctr_path, &self.socket)
    }
}

fn client(ctr: &Path, socket: &Path) -> Command {
    let mut command = Command::new(ctr);
    command.arg("--address").arg(socket);
    command
}

/// *Source:* containerd-config.toml(5), version 2, which 1.6 and 2.x read alike.
fn config(directory: &Path) -> String {
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
# Else it makes /opt/containerd.
[plugins."io.containerd.internal.v1.opt"]
path = "{opt}"
"#,
        root = at("root"),
        state = at("state"),
        socket = at("containerd.sock"),
        opt = at("opt"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leftovers;

    #[test]
    #[ignore = "needs root and containerd"]
    fn it_answers_version_and_leaves_nothing() {
        let containerd = Containerd::start().unwrap();
        let text = output(containerd.ctr().arg("version")).unwrap();
        assert!(text.contains("Server:"), "{text}");
        let directory = containerd.daemon().directory().to_owned();
        drop(containerd);
        assert_eq!(leftovers::processes(&directory).unwrap(), []);
        assert_eq!(leftovers::mounts(&directory).unwrap(), Vec::<PathBuf>::new());
        assert!(!directory.exists());
    }
}
