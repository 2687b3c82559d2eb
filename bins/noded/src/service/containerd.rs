//! containerd, with everything that it keeps below the node's data directory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_client::services::v1::version_client::VersionClient;
use nodekeel_supervisor::Failure;
use nodekeel_supervisor::process::{KillMode, Process, Readiness};

use crate::plan::Containerd;

/// What a node without Kubernetes' runtime interface has no use for, or what would need more than a kernel and root:
/// file systems that are not there, directories outside of the data directory.
const DISABLED: [&str; 10] = [
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.nri.v1.nri",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
];

/// Its own configuration, made anew at each start of the node: version 2 of its format, which 1.6 demands and 2.x still
/// reads.
pub(crate) fn config(containerd: &Containerd) -> String {
    let text = |path: &Path| toml::Value::from(&*path.to_string_lossy()).to_string();
    let disabled: Vec<_> = DISABLED.iter().map(|plugin| format!("  {plugin:?},\n")).collect();
    format!(
        "# Written by noded at each start; what is changed here is lost.\n\
         version = 2\n\
         root = {root}\n\
         state = {state}\n\
         disabled_plugins = [\n{disabled}]\n\n\
         [grpc]\n\
         address = {address}\n\n\
         # The default is outside of the data directory.\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\n\
         path = {opt}\n",
        root = text(&containerd.data.join("root")),
        state = text(&containerd.run.join("state")),
        disabled = disabled.concat(),
        address = text(&containerd.socket()),
        opt = text(&containerd.data.join("opt")),
    )
}

/// containerd as a process; it is ready when it has said so and tells its version.
///
/// Its shims, and so the containers, outlive it: they are what the next containerd finds again.
pub(crate) fn process(containerd: &Containerd, path: String, grace: Duration) -> Process {
    let socket = containerd.socket();
    Process::new(&containerd.binary)
        .arg("--config")
        .arg(containerd.data.join("config.toml"))
        .args(&containerd.config.extra_args)
        // It searches its shims and runc there.
        .env("PATH", path)
        .ready(Readiness::notify().and_probe(move || version(socket.clone())))
        .grace(grace)
        .kill(KillMode::Process)
}

async fn version(socket: PathBuf) -> Result<(), Failure> {
    let channel = containerd_client::connect(&socket).await?;
    VersionClient::new(channel).version(()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_configuration_is_toml_whatever_the_path() {
        let data = PathBuf::from("/tmp/a \"quoted\" directory\\");
        let containerd = Containerd {
            binary: "containerd".into(),
            data: data.clone(),
            run: data.join("run"),
            config: crate::config::ContainerdConfig::default(),
        };
        let parsed: toml::Table = config(&containerd).parse().expect("it is TOML");
        assert_eq!(parsed["root"].as_str(), data.join("root").to_str());
        assert_eq!(parsed["grpc"]["address"].as_str(), containerd.socket().to_str());
        assert_eq!(parsed["disabled_plugins"].as_array().map(Vec::len), Some(DISABLED.len()));
    }
}
