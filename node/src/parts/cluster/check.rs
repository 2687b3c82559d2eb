//! Rules between the keys of `[cluster]` and others.

use std::time::Duration;

use nodekeel_cluster::network::NodeAddress;
use nodekeel_localstorage::volume::{ColdStart, KeyPolicy};

use crate::config::NodedConfig;
use crate::config::check::{
    ConfigViolation, check_absolute_path, check_duration, check_no_nul, reject_field,
};
use crate::parts::PartDeps;
use crate::parts::worker::is_worker;

/// A shorter period would cost more than it tells: a commit itself may take two seconds.
const SHORTEST_PROGRESS_PERIOD: Duration = Duration::from_millis(500);

/// The names of backups have seconds, and each backup reads the whole store.
const SHORTEST_BACKUP_PERIOD: Duration = Duration::from_secs(60);

/// The name of a flag of etcd that only the cluster sets: with another value it would be another member, or serve others than members.
fn own_flag(arg: &str) -> Option<&str> {
    const OWN: [&str; 4] = ["config-file", "data-dir", "name", "wal-dir"];
    let flag = arg.strip_prefix('-')?.trim_start_matches('-').split('=').next()?;
    (OWN.contains(&flag) || flag.contains("peer") || flag.starts_with("initial-cluster")).then_some(flag)
}

/// Checks the rules between fields.
pub(super) fn check_cluster(config: &NodedConfig, deps: &PartDeps) -> Result<(), ConfigViolation> {
    let Some(cluster) = &config.cluster else { return check_no_split_keys(config) };
    check_duration("cluster.deadline", Some(cluster.deadline))?;
    // A deadline of 0 would end each attempt before it starts.
    if cluster.deadline.is_zero() {
        return reject_field("cluster.deadline", "must be above 0; use \"2m\"");
    }
    check_duration("cluster.progress_period", Some(cluster.progress_period))?;
    if cluster.progress_period < SHORTEST_PROGRESS_PERIOD {
        return reject_field("cluster.progress_period", "must be at least 500ms; use \"2500ms\"");
    }
    if let Some(record) = &cluster.bootstrap_record {
        check_absolute_path("cluster.bootstrap_record", record)?;
        if record.file_name().is_none() || record.starts_with(&config.node.data) {
            return reject_field(
                "cluster.bootstrap_record",
                "must be a file outside of node.data, which a lost disk does not take along",
            );
        }
    }
    if let Some(backup) = &cluster.backup {
        if let Some(directory) = &backup.directory {
            check_absolute_path("cluster.backup.directory", directory)?;
        }
        check_duration("cluster.backup.every", Some(backup.every))?;
        if backup.every < SHORTEST_BACKUP_PERIOD {
            return reject_field("cluster.backup.every", "must be at least 1m; use \"24h\"");
        }
    }
    // The cluster runs its own etcd, unless the program brings another consensus.
    if !config.services.etcd.enable && deps.consensus.is_none() {
        return reject_field(
            "services.etcd.enable",
            "[cluster] requires etcd; remove this key, or [cluster]",
        );
    }
    if let Some(flag) = config.services.etcd.extra_args.iter().find_map(|arg| own_flag(arg)) {
        return reject_field(
            "services.etcd.extra_args",
            format!("must not have --{flag}, which [cluster] sets; remove it"),
        );
    }
    match (cluster.address, &cluster.interface) {
        (Some(address), None) => match NodeAddress::try_new(address) {
            Ok(_) => Ok(()),
            Err(error) => reject_field("cluster.address", error.to_string()),
        },
        (None, Some(interface)) if interface.is_empty() || interface.contains('/') => reject_field(
            "cluster.interface",
            format!("{interface:?} is not an interface name; use one like \"eth0\""),
        ),
        (None, Some(interface)) => check_no_nul("cluster.interface", Some(interface.as_str())),
        (Some(_), Some(_)) => {
            reject_field("cluster.interface", "conflicts with cluster.address; set only one of the two")
        }
        // Another part than the shipped network may provide the address.
        (None, None) => Ok(()),
    }
}

/// Without a cluster or a Tang server, nothing would keep the other half of the key: the node's key alone would open the
/// volume for good.
fn check_no_split_keys(config: &NodedConfig) -> Result<(), ConfigViolation> {
    match (config.storage.keys, config.storage.cold_start) {
        (Some(KeyPolicy::Split), cold_start) if cold_start != Some(ColdStart::Tang) && !is_worker(config) => {
            reject_field(
                "storage.keys",
                "\"split\" requires [cluster] or [worker], whose cluster keeps the other half, or cold_start = \"tang\"; add one of them, or \
             choose \"local\"",
            )
        }
        _ => Ok(()),
    }
}
