//! `provisionerd check`: checks everything that `run` needs. It changes nothing, but a directory that it makes in that of
//! the volumes, and removes.

use std::fmt;
use std::process::ExitCode;

use anyhow::Result;
use nodekeel_provisioner::format_chain;

use crate::config::DaemonConfig;
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
#[derive(Debug)]
pub(crate) enum CheckFinding {
    Pass(String),
    /// `run` works, with a limitation.
    Warning(String),
    Failure(anyhow::Error),
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
    for config in config.of_stores() {
        findings.extend(host::check_directory(&config, &running));
    }
    findings.extend(host::check_file_systems(&config));
    if config.csi {
        findings.extend(host::check_kubelet(&config));
    }
    findings.push(host::check_address(&config, running.is_running()));
    findings.extend(start_runtime()?.block_on(cluster::check_api_server(&config)));
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
