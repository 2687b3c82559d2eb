//! The plan of a node: its configuration applied to this machine, without changing anything.

mod difference;

use std::fmt;
use std::path::{Path, PathBuf};

use nodekeel_fsquota::Bytes;
use nodekeel_logtree::parse::{LogFormat, LogZone};
use thiserror::Error;

use crate::config::{ConfigError, NodedConfig};
use crate::data::{self, DataError};
use crate::dependency::{is_descendant, order_by_dependencies};
use crate::dn::is_valid_runnable_name;
use crate::layout::{self, DataLayout, PLACED_IN_MEMORY, ProcessesLayout};
use crate::listen_address::ListenAddress;
use crate::part::{Parts, PlannedService, PlannerInput, RunningUse, call_part, part_of_dn};
use crate::running::{RunningPlan, SkippedRunnable};
use crate::search_path::SearchPath;

pub use crate::part::PartPlanner;
pub use difference::{ChangeEffect, PlanChange, PlanDifference};
pub(crate) use difference::{compare_plans, merge_plans, stop_waves};

/// Free disk space that the node itself requires.
const MIN_NODE_BYTES: u64 = 1 << 20;

/// The plan of a node: what it will run.
#[derive(Debug, Clone)]
pub struct NodePlan {
    /// The configuration, with an absolute data directory.
    pub config: NodedConfig,
    /// The path of the control API's socket.
    pub socket: PathBuf,
    /// All runnables of the parts in the order of their start, including skipped ones.
    pub services: Vec<PlannedService>,
    /// The directories of programs.
    pub search: SearchPath,
    /// The source of the plan, to plan it again.
    pub(crate) source: PlanSource,
    /// The addresses of its runnables, with the keys that set them.
    addresses: Vec<(ListenAddress, String)>,
    /// What will keep runnables from becoming ready, but not the node from starting: a line each.
    pub warnings: Vec<String>,
    /// The process of the node that uses the data directory: the plan can only be looked at.
    pub beside: Option<u32>,
}

/// The source of a plan, besides the configuration.
#[derive(Debug, Clone)]
pub(crate) struct PlanSource {
    pub(crate) parts: Parts,
    pub(crate) search: SearchPath,
    /// True if services with missing requirements are skipped.
    pub(crate) dev: bool,
    /// The file of the configuration; `None` if the program has its text from elsewhere.
    pub(crate) file: Option<PathBuf>,
    /// The data directory, instead of `node.data`.
    pub(crate) data: Option<PathBuf>,
    /// True if another process may run the node meanwhile: what that one uses is free for the plan.
    pub(crate) beside_node: bool,
    /// The data directory of a file without `node.data`.
    pub(crate) default_data: Option<PathBuf>,
}

/// The reason why a text is not the configuration of a node.
#[derive(Debug, Error)]
pub(crate) enum SourceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl PlanSource {
    /// Parses a configuration and plans the node. Addresses that `running` uses itself are free.
    pub(crate) fn plan_text(
        self,
        file: &Path,
        text: &str,
        running: Option<&NodePlan>,
    ) -> Result<NodePlan, SourceError> {
        let config = self.parse_config(file, text)?;
        Ok(self.plan(config, running)?)
    }

    /// Parses a configuration.
    pub(crate) fn parse_config(&self, file: &Path, text: &str) -> Result<NodedConfig, ConfigError> {
        let mut config = self.parts.parse_config(file, text)?;
        // The choice of the operator, as by `--data`, comes before the key of the file, and that before the program's default.
        let default = self.default_data.as_ref().filter(|_| !config.sets_data());
        if let Some(data) = self.data.as_ref().or(default) {
            config.node.data.clone_from(data);
        }
        Ok(config)
    }

    /// Plans the node with this configuration.
    pub(crate) fn plan(self, config: NodedConfig, running: Option<&NodePlan>) -> Result<NodePlan, PlanError> {
        NodePlan::from_source(self, config, running)
    }
}

