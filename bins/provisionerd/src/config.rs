//! The configuration: a file, overridden by environment variables and by flags.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use clap::Args;
use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_fsquota::Bytes;
use nodekeel_localstorage::{FileMode, TrustError, check_file_owner};
use nodekeel_provisioner::settings::{
    AuditSettings, CapacitySettings, DEFAULT_KUBELET, OverlappingStores, check_store_directories,
    default_driver, deserialize_mode, parse_audit_interval,
};
use nodekeel_provisioner::{
    CapacityPolicy, DriverName, FINALIZER, InvalidRatio, NodeName, ProvisionerIdentity, StoreName,
    store_of_volume,
};
use serde::Deserialize;
use thiserror::Error;

/// The commented default configuration.
pub(crate) const DEFAULT_CONFIG: &str = include_str!("../../../deploy/provisionerd.toml");

#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    #[error("can't read configuration {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("can't use configuration {}", path.display())]
    Untrusted {
        path: PathBuf,
        #[source]
        source: TrustError,
    },
    #[error("invalid configuration {}", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: toml::de::Error,
    },
    #[error("invalid `{key}` {}: use an absolute path", path.display())]
    RelativePath { key: &'static str, path: PathBuf },
    #[error("invalid `stores` {name} = {}: use an absolute path without ..", path.display())]
    StorePath { name: StoreName, path: PathBuf },
    #[error("invalid `stores`: {0}")]
    Overlap(OverlappingStores),
    #[error("store {name} is given twice: give each store one directory")]
    SameStore { name: StoreName },
    #[error("there is no store {name}: name one of the table `stores`")]
    UnknownStore { name: StoreName },
    #[error("invalid `capacity.ratio`")]
    CapacityRatio(#[source] InvalidRatio),
    #[error("the hostname is not a valid node name: set --node")]
    InvalidNodeName(#[source] nodekeel_provisioner::InvalidObjectName),
}

/// The configuration file.
#[derive(Debug, Clone, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DaemonConfig {
    pub(crate) driver: DriverName,
    pub(crate) node: Option<NodeName>,
    pub(crate) directory: PathBuf,
    /// The directories of the stores with a name.
    pub(crate) stores: BTreeMap<StoreName, PathBuf>,
    /// The store of `directory`: [`of_store`](DaemonConfig::of_store).
    #[serde(skip)]
    pub(crate) store: Option<StoreName>,
    pub(crate) kubelet: PathBuf,
    pub(crate) csi: bool,
    pub(crate) listen: SocketAddr,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) concurrency: NonZeroU16,
    #[serde(deserialize_with = "deserialize_mode")]
    pub(crate) volume_mode: FileMode,
    pub(crate) capacity: CapacitySettings,
    pub(crate) audit: AuditSettings,
    pub(crate) log: LogConfig,
}

/// The `[log]` section.
#[derive(Debug, Clone, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LogConfig {
    pub(crate) format: LogFormat,
    pub(crate) level: String,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, Deserialize, PartialEq, Eq, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// Human-readable lines.
    Compact,
    /// One JSON object per entry.
    Json,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            driver: default_driver(),
            node: None,
            directory: "/var/lib/nodekeel".into(),
            stores: BTreeMap::new(),
            store: None,
            kubelet: DEFAULT_KUBELET.into(),
            csi: true,
            listen: SocketAddr::from(([127, 0, 0, 1], 9810)),
            kubeconfig: None,
            concurrency: NonZeroU16::MIN.saturating_add(15),
            volume_mode: FileMode::new(0o777),
            capacity: CapacitySettings::default(),
            audit: AuditSettings::default(),
            log: LogConfig::default(),
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Compact, level: "info".into() }
    }
}

