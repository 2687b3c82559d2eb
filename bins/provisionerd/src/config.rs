//! The configuration: a file, over which flags win.

use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use clap::Args;
use nodekeel_localstorage::Mode;
use nodekeel_provisioner::{DriverName, NodeName};
use serde::Deserialize;
use serde::de::Error as _;
use thiserror::Error;

/// The commented default configuration.
pub(crate) const SHIPPED: &str = include_str!("../../../deploy/provisionerd.toml");

/// What is wrong with the configuration.
#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    #[error("read the configuration {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the configuration {} is wrong", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: toml::de::Error,
    },
    #[error("the path {} of `{key}` is not absolute", path.display())]
    Relative { key: &'static str, path: PathBuf },
    #[error("the node has no name that the API could know: give it by --node")]
    NoNode(#[source] nodekeel_provisioner::NameError),
}

/// The file.
#[derive(Debug, Clone, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    #[serde(deserialize_with = "parsed")]
    pub(crate) driver: DriverName,
    #[serde(deserialize_with = "parsed_some")]
    pub(crate) node: Option<NodeName>,
    pub(crate) directory: PathBuf,
    pub(crate) kubelet: PathBuf,
    pub(crate) csi: bool,
    pub(crate) listen: SocketAddr,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) concurrency: NonZeroU16,
    #[serde(deserialize_with = "octal")]
    pub(crate) volume_mode: Mode,
    pub(crate) log: Log,
}

/// How it logs.
#[derive(Debug, Clone, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Log {
    pub(crate) format: Format,
    pub(crate) level: String,
}

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, Deserialize, PartialEq, Eq, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// For people.
    Compact,
    /// One JSON object for each entry.
    Json,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            driver: DriverName::try_new("volumes.nodekeel").expect("a domain"),
            node: None,
            directory: "/var/lib/nodekeel".into(),
            kubelet: "/var/lib/kubelet".into(),
            csi: true,
            listen: SocketAddr::from(([127, 0, 0, 1], 9810)),
            kubeconfig: None,
            concurrency: NonZeroU16::MIN.saturating_add(15),
            volume_mode: Mode::new(0o777),
            log: Log::default(),
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { format: Format::Compact, level: "info".into() }
    }
}

fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

fn parsed_some<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<NodeName>, D::Error> {
    parsed(deserializer).map(Some)
}

fn octal<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
    let text = String::deserialize(deserializer)?;
    match u16::from_str_radix(&text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(Mode::new(mode.into())),
        _ => Err(D::Error::custom(format!("{text:?} is no mode: use octal digits, as in \"0777\""))),
    }
}

/// What can be given on the command line, over the file.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Flags {
    /// The configuration; without it, the defaults
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The driver's name
    #[arg(long, value_name = "NAME")]
    driver: Option<DriverName>,
    /// The node's name in the API [default: the host's name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: Option<NodeName>,
    /// Where volumes are kept
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// The kubelet's directory
    #[arg(long, value_name = "DIR")]
    kubelet: Option<PathBuf>,
    /// Don't serve the CSI
    #[arg(long)]
    no_csi: bool,
    /// Where /healthz, /readyz and /metrics are served
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// A kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// How the log looks
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<Format>,
    /// What is logged: error, warn, info, debug, trace, or directives
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl Flags {
    /// The file, with what the flags say.
    pub(crate) fn config(self) -> Result<Config, ConfigError> {
        let mut config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        let Self {
            driver, node, directory, kubelet, no_csi, listen, kubeconfig, log_format, log_level, ..
        } = self;
        config.driver = driver.unwrap_or(config.driver);
        config.node = node.or(config.node);
        config.directory = directory.unwrap_or(config.directory);
        config.kubelet = kubelet.unwrap_or(config.kubelet);
        config.csi = config.csi && !no_csi;
        config.listen = listen.unwrap_or(config.listen);
        config.kubeconfig = kubeconfig.or(config.kubeconfig);
        config.log.format = log_format.unwrap_or(config.log.format);
        config.log.level = log_level.unwrap_or(config.log.level);
        config.checked()
    }
}

impl Config {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })
    }

    fn checked(self) -> Result<Self, ConfigError> {
        for (key, path) in [("directory", &self.directory), ("kubelet", &self.kubelet)] {
            if !path.is_absolute() {
                return Err(ConfigError::Relative { key, path: path.clone() });
            }
        }
        Ok(self)
    }

    /// The node's name: as given, else the host's.
    pub(crate) fn node(&self) -> Result<NodeName, ConfigError> {
        match &self.node {
            Some(node) => Ok(node.clone()),
            None => {
                let uname = rustix::system::uname();
                let host = uname.nodename().to_string_lossy();
                NodeName::try_new(host.to_lowercase()).map_err(ConfigError::NoNode)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn the_shipped_file_shows_the_defaults() {
        assert_eq!(parse(SHIPPED), Ok(Config::default()));
        // What has no default is shown as a comment, and is right, too.
        let all: String = SHIPPED
            .lines()
            .map(|line| match line.strip_prefix("# ").filter(|line| line.contains(" = \"")) {
                Some(shown) if !shown.contains(", such") && !shown.contains("directives") => {
                    format!("{shown}\n")
                }
                _ => format!("{line}\n"),
            })
            .collect();
        let config = parse(&all).expect("the comments are right");
        assert_eq!(config.node.map(|node| node.to_string()).as_deref(), Some("node-a"));
        assert_eq!(config.kubeconfig.as_deref(), Some(Path::new("/etc/kubernetes/provisionerd.conf")));
    }

    #[test]
    fn an_error_names_the_line_and_the_key() {
        let error = parse("csi = true\ndriver = \"Not A Name\"\n").expect_err("a wrong name");
        assert!(error.contains("line 2") && error.contains("invalid driver name"), "{error}");
        let error = parse("drivr = \"x\"\n").expect_err("an unknown key");
        assert!(error.contains("drivr"), "{error}");
        assert!(parse("volume_mode = \"rwx\"\n").is_err() && parse("volume_mode = \"17777\"\n").is_err());
        assert!(parse("concurrency = 0\n").is_err());
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "driver = \"a.b\"\ndirectory = \"/a\"\n").expect("write");
        let flags = Flags {
            config: Some(file.path().to_owned()),
            directory: Some("/b".into()),
            no_csi: true,
            ..Default::default()
        };
        let config = flags.config().expect("a configuration");
        assert_eq!(config.driver.as_str(), "a.b");
        assert_eq!(config.directory, Path::new("/b"));
        assert!(!config.csi);
        let relative = Flags { directory: Some("b".into()), ..Default::default() };
        assert!(matches!(relative.config(), Err(ConfigError::Relative { key: "directory", .. })));
    }
}
