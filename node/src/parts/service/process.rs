//! The operator's services.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::process::{
    self, Liveness, Privileges, Process, ProcessHandle, ProcessLimits, ReloadAction, Signal,
};
use nodekeel_supervisor::{ChildPolicy, RestartLimit, RestartLimitAction};

use super::UserServicePlan;
use crate::config::{
    ReadinessConfig, ReloadConfig, RestartLimitConfig, RestartPolicy, ServiceLimits, UserService,
};
use crate::part::PreparedRunnable;

/// The service as a runnable with its policy.
pub(crate) fn prepare_service(
    user: &UserServicePlan,
    handle: &ProcessHandle,
    grace: Duration,
) -> PreparedRunnable {
    let runnable = PreparedRunnable::new(service_process(user, grace).handle(handle));
    runnable
        .policy(service_policy(&user.config))
        .restart_with_dependencies(user.config.restart_with_dependencies)
}

fn service_process(user: &UserServicePlan, grace: Duration) -> Process {
    let config = &user.config;
    let process = Process::new(&user.binary).args(&config.command[1..]).ready_when(service_readiness(user));
    let mut process = with_environment(process, user)
        .grace_period(config.grace.unwrap_or(grace))
        .max_grace_period(config.grace_max.unwrap_or_default())
        .stop_signal(config.stop_signal.unwrap_or(Signal::TERM))
        .keep(config.keep)
        .limits(service_limits(user));
    if let Some(interval) = config.watchdog {
        process = process.watchdog(interval);
    }
    if let (Some(liveness), Some(program)) = (&config.liveness, &user.programs.liveness) {
        let probe = Liveness::command(helper_process(program, user));
        let probe = probe.with_period(liveness.period).with_timeout(liveness.timeout);
        process = process.liveness(probe.with_failure_threshold(liveness.failure_threshold));
    }
    match (&config.reload, &user.programs.reload) {
        (Some(ReloadConfig::Signal(signal)), _) => process.reload(ReloadAction::Signal(*signal)),
        (_, Some(program)) => process.reload(ReloadAction::Command(Arc::new(helper_process(program, user)))),
        _ => process,
    }
}

/// The limits of the service's own processes.
fn service_limits(user: &UserServicePlan) -> ProcessLimits {
    let mut limits = process_limits(&user.config.limits);
    limits.oom_score_adj = user.oom_score_adj;
    limits
}

/// The limits as the supervisor takes them.
pub(crate) fn process_limits(config: &ServiceLimits) -> ProcessLimits {
    let mut limits = ProcessLimits::default();
    limits.memory_max = config.memory_max.map(|bytes| bytes.0);
    // The check of the configuration keeps it in range.
    limits.cpu_max_millis = config.cpu_max.map(|cpus| (cpus * 1000.0).round() as u32);
    limits.pids_max = config.pids_max;
    limits.io_weight = config.io_weight;
    limits.rlimits.clone_from(&config.rlimits);
    limits.oom_score_adj = config.oom_score_adj;
    limits
}

fn service_privileges(user: &UserServicePlan) -> Privileges {
    let config = &user.config.privileges;
    let mut privileges = Privileges::default();
    privileges.groups.clone_from(&user.groups);
    privileges.capabilities = config.capabilities.as_ref().map(|names| names.iter().copied().collect());
    privileges.no_new_privs = config.no_new_privs;
    privileges.read_only_paths.clone_from(&config.read_only_paths);
    privileges.umask = config.umask;
    privileges
}

fn service_readiness(user: &UserServicePlan) -> process::Readiness {
    match &user.config.readiness {
        ReadinessConfig::Started => process::Readiness::on_start(),
        ReadinessConfig::Notify => process::Readiness::on_notify(),
        ReadinessConfig::Exit => process::Readiness::on_exit(),
        ReadinessConfig::Probe { timeout, .. } => {
            let program = user.programs.readiness.as_ref();
            let program = program.expect("the plan has the probe of this readiness");
            process::Readiness::on_command(helper_process(program, user)).with_timeout(*timeout)
        }
    }
}

/// A program that probes or reloads the service, with its user, privileges, directory and environment, and its place
/// among the processes that the kernel kills when memory runs out.
fn helper_process((program, args): &(PathBuf, Vec<String>), user: &UserServicePlan) -> Process {
    let mut limits = ProcessLimits::default();
    limits.oom_score_adj = user.oom_score_adj;
    with_environment(Process::new(program).args(args).limits(limits), user)
}

/// Sets user, privileges, directory and environment of the service and its helpers.
fn with_environment(process: Process, user: &UserServicePlan) -> Process {
    let process = process.envs(&user.config.environment).current_dir(&user.config.directory);
    let process = process.privileges(service_privileges(user));
    match user.account {
        Some((uid, gid)) => process.uid(uid).gid(gid),
        None => process,
    }
}

fn service_policy(config: &UserService) -> ChildPolicy {
    use nodekeel_supervisor::RestartPolicy as Rule;
    let restart = match (config.restart, &config.readiness) {
        (Some(RestartPolicy::Always), _) => Rule::Always,
        // By default, a step that has exited with 0 is done.
        (Some(RestartPolicy::OnFailure), _) | (None, ReadinessConfig::Exit) => Rule::OnFailure,
        (Some(RestartPolicy::Never), _) => Rule::Never,
        (None, _) => Rule::Always,
    };
    let limit = |RestartLimitConfig { restarts, period }| RestartLimit {
        restarts,
        period,
        action: RestartLimitAction::StayDead,
    };
    let (backoff, restart_limit) = (config.backoff.to_backoff(), config.restart_limit.map(limit));
    ChildPolicy { restart, backoff, restart_limit, ..ChildPolicy::default() }
}
