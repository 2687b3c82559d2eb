//! Creation and rotation of an encrypted volume, whose journal and node unlock key are on an ESP of the same disk, or
//! of another one.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use nodekeel_localstorage::mount::MountSpec;
use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::volume::{
    ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram, DataVolume as _,
    EncryptedVolume as _, ErasePolicy, KeyPolicy, LuksVolume, LuksVolumeConfig, UnlockSecret,
    VolumeEncryption, VolumeError,
};
use testbed::command_output;
use testbed::power_cut::{CutPlan, PowerCut, RecordedDisk};

use super::{MIB, MountedPart, check_witness, format_count, start_memory, write_witness};
use crate::fixture::{NodeDirs, in_child_process};

const ESP_BYTES: u64 = 16 * MIB;
const DATA_BYTES: u64 = 400 * MIB;
/// Each byte is encrypted, logged and replayed. XFS has less than its usual minimum, which only tests may.
const WIPED_BYTES: u64 = 128 * MIB;

/// The calls that change no file.
const READS: [&str; 9] =
    ["open", "openat", "openat2", "read", "getdents64", "fstat", "fstatat", "fstatfs", "readlinkat"];

/// A volume, and the disks on which it and its ESP are.
#[derive(Clone, Copy)]
struct VolumeSetup {
    encryption: VolumeEncryption,
    wipes: bool,
    has_separate_esp: bool,
}

const ENCRYPTED: VolumeSetup =
    VolumeSetup { encryption: VolumeEncryption::Encrypted, wipes: false, has_separate_esp: false };
const AUTHENTICATED: VolumeSetup =
    VolumeSetup { encryption: VolumeEncryption::EncryptedAndAuthenticated, ..ENCRYPTED };

impl VolumeSetup {
    fn acquire_disk(self) -> Result<RecordedDisk> {
        let parts = [ESP_BYTES, if self.wipes { WIPED_BYTES } else { DATA_BYTES }];
        if self.has_separate_esp {
            RecordedDisk::acquire_separate(&parts)
        } else {
            RecordedDisk::acquire(&parts)
        }
    }
}

/// Counts the formats, and marks each call as a step.
#[derive(Debug, Default)]
struct CountedFormats {
    program: CryptsetupProgram,
    formats: AtomicUsize,
    recorded: Option<Arc<RecordedDisk>>,
}

impl Cryptsetup for CountedFormats {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        if call.action == "luksFormat" {
            self.formats.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(recorded) = &self.recorded {
            recorded.mark_step().unwrap();
        }
        self.program.run(call)
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        self.program.find_mapping(name)
    }
}

/// A machine with these partitions, after its start.
struct Machine<'a> {
    data: &'a Path,
    setup: VolumeSetup,
    cryptsetup: Arc<CountedFormats>,
    // Unmounted before its mount point is removed.
    esp: MountedPart,
    memory: NodeDirs,
}

impl<'a> Machine<'a> {
    fn start([esp, data]: [&'a Path; 2], setup: VolumeSetup) -> Result<Self> {
        let memory = start_memory();
        let esp = MountedPart::mount(&MountSpec::ESP, esp, memory.path("esp"))?;
        Ok(Self { data, setup, cryptsetup: Arc::default(), esp, memory })
    }

    fn volume(&self) -> LuksVolume {
        let config = LuksVolumeConfig {
            keys: KeyPolicy::Split,
            cryptsetup: self.cryptsetup.clone(),
            ..self.memory.luks_config(self.data, self.setup.encryption)
        };
        let volume = LuksVolume::new(config).with_mkfs(self.memory.path("mkfs"));
        let volume = volume.with_mapping_name(self.mapping_name());
        if self.setup.wipes { volume } else { volume.without_wipe() }
    }

    fn mapping_name(&self) -> String {
        format!("crypt-{}", self.data.file_name().unwrap_or_default().display())
    }

    /// Whether the volume or its mapping was formatted.
    fn was_formatted(&self) -> bool {
        self.cryptsetup.formats.load(Ordering::Relaxed) + format_count(&self.memory) > 0
    }

    fn sealed_keys(&self) -> Result<usize> {
        let names = fs::read_dir(&self.esp.target)?.map(|entry| Ok(entry?.file_name().into_string()));
        let names: io::Result<Vec<_>> = names.collect();
        Ok(names?.iter().filter(|name| name.as_ref().is_ok_and(|name| name.ends_with(".key"))).count())
    }
}

/// Closes what a failed check has left open.
impl Drop for Machine<'_> {
    fn drop(&mut self) {
        self.memory.close_volume(&self.mapping_name());
    }
}

