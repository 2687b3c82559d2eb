//! containerd's configuration, from typed settings.

use std::path::PathBuf;

use serde::Deserialize;
use toml::{Table, Value};

use crate::place::Place;

/// The formats of containerd's configuration.
///
/// *Source:* containerd's docs/ops.md and docs/cri/config.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ConfigVersion {
    /// Version 2: 1.3 to 2.x. What concerns Kubernetes is read by 2.x as well, which moves it to its new places itself.
    #[default]
    V2,
    /// Version 3: 2.0 and later.
    V3,
}

impl ConfigVersion {
    /// The newest that a release of containerd reads, as `1.6.20`, `v2.4.2` or `1.6.20~ds1`; the oldest where that is no
    /// release.
    pub fn of_release(release: &str) -> Self {
        let major =
            release.trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= 2) { Self::V3 } else { Self::V2 }
    }
}

/// What containerd is told. The default is a containerd without Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// The format. Default: the one that every release reads.
    pub version: ConfigVersion,
    /// Kubernetes' runtime interface; `None` leaves it out.
    pub cri: Option<Cri>,
}

/// Kubernetes' runtime interface, as code says it or a table of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cri {
    /// Which runtime pods have that name none. Default: runc.
    pub default_runtime: Runtime,
    /// gVisor beside runc: its handler is called `runsc`. Default: none.
    pub runsc: Option<Runsc>,
    /// Who makes the cgroups of pods; the kubelet must be told the same. Default: cgroupfs.
    pub cgroups: CgroupDriver,
    /// Whether pods may be protected from the kernel's hunt for memory more than containerd itself is. Default: where
    /// they can be.
    pub oom_score: OomScore,
    /// The image in which a pod's namespaces live. Default: containerd's own, from the network.
    pub sandbox_image: Option<String>,
    /// Where the plugins of pods' networks are. Default: `/opt/cni/bin`.
    pub cni_bin: PathBuf,
    /// Where their configuration is. Default: `/etc/cni/net.d`.
    pub cni_conf: PathBuf,
}

impl Default for Cri {
    fn default() -> Self {
        Self {
            default_runtime: Runtime::Runc,
            runsc: None,
            cgroups: CgroupDriver::Cgroupfs,
            oom_score: OomScore::Detect,
            sandbox_image: None,
            cni_bin: "/opt/cni/bin".into(),
            cni_conf: "/etc/cni/net.d".into(),
        }
    }
}

/// A program that runs containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Runtime {
    /// `runc`: namespaces of the node's kernel.
    Runc,
    /// `runsc`: gVisor, a kernel of its own.
    Runsc,
}

/// How gVisor is run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runsc {
    /// How it gets at system calls. Default: `systrap`, which needs no hardware.
    pub platform: String,
    /// Whether it tells what helps those who look for a fault in gVisor, some hundred lines for a container and more as
    /// it runs. Default: no. A container whose lines nobody reads, since this program is away, waits once its FIFO is
    /// full, which holds 64 KiB.
    pub debug: bool,
}

impl Default for Runsc {
    fn default() -> Self {
        Self { platform: "systrap".into(), debug: false }
    }
}

/// Who makes the cgroups of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CgroupDriver {
    /// `cgroupfs`: the runtime, by itself.
    Cgroupfs,
    /// `systemd`.
    Systemd,
}

/// Whether containers may have a lower OOM score than containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum OomScore {
    /// `detect`: they may where this process has the capability for it; without it, no pod would start.
    Detect,
    /// `restricted`: they may not.
    Restricted,
    /// `free`: they may.
    Free,
}

impl OomScore {
    fn is_restricted(self) -> bool {
        match self {
            Self::Restricted => true,
            Self::Free => false,
            Self::Detect => {
                let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
                !has_sys_resource(&status)
            }
        }
    }
}

/// Whether a process of this `/proc/PID/status` has `CAP_SYS_RESOURCE`. Where it doesn't tell, it has.
///
/// *Source:* proc_pid_status(5); `linux/capability.h`.
fn has_sys_resource(status: &str) -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let mut lines = status.lines();
    let told = lines.find_map(|line| line.strip_prefix("CapEff:"));
    let effective = told.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    effective.is_none_or(|capabilities| capabilities >> CAP_SYS_RESOURCE & 1 == 1)
}

/// What would need more than a kernel and root: file systems that are not there, directories and sockets outside of
/// containerd's own, collectors of traces.
const NEVER: [&str; 8] = [
    "io.containerd.nri.v1.nri",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
];

/// Kubernetes' runtime interface, in every release.
const CRI: &str = "io.containerd.grpc.v1.cri";
const CRI_IMAGES: &str = "io.containerd.cri.v1.images";
const CRI_RUNTIME: &str = "io.containerd.cri.v1.runtime";

