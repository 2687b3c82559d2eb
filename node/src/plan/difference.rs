//! Changes of a reload of the configuration: a pure function of the plan that runs and the new one.

use std::collections::BTreeSet;
use std::fmt;

use super::NodePlan;
use crate::config::{CORE_TABLES, ConfigSection, LOG_LEVELS};
use crate::dependency::is_descendant;
use crate::part::{PlannedService, call_part, part_of_dn};
use crate::program_name::program_name;

/// The tables that a running node applies at once.
const APPLIED_TABLES: [&str; 2] = ["health", LOG_LEVELS];

/// The changes of a reload, in the order of the new plan, removals last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PlanDifference {
    /// Empty if the node runs by this configuration.
    pub changes: Vec<PlanChange>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanChange {
    /// The effect on the runnable or the node.
    pub effect: ChangeEffect,
    /// The DN of the runnable; or the table of the configuration, of [`ChangeEffect::NodeRestart`], and of
    /// [`ChangeEffect::Apply`] where no runnable has it.
    pub name: String,
    /// The keys that differ: of a `[[service]]`, those of its table; otherwise with their table, as `node.data`. Empty if
    /// it is not the configuration that differs, but the machine: another program, user or file.
    pub keys: Vec<String>,
}

/// The effect of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeEffect {
    /// A new runnable starts.
    Add,
    /// The runnable stops, and starts again by the new configuration.
    Restart,
    /// The runnable stops.
    Remove,
    /// The node applies it at once, and nothing restarts.
    Apply,
    /// The runnable runs on. From its next start on, it waits for others than before, and it stops before them.
    Reorder,
    /// Only a restart of the program applies it: a reload is refused.
    NodeRestart,
}

impl PlanDifference {
    /// The changes that need a restart of the program.
    pub fn node_restarts(&self) -> impl Iterator<Item = &PlanChange> {
        self.changes.iter().filter(|change| change.effect == ChangeEffect::NodeRestart)
    }

    /// The DNs that a change of this kind concerns.
    pub(crate) fn dns_to(&self, effect: ChangeEffect) -> impl Iterator<Item = &str> {
        self.changes.iter().filter(move |change| change.effect == effect).map(|change| change.name.as_str())
    }
}

impl fmt::Display for PlanDifference {
    /// One line for each change, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))
    }
}

impl fmt::Display for PlanChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, keys) = (&self.name, self.keys.join(", "));
        match self.effect {
            ChangeEffect::Add => write!(f, "add {name}"),
            ChangeEffect::Remove => write!(f, "remove {name}"),
            ChangeEffect::Restart if keys.is_empty() => {
                write!(f, "restart {name}: its program, user or files on this machine have changed")
            }
            ChangeEffect::Restart => write!(f, "restart {name}: {keys}"),
            ChangeEffect::Apply => write!(f, "apply {keys}"),
            ChangeEffect::Reorder if keys.is_empty() => {
                write!(f, "reorder {name}: what it depends on starts others; it runs on")
            }
            ChangeEffect::Reorder => write!(f, "reorder {name}: {keys}; it runs on"),
            ChangeEffect::NodeRestart => write!(f, "restart {}: {keys}", program_name()),
        }
    }
}

/// Compares the plan that runs with a new one of the same parts.
pub(crate) fn compare_plans(running: &NodePlan, new: &NodePlan) -> PlanDifference {
    let change_of = |effect| {
        move |name: String| PlanChange { effect, keys: running.config.changed_keys(&new.config, &name), name }
    };
    let restarting = sections_of_node(running, new).into_iter().map(change_of(ChangeEffect::NodeRestart));
    let applied =
        APPLIED_TABLES.into_iter().filter(|table| !running.config.has_same_section(&new.config, table));
    let mut changes: Vec<_> =
        restarting.chain(applied.map(str::to_owned).map(change_of(ChangeEffect::Apply))).collect();
    // Runnables that a reload can't replace are covered by their tables above.
    for planned in new.active_services().filter(|planned| is_replaceable(planned)) {
        match running.active_service(&planned.dn) {
            None => changes.push(PlanChange {
                effect: ChangeEffect::Add,
                name: planned.dn.clone(),
                keys: Vec::new(),
            }),
            Some(former) if runs_the_same(former, planned) => {
                if former.start_after != planned.start_after {
                    changes.push(PlanChange {
                        effect: ChangeEffect::Reorder,
                        name: planned.dn.clone(),
                        keys: changed_dependency_keys(running, new, &planned.dn),
                    });
                }
            }
            Some(former) => changes.push(PlanChange {
                effect: if is_applied(former, planned) { ChangeEffect::Apply } else { ChangeEffect::Restart },
                name: planned.dn.clone(),
                keys: changed_keys(running, new, &planned.dn),
            }),
        }
    }
    let is_removed =
        |planned: &&PlannedService| is_replaceable(planned) && new.active_service(&planned.dn).is_none();
    changes.extend(running.active_services().filter(is_removed).map(|planned| PlanChange {
        effect: ChangeEffect::Remove,
        name: planned.dn.clone(),
        keys: Vec::new(),
    }));
    PlanDifference { changes }
}