/// Records work on a volume that does not exist yet, and checks its remains after each cut.
fn check_volume<T>(
    operation: &str,
    counts: [usize; 2],
    setup: VolumeSetup,
    work: impl FnOnce(&LuksVolume, &dyn Fn(&str) -> Result<()>) -> Result<T>,
    check: impl Fn(&Machine<'_>, &LuksVolume, &PowerCut, &T) -> Result<()>,
) -> Result<()> {
    let disk = Arc::new(setup.acquire_disk()?);
    command_output(Command::new("mkfs.vfat").arg(disk.part(0)))?;
    let worked = record_work(&disk, setup, work)?;
    let recording = Arc::into_inner(disk).context("the work is over")?.finish()?;
    recording.check_cuts(&CutPlan::new(operation, counts), |cut| {
        let machine = Machine::start([recording.part(0), recording.part(1)], setup)?;
        let volume = machine.volume();
        check(&machine, &volume, cut, &worked)
    })
}

/// Marks each change of a file and each call of cryptsetup, if the parts are on two disks.
fn record_work<T>(
    disk: &Arc<RecordedDisk>,
    setup: VolumeSetup,
    work: impl FnOnce(&LuksVolume, &dyn Fn(&str) -> Result<()>) -> Result<T>,
) -> Result<T> {
    let mut machine = Machine::start([disk.part(0), disk.part(1)], setup)?;
    let steps = setup.has_separate_esp.then(|| Arc::clone(disk));
    machine.cryptsetup = Arc::new(CountedFormats { recorded: steps.clone(), ..CountedFormats::default() });
    let volume = machine.volume();
    let mark_step = move |call: &'static str| {
        if let Some(disk) = steps.as_ref().filter(|_| !READS.contains(&call)) {
            disk.mark_step().unwrap();
        }
        SyscallAction::Proceed
    };
    let worked = with_failpoint_hook(mark_step, || work(&volume, &|mark| disk.mark(mark)))?;
    volume.unmount()?;
    Ok(worked)
}

/// Creates a volume with a witness; returns its cluster unlock key.
fn create_volume(volume: &LuksVolume, mark: &dyn Fn(&str) -> Result<()>) -> Result<UnlockSecret> {
    let (top, key) = volume.mount_new_with_key(ErasePolicy::Nothing)?;
    let secret = UnlockSecret::Cluster(key.context("a split volume has a cluster unlock key")?);
    mark("created")?;
    write_witness(&top)?;
    mark("witness")?;
    volume.confirm_secret(&secret)?;
    mark("confirmed")?;
    Ok(secret)
}

fn opens_with(volume: &LuksVolume, secret: &UnlockSecret, cut: &PowerCut) -> Result<()> {
    check_witness(&volume.mount_existing_with(secret)?, cut)?;
    Ok(volume.unmount()?)
}

/// The volume has the one slot of this secret.
fn has_only(volume: &LuksVolume, secret: &UnlockSecret, cut: &PowerCut) -> Result<()> {
    opens_with(volume, secret, cut)?;
    let slots = volume.encryption_status()?.slots;
    ensure!(slots.len() == 1 && !slots[0].is_stale, "{slots:?}");
    ensure!(volume.mount_existing().is_err(), "the node unlock key opens it alone");
    Ok(())
}

