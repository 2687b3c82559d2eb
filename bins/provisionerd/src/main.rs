//! Per-node volumes with limits, for an existing cluster: see docs/provisionerd.md.

mod agent;
mod api_server;
mod check;
mod cli;
mod config;
#[cfg(test)]
mod deploy_test;
mod disk_process;
#[cfg(feature = "kill-points")]
mod file_quota;
#[cfg(test)]
mod golden_test;
mod http;
mod import;
mod inventory;
#[cfg(feature = "kill-points")]
mod kill_points;
mod logging;
mod metrics;
#[cfg(test)]
mod monitoring_test;
mod move_cmd;
mod move_node;
mod orphans_cmd;
mod permissions;
mod plugin;
#[cfg(test)]
mod principals_test;
mod rules_review;
mod run;
mod seccomp;
mod store_cmd;
mod sys;
mod volumes;
mod volumes_cmd;

use std::alloc::System;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use nodekeel_provisioner::csi::PluginError;
use nodekeel_provisioner::format_chain;
use nodekeel_supervisor::process::protect_own_memory;
use zeroizing_alloc::ZeroAlloc;

use crate::api_server::ApiClientError;
use crate::cli::{Cli, Command};
use crate::config::ConfigError;
use crate::inventory::UnreadableStore;
use crate::plugin::Plugin;
use crate::run::StartError;
use crate::volumes::VolumesError;

/// Erases each allocation when it is freed, also those of libraries: they copy keys.
#[global_allocator]
static ALLOCATOR: ZeroAlloc<System> = ZeroAlloc(System);

/// With the value 1, this environment variable permits core dumps, for debugging. They contain keys.
const CORE_DUMPS: &str = "NODEKEEL_CORE_DUMPS";

fn main() -> ExitCode {
    // First, since the allocator must be configured before a thread is started.
    sys::limit_free_memory();
    // The token of the account is a key.
    if std::env::var_os(CORE_DUMPS).is_none_or(|value| value != "1")
        && let Err(error) = protect_own_memory()
    {
        let _ = writeln!(
            std::io::stderr(),
            "provisionerd: can't prevent core dumps, which would contain keys: {error}"
        );
    }
    let name = std::env::args_os().next().map(PathBuf::from);
    if name.as_deref().and_then(Path::file_name).is_some_and(|name| name == plugin::PLUGIN_NAME) {
        return exit(plugin::run_plugin(Plugin::parse()));
    }
    let cli = Cli::parse();
    if cli.print_config {
        return print_stdout(config::DEFAULT_CONFIG);
    }
    let done = match cli.command {
        Some(Command::Run { flags }) => flags.load_config().map_err(Into::into).and_then(run::run_daemon),
        Some(Command::Check { flags }) => flags.load_config().map_err(Into::into).and_then(check::run_checks),
        Some(Command::Import { flags }) => import::run_import(flags),
        Some(Command::InstallSeccomp { flags }) => seccomp::run_install(&flags),
        Some(Command::Agent { flags }) => agent::run_agent(&flags),
        Some(Command::Volumes(flags)) => volumes_cmd::run_volumes(*flags),
        Some(Command::Orphans(flags)) => orphans_cmd::run_orphans(flags),
        Some(Command::ReadStore(flags)) => inventory::run_read_store(flags),
        Some(Command::CheckStore(flags)) => check::run_check_store(flags),
        Some(Command::Store { command }) => store_cmd::run_store(command),
        Some(Command::Completion { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "provisionerd", &mut script);
            Ok(print_stdout(&String::from_utf8_lossy(&script)))
        }
        Some(Command::Man { directory }) => clap_mangen::generate_to(Cli::command(), &directory)
            .with_context(|| format!("can't write man pages into {}", directory.display()))
            .map(|()| ExitCode::SUCCESS),
        None => Ok(print_stdout(&Cli::command().render_help().to_string())),
    };
    exit(done)
}

/// The exit code of a command, whose error is printed.
fn exit(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        // A closed stderr must not prevent the exit.
        let _ = writeln!(std::io::stderr(), "provisionerd: {}", format_chain(&*error));
        ExitCode::from(exit_code(&error))
    })
}

/// The runtime of a command. One thread is enough: it waits for the API server.
fn start_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().context("can't start the async runtime")
}

/// Prints to stdout; a reader that closed the pipe is not an error.
fn print_stdout(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// The exit code of an error, as listed in the help.
fn exit_code(error: &anyhow::Error) -> u8 {
    match (error.downcast_ref::<VolumesError>(), error.downcast_ref::<StartError>()) {
        (Some(VolumesError::InUse { .. }), _) => 5,
        _ if matches!(error.downcast_ref(), Some(PluginError::InUse { .. })) => 5,
        (Some(_), _) | (_, Some(_)) => 4,
        _ if error.is::<UnreadableStore>() => {
            error.downcast_ref::<UnreadableStore>().map_or(1, |unreadable| unreadable.exit_code)
        }
        _ if error.is::<ApiClientError>() || error.is::<PluginError>() => 4,
        _ if matches!(error.downcast_ref(), Some(ConfigError::Untrusted { .. })) => 4,
        _ if error.is::<ConfigError>() => 3,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use kube::config::KubeconfigError;

    use super::*;

    #[test]
    fn what_is_missing_has_an_exit_code_and_what_is_invalid_another() {
        let kubeconfig =
            ApiClientError::Use { path: "/k".into(), source: KubeconfigError::CurrentContextNotSet };
        let kubelet = PluginError::Lock { path: "/p".into(), source: io::ErrorKind::PermissionDenied.into() };
        let directory = ConfigError::RelativePath { key: "directory", path: "d".into() };
        for (error, code) in [
            (anyhow::Error::new(kubeconfig).context("can't read the volumes"), 4),
            (kubelet.into(), 4),
            (PluginError::InUse { path: "/p".into() }.into(), 5),
            (VolumesError::InUse { path: "/d".into() }.into(), 5),
            (directory.into(), 3),
            (anyhow::anyhow!("the claim does not exist"), 1),
        ] {
            assert_eq!(exit_code(&error), code, "{error:#}");
        }
    }
}
