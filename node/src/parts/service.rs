//! The operator's programs: `[[service]]`.

mod check;
pub(crate) mod config;
pub(crate) mod control;
mod needs;
mod process;

use std::fmt;
use std::path::{Path, PathBuf};

use nix::unistd::{Uid, User};
use nodekeel_logtree::parse::LogZone;
use nodekeel_supervisor::process::ProcessHandle;

use self::process::prepare_service;
use crate::config::{ConfigSection, ConfigViolation, NodedConfig, ReadinessConfig, UserService};
use crate::dn::SERVICES as NAME;
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};
use crate::program_name::program_name;

use self::check::check_service;
use self::needs::{HelperPrograms, check_needs, find_groups};

/// The part of the operator's programs.
pub(super) struct ServicePart;

impl Part for ServicePart {
    fn name(&self) -> &str {
        NAME
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::array("service")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        config
            .service
            .iter()
            .enumerate()
            .try_for_each(|(index, service)| check_service(config, index, service))
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let parent = DependencyEntry::of_part(self, config);
        let entry = |(index, service): (usize, &UserService)| {
            let mut entry = parent.child(&service.name);
            // The service has the name that the operator gave it, without that of the part in front.
            entry.name.clone_from(&service.name);
            entry.depends_on.clone_from(&service.depends_on);
            entry.section = format!("service[{index}]");
            entry
        };
        config.service.iter().enumerate().map(entry).collect()
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.config().service.iter().for_each(|service| plan_service(planner, service));
    }
}

fn plan_service(planner: &mut PartPlanner<'_>, service: &UserService) {
    let (name, program) = (&service.name, Path::new(&service.command[0]));
    let hint = "install it, or correct its key command";
    let (binary, mut skipped) = planner.find_program(name, Some(program), hint);
    // The first missing requirement is the reason to skip the service, and so the rest is not looked for.
    let programs = match &skipped {
        None => HelperPrograms::find(planner, service).unwrap_or_else(|reason| {
            skipped = reason;
            HelperPrograms::default()
        }),
        Some(_) => HelperPrograms::default(),
    };
    let account = match (&skipped, &service.user) {
        (None, Some(user)) => {
            let found = User::from_name(user).ok().flatten();
            let is_confined = service.privileges.capabilities.is_some();
            choose_account(user, found, nix::unistd::geteuid(), is_confined).unwrap_or_else(|reason| {
                skipped = planner.skip_or_report(name, reason);
                None
            })
        }
        _ => None,
    };
    if skipped.is_none() && !service.directory.is_dir() {
        let directory = service.directory.display();
        let reason = format!("directory {directory} does not exist: create it, or correct its key directory");
        skipped = planner.skip_or_report(name, reason);
    }
    if skipped.is_none() {
        skipped = check_needs(service).and_then(|reason| planner.skip_or_report(name, reason));
    }
    let groups = match &skipped {
        None => find_groups(service).unwrap_or_else(|reason| {
            skipped = planner.skip_or_report(name, reason);
            None
        }),
        Some(_) => None,
    };
    let reports = service.readiness == ReadinessConfig::Notify
        || service.watchdog.is_some()
        || service.grace_max.is_some_and(|longest| !longest.is_zero());
    if skipped.is_none() && reports {
        planner.check_notify_socket(name);
    }
    let oom_score_adj = choose_oom_score(service.limits.oom_score_adj, own_oom_score());
    let mut config = service.clone();
    // The dependencies belong to the plan: a change of them alone restarts nothing but what restarts with them, since a run
    // watches those that it was started with.
    if !config.restart_with_dependencies {
        config.depends_on.clear();
    }
    let plan = UserServicePlan { binary, config, programs, account, groups, oom_score_adj };
    let dn = format!("root.{NAME}.{name}");
    let environment_zone = || service.environment.get("TZ").map(|tz| LogZone::of_program(Some(tz)));
    let zone = service.log_zone.clone().or_else(environment_zone);
    let planned = PlannedService::new(dn.clone(), plan).log_format(dn, service.log).log_zone(zone);
    let planned = planned.keep(service.keep);
    planner.add(planned.skip(skipped));
}

/// Uid and gid of a service's user, `None` if it is noded's; or the reason why it can't run as that user, and what to do.
/// `is_confined`: the service has only certain capabilities.
fn choose_account(
    name: &str,
    found: Option<User>,
    noded: Uid,
    is_confined: bool,
) -> Result<Option<(u32, u32)>, String> {
    match found {
        // Root has more names than its own. The check of the configuration knows that one.
        Some(user) if user.uid.is_root() && is_confined => Err(format!(
            "user {name} is root (uid 0), which owns the node's files and its control socket, with or without \
             privileges.capabilities: correct its key user, or remove that key"
        )),
        // noded's own user needs no change of the uid, which only root may make.
        Some(user) if user.uid == noded => Ok(None),
        Some(user) if noded.is_root() => Ok(Some((user.uid.as_raw(), user.gid.as_raw()))),
        Some(_) => Err(format!("running as {name} needs root: run {} as root", program_name())),
        None => Err(format!("user {name} does not exist: create it, or correct its key user")),
    }
}

