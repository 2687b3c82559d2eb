//! The log of the kernel.

use std::convert::Infallible;
use std::fmt;
use std::io;

use nodekeel_logtree::source::{KmsgPosition, KmsgSource};
use nodekeel_logtree::{Dn, LogQuery, LogStore};
use nodekeel_supervisor::{Context, Failure, Runnable};
use serde::Deserialize;

use crate::config::{ConfigSection, NodedConfig};
use crate::device_faults::DeviceFaults;
use crate::dn::KERNEL as DN;
use crate::kernel_kills::KernelKills;
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};

/// The name of the part, and of its section.
const NAME: &str = "kernel";

/// `[kernel]`
#[derive(Debug, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct KernelConfig {
    /// True if the kernel's log is kept; `None`: if it can be read.
    log: Option<bool>,
}

/// The part that stores the kernel's log.
pub(super) struct KernelPart;

fn log_key(config: &NodedConfig) -> Option<bool> {
    config.section::<KernelConfig>(NAME)?.log
}

impl Part for KernelPart {
    fn name(&self) -> &str {
        NAME
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<KernelConfig>(NAME)]
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let unavailable =
            (log_key(config) == Some(false)).then_some("which is disabled; set kernel.log = true");
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let wanted = log_key(planner.config());
        if wanted == Some(false) {
            return;
        }
        let reason = KmsgSource::check().err().map(|error| unreadable(&error));
        // Unless the operator asks for it, a log that can't be read is no problem: the part is skipped, also
        // without --dev.
        let skipped = match reason {
            Some(reason) if wanted == Some(true) => planner.skip_or_report(NAME, reason),
            reason => reason,
        };
        planner.add(PlannedService::new(DN, KernelLogPlan).skip(skipped));
    }
}

fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "/dev/kmsg does not exist: set kernel.log = false".into(),
        io::ErrorKind::PermissionDenied => {
            "no permission to read /dev/kmsg: run as root or with CAP_SYSLOG, or set kernel.log = false"
                .into()
        }
        _ => format!("can't read /dev/kmsg: {error}; set kernel.log = false"),
    }
}

/// The copy of the kernel's log.
#[derive(Debug, PartialEq)]
struct KernelLogPlan;

impl fmt::Display for KernelLogPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the log of the kernel, from /dev/kmsg")
    }
}

impl PlannedRunnable for KernelLogPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        // The position outlives the runnable, so that no record is stored twice.
        let position = node.extensions().get_or_insert_default::<KmsgPosition>().clone();
        let kills = node.extensions().get_or_insert_default::<KernelKills>().clone();
        let faults = node.extensions().get_or_insert_default::<DeviceFaults>().clone();
        Ok(PreparedRunnable::new(copy_kernel_log(node.log_store().clone(), position, kills, faults)))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }
}

fn copy_kernel_log(
    log_store: LogStore,
    position: KmsgPosition,
    kills: KernelKills,
    faults: DeviceFaults,
) -> impl Runnable {
    move |ctx: Context| {
        let (log_store, position) = (log_store.clone(), position.clone());
        let (kills, faults) = (kills.clone(), faults.clone());
        async move {
            let dn: Dn = ctx.dn().parse().expect("every name in the tree is a DN");
            let mut kernel = KmsgSource::open(&position)?;
            // From here on: an earlier run has seen what is in the log.
            let mut log = log_store.open_reader(LogQuery::of_dn(dn.clone()).last_entries(0).follow())?;
            ctx.signal_ready()?;
            let record_events = async {
                while let Some(entry) = log.next().await {
                    kills.record(&entry);
                    faults.record(&entry);
                }
                // The log ends with the node.
                std::future::pending::<()>().await
            };
            // Dropping the copy at a stop loses no record: the next one continues at the position.
            tokio::select! {
                () = record_events => Ok(()),
                failed = kernel.copy_records(&log_store, &dn) => failed.map(|never: Infallible| match never {}).map_err(Failure::from),
                stopped = ctx.until_canceled() => stopped,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Result<Option<bool>, String> {
        let config =
            NodedConfig::parse_toml(Path::new("noded.toml"), text).map_err(|error| error.to_string())?;
        Ok(log_key(&config))
    }

    #[test]
    fn the_kernels_log_is_kept_unless_the_configuration_excludes_it() {
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("[kernel]\n"), Ok(None));
        assert_eq!(parse("kernel.log = true\n"), Ok(Some(true)));
        assert_eq!(parse("kernel.log = false\n"), Ok(Some(false)));
        let error = parse("[kernel]\nlogs = true\n").expect_err("an unknown key");
        assert!(error.contains("unknown field `logs`, expected `log`"), "{error}");
        let depends = "kernel.log = false\n[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\ndepends_on = [\"kernel\"]\n";
        let error = parse(depends).expect_err("it is disabled");
        assert!(error.contains("which is disabled; set kernel.log = true"), "{error}");
    }

    #[test]
    fn what_can_not_be_read_says_what_to_do() {
        for (kind, text) in [
            (io::ErrorKind::NotFound, "does not exist"),
            (io::ErrorKind::PermissionDenied, "as root or with CAP_SYSLOG"),
            (io::ErrorKind::InvalidInput, "invalid input parameter"),
        ] {
            let reason = unreadable(&kind.into());
            assert!(reason.contains(text) && reason.contains("set kernel.log = false"), "{reason}");
        }
    }
}
