//! Renders containerd's configuration from typed settings.

mod fragment;
mod oom_score;
mod runsc;

use std::path::PathBuf;

use serde::Deserialize;
use toml::{Table, Value};

use crate::layout::DirectoryLayout;

pub use fragment::{ConfigFragment, InvalidFragment};
pub use oom_score::OomScorePolicy;
pub use runsc::RunscSettings;

/// The format version of containerd's configuration.
///
/// *Source:* containerd's docs/ops.md and docs/cri/config.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ConfigVersion {
    /// Version 2: 1.3 to 2.x. Releases 2.x migrate the CRI tables of version 2 themselves.
    #[default]
    V2,
    /// Version 3: 2.0 and later.
    V3,
}

impl ConfigVersion {
    pub(crate) fn number(self) -> i64 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    /// The newest version that a release of containerd (`1.6.20`, `v2.4.2` or `1.6.20~ds1`) reads; the oldest
    /// for an invalid release.
    pub fn for_release(release: &str) -> Self {
        let major =
            release.trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= 2) { Self::V3 } else { Self::V2 }
    }
}

/// The settings of containerd. The default is a containerd without the CRI.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerdSettings {
    /// Format version. Default: the newest one that the program reads.
    pub version: Option<ConfigVersion>,
    /// Kubernetes' Container Runtime Interface; `None` disables it.
    pub cri: Option<CriSettings>,
    /// Parts of an operator's own configuration, merged over this one in their order.
    pub fragments: Vec<ConfigFragment>,
}

/// Settings of Kubernetes' Container Runtime Interface, also a table of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CriSettings {
    /// Runtime of pods without a RuntimeClass. Default: runc.
    pub default_runtime: RuntimeHandler,
    /// gVisor in addition to runc, with the handler `runsc`. Default: none.
    pub runsc: Option<RunscSettings>,
    /// Cgroup driver of pods; the kubelet must use the same. Default: cgroupfs.
    pub cgroups: CgroupDriver,
    /// The permission of containers to have a lower OOM score than containerd itself. Default: if this process has the
    /// capability.
    pub oom_score: OomScorePolicy,
    /// Image of the pod sandbox (pause) container. Default: containerd's default, pulled from a registry.
    pub sandbox_image: Option<String>,
    /// Directory of CNI plugins. Default: `/opt/cni/bin`.
    pub cni_bin: PathBuf,
    /// Directory of the CNI configuration. Default: `/etc/cni/net.d`.
    pub cni_conf: PathBuf,
    /// Directory of the registries' `REGISTRY/hosts.toml`: mirrors, certificates, credentials. containerd reads them at each
    /// pull. Default: none, and images come from the registries themselves.
    ///
    /// *Source:* containerd's docs/hosts.md.
    pub registries: Option<PathBuf>,
}

impl Default for CriSettings {
    fn default() -> Self {
        Self {
            default_runtime: RuntimeHandler::Runc,
            runsc: None,
            cgroups: CgroupDriver::Cgroupfs,
            oom_score: OomScorePolicy::Detect,
            sandbox_image: None,
            cni_bin: "/opt/cni/bin".into(),
            cni_conf: "/etc/cni/net.d".into(),
            registries: None,
        }
    }
}

/// A container runtime, by the handler name of a RuntimeClass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RuntimeHandler {
    /// `runc`: namespaces of the node's kernel.
    Runc,
    /// `runsc`: gVisor, a separate kernel in user space.
    Runsc,
}

/// The cgroup driver of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CgroupDriver {
    /// `cgroupfs`: the runtime creates them.
    Cgroupfs,
    /// `systemd`: systemd creates them.
    Systemd,
}

/// Plugins that need more than a kernel and root: other file systems, directories and sockets outside of
/// containerd's layout, trace collectors.
const DISABLED_PLUGINS: [&str; 8] = [
    "io.containerd.nri.v1.nri",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
];

/// The CRI plugin, in every release.
pub(crate) const CRI_PLUGIN: &str = "io.containerd.grpc.v1.cri";
pub(crate) const CRI_IMAGES_PLUGIN: &str = "io.containerd.cri.v1.images";
pub(crate) const CRI_RUNTIME_PLUGIN: &str = "io.containerd.cri.v1.runtime";