/// The flags that override the file.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConfigFlags {
    /// Configuration file [default: built-in defaults]
    #[arg(long, value_name = "FILE", env = "PROVISIONERD_CONFIG")]
    config: Option<PathBuf>,
    /// Driver name
    #[arg(long, value_name = "NAME", env = "PROVISIONERD_DRIVER")]
    driver: Option<DriverName>,
    /// Node name in the API [default: the hostname]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: Option<NodeName>,
    /// Directory of volumes
    #[arg(long, value_name = "DIR", env = "PROVISIONERD_DIRECTORY")]
    directory: Option<PathBuf>,
    /// Directories of further stores, by name
    #[arg(
        long,
        value_name = "NAME=DIR,…",
        env = "PROVISIONERD_STORES",
        value_delimiter = ',',
        value_parser = parse_store
    )]
    stores: Option<Vec<(StoreName, PathBuf)>>,
    /// The kubelet's root directory
    #[arg(long, value_name = "DIR", env = "PROVISIONERD_KUBELET")]
    kubelet: Option<PathBuf>,
    /// Disable the CSI node plugin
    #[arg(long)]
    no_csi: bool,
    /// Listen address of /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDRESS:PORT", env = "PROVISIONERD_LISTEN", value_parser = parse_listen_address)]
    listen: Option<SocketAddr>,
    /// Kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// How often each byte is promised to volumes
    #[arg(long, value_name = "RATIO")]
    capacity_ratio: Option<f64>,
    /// Bytes kept for other data, such as 10Gi
    #[arg(long, value_name = "BYTES")]
    capacity_reserve: Option<Bytes>,
    /// Time between two audits of limits, such as 30m
    #[arg(long, value_name = "DURATION", value_parser = parse_audit_interval)]
    audit_interval: Option<Duration>,
    /// Log format
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace, or directives
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

/// Parses an address with its port. An IPv6 address may lack its brackets, as in the `$(POD_IP):9810` of a manifest.
pub(crate) fn parse_listen_address(text: &str) -> Result<SocketAddr, String> {
    let unbracketed = || {
        let (address, port) = text.rsplit_once(':')?;
        Some(SocketAddr::new(address.parse().ok()?, port.parse().ok()?))
    };
    let error = || format!("invalid address {text:?}: use an IP address and a port, such as 127.0.0.1:9810");
    text.parse().ok().or_else(unbracketed).ok_or_else(error)
}

/// Parses `NAME=DIR`.
fn parse_store(text: &str) -> Result<(StoreName, PathBuf), String> {
    let (name, path) = text
        .split_once('=')
        .ok_or_else(|| format!("invalid store {text:?}: use NAME=DIR, such as fast=/srv/fast"))?;
    Ok((StoreName::try_new(name).map_err(|error| error.to_string())?, path.into()))
}

impl ConfigFlags {
    /// Reads the file and applies the flags.
    pub(crate) fn load_config(self) -> Result<DaemonConfig, ConfigError> {
        let mut config = match &self.config {
            Some(path) => DaemonConfig::read_file(path)?,
            None => DaemonConfig::default(),
        };
        let Self {
            driver,
            node,
            directory,
            stores,
            kubelet,
            no_csi,
            listen,
            kubeconfig,
            capacity_ratio,
            capacity_reserve,
            audit_interval,
            log_format,
            log_level,
            ..
        } = self;
        config.driver = driver.unwrap_or(config.driver);
        config.node = node.or(config.node);
        config.directory = directory.unwrap_or(config.directory);
        if let Some(stores) = stores {
            config.stores = BTreeMap::new();
            for (name, path) in stores {
                if config.stores.insert(name.clone(), path).is_some() {
                    return Err(ConfigError::SameStore { name });
                }
            }
        }
        config.kubelet = kubelet.unwrap_or(config.kubelet);
        // The flag can disable the plugin, but not enable one that the file disables.
        config.csi = config.csi && !no_csi;
        config.listen = listen.unwrap_or(config.listen);
        config.kubeconfig = kubeconfig.or(config.kubeconfig);
        config.capacity.ratio = capacity_ratio.unwrap_or(config.capacity.ratio);
        config.capacity.reserve = capacity_reserve.unwrap_or(config.capacity.reserve);
        config.audit.interval = audit_interval.unwrap_or(config.audit.interval);
        config.log.format = log_format.unwrap_or(config.log.format);
        config.log.level = log_level.unwrap_or(config.log.level);
        config.validate()
    }
}