/// The reasons why a node can't run: all problems, one line each.
#[derive(Debug)]
pub struct PlanError {
    lines: Vec<String>,
    /// Another instance uses the data directory: nothing else was checked.
    pub in_use: bool,
    /// Two keys of the configuration set one address: no machine can run it.
    pub keys_conflict: bool,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

impl std::error::Error for PlanError {}

impl NodePlan {
    fn from_source(
        source: PlanSource,
        mut config: NodedConfig,
        running: Option<&NodePlan>,
    ) -> Result<Self, PlanError> {
        let PlanSource { parts, search, .. } = &source;
        let conflict = |error: String| PlanError { lines: vec![error], in_use: false, keys_conflict: false };
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| conflict(format!("{}: {error}", path.display())))
        };
        // A configuration that was parsed for other parts has not passed this.
        parts.check_dependencies(&config).map_err(|violation| conflict(violation.to_string()))?;
        config.node.data = absolute(&config.node.data)?;
        let socket = absolute(&config.control_socket())?;
        // A node that runs holds its data directory.
        let mut beside = None;
        if running.is_none()
            && let Err(error) = data::check_lock(&config.node.data)
        {
            let in_use = matches!(error, DataError::InUse { .. });
            beside = data::running_node(&config.node.data).filter(|_| in_use && source.beside_node);
            if beside.is_none() {
                return Err(PlanError { lines: vec![error.to_string()], in_use, keys_conflict: false });
            }
        }
        let by_process = beside.map(|pid| RunningUse {
            config: &config,
            socket: &socket,
            addresses: &[],
            process: Some(pid),
        });
        let is_running = running.is_some() || beside.is_some();
        let layout_error = |error| conflict(data::placement_error(&config.node.data, error).to_string());
        let root = layout::layout_in_memory(&config.node.data).map_err(layout_error)?;
        let volume = layout::volume_in_memory(&config.node.data, parts.provide_volume());
        // Each part looks at the machine, in memory: nothing is created.
        let mut planner = PartPlanner::new(PlannerInput {
            config: &config,
            search,
            socket: &socket,
            dev: source.dev,
            root,
            volume: volume.expect(PLACED_IN_MEMORY),
            is_volume_known: parts.is_volume_known(&config),
            dependencies: parts.dependencies(&config),
            running: by_process.or(running.map(|running| RunningUse {
                config: &running.config,
                socket: &running.socket,
                addresses: &running.addresses,
                process: None,
            })),
        });
        parts.iter().for_each(|part| planner.plan_part(part));
        planner.resolve_dependencies();
        let PartPlanner { planned: mut services, mut problems, warnings, addresses, keys_conflict, .. } =
            planner;
        // Then the rules between parts, and the order of their start.
        problems.extend(find_invalid_dn(&services));
        problems.extend(find_shared_directory(&services));
        skip_dependents(&mut services);
        let services = sort_services(services).unwrap_or_else(|cycle| {
            problems.push(cycle);
            Vec::new()
        });

        if !is_running {
            let checked = check_data(&config.node.data, &services, parts.is_volume_known(&config));
            problems.extend(checked.err().map(|error| error.to_string()));
        }
        problems.extend(check_log_size(config.log.bytes));
        if !problems.is_empty() {
            return Err(PlanError { lines: problems, in_use: false, keys_conflict });
        }
        let search = search.clone();
        Ok(Self { config, socket, services, search, source, addresses, warnings, beside })
    }

    /// The runnables that are not skipped, in the order of their start.
    pub(crate) fn active_services(&self) -> impl Iterator<Item = &PlannedService> {
        self.services.iter().filter(|planned| planned.skip_reason.is_none())
    }

    /// The runnable with this DN, unless it is skipped.
    pub(crate) fn active_service(&self, dn: &str) -> Option<&PlannedService> {
        self.active_services().find(|planned| planned.dn == dn)
    }

    pub(crate) fn skipped_services(&self) -> impl Iterator<Item = &PlannedService> {
        self.services.iter().filter(|planned| planned.skip_reason.is_some())
    }

    /// The part of the plan that the control API and the metrics see.
    pub(crate) fn to_running(&self) -> RunningPlan {
        let skipped = self.skipped_services().map(|planned| SkippedRunnable {
            dn: planned.dn.clone(),
            reason: planned.skip_reason.clone().unwrap_or_default(),
        });
        RunningPlan { config: self.config.clone(), skipped: skipped.collect() }
    }

    /// The formats of the logs of what it runs, and their zones, by DN.
    pub(crate) fn log_formats(&self) -> impl Iterator<Item = (String, (LogFormat, Option<LogZone>))> + '_ {
        self.active_services().flat_map(|planned| {
            let with_zone =
                |(dn, format): &(String, LogFormat)| (dn.clone(), (*format, planned.log_zone.clone()));
            planned.log_formats.iter().map(with_zone)
        })
    }
}

