//! The operator's services.

use std::time::Duration;

use nodekeel_supervisor::process::{self, Process};
use nodekeel_supervisor::{Backoff, ChildPolicy, ChildSpec, Context, RunFuture, Runnable, WaitReadyError};

use crate::config::{ReadinessConfig, RestartPolicy, UserService};
use crate::plan::UserServicePlan;

/// Pause before a DN that left the tree, because its parent restarts, is looked for again.
const UNKNOWN_PAUSE: Duration = Duration::from_millis(50);

/// The service as a child of the tree.
pub(crate) fn service_child(user: &UserServicePlan, grace: Duration) -> ChildSpec {
    let service = DependentProcess { process: service_process(user, grace), after: user.start_after.clone() };
    ChildSpec::new(user.config.name.clone(), service).policy(service_policy(&user.config))
}

/// A process that starts when other runnables are ready.
struct DependentProcess {
    process: Process,
    after: Vec<String>,
}

impl Runnable for DependentProcess {
    fn run(&self, ctx: Context) -> RunFuture {
        let Self { process, after } = self;
        let (process, after) = (process.clone(), after.clone());
        Box::pin(async move {
            wait_dependencies(&ctx, &after).await?;
            process.run(ctx).await
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.process.stop_timeout()
    }
}

/// Waits for each of the DNs. One that is below another, which restarts just now, is waited for again from the
/// first on.
async fn wait_dependencies(ctx: &Context, after: &[String]) -> Result<(), WaitReadyError> {
    'again: loop {
        for (index, dn) in after.iter().enumerate() {
            let is_below =
                |dn: &str| after[..index].iter().any(|parent| dn.starts_with(&format!("{parent}.")));
            match ctx.wait_ready(dn).await {
                Err(WaitReadyError::UnknownDn { dn }) if is_below(&dn) => {
                    tokio::time::sleep(UNKNOWN_PAUSE).await;
                    continue 'again;
                }
                ready => ready?,
            }
        }
        return Ok(());
    }
}

fn service_process(user: &UserServicePlan, grace: Duration) -> Process {
    let config = &user.config;
    let process = Process::new(&user.binary).args(&config.command[1..]).ready_when(service_readiness(user));
    with_environment(process, user).grace_period(config.grace.unwrap_or(grace))
}

fn service_readiness(user: &UserServicePlan) -> process::Readiness {
    match &user.config.readiness {
        ReadinessConfig::Started => process::Readiness::on_start(),
        ReadinessConfig::Notify => process::Readiness::on_notify(),
        ReadinessConfig::Exit => process::Readiness::on_exit(),
        ReadinessConfig::Probe { timeout, .. } => {
            process::Readiness::on_command(probe_process(user)).with_timeout(*timeout)
        }
    }
}

/// The readiness probe, with the service's user, directory and environment.
fn probe_process(user: &UserServicePlan) -> Process {
    let (program, args) = user.probe.as_ref().expect("the plan has the probe of this readiness");
    with_environment(Process::new(program).args(args), user)
}

/// Sets user, directory and environment of the service and its probe.
fn with_environment(process: Process, user: &UserServicePlan) -> Process {
    let process = process.envs(&user.config.environment).current_dir(&user.config.directory);
    match user.account {
        Some((uid, gid)) => process.uid(uid).gid(gid),
        None => process,
    }
}

fn service_policy(config: &UserService) -> ChildPolicy {
    use nodekeel_supervisor::RestartPolicy as Rule;
    let restart = match (config.restart, &config.readiness) {
        (Some(RestartPolicy::Always), _) => Rule::Always,
        (Some(RestartPolicy::OnFailure), _) | (None, ReadinessConfig::Exit) => Rule::OnFailure,
        (Some(RestartPolicy::Never), _) => Rule::Never,
        (None, _) => Rule::Always,
    };
    let crate::config::BackoffConfig { initial, factor, max, jitter } = config.backoff;
    ChildPolicy { restart, backoff: Backoff { initial, factor, max, jitter }, ..ChildPolicy::default() }
}
