//! Faults of the open data volume: what the kernel reports of its devices stays a problem until an operator has looked at it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::stat::{major, minor};
use std::time::Instant;

use nodekeel_localstorage::{Dir, FileMode};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::spawn_blocking;

use super::error::StorageError;
use super::opener::VolumeOpener;
use crate::device_faults::{DeviceFault, DeviceFaults, FaultKind};
use crate::dn::STORAGE;
use crate::error_chain::error_chain;
use crate::health::HealthChanges;

/// The name of the record, in `esp/`: a restart does not make a fault undone.
const RECORD_FILE: &str = "data-volume.faults";
/// Far more than the lines of a few devices.
const MAX_RECORD_BYTES: u64 = 4096;
const HEADER: &str = "nodekeel faults of the data volume, format 1";

type Faults = BTreeMap<(FaultKind, String), FaultCount>;

/// The faults that no operator has acknowledged. Cheap to clone; all clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct VolumeFaults(Arc<Mutex<Faults>>);

/// The faults of one kind on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FaultCount {
    /// At least so many: the kernel limits the rate of its lines.
    count: u64,
    sectors: Option<RangeInclusive<u64>>,
}

impl VolumeFaults {
    /// Those that an earlier program has recorded. What can't be read of the record is a fault of an unknown device.
    pub(super) fn read_from(esp: &Dir) -> Self {
        let faults = match esp.read_at_most(RECORD_FILE, MAX_RECORD_BYTES) {
            Ok(text) => parse_record(&String::from_utf8_lossy(&text)),
            Err(error) if error.is_not_found() => BTreeMap::new(),
            Err(error) => {
                tracing::warn!(
                    dn = STORAGE,
                    "can't read which faults the data volume has had: {}",
                    error_chain(&error)
                );
                BTreeMap::from([unknown_fault()])
            }
        };
        Self(Arc::new(Mutex::new(faults)))
    }

    /// Follows the faults of the devices below a file system, as long as it is open.
    pub(super) async fn follow(
        &self,
        faults: &DeviceFaults,
        file_system: u64,
        opener: &VolumeOpener,
        health: &HealthChanges,
    ) -> Infallible {
        let (mut lines, opened_at) = (faults.subscribe(), Instant::now());
        loop {
            let fault = match lines.recv().await {
                // What was read while the volume was being made or opened: no data of its files.
                Ok((at, _)) if at < opened_at => continue,
                Ok((_, fault)) => fault,
                // Those that follow tell the same.
                Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => std::future::pending().await,
            };
            if devices_below(file_system).iter().any(|device| device.has(&fault))
                && self.add(name_mapping(Path::new("/sys"), fault))
            {
                let (known, opener, health) = (self.clone(), opener.clone(), health.clone());
                // It fails only if it panics.
                let _ = spawn_blocking(move || known.announce(&opener, &health)).await;
            }
        }
    }

    /// Logs and records the faults, as the problem that they are. It blocks.
    pub(super) fn announce(&self, opener: &VolumeOpener, health: &HealthChanges) {
        tracing::error!(dn = STORAGE, "the data volume {}", self.describe().unwrap_or_default());
        health.announce();
        if let Err(error) = opener.esp().and_then(|esp| self.record(esp)) {
            tracing::warn!(
                dn = STORAGE,
                "can't record the faults of the data volume: {}",
                error_chain(&error)
            );
        }
    }

    /// Counts a fault. Returns whether it is to be told: the first one of its kind and device, and each time that they have
    /// doubled.
    fn add(&self, fault: DeviceFault) -> bool {
        self.update(fault, |count| count.saturating_add(1))
    }

    /// The same for the last one of so many, which the kernel may have reported, too.
    pub(super) fn add_at_least(&self, fault: DeviceFault, count: u64) -> bool {
        self.update(fault, |known| known.max(count))
    }