/// Returns the secret that opens the volume in the end.
fn check_creation(
    machine: &Machine<'_>,
    volume: &LuksVolume,
    cut: &PowerCut,
    secret: &UnlockSecret,
) -> Result<UnlockSecret> {
    if !cut.has_mark("created") {
        return resume_creation(machine, volume, cut);
    }
    opens_with(volume, secret, cut).context("open it with both keys")?;
    if !cut.has_mark("witness") {
        opens_with(volume, &UnlockSecret::Node, cut).context("open it by the temporary slot")?;
    }
    let again = volume.mount_new(ErasePolicy::Nothing);
    ensure!(matches!(again, Err(VolumeError::Occupied { .. })), "created again: {again:?}");
    volume.confirm_secret(secret).context("confirm the key")?;
    has_only(volume, secret, cut)?;
    ensure!(!machine.was_formatted(), "a volume with data was formatted");
    Ok(secret.clone())
}

/// The creation was not reported: it is complete, or resumes.
fn resume_creation(machine: &Machine<'_>, volume: &LuksVolume, cut: &PowerCut) -> Result<UnlockSecret> {
    let is_complete = volume.mount_existing().is_ok();
    volume.unmount()?;
    let key = match volume.mount_new_with_key(ErasePolicy::Nothing) {
        Ok((_, key)) if !is_complete => key,
        Err(VolumeError::Occupied { .. }) if is_complete => {
            ensure!(!machine.was_formatted(), "a complete volume was formatted");
            volume.rotate_keys(&UnlockSecret::Node).context("rotate the keys")?
        }
        Ok(_) => anyhow::bail!("a complete volume was created again"),
        Err(error) => return Err(error).context("the creation does not resume"),
    };
    volume.unmount()?;
    let secret = UnlockSecret::Cluster(key.context("a split volume has a cluster unlock key")?);
    volume.confirm_secret(&secret).context("confirm the key")?;
    has_only(volume, &secret, cut)?;
    Ok(secret)
}

fn check_creation_cuts(operation: &str, counts: [usize; 2], setup: VolumeSetup) {
    let work = |volume: &LuksVolume, mark: &dyn Fn(&str) -> Result<()>| {
        mark("prepared")?;
        create_volume(volume, mark)
    };
    let check = |machine: &Machine<'_>, volume: &LuksVolume, cut: &PowerCut, secret: &UnlockSecret| {
        let secret = check_creation(machine, volume, cut, secret)?;
        if setup.wipes { read_all_blocks(machine, volume, &secret) } else { Ok(()) }
    };
    check_volume(operation, counts, setup, work, check).unwrap();
}