impl DaemonConfig {
    fn read_file(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Read { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(unreadable)?;
        check_file_owner(&file, path)
            .map_err(|source| ConfigError::Untrusted { path: path.to_owned(), source })?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(unreadable)?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })
    }

    fn validate(self) -> Result<Self, ConfigError> {
        for (key, path) in [("directory", &self.directory), ("kubelet", &self.kubelet)] {
            if !path.is_absolute() {
                return Err(ConfigError::RelativePath { key, path: path.clone() });
            }
        }
        for (name, path) in &self.stores {
            if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
                return Err(ConfigError::StorePath { name: name.clone(), path: path.clone() });
            }
        }
        check_store_directories(Some(&self.directory), &self.stores).map_err(ConfigError::Overlap)?;
        // Only checked here, so that an invalid ratio is an error of the configuration.
        self.capacity_policy()?;
        Ok(self)
    }

    /// The configuration of each store: that of `directory`, and those with a name.
    pub(crate) fn of_stores(&self) -> impl Iterator<Item = Self> {
        let named = self.stores.keys().map(|name| self.of_store(Some(name)));
        std::iter::once(self.clone()).chain(named.flatten())
    }

    /// The configuration of a store, whose directory is `directory` there; `None` if there is none of this name.
    pub(crate) fn of_store(&self, name: Option<&StoreName>) -> Option<Self> {
        let directory = match name {
            Some(name) => self.stores.get(name)?.clone(),
            None => self.directory.clone(),
        };
        Some(Self { directory, store: name.cloned(), ..self.clone() })
    }

    /// The directory of the store, and its name if it has one.
    pub(crate) fn store_label(&self) -> String {
        let name = self.store.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        format!("{}{name}", self.directory.display())
    }

    /// The store that a PersistentVolume names, if the node does not have it.
    pub(crate) fn unknown_store(&self, volume: &PersistentVolume) -> Option<StoreName> {
        store_of_volume(volume).0.filter(|name| !self.stores.contains_key(name))
    }

    /// The share of the file system that may be promised to volumes.
    pub(crate) fn capacity_policy(&self) -> Result<CapacityPolicy, ConfigError> {
        self.capacity.policy().map_err(ConfigError::CapacityRatio)
    }

    /// The driver on a node, and the store, whose volumes this program serves.
    pub(crate) fn provisioner_identity(&self, node: NodeName) -> ProvisionerIdentity {
        ProvisionerIdentity {
            driver: self.driver.clone(),
            node,
            finalizer: Some(FINALIZER.to_owned()),
            store: self.store.clone(),
        }
    }

    /// The configured node name, else the hostname.
    pub(crate) fn node_name(&self) -> Result<NodeName, ConfigError> {
        match &self.node {
            Some(node) => Ok(node.clone()),
            None => {
                let uname = rustix::system::uname();
                let host = uname.nodename().to_string_lossy();
                // The kubelet, too, registers the hostname in lower case.
                NodeName::try_new(host.to_lowercase()).map_err(ConfigError::InvalidNodeName)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_config(text: &str) -> Result<DaemonConfig, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn the_shipped_file_shows_the_defaults() {
        assert_eq!(parse_config(DEFAULT_CONFIG), Ok(DaemonConfig::default()));
        // Keys without a default are shown as comments, which must also be valid.
        let all: String = DEFAULT_CONFIG
            .lines()
            .map(|line| match line.strip_prefix("# ").filter(|line| line.contains(" = \"")) {
                Some(shown) if !shown.contains(", such") && !shown.contains("directives") => {
                    format!("{shown}\n")
                }
                _ => format!("{line}\n"),
            })
            .collect();
        let config = parse_config(&all).expect("valid comments");
        assert_eq!(config.node.map(|node| node.to_string()).as_deref(), Some("node-a"));
        assert_eq!(config.kubeconfig.as_deref(), Some(Path::new("/etc/kubernetes/provisionerd.conf")));
    }

    #[test]
    fn a_listen_address_is_an_ip_address_and_a_port_with_or_without_brackets() {
        for (text, address) in [
            ("127.0.0.1:9810", "127.0.0.1:9810"),
            ("[fd00::7]:9810", "[fd00::7]:9810"),
            ("fd00::7:9810", "[fd00::7]:9810"),
        ] {
            assert_eq!(parse_listen_address(text).map(|parsed| parsed.to_string()).as_deref(), Ok(address));
        }
        for text in ["", ":9810", "127.0.0.1", "node:9810", "$(POD_IP):9810", "fd00::7:98100"] {
            assert!(parse_listen_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_names_the_line_and_the_key() {
        let error = parse_config("csi = true\ndriver = \"Not A Name\"\n").expect_err("a wrong name");
        assert!(error.contains("line 2") && error.contains("invalid driver name"), "{error}");
        let error = parse_config("drivr = \"x\"\n").expect_err("an unknown key");
        assert!(error.contains("drivr"), "{error}");
        assert!(parse_config("concurrency = 0\n").is_err());
        let error = parse_config("[audit]\ninterval = \"0s\"\n").expect_err("a short interval");
        assert!(error.contains("line 2") && error.contains("invalid interval \"0s\""), "{error}");
        assert!(parse_config("[capacity]\nreserve = 10737418240\n").is_ok());
    }

    #[test]
    fn flags_override_the_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "driver = \"a.b\"\ndirectory = \"/a\"\n").expect("write");
        let flags = ConfigFlags {
            config: Some(file.path().to_owned()),
            directory: Some("/b".into()),
            no_csi: true,
            audit_interval: Some(Duration::from_secs(5)),
            ..Default::default()
        };
        let config = flags.load_config().expect("a configuration");
        assert_eq!(config.driver.as_str(), "a.b");
        assert_eq!(config.directory, Path::new("/b"));
        assert!(!config.csi);
        assert_eq!(config.audit.interval, Duration::from_secs(5));
        let store = |text: &str| parse_store(text).expect("a store");
        let stores = |given: &[&str]| ConfigFlags {
            directory: Some("/b".into()),
            stores: Some(given.iter().map(|text| store(text)).collect()),
            ..Default::default()
        };
        let config = stores(&["fast=/f", "bulk=/c"]).load_config().expect("a configuration");
        let each: Vec<_> =
            config.of_stores().map(|it| (it.store.map(|it| it.to_string()), it.directory)).collect();
        let named = |name: &str, path: &str| (Some(name.to_owned()), PathBuf::from(path));
        assert_eq!(each, [(None, "/b".into()), named("bulk", "/c"), named("fast", "/f")]);
        let twice = stores(&["fast=/f", "fast=/g"]).load_config();
        assert!(matches!(twice, Err(ConfigError::SameStore { .. })), "{twice:?}");
        for (given, named) in [
            (["fast=/b", "bulk=/c"], "store fast"),
            (["fast=/c", "bulk=/c"], "store bulk"),
            (["fast=/c", "bulk=/c/d"], "store bulk"),
            (["fast=/c", "bulk=/b//d/."], "store bulk"),
            (["fast=/c", "bulk=/"], "store fast"),
        ] {
            let error = stores(&given).load_config().expect_err("they overlap").to_string();
            assert!(error.contains(&format!("{named} has the directory")), "{error}");
        }
        assert!(stores(&["fast=/c", "bulk=/cd"]).load_config().is_ok());
        for given in ["fast=f", "fast=/c/../b"] {
            assert!(matches!(stores(&[given]).load_config(), Err(ConfigError::StorePath { .. })), "{given}");
        }
        assert!(parse_store("fast").is_err() && parse_store("../x=/f").is_err());
        let zero = ConfigFlags { capacity_ratio: Some(0.0), ..Default::default() };
        assert!(matches!(zero.load_config(), Err(ConfigError::CapacityRatio(_))));
        let relative = ConfigFlags { directory: Some("b".into()), ..Default::default() };
        assert!(matches!(relative.load_config(), Err(ConfigError::RelativePath { key: "directory", .. })));
    }
}