    fn update(&self, fault: DeviceFault, count: impl FnOnce(u64) -> u64) -> bool {
        let mut known = self.lock();
        let DeviceFault { device, kind, sector } = fault;
        let entry = known.entry((kind, device)).or_insert(FaultCount { count: 0, sectors: None });
        let before = entry.count;
        entry.count = count(before);
        if let Some(sector) = sector {
            let (first, last) = entry.sectors.clone().map_or((sector, sector), RangeInclusive::into_inner);
            entry.sectors = Some(first.min(sector)..=last.max(sector));
        }
        entry.count.checked_ilog2() != before.checked_ilog2()
    }

    pub(super) fn record(&self, esp: &Dir) -> Result<(), StorageError> {
        let mut text = format!("{HEADER}\n");
        for ((kind, device), FaultCount { count, sectors }) in &*self.lock() {
            let sectors = sectors.as_ref().map(|range| format!(" {} {}", range.start(), range.end()));
            text += &format!("{} {device} {count}{}\n", kind.name(), sectors.unwrap_or_default());
        }
        esp.write(RECORD_FILE, text.as_bytes(), FileMode::PRIVATE_FILE).map_err(StorageError::Record)
    }

    /// Forgets all, also the record, and returns what it has forgotten. It blocks.
    pub(super) fn acknowledge(&self, esp: &Dir) -> Result<Vec<String>, StorageError> {
        esp.remove_file(RECORD_FILE).map_err(StorageError::Record)?;
        Ok(describe_all(&std::mem::take(&mut *self.lock())))
    }

    /// A line for each kind and device; empty without faults.
    pub(super) fn lines(&self) -> Vec<String> {
        describe_all(&self.lock())
    }

    /// All of them in a clause about the volume; `None` without faults.
    pub(super) fn describe(&self) -> Option<String> {
        let lines = self.lines();
        (!lines.is_empty()).then(|| format!("has had {}", lines.join("; ")))
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe_all(faults: &Faults) -> Vec<String> {
    let line = |((kind, device), found): (&(FaultKind, String), &FaultCount)| {
        let what = match kind {
            FaultKind::Unauthentic => "reads of data that nobody with its key has written",
            FaultKind::Failed => "failed reads or writes",
            FaultKind::FileSystem => "reports of a damaged file system",
        };
        let sectors = found.sectors.as_ref().map(|range| match range.clone().into_inner() {
            (first, last) if first == last => format!(", sector {first}"),
            (first, last) => format!(", sectors {first} to {last}"),
        });
        format!("at least {} {what}: {device}{}", found.count, sectors.unwrap_or_default())
    };
    faults.iter().map(line).collect()
}

fn unknown_fault() -> ((FaultKind, String), FaultCount) {
    ((FaultKind::Failed, "unknown device".to_owned()), FaultCount { count: 1, sectors: None })
}

fn parse_record(text: &str) -> Faults {
    let parse = |line: &str| {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let kind = FaultKind::ALL.into_iter().find(|known| known.name() == kind)?;
        let device = words.next()?.to_owned();
        let mut number = || words.next()?.parse().ok();
        let count = number().filter(|count| *count > 0)?;
        let sectors =
            number().zip(number()).map(|(first, last)| first..=last).filter(|range| !range.is_empty());
        Some(((kind, device), FaultCount { count, sectors }))
    };
    let mut lines = text.lines();
    let has_header = lines.next() == Some(HEADER);
    let mut faults: Faults = lines.map(|line| parse(line).unwrap_or_else(unknown_fault)).collect();
    // A record is written with a fault.
    if !has_header || faults.is_empty() {
        faults.extend([unknown_fault()]);
    }
    faults
}

/// Reads at each scrape how many faults nobody has acknowledged.
#[derive(Debug)]
pub(super) struct FaultCollector(pub(super) VolumeFaults);

impl Collector for FaultCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Faults of the data volume that the kernel has reported and nobody has acknowledged";
        let mut faults = encoder.encode_descriptor("storage_faults", help, None, MetricType::Gauge)?;
        for kind in FaultKind::ALL {
            let known = self.0.lock();
            let counts = known.iter().filter(|((of, _), _)| *of == kind).map(|(_, found)| found.count);
            let count = counts.fold(0, u64::saturating_add);
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            ConstGauge::new(count).encode(faults.encode_family(&[("kind", kind.name())])?)?;
        }
        Ok(())
    }
}

