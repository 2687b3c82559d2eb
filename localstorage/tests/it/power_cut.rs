//! Power cuts below the file system: a disk whose writes are logged, and replayed up to any of them.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_localstorage::mount::{MountFlags, MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::step_journal::StepJournal;
use nodekeel_localstorage::{Dir, FileMode};
use tempfile::TempDir;
use testbed::command_output;
use testbed::guest::disk::GuestDisk;

use crate::fixture::{in_child_process, runs_whole_counts};

const SECTOR_BYTES: usize = 512;
/// The size of the logged disk: small, since each cut writes all of it.
const DISK_BYTES: usize = 8 << 20;
/// The number of power cuts for each way to mount: a sample, and the whole count.
const CUTS: [usize; 2] = [40, 200];
/// The number of ways in which writes are lost at each moment, from which the cuts are sampled.
const WAYS: usize = 8;
/// The number of states that are recorded.
const STATES: usize = 10;

/// A disk, and another one with the log of its writes. *Source:* Linux
/// `Documentation/admin-guide/device-mapper/log-writes.rst`.
struct LoggedDisk {
    disks: Vec<GuestDisk>,
    name: String,
    device_path: PathBuf,
}

impl LoggedDisk {
    fn create(disks: Vec<GuestDisk>) -> LoggedDisk {
        let name = format!("logged-{}", disks[0].device_path().file_name().unwrap().display());
        command_output(Command::new("modprobe").arg("dm-log-writes")).unwrap();
        let zeroed = vec![0; DISK_BYTES];
        for disk in &disks {
            File::options().write(true).open(disk.device_path()).unwrap().write_all_at(&zeroed, 0).unwrap();
        }
        let [disk, log] = [0, 1].map(|index| disks[index].device_path().display().to_string());
        let table = format!("0 {} log-writes {disk} {log}", DISK_BYTES / SECTOR_BYTES);
        run_dmsetup(&["create", &name, "--noudevsync", "--table", &table]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", &name])
            .trim()
            .to_owned();
        LoggedDisk { disks, name, device_path: format!("/dev/dm-{minor}").into() }
    }

    /// Writes a mark into the log, behind all writes that were flushed.
    fn mark(&self, text: &str) {
        run_dmsetup(&["message", &self.name, "0", &format!("mark {text}")]);
    }

    /// Ends the log; returns the plain disk and the entries.
    fn finish(self) -> (Vec<GuestDisk>, Vec<LogEntry>) {
        run_dmsetup(&["remove", "--noudevsync", "--retry", &self.name]);
        let entries = read_log(self.disks[1].device_path());
        (self.disks, entries)
    }
}

fn run_dmsetup(arguments: &[&str]) -> String {
    command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1")).unwrap()
}

enum LogEntry {
    Mark(String),
    Write {
        offset: usize,
        bytes: Vec<u8>,
        /// All earlier writes are durable.
        is_flush: bool,
        /// This write is durable.
        is_durable: bool,
    },
}

fn read_log(path: &Path) -> Vec<LogEntry> {
    const MAGIC: u64 = 0x006a_7366_7773_6872;
    let mut log = File::open(path).unwrap();
    let mut sector = [0; SECTOR_BYTES];
    let number = |sector: &[u8], at: usize| u64::from_le_bytes(sector[at * 8..][..8].try_into().unwrap());
    log.read_exact(&mut sector).unwrap();
    assert_eq!((number(&sector, 0), number(&sector, 1)), (MAGIC, 1), "a log of writes");
    let count = number(&sector, 2);
    let mut entries = Vec::new();
    for _ in 0..count {
        log.read_exact(&mut sector).unwrap();
        let [offset, sectors, flags, data] = [0, 1, 2, 3].map(|at| number(&sector, at) as usize);
        let has_flag = |bit: u32| flags & (1 << bit) != 0;
        entries.push(match has_flag(3) {
            true => {
                LogEntry::Mark(String::from_utf8_lossy(&sector[32..32 + data]).trim_end_matches('\0').into())
            }
            false => {
                // A discarded range has no data.
                let mut bytes = vec![0; sectors * SECTOR_BYTES];
                if !has_flag(2) {
                    log.read_exact(&mut bytes).unwrap();
                }
                let (is_flush, is_durable) = (has_flag(0), has_flag(1));
                LogEntry::Write { offset: offset * SECTOR_BYTES, bytes, is_flush, is_durable }
            }
        });
    }
    entries
}

/// The disk after a power cut before the entry `cut`: writes since the last flush may be lost, each sector by
/// itself.
fn image_after_cut(entries: &[LogEntry], (cut, way): (usize, usize)) -> Vec<u8> {
    let entries = &entries[..cut];
    let last_flush =
        entries.iter().rposition(|entry| matches!(entry, LogEntry::Write { is_flush: true, .. }));
    let mut image = vec![0; DISK_BYTES];
    for (index, entry) in entries.iter().enumerate() {
        let LogEntry::Write { offset, bytes, is_durable, .. } = entry else { continue };
        let is_kept = last_flush.is_some_and(|flush| index < flush) || *is_durable;
        for (number, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            // A write is kept, lost or torn.
            let fate = hash((cut, way, index)) % 3;
            if is_kept || fate == 0 || fate == 1 && hash((cut, way, index, number)) % 2 == 0 {
                image[offset + number * SECTOR_BYTES..][..sector.len()].copy_from_slice(sector);
            }
        }
    }
    image
}

fn hash(value: impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// States of different lengths: within a cluster and over many, longer and shorter than the one before.
fn numbered_state(number: usize) -> Vec<u8> {
    let length = [20, 600, 3000, 100, 5000, 4000, 9000, 30, 15_000, 60_000][number % 10];
    vec![number as u8; length]
}

fn recorded_number(journal: &StepJournal) -> usize {
    let Some(state) = journal.committed_state() else { return 0 };
    let number = usize::from(state[0]);
    assert!(state == numbered_state(number), "state {number} is mixed");
    number
}

/// A disk, with all writes of some work on a new vfat.
struct Recording<'a> {
    spec: &'a MountSpec,
    disks: Vec<GuestDisk>,
    entries: Vec<LogEntry>,
    temporary: TempDir,
}

impl<'a> Recording<'a> {
    fn of_work(spec: &'a MountSpec, work: impl FnOnce(&Dir, &LoggedDisk)) -> Self {
        let logged = LoggedDisk::create(GuestDisk::acquire_many(2).unwrap());
        let temporary = tempfile::tempdir().unwrap();
        // Clusters of one sector, so that each file has many.
        command_output(Command::new("mkfs.vfat").args(["-s", "1"]).arg(&logged.device_path)).unwrap();
        let target = mount_target(&temporary);
        fs::create_dir(&target).unwrap();
        OsMounter.mount(spec, Some(&logged.device_path), &target).unwrap();
        logged.mark("mounted");
        work(&Dir::open(&target).unwrap(), &logged);
        OsMounter.unmount(&target).unwrap();
        let (disks, entries) = logged.finish();
        Self { spec, disks, entries, temporary }
    }