impl ContainerdSettings {
    /// The configuration as TOML, for this directory layout; in version 2 if none is set.
    pub fn render_toml(&self, layout: &DirectoryLayout) -> String {
        let version = self.version.unwrap_or_default();
        let mut disabled: Vec<&str> = DISABLED_PLUGINS.to_vec();
        let mut plugins = Table::from_iter([(
            // The default path is outside of the data directory.
            "io.containerd.internal.v1.opt".to_owned(),
            toml_table([("path", path_value(layout.data().opt.path()))]),
        )]);
        match &self.cri {
            // 2.x has split the plugin of the CRI into three. A release ignores names of plugins that it does
            // not have.
            None => disabled.extend([CRI_PLUGIN, CRI_IMAGES_PLUGIN, CRI_RUNTIME_PLUGIN]),
            Some(cri) => plugins.extend(cri.plugin_tables(version, layout)),
        }
        let mut config = Table::from_iter([
            ("version".to_owned(), Value::from(version.number())),
            ("root".to_owned(), path_value(layout.data().root.path())),
            ("state".to_owned(), path_value(layout.run().state.path())),
            ("disabled_plugins".to_owned(), Value::from(disabled)),
            ("grpc".to_owned(), toml_table([("address", path_value(&layout.socket_path()))])),
            ("ttrpc".to_owned(), toml_table([("address", path_value(&layout.ttrpc_path()))])),
            ("plugins".to_owned(), Value::Table(plugins)),
        ]);
        self.fragments.iter().for_each(|fragment| fragment.merge_into(&mut config));
        format!("# Generated at each start; edits are lost.\n{config}")
    }

    /// The settings of gVisor, if it is among the runtimes.
    pub fn runsc_settings(&self) -> Option<&RunscSettings> {
        self.cri.as_ref()?.runsc.as_ref()
    }
}

fn path_value(path: &std::path::Path) -> Value {
    // The layout's paths are UTF-8, and so is the operator's configuration.
    Value::from(path.to_string_lossy().into_owned())
}