/// The tables that differ, and belong to the node itself or to a part that a reload can't change.
fn sections_of_node(running: &NodePlan, new: &NodePlan) -> Vec<String> {
    let differs = |section: &str| !running.config.has_same_section(&new.config, section);
    let of_node =
        // `[services]` only contains the tables of parts, which are compared with their part.
        CORE_TABLES.into_iter().filter(|table| *table != "services" && !APPLIED_TABLES.contains(table));
    let mut sections: Vec<String> = of_node.filter(|table| differs(table)).map(str::to_owned).collect();
    for part in new.source.parts.iter() {
        let top = format!("root.{}", part.name());
        let is_of_part = |planned: &&PlannedService| planned.dn == top || is_descendant(&planned.dn, &top);
        // Both plans count: a part may run nothing in one of them.
        let mut planned = running.services.iter().chain(&new.services).filter(is_of_part);
        if planned.any(|planned| !is_replaceable(planned)) {
            let changed = part.sections().into_iter().filter(|section| {
                // `depends_on` is not in the parsed section, and so it is compared for itself.
                differs(section.path())
                    || running.config.depends_on.get(part.name()) != new.config.depends_on.get(part.name())
            });
            sections.extend(changed.map(|section| section.path().to_owned()));
        }
    }
    // Two parts may read the same table.
    let mut seen = BTreeSet::new();
    sections.retain(|section| seen.insert(section.clone()));
    sections
}

fn is_replaceable(planned: &PlannedService) -> bool {
    // A plan that can't be compared answers `None`, even to itself.
    is_same(planned, planned).is_some()
}

fn is_same(running: &PlannedService, new: &PlannedService) -> Option<bool> {
    call_part(part_of_dn(&running.dn), "is_same", || running.runnable.is_same(&*new.runnable))
}

fn runs_the_same(running: &PlannedService, new: &PlannedService) -> bool {
    is_same(running, new) == Some(true)
        // Its writers get their format when they are opened.
        && running.log_formats == new.log_formats
        && running.log_zone == new.log_zone
}

/// Returns whether a running node applies what differs: what the runnable waits for, and the form of its log, are not part of that.
fn is_applied(running: &PlannedService, new: &PlannedService) -> bool {
    running.start_after == new.start_after
        && running.log_formats == new.log_formats
        && running.log_zone == new.log_zone
        && call_part(part_of_dn(&running.dn), "is_applicable", || {
            running.runnable.is_applicable(&*new.runnable)
        })
}

/// The keys that make a runnable differ.
fn changed_keys(running: &NodePlan, new: &NodePlan, dn: &str) -> Vec<String> {
    if let Some(name) = dn.strip_prefix("root.service.") {
        return running.config.changed_service_keys(&new.config, name);
    }
    let sections = sections_of(new, dn);
    let changed =
        sections.iter().filter(|section| !running.config.has_same_section(&new.config, section.path()));
    changed.flat_map(|section| running.config.changed_keys(&new.config, section.path())).collect()
}

/// The keys that change what a runnable waits for.
fn changed_dependency_keys(running: &NodePlan, new: &NodePlan, dn: &str) -> Vec<String> {
    let mut keys: Vec<String> = match dn.strip_prefix("root.service.") {
        Some(name) => running.config.changed_service_keys(&new.config, name),
        None => sections_of(new, dn)
            .iter()
            .flat_map(|section| running.config.changed_keys(&new.config, section.path()))
            .collect(),
    };
    keys.retain(|key| key.rsplit('.').next() == Some("depends_on"));
    keys
}

/// The tables of the part to which a runnable belongs.
fn sections_of(plan: &NodePlan, dn: &str) -> Vec<ConfigSection> {
    let part = plan.source.parts.iter().find(|part| {
        let top = format!("root.{}", part.name());
        dn == top || is_descendant(dn, &top)
    });
    part.map(|part| part.sections()).unwrap_or_default()
}

/// The plan of a node that runs by one plan and is reloaded with another: what a reload can't replace stays as it is.
pub(crate) fn merge_plans(running: &NodePlan, new: NodePlan) -> NodePlan {
    let kept = |dn: &str| running.services.iter().find(|planned| planned.dn == dn).cloned();
    let mut services: Vec<PlannedService> = new
        .services
        .into_iter()
        // The keys of these did not change, or the reload would be refused: the machine has changed, and what runs
        // stays.
        .filter_map(|planned| if is_replaceable(&planned) { Some(planned) } else { kept(&planned.dn) })
        .collect();
    // One that the new plan lacks still runs, too.
    for planned in running.services.iter().filter(|planned| !is_replaceable(planned)) {
        if services.iter().all(|known| known.dn != planned.dn) {
            services.push(planned.clone());
        }
    }
    NodePlan { services, ..new }
}

/// The DNs to stop, in waves: each one after those that depend on it.
pub(crate) fn stop_waves(running: &NodePlan, dns: BTreeSet<&str>) -> Vec<Vec<String>> {
    let mut left: Vec<&PlannedService> =
        running.services.iter().filter(|planned| dns.contains(planned.dn.as_str())).collect();
    let mut waves = Vec::new();
    while !left.is_empty() {
        let is_needed =
            |planned: &PlannedService| left.iter().any(|other| other.start_after.contains(&planned.dn));
        // A plan has no cycles, so that each wave has members.
        let (later, wave): (Vec<_>, Vec<_>) = left.iter().copied().partition(|planned| is_needed(planned));
        waves.push(wave.iter().map(|planned| planned.dn.clone()).collect());
        left = later;
    }
    waves
}

#[cfg(test)]
#[path = "difference_test.rs"]
mod tests;