/// The problem of a part that plans a DN twice, or one that can't be in the tree.
fn find_invalid_dn(services: &[PlannedService]) -> Option<String> {
    services.iter().enumerate().find_map(|(index, PlannedService { dn, .. })| {
        let names: Vec<_> = dn.split('.').collect();
        let is_valid = matches!(names[..], ["root", _] | ["root", _, _])
            && names[1..].iter().all(|name| is_valid_runnable_name(name));
        if !is_valid {
            return Some(format!("invalid DN {dn:?} of a part: use root.NAME or root.PART.NAME"));
        }
        // A DN below another runnable would never start: the tree adds children only below names that are no
        // runnables.
        let conflict = |other: &&PlannedService| {
            other.dn == *dn || is_descendant(dn, &other.dn) || is_descendant(&other.dn, dn)
        };
        let other = services[..index].iter().find(conflict)?;
        Some(format!("two parts run {dn:?} and {:?}: use another name for one of them", other.dn))
    })
}

/// The problem of two parts that keep files in one directory, or of one that keeps them in a directory of the node itself.
fn find_shared_directory(services: &[PlannedService]) -> Option<String> {
    let of_node =
        layout::directories_of::<DataLayout>("").into_iter().map(|directory| ("the node", directory));
    let mut owners: Vec<(&str, String)> = of_node.collect();
    for planned in services {
        let part = part_of_dn(&planned.dn);
        let on_volume = planned.volume_directories.iter();
        let on_volume = on_volume.map(|directory| format!("{}/{directory}", layout::VOLUME_DIR));
        for directory in planned.directories.iter().cloned().chain(on_volume) {
            match owners.iter().find(|(_, owned)| *owned == directory) {
                Some((owner, _)) if *owner != part => {
                    return Some(format!(
                        "{owner} and {part} keep files in {directory:?}: use another name for one of them"
                    ));
                }
                Some(_) => {}
                None => owners.push((part, directory)),
            }
        }
    }
    None
}

/// Skips what depends on a skipped runnable.
fn skip_dependents(services: &mut [PlannedService]) {
    // A skipped dependent may have dependents of its own, until nothing changes any more.
    while let Some((index, missing)) = find_dependent_of_skipped(services) {
        services[index].skip_reason = Some(format!("depends on {missing}, which is skipped"));
    }
}

fn find_dependent_of_skipped(services: &[PlannedService]) -> Option<(usize, String)> {
    let is_skipped =
        |dn: &&String| services.iter().any(|known| known.dn == **dn && known.skip_reason.is_some());
    services
        .iter()
        .enumerate()
        .filter(|(_, service)| service.skip_reason.is_none())
        .find_map(|(index, service)| Some((index, service.start_after.iter().find(is_skipped)?.clone())))
}

/// Sorts runnables after those that they wait for.
///
/// # Errors
/// The problem of a dependency cycle, which a part can plan although the configuration has none.
fn sort_services(services: Vec<PlannedService>) -> Result<Vec<PlannedService>, String> {
    let waits_for = |index: usize| -> Vec<usize> {
        let start_after: &[String] = &services[index].start_after;
        (0..services.len()).filter(|other| start_after.contains(&services[*other].dn)).collect()
    };
    match order_by_dependencies(services.len(), waits_for) {
        Ok(order) => Ok(order.into_iter().map(|index| services[index].clone()).collect()),
        Err(cycle) => {
            let dns: Vec<_> = cycle.into_iter().map(|index| services[index].dn.as_str()).collect();
            Err(format!("dependency cycle: {}", dns.join(" -> ")))
        }
    }
}

/// Checks whether the data directory can hold what will run. A volume that is not there yet is checked when it is opened.
fn check_data(data: &Path, services: &[PlannedService], is_volume_known: bool) -> Result<(), DataError> {
    let mut directories = layout::directories_of::<DataLayout>("");
    directories.extend(layout::directories_of::<ProcessesLayout>("run/"));
    let mut bytes = MIN_NODE_BYTES;
    for planned in services.iter().filter(|planned| planned.skip_reason.is_none()) {
        directories.extend(planned.directories.iter().cloned());
        if is_volume_known {
            let on_volume = planned.volume_directories.iter();
            directories.extend(on_volume.map(|directory| format!("{}/{directory}", layout::VOLUME_DIR)));
            bytes += planned.disk_bytes;
        }
    }
    data::check_data_dir(data, &directories, bytes)
}

impl fmt::Display for NodePlan {
    /// Lists what `run` would start, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "node {} with data in {}", self.config.node.name, self.config.node.data.display())?;
        for planned in &self.services {
            write!(f, "{:<24} ", planned.dn)?;
            let runs = call_part(part_of_dn(&planned.dn), "fmt", || planned.runnable.to_string());
            match &planned.skip_reason {
                Some(reason) => writeln!(f, "skipped: {reason}")?,
                None if planned.start_after.is_empty() => writeln!(f, "{runs}")?,
                None => writeln!(f, "{runs}, after {}", planned.start_after.join(", "))?,
            }
        }
        if let Some(pid) = self.beside {
            writeln!(
                f,
                "process {pid} runs the node now: its data directory, ports and sockets count as free"
            )?;
        }
        self.warnings.iter().try_for_each(|warning| writeln!(f, "warning: {warning}"))
    }
}