impl Settings {
    /// The configuration as TOML, for a containerd in this place.
    pub fn render(&self, place: &Place) -> String {
        let mut disabled: Vec<&str> = NEVER.to_vec();
        let mut plugins = Table::from_iter([(
            // Its default is outside of the data directory.
            "io.containerd.internal.v1.opt".to_owned(),
            table([("path", path(&place.opt()))]),
        )]);
        match &self.cri {
            None => disabled.extend([CRI, CRI_IMAGES, CRI_RUNTIME]),
            Some(cri) => plugins.extend(cri.plugins(self.version, place)),
        }
        let version = match self.version {
            ConfigVersion::V2 => 2,
            ConfigVersion::V3 => 3,
        };
        let whole = Table::from_iter([
            ("version".to_owned(), Value::from(version)),
            ("root".to_owned(), path(&place.root())),
            ("state".to_owned(), path(&place.state())),
            ("disabled_plugins".to_owned(), Value::from(disabled)),
            ("grpc".to_owned(), table([("address", path(&place.socket()))])),
            ("ttrpc".to_owned(), table([("address", path(&place.ttrpc()))])),
            ("plugins".to_owned(), Value::Table(plugins)),
        ]);
        format!("# Written at each start; what is changed here is lost.\n{whole}")
    }

    /// gVisor, where it is among the runtimes.
    pub fn runsc(&self) -> Option<&Runsc> {
        self.cri.as_ref()?.runsc.as_ref()
    }
}

fn path(path: &std::path::Path) -> Value {
    // Places are UTF-8, and what the operator says is.
    Value::from(path.to_string_lossy().into_owned())
}

fn table<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Table(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

impl Cri {
    fn plugins(&self, version: ConfigVersion, place: &Place) -> Vec<(String, Value)> {
        let streams = [
            ("disable_tcp_service", Value::from(true)),
            ("stream_server_address", Value::from("127.0.0.1")),
            ("stream_server_port", Value::from("0")),
        ];
        let cni = table([("bin_dir", path(&self.cni_bin)), ("conf_dir", path(&self.cni_conf))]);
        let restricted = Value::from(self.oom_score.is_restricted());
        let mut containerd = Table::from_iter([
            ("default_runtime_name".to_owned(), Value::from(self.default_runtime.handler())),
            ("runtimes".to_owned(), self.runtimes(place)),
        ]);
        let runtime = [("restrict_oom_score_adj", restricted), ("cni", cni)];
        match version {
            ConfigVersion::V2 => {
                containerd.insert("snapshotter".into(), Value::from("overlayfs"));
                let sandbox =
                    self.sandbox_image.iter().map(|image| ("sandbox_image", Value::from(image.clone())));
                let all = streams.into_iter().chain(runtime).chain(sandbox);
                let all = all.chain([("containerd", Value::Table(containerd))]);
                vec![(
                    CRI.to_owned(),
                    Value::Table(all.map(|(key, value)| (key.to_owned(), value)).collect()),
                )]
            }
            ConfigVersion::V3 => {
                let [oom, cni] = runtime;
                let mut images = Table::from_iter([("snapshotter".to_owned(), Value::from("overlayfs"))]);
                if let Some(image) = &self.sandbox_image {
                    images.insert("pinned_images".into(), table([("sandbox", Value::from(image.clone()))]));
                }
                vec![
                    (CRI.to_owned(), table(streams)),
                    (CRI_IMAGES.to_owned(), Value::Table(images)),
                    (CRI_RUNTIME.to_owned(), table([oom, cni, ("containerd", Value::Table(containerd))])),
                ]
            }
        }
    }

    fn runtimes(&self, place: &Place) -> Value {
        let systemd = Value::from(self.cgroups == CgroupDriver::Systemd);
        let runc = table([
            ("runtime_type", Value::from("io.containerd.runc.v2")),
            ("options", table([("SystemdCgroup", systemd)])),
        ]);
        let mut runtimes = Table::from_iter([(Runtime::Runc.handler().to_owned(), runc)]);
        if self.runsc.is_some() {
            let options = table([
                ("TypeUrl", Value::from("io.containerd.runsc.v1.options")),
                ("ConfigPath", path(&place.runsc_config())),
            ]);
            let runsc =
                table([("runtime_type", Value::from("io.containerd.runsc.v1")), ("options", options)]);
            runtimes.insert(Runtime::Runsc.handler().to_owned(), runsc);
        }
        Value::Table(runtimes)
    }
}

impl Runtime {
    /// What a RuntimeClass calls it.
    pub fn handler(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Runsc => "runsc",
        }
    }
}

