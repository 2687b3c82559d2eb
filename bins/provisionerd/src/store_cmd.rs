//! `provisionerd store`: the store on the disk of the node, and what became of an earlier one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_provisioner::{
    ProvisionerIdentity, STORE_ATTRIBUTE, StoreAction, StoreId, VolumeOwners, format_chain, required_volume,
};

use crate::config::{ConfigFlags, DaemonConfig};
use crate::inventory::{NodeInventory, UnreadableStore};
use crate::{inventory, print_stdout, start_runtime};

/// The exit code if the store is not served.
const EXIT_NOT_SERVED: u8 = 4;

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Show the store, and the stores that PersistentVolumes name
    Show {
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Declare the disk of a store lost for good
    ///
    /// Annotates each PersistentVolume of this node that names the store. Then provisionerd serves the new disk, and
    /// deletes those PersistentVolumes after their claims. Nothing else is deleted.
    Replace(ReplaceFlags),
}

#[derive(Debug, Args)]
pub(crate) struct ReplaceFlags {
    /// Id of the lost store, as `provisionerd store show` prints it
    #[arg(long, value_name = "STORE")]
    lost: StoreId,
    #[command(flatten)]
    flags: ConfigFlags,
}

pub(crate) fn run_store(command: StoreCommand) -> Result<ExitCode> {
    let runtime = start_runtime()?;
    match command {
        StoreCommand::Show { flags } => runtime.block_on(show_stores(&flags.load_config()?)),
        StoreCommand::Replace(ReplaceFlags { lost, flags }) => {
            runtime.block_on(replace_store(&flags.load_config()?, &lost))
        }
    }
}

/// Shows each store; the exit code is that of one that is not served.
async fn show_stores(config: &DaemonConfig) -> Result<ExitCode> {
    let (mut code, mut failed) = (ExitCode::SUCCESS, Vec::new());
    for (config, inventory) in NodeInventory::read_all(config).await {
        match show_store(&config, inventory).await {
            Ok(shown) if shown == ExitCode::SUCCESS => {}
            Ok(shown) => code = shown,
            Err(error) => failed.push(error),
        }
    }
    // The first one is printed by the caller, and has the exit code.
    let mut failed = failed.into_iter();
    let Some(first) = failed.next() else { return Ok(code) };
    failed.for_each(|error| drop(writeln!(std::io::stderr(), "provisionerd: {}", format_chain(&*error))));
    Err(first)
}

async fn show_store(config: &DaemonConfig, inventory: Result<NodeInventory>) -> Result<ExitCode> {
    let label = config.store_label();
    let inventory = match inventory {
        Ok(inventory) => inventory,
        // Without its disk, the operator has to know which one to mount.
        Err(error) if error.downcast_ref::<UnreadableStore>().is_some_and(|it| it.may_be_absent) => {
            let recovery = NodeInventory::recovery_of(config).await?;
            let owners = recovery.read_owners(&BTreeSet::new()).await?;
            let mut text = format!("{label} is not a store, or its disk is not mounted\n");
            text += &format_named_stores(&config.provisioner_identity(config.node_name()?), &owners);
            print_stdout(&text);
            return Err(error);
        }
        Err(error) => return Err(error),
    };
    let mut text = match &inventory.store {
        Some(store) => format!("{label} is store {store}\n"),
        None => format!("{label} is not a store yet, or its disk is not mounted\n"),
    };
    let owners = match inventory.owners {
        Ok(ref owners) => owners,
        Err(error) => return Err(error.context("can't compare it with the PersistentVolumes of the node")),
    };
    text += &format_named_stores(&inventory.identity, owners);
    let action = inventory.store_action(owners);
    let _ = match &action {
        StoreAction::Serve => writeln!(text, "provisionerd serves it"),
        StoreAction::CreateIdentity => writeln!(text, "provisionerd makes it a new store when it starts"),
        StoreAction::Reject(rejection) => writeln!(text, "provisionerd does not serve it: {rejection}"),
        _ => Ok(()),
    };
    let printed = print_stdout(&text);
    Ok(if matches!(action, StoreAction::Reject(_)) { ExitCode::from(EXIT_NOT_SERVED) } else { printed })
}

/// A line for each store that PersistentVolumes of the node name.
fn format_named_stores(identity: &ProvisionerIdentity, owners: &VolumeOwners) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for object in owners.volumes.values().filter(|object| required_volume(identity, object).is_some()) {
        *counts.entry(named_store(object)).or_default() += 1;
    }
    let line = |(store, count)| {
        format!("{count} PersistentVolumes of node {} are in store {store}\n", identity.node)
    };
    counts.into_iter().map(line).collect()
}

fn named_store(object: &PersistentVolume) -> &str {
    let csi = object.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    let attributes = csi.and_then(|csi| csi.volume_attributes.as_ref());
    attributes.and_then(|all| all.get(STORE_ATTRIBUTE)).map_or("none", String::as_str)
}

async fn replace_store(config: &DaemonConfig, lost: &StoreId) -> Result<ExitCode> {
    // A directory that can't be read is not the store, nor is one whose disk hangs.
    let asked: Vec<_> = config.of_stores().map(|config| (inventory::ask_store(&config), config)).collect();
    let identities = asked.into_iter().map(|(asked, config)| (inventory::read_identity(asked), config));
    // The disk is here: the id is that of another store, or nothing is lost.
    let found = identities.into_iter().find(|(identity, _)| identity.as_ref() == Some(lost));
    if let Some((_, config)) = found {
        bail!("can't declare store {lost} lost: it is in {}", config.directory.display());
    }
    let recovery = NodeInventory::recovery_of(config).await?;
    let names = recovery.declare_lost(lost).await?;
    let mut text: String = names.iter().map(|name| format!("{name} is declared lost\n")).collect();
    if names.is_empty() {
        text += &format!(
            "no PersistentVolume of this node is in store {lost}: `provisionerd store show` lists the stores\n"
        );
    } else {
        text += "delete the claims of these volumes; then provisionerd deletes their PersistentVolumes\n";
    }
    Ok(print_stdout(&text))
}
