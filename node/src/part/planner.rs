//! The machine, as a part sees it while it is planned.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::tree::LayoutEntry;
use nodekeel_supervisor::process::longest_notify_path;

use super::{Part, PlannedService};
use crate::config::NodedConfig;
use crate::control::socket::{self, SocketPath};
use crate::data::{self, DataError};
use crate::dependency::{DependencyEntry, is_descendant};
use crate::error_chain::error_chain;
use crate::layout::{DataLayout, PLACED_IN_MEMORY, ProcessesLayout, VolumeLayout};
use crate::listen_address::{ListenAddress, check_socket_path};
use crate::ports;
use crate::search_path::SearchPath;

/// The facts that the parts are planned from.
#[derive(Debug)]
pub(crate) struct PlannerInput<'a> {
    pub(crate) config: &'a NodedConfig,
    pub(crate) search: &'a SearchPath,
    /// The path of the control socket.
    pub(crate) socket: &'a Path,
    /// True if services with missing requirements are skipped.
    pub(crate) dev: bool,
    /// The data directory, in memory.
    pub(crate) root: DataLayout,
    /// The data volume, in memory.
    pub(crate) volume: VolumeLayout,
    /// True if the data volume can be looked at before root.storage has opened it.
    pub(crate) is_volume_known: bool,
    /// The names of all parts and services.
    pub(crate) dependencies: Vec<DependencyEntry>,
    /// What the node uses that plans again at a reload, or that runs while another program checks its configuration.
    pub(crate) running: Option<RunningUse<'a>>,
}

/// The addresses that a running node uses itself, and which so are free for its new plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunningUse<'a> {
    pub(crate) config: &'a NodedConfig,
    pub(crate) socket: &'a Path,
    /// The addresses of its runnables, with the keys that set them.
    pub(crate) addresses: &'a [(ListenAddress, String)],
    /// The process of the node, whose descendants hold its ports; `None` at a reload, where the addresses are known.
    pub(crate) process: Option<u32>,
}

/// Plans the parts of a node on this machine: looks for what they need, changes nothing.
#[derive(Debug)]
pub struct PartPlanner<'a> {
    input: PlannerInput<'a>,
    pub(crate) problems: Vec<String>,
    pub(crate) warnings: Vec<String>,
    pub(crate) planned: Vec<PlannedService>,
    /// The addresses of the runnables, with the keys that set them.
    pub(crate) addresses: Vec<(ListenAddress, String)>,
    /// True if two keys set one address.
    pub(crate) keys_conflict: bool,
}

impl<'a> PartPlanner<'a> {
    pub(crate) fn new(input: PlannerInput<'a>) -> Self {
        let (problems, warnings, planned, addresses) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { input, problems, warnings, planned, addresses, keys_conflict: false }
    }

