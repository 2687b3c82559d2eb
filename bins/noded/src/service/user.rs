//! The operator's services.

use std::time::Duration;

use nodekeel_supervisor::process::{self, Process};
use nodekeel_supervisor::{Backoff, Child, Context, Policy, RunFuture, Runnable};

use crate::config::{Readiness, Restart, UserService};
use crate::plan::User;

/// The service as a child of the tree.
pub(crate) fn child(user: &User, grace: Duration) -> Child {
    let service = Service { process: process(user, grace), after: user.after.clone() };
    Child::new(user.config.name.clone(), service).policy(policy(&user.config))
}

/// A process that is started when other runnables have become ready.
struct Service {
    process: Process,
    after: Vec<String>,
}

impl Runnable for Service {
    fn run(&self, ctx: Context) -> RunFuture {
        let Self { process, after } = self;
        let (process, after) = (process.clone(), after.clone());
        Box::pin(async move {
            for dn in after {
                ctx.wait_ready(&dn).await?;
            }
            process.run(ctx).await
        })
    }

    fn stop_within(&self) -> Option<Duration> {
        self.process.stop_within()
    }
}

fn process(user: &User, grace: Duration) -> Process {
    let config = &user.config;
    let process = Process::new(&user.binary).args(&config.command[1..]).ready(readiness(user));
    placed(process, user).grace(config.grace.unwrap_or(grace))
}

fn readiness(user: &User) -> process::Readiness {
    match &user.config.readiness {
        Readiness::Started => process::Readiness::started(),
        Readiness::Notify => process::Readiness::notify(),
        Readiness::Exit => process::Readiness::exit(),
        Readiness::Probe { timeout, .. } => process::Readiness::command(probe(user)).within(*timeout),
    }
}

/// What asks for the service, in its own place and environment.
fn probe(user: &User) -> Process {
    let (program, args) = user.probe.as_ref().expect("planned with the readiness");
    placed(Process::new(program).args(args), user)
}

/// As whom, where and with what the service and its probe run.
fn placed(process: Process, user: &User) -> Process {
    let process = process.envs(&user.config.environment).current_dir(&user.config.directory);
    match user.account {
        Some((uid, gid)) => process.uid(uid).gid(gid),
        None => process,
    }
}

fn policy(config: &UserService) -> Policy {
    use nodekeel_supervisor::Restart as Rule;
    let restart = match (config.restart, &config.readiness) {
        (Some(Restart::Always), _) => Rule::Always,
        (Some(Restart::OnFailure), _) | (None, Readiness::Exit) => Rule::OnFailure,
        (Some(Restart::Never), _) => Rule::Never,
        (None, _) => Rule::Always,
    };
    let crate::config::Backoff { initial, factor, max, jitter } = config.backoff;
    Policy { restart, backoff: Backoff { initial, factor, max, jitter }, ..Policy::default() }
}