/// A device, or the part of one that a partition is.
#[derive(Debug, PartialEq, Eq)]
struct DevicePart {
    name: String,
    /// The sectors of 512 bytes; all without.
    sectors: Option<RangeInclusive<u64>>,
}

impl DevicePart {
    fn has(&self, fault: &DeviceFault) -> bool {
        let is_inside =
            |sectors: &RangeInclusive<u64>| fault.sector.is_some_and(|sector| sectors.contains(&sector));
        self.name == fault.device && self.sectors.as_ref().is_none_or(is_inside)
    }
}

/// The devices that a file system is on, by its `st_dev`: its own, and those below it. None for one without a device.
fn devices_below(file_system: u64) -> Vec<DevicePart> {
    let device = Path::new("/sys/dev/block").join(format!("{}:{}", major(file_system), minor(file_system)));
    let mut found = Vec::new();
    let mut pending: Vec<PathBuf> = device.canonicalize().into_iter().collect();
    while let Some(path) = pending.pop() {
        let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { continue };
        if found.iter().any(|part: &DevicePart| part.name == name) {
            continue;
        }
        found.push(DevicePart { name, sectors: None });
        let slaves = fs::read_dir(path.join("slaves")).into_iter().flatten().flatten();
        pending.extend(slaves.filter_map(|slave| slave.path().canonicalize().ok()));
        // The kernel reports a partition's faults by its disk.
        let number = |file: &str| fs::read_to_string(path.join(file)).ok()?.trim().parse::<u64>().ok();
        if let (true, Some(start), Some(size)) =
            (path.join("partition").exists(), number("start"), number("size"))
            && let Some(disk) = path.parent().and_then(Path::file_name)
        {
            let sectors = Some(start..=start.saturating_add(size).saturating_sub(1));
            found.push(DevicePart { name: disk.to_string_lossy().into_owned(), sectors });
        }
    }
    found
}

