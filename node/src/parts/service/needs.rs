//! Needs of a `[[service]]` on the machine: programs, groups, limits.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group, User};
use nodekeel_supervisor::process::{CgroupParent, check_cgroup_limits};

use super::process::process_limits;
use crate::config::{ReadinessConfig, ReloadConfig, UserService};
use crate::error_chain::error_chain;
use crate::part::PartPlanner;
use crate::program_name::program_name;

/// The programs that probe or reload a service, with their arguments; `None` where it has none.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct HelperPrograms {
    pub(crate) readiness: Option<(PathBuf, Vec<String>)>,
    pub(crate) liveness: Option<(PathBuf, Vec<String>)>,
    pub(crate) reload: Option<(PathBuf, Vec<String>)>,
}

impl HelperPrograms {
    /// Finds them, or returns the reason to skip the service.
    pub(super) fn find(planner: &mut PartPlanner<'_>, service: &UserService) -> Result<Self, Option<String>> {
        let mut find = |command: Option<&Vec<String>>, hint: &str| match command {
            None => Ok(None),
            Some(command) => match planner.find_program(&service.name, Some(Path::new(&command[0])), hint) {
                (program, None) => Ok(Some((program, command[1..].to_vec()))),
                (_, reason) => Err(reason),
            },
        };
        let readiness = match &service.readiness {
            ReadinessConfig::Probe { command, .. } => Some(command),
            _ => None,
        };
        let reload = match &service.reload {
            Some(ReloadConfig::Command(command)) => Some(command),
            _ => None,
        };
        let liveness = service.liveness.as_ref().map(|liveness| &liveness.probe);
        Ok(Self {
            readiness: find(readiness, "install its probe, or correct its key readiness")?,
            liveness: find(liveness, "install its probe, or correct its key liveness")?,
            reload: find(reload, "install it, or correct its key reload")?,
        })
    }
}

/// The reason why the limits or privileges of a service can't be had here, and what to do.
pub(super) fn check_needs(service: &UserService) -> Option<String> {
    let privileges = &service.privileges;
    if !nix::unistd::geteuid().is_root() {
        let given = [
            ("groups", !privileges.groups.is_empty()),
            ("capabilities", privileges.capabilities.is_some()),
            ("read_only_paths", !privileges.read_only_paths.is_empty()),
        ];
        if let Some((key, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
            return Some(format!(
                "privileges.{key} needs root: run {} as root, or remove the key",
                program_name()
            ));
        }
    }
    if let Some(missing) = privileges.read_only_paths.iter().find(|path| !path.exists()) {
        let missing = missing.display();
        return Some(format!(
            "read-only path {missing} does not exist: create it, or correct privileges.read_only_paths"
        ));
    }
    let limits = check_cgroup_limits(&CgroupParent::Current, &process_limits(&service.limits));
    limits.err().map(|error| format!("{}; or remove the limit", error_chain(&error)))
}

/// The supplementary groups of a service: those of its user, and those that it names. `None` are noded's.
///
/// # Errors
/// The reason why they can't be found, and what to do.
pub(super) fn find_groups(service: &UserService) -> Result<Option<Vec<u32>>, String> {
    let named = &service.privileges.groups;
    // A name comes first: it may consist of digits.
    let find_group = |name: &String| match (Group::from_name(name), name.parse()) {
        (Ok(Some(group)), _) => Ok(group.gid.as_raw()),
        (_, Ok(gid)) => Ok(gid),
        _ => Err(format!("group {name} does not exist: create it, or correct its key privileges.groups")),
    };
    let mut groups = match &service.user {
        // Root replaces all groups of the process, so that those of the user are given explicitly.
        Some(user) if nix::unistd::geteuid().is_root() => groups_of_user(user)?,
        _ if named.is_empty() => return Ok(None),
        _ => Vec::new(),
    };
    for name in named {
        groups.push(find_group(name)?);
    }
    // Sorted, since two plans with the same groups must be equal.
    groups.sort_unstable();
    groups.dedup();
    Ok(Some(groups))
}

/// The groups of a user, in the host's database.
fn groups_of_user(name: &str) -> Result<Vec<u32>, String> {
    let unknown =
        || format!("the groups of user {name} are unknown: create the user, or correct its key user");
    let user = User::from_name(name).ok().flatten().ok_or_else(unknown)?;
    let name = CString::new(user.name.as_str()).map_err(|_| unknown())?;
    let groups = nix::unistd::getgrouplist(&name, user.gid).map_err(|_| unknown())?;
    Ok(groups.into_iter().map(Gid::as_raw).collect())
}
