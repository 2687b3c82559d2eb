//! The life of a data volume, recorded once, and what its operator knows at each moment of it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nodekeel_node::v1::{
    AddRecoveryPassphraseRequest, ConfirmRecoveryPassphraseRequest, RotateStorageKeysRequest, StorageRequest,
};
use testbed::command_output;
use testbed::power_cut::{DiskRecording, PowerCut, RecordedDisk};

use super::machine::{GROWN_MEBIBYTES, Machine, SMALL_MEBIBYTES};
use super::remedy::{Settled, choose_command, settle};
use crate::harness::Ended;
use crate::storage_device::DeviceNode;

const ESP_BYTES: u64 = 16 << 20;
const WITNESS: &str = "data of a pod\n";

/// The scenario in which the test damages the header, which no cut is checked in.
pub(super) const DAMAGE: &str = "damage";
/// The scenarios by the marks with which they begin, the last one first.
const SCENARIOS: [(&str, &str); 9] = [
    ("reencrypted", "after the re-encryption"),
    ("reencrypting", "re-encryption"),
    ("restored", "after all"),
    ("damaged", "header restore"),
    ("damaging", DAMAGE),
    ("growing", "growth"),
    ("rotating", "rotation"),
    ("created", "first use"),
    ("prepared", "creation"),
];

/// How the header of a volume is lost.
#[derive(Clone, Copy)]
pub(super) enum Damage {
    /// It is overwritten.
    Noise,
    /// An older one is put back.
    Rollback,
}

pub(super) struct Life {
    pub(super) name: &'static str,
    pub(super) encryption: &'static str,
    /// The marks with which its operations begin.
    pub(super) starts: &'static [&'static str],
    grows: bool,
    reencrypts: bool,
    damage: Damage,
}

impl Life {
    pub(super) const ENCRYPTED: Self = Self {
        name: "an encrypted volume",
        encryption: "encrypted",
        starts: &["prepared", "rotating", "growing", "damaged"],
        grows: true,
        reencrypts: false,
        damage: Damage::Noise,
    };
    /// It is wiped, and can't grow.
    pub(super) const AUTHENTICATED: Self = Self {
        name: "an authenticated volume",
        encryption: "encrypted-and-authenticated",
        starts: &["prepared", "rotating", "damaged"],
        grows: false,
        reencrypts: false,
        damage: Damage::Rollback,
    };
    /// It gets another volume key at its end.
    pub(super) const REENCRYPTED: Self = Self {
        name: "a volume that is re-encrypted",
        encryption: "encrypted",
        starts: &["reencrypting"],
        grows: false,
        reencrypts: true,
        damage: Damage::Noise,
    };
}

/// The UUIDs of a volume.
#[derive(Clone)]
pub(super) struct VolumeId {
    pub(super) header: String,
    pub(super) file_system: [u8; 16],
}

/// What an operator knows and has.
#[derive(Clone, Default)]
pub(super) struct Knowledge {
    /// Of a volume that was reported as open.
    pub(super) volume: Option<VolumeId>,
    /// The text of a file that was reported as written.
    pub(super) witness: Option<String>,
    pub(super) passphrase: String,
    /// The newest backup of the header.
    pub(super) header: Option<PathBuf>,
    /// The runs of mkfs.xfs on this machine, the last of which has made the volume.
    pub(super) formats: usize,
}

impl Knowledge {
    /// Types a command of a hint. The operator's file and passphrase take the place of its placeholders.
    pub(super) fn type_command(&self, machine: &Machine, command: &str) -> Result<Ended> {
        let Some(arguments) = command.strip_prefix("nodectl ") else { return machine.shell(command) };
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        for word in words.iter_mut().filter(|word| **word == "FILE") {
            let header = self.header.as_ref().context("the operator has no backup of the header")?;
            *word = header.to_str().context("a path")?;
        }
        let answer = if words.first() == Some(&"reset") { "yes" } else { self.passphrase.as_str() };
        machine.nodectl(&words, answer)
    }
}

/// What was recorded.
pub(super) struct Story {
    /// At the end.
    known: Knowledge,
    /// Backups of the header, before the rotation and after it.
    headers: [Vec<u8>; 2],
}

impl Story {
    /// The size of the disk, in MiB.
    pub(super) fn size_at(&self, cut: &PowerCut) -> u64 {
        if cut.has_mark("growing") { GROWN_MEBIBYTES } else { SMALL_MEBIBYTES }
    }

