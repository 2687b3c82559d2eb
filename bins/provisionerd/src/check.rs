//! `provisionerd check`: checks everything that `run` needs. It changes nothing, but a directory that it makes in that of
//! the volumes, and removes.

use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use nodekeel_provisioner::{StoreName, format_chain};
use serde::{Deserialize, Serialize};

use crate::config::DaemonConfig;
use crate::disk_process::{DiskError, DiskFlags, DiskProcess, print_answer};
use crate::{print_stdout, start_runtime};

mod cluster;
mod host;
mod permissions;

pub(crate) use cluster::check_api_objects;
pub(crate) use host::{check_shared_mount, is_in_pod};
pub(crate) use permissions::{check_permissions, check_scoped_permissions};

/// The exit code for a missing requirement.
const EXIT_CHECK_FAILED: u8 = 4;

/// The result of one check.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CheckFinding {
    Pass(String),
    /// `run` works, with a limitation.
    Warning(String),
    #[serde(with = "error_text")]
    Failure(anyhow::Error),
}

/// An error as the text of its causes.
mod error_text {
    use nodekeel_provisioner::format_chain;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(error: &anyhow::Error, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format_chain(&**error))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<anyhow::Error, D::Error> {
        String::deserialize(from).map(anyhow::Error::msg)
    }
}

/// A store whose requirements are checked.
#[derive(Debug, Args)]
pub(crate) struct CheckStoreFlags {
    #[command(flatten)]
    disk: DiskFlags,
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    store: Option<StoreName>,
}

/// What a process finds on the disk of a store.
#[derive(Debug, Serialize, Deserialize)]
struct StoreCheck {
    findings: Vec<CheckFinding>,
    /// The device of the file system.
    device: Option<u64>,
    content: StoreIds,
}

/// The identity of a store and the names in its directory, by which it is decided whether it is served.
#[derive(Debug, Serialize, Deserialize)]
enum StoreIds {
    Found { store: Option<String>, volumes: Vec<String>, snapshots: Vec<String> },
    Unreadable(String),
}

/// Checks the disk of a store for the process that has started this one.
pub(crate) fn run_check_store(flags: CheckStoreFlags) -> Result<ExitCode> {
    let CheckStoreFlags { disk, listen, store } = flags;
    let config = DaemonConfig { listen, store, ..disk.into_config() };
    let running = host::RunningInstance::find(config.listen);
    print_answer(&StoreCheck {
        findings: host::check_directory(&config, &running),
        device: host::device(&config),
        content: host::read_ids(&config),
    })
}

/// Checks the disks of all stores, at once.
fn check_disks(config: &DaemonConfig) -> Vec<(DaemonConfig, Result<StoreCheck, DiskError>)> {
    let ask = |config: &DaemonConfig| {
        let listen = config.listen.to_string();
        let name = config.store.as_ref().map(StoreName::as_str);
        let mut arguments = vec![OsStr::new("--listen"), OsStr::new(&listen)];
        arguments.extend(name.into_iter().flat_map(|name| ["--store", name]).map(OsStr::new));
        DiskProcess::start(config, "check-store", &arguments)
    };
    let asked: Vec<_> = config.of_stores().map(|config| (ask(&config), config)).collect();
    let answer = |asked: Result<DiskProcess, DiskError>| asked?.answer(host::CHECK_TIMEOUT);
    asked.into_iter().map(|(asked, config)| (config, answer(asked))).collect()
}

impl CheckFinding {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Failure(_))
    }

    fn from_result(found: Result<impl Into<String>>) -> Self {
        match found {
            Ok(text) => Self::Pass(text.into()),
            Err(error) => Self::Failure(error),
        }
    }
}

/// Formats the finding as one line.
impl fmt::Display for CheckFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, text) = match self {
            Self::Pass(text) => ("ok  ", text.clone()),
            Self::Warning(text) => ("warn", text.clone()),
            Self::Failure(error) => ("FAIL", format_chain(&**error)),
        };
        write!(f, "{word}  {}", text.replace('\n', " "))
    }
}

/// Prints a line for each finding; the exit code shows whether `run` would work.
pub(crate) fn run_checks(config: DaemonConfig) -> Result<ExitCode> {
    let mut findings = vec![CheckFinding::from_result(
        config.node_name().map(|node| format!("this is node {node}")).map_err(Into::into),
    )];
    // A running instance holds the directory and the address: then their use is no problem.
    let running = host::RunningInstance::find(config.listen);
    let (mut devices, mut stores) = (Vec::new(), Vec::new());
    for (config, checked) in check_disks(&config) {
        match checked {
            Ok(checked) => {
                findings.extend(checked.findings);
                devices.extend(checked.device.map(|device| (device, config.directory.clone())));
                stores.push((config, checked.content));
            }
            Err(error) => findings.push(CheckFinding::Failure(error.into())),
        }
    }
    findings.extend(host::check_file_systems(&devices));
    if config.csi {
        findings.extend(host::check_kubelet(&config));
    }
    findings.push(host::check_address(&config, running.is_running()));
    findings.extend(start_runtime()?.block_on(cluster::check_api_server(&config, &stores)));
    Ok(print_findings(&findings))
}

/// Prints a line for each finding, and returns the exit code.
pub(crate) fn print_findings(findings: &[CheckFinding]) -> ExitCode {
    let text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    let printed = print_stdout(&text);
    if findings.iter().any(CheckFinding::is_failure) { ExitCode::from(EXIT_CHECK_FAILED) } else { printed }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_finding_is_one_line() {
        let error = anyhow!("first\nsecond").context("look");
        assert_eq!(CheckFinding::Failure(error).to_string(), "FAIL  look: first second");
        assert!(!CheckFinding::Warning("careful".into()).is_failure());
    }
}