    /// The entry behind a mark.
    fn position(&self, text: &str) -> usize {
        let is_it = |entry: &LogEntry| matches!(entry, LogEntry::Mark(mark) if mark == text);
        self.entries.iter().position(is_it).expect("the mark was written") + 1
    }

    /// The numbers of the states that were recorded before the cut.
    fn recorded_before(&self, cut: usize) -> usize {
        (1..=STATES).filter(|number| self.position(&recorded_mark(*number)) <= cut).max().unwrap_or(0)
    }

    /// Mounts the disk after each of the cuts, or after a sample of them, and checks it.
    fn check_cuts(
        &self,
        cuts: impl Iterator<Item = usize>,
        check: impl Fn(&Path, usize) -> anyhow::Result<()>,
    ) {
        let cuts: Vec<_> = cuts.flat_map(|cut| (0..WAYS).map(move |way| (cut, way))).collect();
        let step = cuts.len().div_ceil(CUTS[usize::from(runs_whole_counts())]);
        println!("{} entries, every {step}th cut of {}", self.entries.len(), cuts.len());
        let (disk, target) = (self.disks[0].device_path(), mount_target(&self.temporary));
        let mut failures = Vec::new();
        for (cut, way) in cuts.into_iter().step_by(step) {
            let recorded = self.recorded_before(cut);
            let file = File::options().write(true).open(disk).unwrap();
            file.write_all_at(&image_after_cut(&self.entries, (cut, way)), 0).unwrap();
            file.sync_all().unwrap();
            drop(file);
            OsMounter.mount(self.spec, Some(disk), &target).unwrap();
            if let Err(error) = check(&target, recorded) {
                failures.push(format!("cut at {cut} ({way}), {recorded} recorded: {error:#}"));
            }
            OsMounter.unmount(&target).unwrap();
        }
        assert!(failures.is_empty(), "{} cuts failed:\n{}", failures.len(), failures.join("\n"));
    }
}

fn mount_target(temporary: &TempDir) -> PathBuf {
    temporary.path().canonicalize().unwrap().join("esp")
}

fn recorded_mark(number: usize) -> String {
    format!("recorded-{number}")
}

/// Commits states on a logged vfat, then opens the journal after many power cuts.
fn check_journal_on_vfat(spec: &MountSpec) {
    let recording = Recording::of_work(spec, |dir, logged| {
        let mut journal = StepJournal::open(dir, "journal").unwrap();
        for number in 1..=STATES {
            journal.commit(&numbered_state(number)).unwrap();
            logged.mark(&recorded_mark(number));
        }
    });
    let is_open = |cut: &usize| {
        !matches!(recording.entries[cut - 1], LogEntry::Mark(_) | LogEntry::Write { is_flush: true, .. })
    };
    let cuts = recording.position("mounted")..=recording.entries.len();
    recording.check_cuts(cuts.filter(is_open), open_and_commit);
}

/// The journal has the last committed state or the next one, and can be continued.
fn open_and_commit(target: &Path, committed: usize) -> anyhow::Result<()> {
    let dir = Dir::open(target)?;
    let mut journal = StepJournal::open(&dir, "journal")?;
    let recorded = recorded_number(&journal);
    anyhow::ensure!((committed..=committed + 1).contains(&recorded), "state {recorded} is recorded");
    for next in [recorded + 1, recorded + 2] {
        journal.commit(&numbered_state(next))?;
        drop(journal);
        journal = StepJournal::open(&dir, "journal")?;
        anyhow::ensure!(recorded_number(&journal) == next, "the next commit was lost");
    }
    Ok(())
}

/// Replaces a file on a logged vfat; a power cut right after each replacement finds the new content. Cuts in
/// the middle of one are not checked: there a rename is not atomic.
fn check_replacement_on_vfat(spec: &MountSpec) {
    let recording = Recording::of_work(spec, |dir, logged| {
        for number in 1..=STATES {
            dir.write("file", &numbered_state(number), FileMode::PRIVATE_FILE).unwrap();
            logged.mark(&recorded_mark(number));
        }
    });
    let cuts = (1..=STATES).map(|number| recording.position(&recorded_mark(number)));
    recording.check_cuts(cuts, |target, written| {
        let content = Dir::open(target)?.read("file")?;
        anyhow::ensure!(content == numbered_state(written), "the file has {} other bytes", content.len());
        Ok(())
    });
}

/// The ESP without `sync`.
fn asynchronous_spec() -> MountSpec {
    MountSpec { flags: MountFlags::NOSUID, ..MountSpec::ESP }
}

// Each test takes two disks. The guest has two more, so that others run beside it.
#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_journal_on_vfat_has_its_last_state_after_power_cuts() {
    in_child_process("power_cut::a_journal_on_vfat_has_its_last_state_after_power_cuts", || {
        check_journal_on_vfat(&asynchronous_spec());
    });
}

#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_journal_on_a_synchronous_vfat_has_its_last_state_after_power_cuts() {
    in_child_process(
        "power_cut::a_journal_on_a_synchronous_vfat_has_its_last_state_after_power_cuts",
        || {
            check_journal_on_vfat(&MountSpec::ESP);
        },
    );
}

#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_replaced_file_on_vfat_has_its_new_content_after_power_cuts() {
    in_child_process("power_cut::a_replaced_file_on_vfat_has_its_new_content_after_power_cuts", || {
        for spec in [asynchronous_spec(), MountSpec::ESP] {
            check_replacement_on_vfat(&spec);
        }
    });
}