    /// What the operator knows after a cut.
    pub(super) fn knowledge_at(&self, cut: &PowerCut, machine: &Machine) -> Result<Knowledge> {
        let mut known = Knowledge { header: None, formats: machine.count_formats(), ..self.known.clone() };
        known.volume.take_if(|_| !cut.has_mark("created"));
        known.witness.take_if(|_| !cut.has_mark("witness"));
        if cut.has_mark("backup-1") {
            let path = machine.path("header");
            fs::write(&path, &self.headers[usize::from(cut.has_mark("backup-2"))])?;
            known.header = Some(path);
        }
        Ok(known)
    }
}

/// The scenario in which the power was cut.
pub(super) fn scenario_of(cut: &PowerCut) -> &'static str {
    SCENARIOS.iter().find(|(mark, _)| cut.has_mark(mark)).map_or("start", |(_, scenario)| *scenario)
}

/// Writes a file to a new volume that is open, and has a passphrase and a backup made.
pub(super) async fn first_use(machine: &Machine, node: &mut DeviceNode) -> Result<Knowledge> {
    let status = node.client.storage(StorageRequest {}).await?.into_inner();
    let header = status.encryption.context("it is encrypted")?.volume;
    let volume = Some(VolumeId { header, file_system: machine.file_system_id()? });
    machine.write_file("witness", WITNESS)?;
    let request = AddRecoveryPassphraseRequest::default();
    let passphrase = node.client.add_recovery_passphrase(request).await?.into_inner().passphrase;
    let confirmed = ConfirmRecoveryPassphraseRequest { passphrase: passphrase.clone() };
    node.client.confirm_recovery_passphrase(confirmed).await?;
    let (passphrase, header) = (passphrase.unwrap_or_default().text, Some(machine.back_up_header()?));
    let formats = machine.count_formats();
    Ok(Knowledge { volume, witness: Some(WITNESS.to_owned()), passphrase, header, formats })
}

/// Re-encrypts the open volume, to the end. One that was cut off goes on.
pub(super) fn reencrypt(machine: &Machine, known: &Knowledge) -> Result<()> {
    let ended = known.type_command(machine, "nodectl storage reencrypt --recovery --wait")?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(())
}

/// Lives it, on a disk that also has the ESP.
pub(super) async fn record_life(life: &Life) -> Result<(DiskRecording, Story)> {
    let disk = RecordedDisk::acquire(&[ESP_BYTES, GROWN_MEBIBYTES << 20])?;
    command_output(Command::new("mkfs.vfat").arg(disk.part(0)))?;
    let machine = Machine::start(life.encryption, [disk.part(0), disk.part(1)], SMALL_MEBIBYTES)?;
    disk.mark("prepared")?;
    let mut node = machine.start_node().await?;
    node.wait_open().await;
    disk.mark("created")?;
    let mut known = first_use(&machine, &mut node).await?;
    disk.mark("witness")?;
    let old = fs::read(known.header.take().context("it has a backup")?)?;
    disk.mark("backup-1")?;

    disk.mark("rotating")?;
    node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await?;
    let path = machine.back_up_header()?;
    let new = fs::read(&path)?;
    disk.mark("backup-2")?;
    node.node.shutdown().await;

    if life.grows {
        machine.grow(GROWN_MEBIBYTES);
        disk.mark("growing")?;
        let node = machine.start_node().await?;
        node.wait_open().await;
        machine.check_size()?;
        node.node.shutdown().await;
    }

    disk.mark("damaging")?;
    let noise = vec![0xa5; 1 << 20];
    machine.damage_header(match life.damage {
        Damage::Noise => &noise,
        Damage::Rollback => &old,
    })?;
    disk.mark("damaged")?;
    known.header = Some(path);
    let mut node = machine.start_node().await?;
    let Settled::Condition { texts, .. } = settle(&mut node).await? else {
        anyhow::bail!("a lost header is no problem")
    };
    let command = choose_command(&texts, true).context("the header can be restored")?;
    let ended = known.type_command(&machine, &command)?;
    ensure!(ended.code == Some(0), "{command}: {ended:?}");
    node.wait_open().await;
    disk.mark("restored")?;
    if life.reencrypts {
        disk.mark("reencrypting")?;
        reencrypt(&machine, &known)?;
        disk.mark("reencrypted")?;
    }
    node.node.shutdown().await;
    drop(machine);
    Ok((disk.finish()?, Story { known, headers: [old, new] }))
}