    /// The configuration, with an absolute data directory.
    pub fn config(&self) -> &'a NodedConfig {
        self.input.config
    }

    /// The path of the control socket.
    pub fn control_socket(&self) -> &'a Path {
        self.input.socket
    }

    /// Returns whether the node runs, and serves the control API at this path.
    pub(crate) fn serves_socket(&self, path: &Path) -> bool {
        self.input.running.is_some_and(|running| running.socket == path)
    }

    /// The configuration that the node runs, at a reload.
    pub(crate) fn running_config(&self) -> Option<&'a NodedConfig> {
        self.input.running.map(|running| running.config)
    }

    /// The layout of the data directory, in memory.
    pub(crate) fn root(&self) -> &DataLayout {
        &self.input.root
    }

    /// The directories of programs.
    pub(crate) fn search_path(&self) -> &'a SearchPath {
        self.input.search
    }

    /// Returns whether the data volume can be looked at before root.storage has opened it.
    pub(crate) fn is_volume_known(&self) -> bool {
        self.input.is_volume_known
    }

    /// The data volume, in memory.
    pub(crate) fn volume(&self) -> &VolumeLayout {
        &self.input.volume
    }

    /// The paths that a layout will have on the data volume. Those on a volume that the program provides begin with
    /// `/<volume>`: its mount point is known once it is open, see [`VolumeHandle::path`](crate::part::VolumeHandle::path).
    ///
    /// # Errors
    /// A path is too long.
    pub fn plan_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.input.volume.add_layout().map_err(|error| data::placement_error(self.input.volume.path(), error))
    }

    /// The paths that a layout will have in the data directory, outside of the volume.
    ///
    /// # Errors
    /// A path is too long, or an entry is one of the node itself.
    pub fn plan_node_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        self.input
            .root
            .add_layout()
            .map_err(|error| data::placement_error(&self.input.config.node.data, error))
    }

    /// The paths that a layout will have in `run` below the data directory.
    ///
    /// # Errors
    /// A path is too long.
    pub fn plan_run_layout<L: LayoutEntry>(&self) -> Result<L, DataError> {
        let run = &self.input.root.run;
        run.add_layout().map_err(|error| data::placement_error(run.path(), error))
    }

    /// Adds a runnable. It starts after the dependencies of its name.
    pub fn add(&mut self, mut service: PlannedService) {
        service.start_after.extend(self.dependency_dns(&service.dn));
        self.planned.push(service);
    }

    /// The reason why a planned runnable is skipped; `None` if it will run, or if it is not planned.
    pub fn skip_reason(&self, dn: &str) -> Option<&str> {
        self.planned.iter().find(|planned| planned.dn == dn)?.skip_reason.as_deref()
    }

    /// Records a problem that keeps the node from starting. The text tells what to do.
    pub fn report(&mut self, problem: impl Into<String>) {
        self.problems.push(problem.into());
    }

    /// Records something that will keep a runnable from becoming ready, but not the node from starting: `noded check` fails
    /// with it, and a start logs it. The text tells what to do.
    pub fn warn(&mut self, warning: impl Into<String>) {
        self.warnings.push(warning.into());
    }

    /// Handles a missing requirement of a service: returns the reason to skip it, or records a problem.
    pub fn skip_or_report(&mut self, service: &str, reason: impl Into<String>) -> Option<String> {
        let reason = reason.into();
        if self.input.dev {
            return Some(reason);
        }
        self.problems.push(format!("{service}: {reason}, or run with --dev to skip it"));
        None
    }

    /// Finds the program of a service, by default the one of its name. Returns a reason to skip it, or records a
    /// problem, if it is missing.
    pub fn find_program(
        &mut self,
        service: &str,
        given: Option<&Path>,
        hint: &str,
    ) -> (PathBuf, Option<String>) {
        let program = given.unwrap_or(Path::new(service));
        match self.input.search.find_program(program) {
            Ok(binary) => (binary, None),
            Err(not_found) => {
                let found = self.skip_or_report(service, format!("{not_found}; {hint}"));
                (program.to_owned(), found)
            }
        }
    }

    /// Records a problem if a TCP port is in use at this address, or another key sets it too; `field` is the key that sets
    /// it.
    pub fn check_port(&mut self, address: IpAddr, port: u16, field: &str) {
        let is_free = self.claim_address(ListenAddress::Tcp(address, port), field);
        // Two keys with one address conflict on every machine: the holder need not be found. At a reload, the node
        // itself holds the ports of its runnables.
        if !is_free
            || self.input.running.is_some_and(|running| {
                running.addresses.iter().any(|(known, _)| *known == ListenAddress::Tcp(address, port))
            })
        {
            return;
        }
        if !ports::is_of_this_machine(address) {
            let has_none = format!("no interface of this machine has the address {address}");
            self.problems.push(format!("{has_none}: set {field} to one that it has"));
            return;
        }
        let node = self.input.running.and_then(|running| running.process);
        if let Some(holder) = ports::lasting_holder(address, port, node) {
            self.problems
                .push(format!("port {port} is in use by {}: set {field} to another port", holder.text));
        }
    }

    /// Records a problem if a unix socket can't be bound at this path: it is too long, its directory does not exist, something
    /// else has the path, or another key sets it too; `field` is the key that sets it. A file without a listener, which a killed
    /// program has left, is none: remove it before you bind.
    pub fn check_socket(&mut self, path: &Path, field: &str) {
        let address = ListenAddress::Unix(path.to_owned());
        // As for ports: at a reload, the node itself holds the sockets of its runnables.
        let is_held = |running: RunningUse<'_>| running.addresses.iter().any(|(known, _)| *known == address);
        let is_held = self.input.running.is_some_and(is_held);
        if !self.claim_address(address, field) || is_held {
            return;
        }
        if let Some(problem) = check_socket_path(path, &format!("set {field} to a shorter path")) {
            return self.report(problem);
        }
        let socket = SocketPath::of_key(path, field);
        let checked = socket::check_socket(&socket, &self.input.config.node.data);
        self.problems.extend(checked.err().map(|error| error_chain(&error)));
    }

    /// Records a problem if the processes of a service could not get their sockets for sd_notify(3).
    pub(crate) fn check_notify_socket(&mut self, service: &str) {
        let placed: ProcessesLayout = self.input.root.run.add_layout().expect(PLACED_IN_MEMORY);
        let socket = longest_notify_path(placed.notify.path());
        let problem = check_socket_path(&socket, "set node.data or --data to a shorter path");
        self.problems.extend(problem.map(|problem| format!("{service}: {problem}")));
    }

    /// Reserves an address for the runnable of a key. Records a problem, and returns false, if it is that of another key.
    pub(crate) fn claim_address(&mut self, address: ListenAddress, field: &str) -> bool {
        let mut others = self.addresses.iter().filter(|(_, other)| other != field);
        let conflict =
            others.find(|(other, _)| other.conflicts_with(&address)).map(|(_, field)| field.clone());
        if let Some(other) = &conflict {
            self.keys_conflict = true;
            self.problems
                .push(format!("{address} is set by {other} and by {field}: set one of them to another"));
        }
        // The address is claimed in a conflict, too, so that a third key is reported as well.
        self.addresses.push((address, field.to_owned()));
        conflict.is_none()
    }

    /// The DNs that a runnable waits for: those of its name, and of the names above it.
    fn dependency_dns(&self, dn: &str) -> Vec<String> {
        let dn_of = |name: &String| {
            self.input.dependencies.iter().find(|entry| entry.name == *name).map(|entry| entry.dn.clone())
        };
        let entries =
            self.input.dependencies.iter().filter(|entry| entry.dn == dn || is_descendant(dn, &entry.dn));
        // A name that does not exist was refused when the dependencies were checked.
        entries.flat_map(|entry| entry.depends_on.iter().filter_map(dn_of)).collect()
    }

    /// Lets a part plan, and reports runnables with the DNs of another part.
    pub(crate) fn plan_part(&mut self, part: &dyn Part) {
        let planned_before = self.planned.len();
        part.plan(self);
        let (name, top) = (part.name(), format!("root.{}", part.name()));
        for PlannedService { dn, .. } in &self.planned[planned_before..] {
            if *dn != top && !is_descendant(dn, &top) {
                self.problems.push(format!("invalid DN {dn:?} of part {name:?}: use {top} or {top}.NAME"));
            }
        }
    }

    /// Resolves what each runnable waits for to runnables of the plan, when all parts have planned. What waits for a
    /// name that nothing runs would wait for ever: it is skipped or reported.
    pub(crate) fn resolve_dependencies(&mut self) {
        let planned: Vec<_> = self.planned.iter().map(|planned| planned.dn.clone()).collect();
        for (index, own) in planned.iter().enumerate() {
            let mut resolved: Vec<String> = Vec::new();
            // The list is taken out, since `skip_or_report` borrows the whole planner.
            for dn in std::mem::take(&mut self.planned[index].start_after) {
                let mut found = find_dependency(&planned, own, &dn);
                // A runnable that is skipped anyway keeps its first reason.
                if found.is_empty() && self.planned[index].skip_reason.is_none() {
                    let reason = format!(
                        "depends on {dn}, which nothing runs: configure its part, or do not depend on it"
                    );
                    self.planned[index].skip_reason = self.skip_or_report(own, reason);
                }
                found.retain(|dn| !resolved.contains(dn));
                resolved.extend(found);
            }
            self.planned[index].start_after = resolved;
        }
    }
}

/// The DNs to wait for instead of a dependency, in the order in which they become ready: a planned runnable, one and
/// the runnable below it, or, if only the name is shared, all planned runnables below the name.
fn find_dependency(planned: &[String], own: &str, dn: &str) -> Vec<String> {
    let others = || planned.iter().filter(|other| *other != own);
    // The second case is a runnable that starts the other one itself, below its own DN.
    if planned.iter().any(|other| other == dn) || is_descendant(dn, own) {
        vec![dn.to_owned()]
    } else if let Some(above) = others().find(|other| is_descendant(dn, other)) {
        // A runnable below another may be done, and then it no longer orders the stop: both are waited for.
        vec![above.clone(), dn.to_owned()]
    } else {
        // Only the name is shared, as that of the services: the runnable waits for all of them.
        others().filter(|other| is_descendant(other, dn)).cloned().collect()
    }
}