/// The `oom_score_adj` of a service: the configured one, or 0 where noded itself is protected by a negative one, which
/// is not for what it runs. `None` is noded's.
fn choose_oom_score(configured: Option<i16>, own: i16) -> Option<i16> {
    configured.or((own < 0).then_some(0))
}

/// noded's `oom_score_adj`; 0, the kernel's default, if it is not readable.
fn own_oom_score() -> i16 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// A program of the operator.
#[derive(Debug, PartialEq)]
pub(crate) struct UserServicePlan {
    pub(crate) binary: PathBuf,
    pub(crate) config: UserService,
    /// Programs that probe or reload it.
    pub(crate) programs: HelperPrograms,
    /// Uid and gid of its process; `None` is noded's.
    pub(crate) account: Option<(u32, u32)>,
    /// The supplementary groups of its process; `None` are noded's, or none for another user.
    pub(crate) groups: Option<Vec<u32>>,
    /// Which process the kernel kills first when memory runs out; `None` is noded's.
    pub(crate) oom_score_adj: Option<i16>,
}

impl fmt::Display for UserServicePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.binary.display())?;
        self.config.command[1..].iter().try_for_each(|argument| write!(f, " {argument:?}"))
    }
}

impl PlannedRunnable for UserServicePlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        // All incarnations share the handle, so that clients reach the process that runs.
        let handle = ProcessHandle::default();
        let dn = format!("root.{NAME}.{}", self.config.name);
        node.add_process(dn, handle.clone());
        Ok(prepare_service(self, &handle, node.config().node.grace))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::{PartDeps, shipped_parts};
    use crate::plan::PlanSource;
    use crate::search_path::SearchPath;

    #[test]
    fn a_service_whose_notification_socket_has_too_long_a_path_is_refused() {
        let plan = |data_bytes: usize, keys: &str| {
            let data = Some(format!("/tmp/{}", "x".repeat(data_bytes - "/tmp/".len())).into());
            let search = SearchPath::with_default_directories(None, None);
            let parts = shipped_parts(PartDeps::default());
            let source = PlanSource {
                parts,
                search,
                dev: false,
                file: None,
                data,
                default_data: None,
                beside_node: false,
            };
            let text = format!(
                "services = {{ etcd.enable = false, containerd.enable = false }}\n\
                 [[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\n{keys}\n"
            );
            source.plan_text(Path::new("a.toml"), &text, None).err().map(|error| error.to_string())
        };
        assert_eq!(plan(79, "watchdog = \"5s\""), None);
        for keys in ["watchdog = \"5s\"", "readiness = \"notify\"", "grace_max = \"60s\""] {
            let error = plan(80, keys).expect(keys);
            assert!(error.starts_with("a: socket path /tmp/x") && error.contains("/run/notify/"), "{error}");
            assert!(
                error.ends_with("unix socket is 107; set node.data or --data to a shorter path"),
                "{error}"
            );
        }
        assert_eq!(plan(80, ""), None, "it needs none");
    }

    #[test]
    fn capabilities_confine_no_user_with_the_uid_of_root_under_any_name() {
        let mut toor = User::from_name("root").expect("it is readable").expect("it is there");
        toor.name = "toor".to_owned();
        let (root, other) = (Uid::from_raw(0), Uid::from_raw(7));
        let reason = choose_account("toor", Some(toor.clone()), root, true).expect_err("it is root");
        assert!(reason.starts_with("user toor is root (uid 0), which owns the node's files"), "{reason}");
        assert_eq!(choose_account("toor", Some(toor.clone()), root, false), Ok(None));
        let plain = User { uid: other, ..toor };
        let account = Some((7, plain.gid.as_raw()));
        assert_eq!(choose_account("plain", Some(plain.clone()), root, true), Ok(account));
        assert_eq!(choose_account("plain", Some(plain), other, true), Ok(None));
    }

    #[test]
    fn the_protection_of_noded_is_not_that_of_its_services() {
        assert_eq!(choose_oom_score(None, -900), Some(0));
        assert_eq!(choose_oom_score(None, 0), None);
        assert_eq!(choose_oom_score(None, 300), None, "a less protected noded protects none");
        assert_eq!(choose_oom_score(Some(-500), -900), Some(-500));
        assert_eq!(choose_oom_score(Some(700), 0), Some(700));
    }
}