impl Runsc {
    /// The configuration of its shim as TOML. What it and runsc log goes into the FIFO; but not runsc's `log`, in which
    /// the shim reads why a container could not be started.
    ///
    /// *Source:* gvisor.dev/docs/user_guide/containerd/configuration, and `runsc flags`.
    pub fn render(&self, place: &Place) -> String {
        let log = || path(&place.runsc_log());
        // All of these are flags, and so texts.
        let flags = table([
            ("platform", Value::from(self.platform.clone())),
            ("debug", Value::from(self.debug.to_string())),
            ("debug-log", log()),
            ("panic-log", log()),
        ]);
        let level = if self.debug { "debug" } else { "info" };
        let whole = Table::from_iter([
            ("root".to_owned(), path(&place.runsc().join("root"))),
            ("log_path".to_owned(), log()),
            ("log_level".to_owned(), Value::from(level)),
            ("runsc_config".to_owned(), flags),
        ]);
        format!("# Written at each start; what is changed here is lost.\n{whole}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        Place::new("/tmp/a \"quoted\" directory\\", "/run/c").expect("short")
    }

    fn parsed(settings: &Settings) -> Table {
        settings.render(&place()).parse().expect("it is TOML")
    }

    #[test]
    fn it_is_toml_whatever_the_path() {
        let table = parsed(&Settings::default());
        assert_eq!(table["root"].as_str(), Some("/tmp/a \"quoted\" directory\\/root"));
        assert_eq!(table["grpc"]["address"].as_str(), Some("/run/c/containerd.sock"));
        assert_eq!(table["version"].as_integer(), Some(2));
    }

    #[test]
    fn without_kubernetes_its_plugins_are_off() {
        let disabled = parsed(&Settings::default())["disabled_plugins"].to_string();
        assert!([CRI, CRI_IMAGES, CRI_RUNTIME].iter().all(|plugin| disabled.contains(plugin)), "{disabled}");
        let on = Settings { cri: Some(Cri::default()), ..Settings::default() };
        assert!(!parsed(&on)["disabled_plugins"].to_string().contains("cri"));
    }

    fn cri() -> Cri {
        Cri {
            runsc: Some(Runsc::default()),
            default_runtime: Runtime::Runsc,
            cgroups: CgroupDriver::Systemd,
            oom_score: OomScore::Restricted,
            sandbox_image: Some("localhost/pause:1".into()),
            ..Cri::default()
        }
    }

    #[test]
    fn each_version_has_its_own_places() {
        let two = parsed(&Settings { version: ConfigVersion::V2, cri: Some(cri()) });
        let three = parsed(&Settings { version: ConfigVersion::V3, cri: Some(cri()) });
        assert_eq!(three["version"].as_integer(), Some(3));
        let places = [&two["plugins"][CRI], &three["plugins"][CRI_RUNTIME]];
        for plugin in places {
            assert_eq!(plugin["restrict_oom_score_adj"].as_bool(), Some(true));
            assert_eq!(plugin["cni"]["conf_dir"].as_str(), Some("/etc/cni/net.d"));
            let containerd = &plugin["containerd"];
            assert_eq!(containerd["default_runtime_name"].as_str(), Some("runsc"));
            assert_eq!(containerd["runtimes"]["runc"]["options"]["SystemdCgroup"].as_bool(), Some(true));
            let config = containerd["runtimes"]["runsc"]["options"]["ConfigPath"].as_str();
            assert_eq!(config, Some("/run/c/runsc/config.toml"));
        }
        assert_eq!(two["plugins"][CRI]["sandbox_image"].as_str(), Some("localhost/pause:1"));
        assert_eq!(
            three["plugins"][CRI_IMAGES]["pinned_images"]["sandbox"].as_str(),
            Some("localhost/pause:1")
        );
        assert!(three["plugins"][CRI].get("restrict_oom_score_adj").is_none());
    }

    #[test]
    fn the_version_is_that_of_the_release() {
        for release in ["2.4.2", "v2.0.0", "2.2.1~ds1-1"] {
            assert_eq!(ConfigVersion::of_release(release), ConfigVersion::V3);
        }
        for release in ["1.6.20~ds1", "v1.7.24", "", "unknown"] {
            assert_eq!(ConfigVersion::of_release(release), ConfigVersion::V2);
        }
    }

    #[test]
    fn the_missing_capability_is_seen() {
        assert!(has_sys_resource("CapPrm:\t0\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_resource("Name:\tx\nCapEff:\t00000000a80425fb\n"));
        assert!(has_sys_resource(""));
    }

    #[test]
    fn what_runsc_logs_goes_into_its_fifo_but_for_what_its_shim_reads() {
        let text = Runsc { debug: true, ..Runsc::default() }.render(&place());
        let table: Table = text.parse().expect("it is TOML");
        let log = Some("/run/c/runsc/log.fifo");
        assert_eq!(table["log_path"].as_str(), log);
        for flag in ["debug-log", "panic-log"] {
            assert_eq!(table["runsc_config"][flag].as_str(), log);
        }
        assert!(table["runsc_config"].get("log").is_none());
        assert_eq!(table["runsc_config"]["debug"].as_str(), Some("true"));
    }
}