/// Names a block that can't be authenticated by the mapping that can be read. Some kernels name the one below it, which has the
/// tags, with the sector of the mapping; who reads the mapping, as a scrub does, would count the block again.
fn name_mapping(sys: &Path, mut fault: DeviceFault) -> DeviceFault {
    let name_of = |device: &Path| fs::read_to_string(device.join("dm/name")).unwrap_or_default();
    let device = sys.join("block").join(&fault.device);
    // *Source:* cryptsetup `INTEGRITY_DEVICE_SUFFIX`.
    if fault.kind == FaultKind::Unauthentic
        && let Some(mapping) = name_of(&device).trim_end().strip_suffix("_dif")
    {
        let mut holders = fs::read_dir(device.join("holders")).into_iter().flatten().flatten();
        if let Some(holder) = holders.find(|holder| name_of(&holder.path()).trim_end() == mapping) {
            fault.device = holder.file_name().to_string_lossy().into_owned();
        }
    }
    fault
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(kind: FaultKind, device: &str, sector: Option<u64>) -> DeviceFault {
        DeviceFault { device: device.to_owned(), kind, sector }
    }

    #[test]
    fn faults_are_counted_recorded_and_forgotten_when_they_are_acknowledged() {
        let scratch = tempfile::tempdir().expect("a directory");
        let esp = Dir::open(scratch.path()).expect("there");
        let faults = VolumeFaults::read_from(&esp);
        assert_eq!(faults.describe(), None);
        let new: Vec<bool> = [
            fault(FaultKind::Unauthentic, "dm-1", Some(4096)),
            fault(FaultKind::Unauthentic, "dm-1", Some(80)),
            fault(FaultKind::FileSystem, "dm-1", None),
        ]
        .into_iter()
        .map(|fault| faults.add(fault))
        .collect();
        assert_eq!(new, [true, true, true]);
        assert!(!faults.add(fault(FaultKind::Unauthentic, "dm-1", Some(81))), "the third one");
        let found = || fault(FaultKind::Unauthentic, "dm-1", Some(82));
        assert!(!faults.add_at_least(found(), 3), "as many as are known");
        assert!(faults.add_at_least(found(), 5), "more than twice as many");
        let lines = [
            "at least 5 reads of data that nobody with its key has written: dm-1, sectors 80 to 4096",
            "at least 1 reports of a damaged file system: dm-1",
        ];
        assert_eq!(faults.lines(), lines);
        faults.record(&esp).expect("written");
        assert_eq!(VolumeFaults::read_from(&esp).lines(), lines);
        assert_eq!(faults.acknowledge(&esp).expect("removed"), lines);
        assert_eq!(faults.lines(), Vec::<String>::new());
        assert_eq!(VolumeFaults::read_from(&esp).lines(), Vec::<String>::new());
        assert_eq!(faults.acknowledge(&esp).expect("again"), Vec::<String>::new());
    }

    #[test]
    fn a_block_that_can_not_be_authenticated_is_named_by_the_mapping_above_its_tags() {
        let scratch = tempfile::tempdir().expect("a directory");
        let sys = scratch.path();
        for (device, name) in
            [("block/dm-0", "data_dif\n"), ("block/dm-0/holders/dm-1", "data\n"), ("block/dm-2", "x_dif\n")]
        {
            let dm = sys.join(device).join("dm");
            fs::create_dir_all(&dm).and_then(|()| fs::write(dm.join("name"), name)).expect("written");
        }
        for (kind, device, named) in [
            (FaultKind::Unauthentic, "dm-0", "dm-1"),
            (FaultKind::Failed, "dm-0", "dm-0"),
            (FaultKind::Unauthentic, "dm-1", "dm-1"),
            (FaultKind::Unauthentic, "dm-2", "dm-2"),
        ] {
            let named_fault = name_mapping(sys, fault(kind, device, Some(8)));
            assert_eq!((named_fault.device.as_str(), named_fault.sector), (named, Some(8)), "{device}");
        }
    }

    #[test]
    fn a_line_of_the_record_that_can_not_be_read_is_a_fault() {
        for text in ["", HEADER, "x", "failed dm-1 1"] {
            assert_eq!(parse_record(text).into_iter().next(), Some(unknown_fault()), "{text}");
        }
        for line in ["", "x", "unauthentic dm-1", "failed dm-1 x", "failed dm-1 0", "\0"] {
            assert_eq!(parse_record(&format!("{HEADER}\n{line}\n")), [unknown_fault()].into(), "{line}");
        }
        let scratch = tempfile::tempdir().expect("a directory");
        let esp = Dir::open(scratch.path()).expect("there");
        let record = scratch.path().join(RECORD_FILE);
        fs::write(&record, "x".repeat(5000)).expect("written");
        assert_eq!(VolumeFaults::read_from(&esp).lines().len(), 1, "too long");
        fs::remove_file(&record).and_then(|()| fs::create_dir(&record)).expect("made");
        assert_eq!(VolumeFaults::read_from(&esp).lines().len(), 1, "no file");
    }

    #[test]
    fn a_disks_fault_is_that_of_the_partition_in_which_its_sector_is() {
        let part = DevicePart { name: "vdb".into(), sectors: Some(2048..=4095) };
        for (device, sector, is_of) in [
            ("vdb", Some(2048), true),
            ("vdb", Some(4096), false),
            ("vda", Some(2048), false),
            ("vdb", None, false),
        ] {
            assert_eq!(part.has(&fault(FaultKind::Failed, device, sector)), is_of, "{device} {sector:?}");
        }
        assert_eq!(devices_below(0), [], "one without a device");
    }
}