fn toml_table<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Table(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

impl CriSettings {
    fn plugin_tables(&self, version: ConfigVersion, layout: &DirectoryLayout) -> Vec<(String, Value)> {
        // Only the kubelet connects to these streams (exec, attach, port-forward), and it is on this host.
        let streams = [
            ("disable_tcp_service", Value::from(true)),
            ("stream_server_address", Value::from("127.0.0.1")),
            ("stream_server_port", Value::from("0")),
        ];
        let cni =
            toml_table([("bin_dir", path_value(&self.cni_bin)), ("conf_dir", path_value(&self.cni_conf))]);
        let restricted = Value::from(self.oom_score.is_restricted());
        let mut containerd = Table::from_iter([
            ("default_runtime_name".to_owned(), Value::from(self.default_runtime.as_str())),
            ("runtimes".to_owned(), self.runtime_table(layout)),
        ]);
        let runtime = [("restrict_oom_score_adj", restricted), ("cni", cni)];
        let registry = self.registries.iter();
        let registry =
            registry.map(|directory| ("registry", toml_table([("config_path", path_value(directory))])));
        match version {
            ConfigVersion::V2 => {
                // Version 2 has all settings of the CRI in one table.
                containerd.insert("snapshotter".into(), Value::from("overlayfs"));
                let sandbox =
                    self.sandbox_image.iter().map(|image| ("sandbox_image", Value::from(image.clone())));
                let all = streams.into_iter().chain(runtime).chain(sandbox).chain(registry);
                let all = all.chain([("containerd", Value::Table(containerd))]);
                vec![(
                    CRI_PLUGIN.to_owned(),
                    Value::Table(all.map(|(key, value)| (key.to_owned(), value)).collect()),
                )]
            }
            ConfigVersion::V3 => {
                // Version 3 divides them among three plugins: the streams, images and runtimes.
                let [oom, cni] = runtime;
                let mut images = Table::from_iter([("snapshotter".to_owned(), Value::from("overlayfs"))]);
                images.extend(registry.map(|(key, value)| (key.to_owned(), value)));
                if let Some(image) = &self.sandbox_image {
                    images.insert(
                        "pinned_images".into(),
                        toml_table([("sandbox", Value::from(image.clone()))]),
                    );
                }
                vec![
                    (CRI_PLUGIN.to_owned(), toml_table(streams)),
                    (CRI_IMAGES_PLUGIN.to_owned(), Value::Table(images)),
                    (
                        CRI_RUNTIME_PLUGIN.to_owned(),
                        toml_table([oom, cni, ("containerd", Value::Table(containerd))]),
                    ),
                ]
            }
        }
    }

    fn runtime_table(&self, layout: &DirectoryLayout) -> Value {
        let systemd = Value::from(self.cgroups == CgroupDriver::Systemd);
        let runc = toml_table([
            ("runtime_type", Value::from("io.containerd.runc.v2")),
            ("options", toml_table([("SystemdCgroup", systemd)])),
        ]);
        let mut runtimes = Table::from_iter([(RuntimeHandler::Runc.as_str().to_owned(), runc)]);
        if self.runsc.is_some() {
            let options = toml_table([
                // The shim reads its configuration file only if its options have this type.
                ("TypeUrl", Value::from("io.containerd.runsc.v1.options")),
                ("ConfigPath", path_value(&layout.runsc_config_path())),
            ]);
            let runsc =
                toml_table([("runtime_type", Value::from("io.containerd.runsc.v1")), ("options", options)]);
            runtimes.insert(RuntimeHandler::Runsc.as_str().to_owned(), runsc);
        }
        Value::Table(runtimes)
    }
}

impl RuntimeHandler {
    /// The handler name in a RuntimeClass.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Runsc => "runsc",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_layout() -> DirectoryLayout {
        DirectoryLayout::new("/tmp/a \"quoted\" directory\\", "/run/c").expect("short")
    }

    fn rendered_table(settings: &ContainerdSettings) -> Table {
        settings.render_toml(&test_layout()).parse().expect("valid TOML")
    }

    #[test]
    fn the_configuration_is_toml_for_any_path() {
        let table = rendered_table(&ContainerdSettings::default());
        assert_eq!(table["root"].as_str(), Some("/tmp/a \"quoted\" directory\\/root"));
        assert_eq!(table["grpc"]["address"].as_str(), Some("/run/c/containerd.sock"));
        assert_eq!(table["version"].as_integer(), Some(2));
    }

    #[test]
    fn cri_plugins_are_disabled_without_kubernetes() {
        let disabled = rendered_table(&ContainerdSettings::default())["disabled_plugins"].to_string();
        assert!(
            [CRI_PLUGIN, CRI_IMAGES_PLUGIN, CRI_RUNTIME_PLUGIN]
                .iter()
                .all(|plugin| disabled.contains(plugin)),
            "{disabled}"
        );
        let on = ContainerdSettings { cri: Some(CriSettings::default()), ..ContainerdSettings::default() };
        assert!(!rendered_table(&on)["disabled_plugins"].to_string().contains("cri"));
    }

    fn full_cri_settings() -> CriSettings {
        CriSettings {
            runsc: Some(RunscSettings::default()),
            default_runtime: RuntimeHandler::Runsc,
            cgroups: CgroupDriver::Systemd,
            oom_score: OomScorePolicy::Restricted,
            sandbox_image: Some("localhost/pause:1".into()),
            registries: Some("/etc/certs.d".into()),
            ..CriSettings::default()
        }
    }

    #[test]
    fn each_config_version_uses_its_own_keys() {
        let two = rendered_table(&ContainerdSettings {
            version: Some(ConfigVersion::V2),
            cri: Some(full_cri_settings()),
            fragments: Vec::new(),
        });
        let three = rendered_table(&ContainerdSettings {
            version: Some(ConfigVersion::V3),
            cri: Some(full_cri_settings()),
            fragments: Vec::new(),
        });
        assert_eq!(three["version"].as_integer(), Some(3));
        let places = [&two["plugins"][CRI_PLUGIN], &three["plugins"][CRI_RUNTIME_PLUGIN]];
        for plugin in places {
            assert_eq!(plugin["restrict_oom_score_adj"].as_bool(), Some(true));
            assert_eq!(plugin["cni"]["conf_dir"].as_str(), Some("/etc/cni/net.d"));
            let containerd = &plugin["containerd"];
            assert_eq!(containerd["default_runtime_name"].as_str(), Some("runsc"));
            assert_eq!(containerd["runtimes"]["runc"]["options"]["SystemdCgroup"].as_bool(), Some(true));
            let config = containerd["runtimes"]["runsc"]["options"]["ConfigPath"].as_str();
            assert_eq!(config, Some("/run/c/runsc/config.toml"));
        }
        for plugin in [&two["plugins"][CRI_PLUGIN], &three["plugins"][CRI_IMAGES_PLUGIN]] {
            assert_eq!(plugin["registry"]["config_path"].as_str(), Some("/etc/certs.d"));
        }
        assert_eq!(two["plugins"][CRI_PLUGIN]["sandbox_image"].as_str(), Some("localhost/pause:1"));
        assert_eq!(
            three["plugins"][CRI_IMAGES_PLUGIN]["pinned_images"]["sandbox"].as_str(),
            Some("localhost/pause:1")
        );
        assert!(three["plugins"][CRI_PLUGIN].get("restrict_oom_score_adj").is_none());
    }

    #[test]
    fn the_config_version_follows_the_release() {
        for release in ["2.4.2", "v2.0.0", "2.2.1~ds1-1"] {
            assert_eq!(ConfigVersion::for_release(release), ConfigVersion::V3);
        }
        for release in ["1.6.20~ds1", "v1.7.24", "", "unknown"] {
            assert_eq!(ConfigVersion::for_release(release), ConfigVersion::V2);
        }
    }
}