/// Reads each block of the mapping: one that the wipe has left out is an error of the kernel.
fn read_all_blocks(machine: &Machine<'_>, volume: &LuksVolume, secret: &UnlockSecret) -> Result<()> {
    volume.mount_existing_with(secret)?;
    let mapping = machine.cryptsetup.find_mapping(&machine.mapping_name())?.context("no mapping is open")?;
    let mut device = File::open(&mapping.device_path)?;
    let mut chunk = vec![0; MIB as usize];
    let mut bytes = 0;
    loop {
        match device.read(&mut chunk).with_context(|| format!("read block {}", bytes / 4096))? {
            0 => break,
            count => bytes += count as u64,
        }
    }
    ensure!(bytes > WIPED_BYTES / 2, "the mapping has {bytes} bytes");
    drop(device);
    Ok(volume.unmount()?)
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn an_encrypted_volume_whose_creation_was_cut_resumes_and_one_with_data_is_never_formatted() {
    in_child_process(
        an_encrypted_volume_whose_creation_was_cut_resumes_and_one_with_data_is_never_formatted,
        || {
            check_creation_cuts("LuksVolume::mount_new", [1, 12], ENCRYPTED);
        },
    );
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB"]
fn an_authenticated_volume_whose_creation_was_cut_resumes() {
    in_child_process(an_authenticated_volume_whose_creation_was_cut_resumes, || {
        check_creation_cuts("LuksVolume::mount_new, authenticated", [1, 12], AUTHENTICATED);
    });
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB and 2 GiB of memory"]
fn an_authenticated_volume_whose_wipe_was_cut_is_wiped_again() {
    in_child_process(an_authenticated_volume_whose_wipe_was_cut_is_wiped_again, || {
        let setup = VolumeSetup { wipes: true, ..AUTHENTICATED };
        check_creation_cuts("LuksVolume::mount_new, authenticated and wiped", [1, 16], setup);
    });
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB"]
fn a_volume_whose_esp_is_on_another_disk_resumes_after_power_cuts() {
    in_child_process(a_volume_whose_esp_is_on_another_disk_resumes_after_power_cuts, || {
        let setup = VolumeSetup { has_separate_esp: true, ..ENCRYPTED };
        check_creation_cuts("LuksVolume::mount_new, ESP on another disk", [1, 24], setup);
    });
}

/// The number of rotations.
const ROTATIONS: usize = 2;

/// Rotates the keys of a volume; returns the cluster unlock keys, the first one included.
fn rotate_keys(volume: &LuksVolume, mark: &dyn Fn(&str) -> Result<()>) -> Result<Vec<UnlockSecret>> {
    let mut secrets = vec![create_volume(volume, mark)?];
    mark("prepared")?;
    for number in 1..=ROTATIONS {
        let key = volume.rotate_keys(&secrets[number - 1])?;
        let secret = UnlockSecret::Cluster(key.context("a split volume has a cluster unlock key")?);
        mark(&format!("rotated-{number}"))?;
        volume.confirm_secret(&secret)?;
        mark(&format!("confirmed-{number}"))?;
        secrets.push(secret);
    }
    Ok(secrets)
}

fn check_rotation(
    machine: &Machine<'_>,
    volume: &LuksVolume,
    cut: &PowerCut,
    secrets: &[UnlockSecret],
) -> Result<()> {
    let (rotated, confirmed) = (cut.last_number("rotated"), cut.last_number("confirmed"));
    opens_with(volume, &secrets[rotated], cut).context("open it with the newest key")?;
    if let Some(older) = confirmed.checked_sub(1) {
        ensure!(volume.mount_existing_with(&secrets[older]).is_err(), "a key that was replaced opens it");
    }
    let new = volume.rotate_keys(&secrets[rotated]).context("rotate again")?;
    let new = UnlockSecret::Cluster(new.context("a split volume has a cluster unlock key")?);
    volume.confirm_secret(&new).context("confirm the new key")?;
    has_only(volume, &new, cut)?;
    ensure!(machine.sealed_keys()? == 1, "{} node unlock keys remain", machine.sealed_keys()?);
    ensure!(!machine.was_formatted(), "a volume with data was formatted");
    Ok(())
}

fn check_rotation_cuts(operation: &str, counts: [usize; 2], setup: VolumeSetup) {
    check_volume(operation, counts, setup, rotate_keys, |machine, volume, cut, secrets| {
        check_rotation(machine, volume, cut, secrets)
    })
    .unwrap();
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_rotation_that_was_cut_leaves_a_key_that_opens_the_volume_and_can_be_repeated() {
    in_child_process(a_rotation_that_was_cut_leaves_a_key_that_opens_the_volume_and_can_be_repeated, || {
        check_rotation_cuts("LuksVolume::rotate_keys", [1, 16], ENCRYPTED)
    });
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB"]
fn a_rotation_of_an_authenticated_volume_leaves_a_key_that_opens_it() {
    in_child_process(a_rotation_of_an_authenticated_volume_leaves_a_key_that_opens_it, || {
        check_rotation_cuts("LuksVolume::rotate_keys, authenticated", [1, 16], AUTHENTICATED);
    });
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB"]
fn a_rotation_whose_esp_is_on_another_disk_leaves_a_key_that_opens_the_volume() {
    in_child_process(a_rotation_whose_esp_is_on_another_disk_leaves_a_key_that_opens_the_volume, || {
        let setup = VolumeSetup { has_separate_esp: true, ..ENCRYPTED };
        check_rotation_cuts("LuksVolume::rotate_keys, ESP on another disk", [1, 24], setup);
    });
}