/// The problem of a log that exceeds this machine's memory.
fn check_log_size(log: Bytes) -> Option<String> {
    // Without /proc, the size is not checked.
    let memory = Bytes(total_memory(&std::fs::read_to_string("/proc/meminfo").ok()?)?);
    (log > memory)
        .then(|| format!("log.bytes is {log}, but this machine has {memory} of memory: use a lower value"))
}

/// *Source:* proc_meminfo(5): `MemTotal: 16384000 kB`, where kB are 1024 bytes.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use nodekeel_supervisor::Context;

    use super::*;

    fn services<const N: usize>(dns: [&str; N]) -> Vec<PlannedService> {
        let run = |ctx: Context| async move { ctx.until_canceled().await };
        dns.map(|dn| PlannedService::from_runnable(dn, "", run)).into()
    }

    #[test]
    fn a_dn_belongs_to_one_part_and_can_be_in_the_tree() {
        assert_eq!(find_invalid_dn(&services(["root.a", "root.b.a", "root.b.b", "root.ab"])), None);
        for (dns, says) in [
            (["root.a", "root.a"], "two parts run \"root.a\" and \"root.a\""),
            (["root.a", "root.a.b"], "two parts run \"root.a.b\" and \"root.a\""),
            (["root.a.b", "root.a"], "two parts run \"root.a\" and \"root.a.b\""),
            (["root.a", "root"], "invalid DN \"root\""),
            (["root.a", "b"], "invalid DN \"b\""),
            (["root.a", "root.b.c.d"], "invalid DN \"root.b.c.d\""),
            (["root.a", "root.B"], "invalid DN \"root.B\""),
        ] {
            let problem = find_invalid_dn(&services(dns)).unwrap_or_default();
            assert!(problem.starts_with(says), "{dns:?}\n is: {problem}\nnot: {says}");
        }
    }

    #[test]
    fn a_directory_belongs_to_one_part() {
        nodekeel_localstorage::layout! {
            struct Own { own: nodekeel_localstorage::tree::LayoutDir = "own", 0o700; }
        }
        nodekeel_localstorage::layout! {
            struct Run { run: nodekeel_localstorage::tree::LayoutDir = "run", 0o700; }
        }
        let [first, second] = services(["root.a", "root.b"]).try_into().expect("two");
        let found = |first: PlannedService, second: PlannedService| find_shared_directory(&[first, second]);
        let own = |planned: &PlannedService| planned.clone().node_layout::<Own>();
        // `run` and the volume have names of their own.
        assert_eq!(found(own(&first), second.clone().run_layout::<Own>().layout::<Own>()), None);
        let shared = found(own(&first), own(&second)).unwrap_or_default();
        assert!(shared.starts_with("a and b keep files in \"own\""), "{shared}");
        let of_node = found(first.node_layout::<Run>(), second).unwrap_or_default();
        assert!(of_node.starts_with("the node and a keep files in \"run\""), "{of_node}");
    }

    #[test]
    fn what_depends_on_a_skipped_runnable_is_skipped_and_the_rest_is_sorted() {
        let mut planned = services(["root.a", "root.b", "root.service.c", "root.service.d"]);
        planned[0].start_after = vec!["root.service.c".to_owned()];
        planned[1].start_after = vec!["root.a".to_owned()];
        let sorted = sort_services(planned.clone()).expect("no cycle");
        let order: Vec<_> = sorted.iter().map(|planned| planned.dn.as_str()).collect();
        assert_eq!(order, ["root.service.c", "root.a", "root.b", "root.service.d"]);
        let mut circular = planned.clone();
        circular[2].start_after = vec!["root.b".to_owned()];
        let says = "dependency cycle: root.a -> root.service.c -> root.b -> root.a";
        assert_eq!(sort_services(circular).expect_err("a cycle"), says);
        planned[2].skip_reason = Some("it lacks its program".to_owned());
        skip_dependents(&mut planned);
        let reasons: Vec<_> = planned.iter().map(|planned| planned.skip_reason.as_deref()).collect();
        let depends = |dn: &str| format!("depends on {dn}, which is skipped");
        let [first, second] = [depends("root.service.c"), depends("root.a")];
        assert_eq!(reasons, [Some(&*first), Some(&*second), Some("it lacks its program"), None]);
    }
}
