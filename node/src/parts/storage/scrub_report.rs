//! The report of a scrub, and its record in `esp/`.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_localstorage::{Dir, FileMode};

use super::error::StorageError;
use crate::dn::STORAGE;
use crate::error_chain::error_chain;

/// The name of the record: a restart does not make a scrub undone.
const RECORD_FILE: &str = "data-volume.scrub";
const MAX_RECORD_BYTES: u64 = 4096;
const HEADER: &str = "nodekeel scrub of the data volume, format 1";
/// The unreadable ranges that are kept with their places.
const KEPT_RANGES: usize = 8;

/// The end of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScrubEnd {
    Complete,
    Canceled,
    /// The volume was closed.
    Closed,
    /// The device has gone.
    Failed,
}

impl ScrubEnd {
    const ALL: [Self; 4] = [Self::Complete, Self::Canceled, Self::Closed, Self::Failed];

    /// Its name in records and answers.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Canceled => "canceled",
            Self::Closed => "closed",
            Self::Failed => "failed",
        }
    }
}

/// A scrub, as far as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ScrubReport {
    /// The kernel's name of the device.
    pub(super) device: String,
    pub(super) began: SystemTime,
    /// When it ended, and how; `None` while it runs.
    pub(super) ended: Option<(SystemTime, ScrubEnd)>,
    pub(super) done_bytes: u64,
    pub(super) device_bytes: u64,
    /// Adjacent blocks are one range.
    pub(super) unreadable_ranges: u64,
    pub(super) unreadable_bytes: u64,
    /// The first few, in bytes of the device.
    pub(super) first_unreadable: Vec<Range<u64>>,
    /// The end of the last range that was added.
    last_unreadable: Option<u64>,
}

impl ScrubReport {
    pub(super) fn begin(device: String, device_bytes: u64, began: SystemTime) -> Self {
        let (done_bytes, unreadable_ranges, unreadable_bytes) = Default::default();
        let (first_unreadable, last_unreadable) = Default::default();
        Self {
            device,
            began,
            ended: None,
            done_bytes,
            device_bytes,
            unreadable_ranges,
            unreadable_bytes,
            first_unreadable,
            last_unreadable,
        }
    }

    pub(super) fn end(self, end: ScrubEnd, at: SystemTime) -> Self {
        Self { ended: Some((at, end)), ..self }
    }

    /// Adds a range behind those before.
    pub(super) fn add_unreadable(&mut self, range: Range<u64>) {
        self.unreadable_bytes += range.end - range.start;
        if self.last_unreadable.replace(range.end) != Some(range.start) {
            self.unreadable_ranges += 1;
            if self.first_unreadable.len() < KEPT_RANGES {
                self.first_unreadable.push(range);
            }
        } else if self.unreadable_ranges == self.first_unreadable.len() as u64
            && let Some(last) = self.first_unreadable.last_mut()
        {
            last.end = range.end;
        }
    }

    /// The last one that was recorded. A damaged record counts as none.
    pub(super) fn read_from(esp: &Dir) -> Option<Self> {
        match esp.read_at_most(RECORD_FILE, MAX_RECORD_BYTES) {
            Ok(text) => {
                let report = parse(&String::from_utf8_lossy(&text));
                if report.is_none() {
                    tracing::warn!(dn = STORAGE, "esp/{RECORD_FILE} is damaged: the last scrub is not known");
                }
                report
            }
            Err(error) if error.is_not_found() => None,
            Err(error) => {
                tracing::warn!(dn = STORAGE, "can't read the last scrub: {}", error_chain(&error));
                None
            }
        }
    }

    pub(super) fn write_to(&self, esp: &Dir) -> Result<(), StorageError> {
        esp.write(RECORD_FILE, self.encode().as_bytes(), FileMode::PRIVATE_FILE).map_err(StorageError::Record)
    }

    /// The last scrub is of another volume from now on.
    pub(super) fn remove_from(esp: &Dir) -> Result<(), StorageError> {
        esp.remove_file(RECORD_FILE).map(drop).map_err(StorageError::Record)
    }

    fn encode(&self) -> String {
        let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut text = format!("{HEADER}\ndevice = {}\nbegan = {}\n", self.device, seconds(self.began));
        if let Some((at, end)) = self.ended {
            text += &format!("ended = {}\nend = {}\n", seconds(at), end.name());
        }
        text += &format!("done_bytes = {}\ndevice_bytes = {}\n", self.done_bytes, self.device_bytes);
        text += &format!("unreadable = {} {}\n", self.unreadable_ranges, self.unreadable_bytes);
        text.extend(
            self.first_unreadable.iter().map(|range| format!("at = {} {}\n", range.start, range.end)),
        );
        text
    }
}

fn parse(text: &str) -> Option<ScrubReport> {
    let mut lines = text.strip_suffix('\n')?.lines();
    (lines.next()? == HEADER).then_some(())?;
    let mut value = |key: &str| lines.next()?.strip_prefix(key)?.strip_prefix(" = ");
    let time = |text: &str| UNIX_EPOCH.checked_add(Duration::from_secs(text.parse().ok()?));
    let device = value("device")?.to_owned();
    let began = time(value("began")?)?;
    let ended = time(value("ended")?)?;
    let end = value("end")?;
    let end = ScrubEnd::ALL.into_iter().find(|known| known.name() == end)?;
    let (done_bytes, device_bytes) =
        (value("done_bytes")?.parse().ok()?, value("device_bytes")?.parse().ok()?);
    let (ranges, bytes) = value("unreadable")?.split_once(' ')?;
    let at = |line: &str| {
        let (start, end) = line.strip_prefix("at = ")?.split_once(' ')?;
        Some(start.parse().ok()?..end.parse().ok()?).filter(|range| !range.is_empty())
    };
    let first_unreadable: Vec<_> = lines.map(at).collect::<Option<_>>()?;
    (first_unreadable.len() <= KEPT_RANGES).then_some(ScrubReport {
        device,
        began,
        ended: Some((ended, end)),
        done_bytes,
        device_bytes,
        unreadable_ranges: ranges.parse().ok()?,
        unreadable_bytes: bytes.parse().ok()?,
        first_unreadable,
        last_unreadable: None,
    })
}

/// As the end of a sentence: "complete: read 10 of …".
impl fmt::Display for ScrubReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.ended.map_or("running", |(_, end)| end.name());
        write!(f, "{end}, {} of {} bytes of {} read, ", self.done_bytes, self.device_bytes, self.device)?;
        write!(f, "{} bytes in {} ranges unreadable", self.unreadable_bytes, self.unreadable_ranges)?;
        let [first, ..] = &*self.first_unreadable else { return Ok(()) };
        write!(f, ", the first one at byte {}", first.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn report(blocks: &[u64]) -> ScrubReport {
        let mut report = ScrubReport::begin("dm-1".to_owned(), 1 << 20, UNIX_EPOCH + Duration::from_secs(7));
        report.done_bytes = 1 << 19;
        blocks.iter().for_each(|block| report.add_unreadable(block * 4096..block * 4096 + 4096));
        report.end(ScrubEnd::Canceled, UNIX_EPOCH + Duration::from_secs(9))
    }

    #[test]
    fn adjacent_blocks_are_one_range_and_only_the_first_ranges_are_kept() {
        let few = report(&[1, 2, 4]);
        assert_eq!((few.unreadable_ranges, few.unreadable_bytes), (2, 12288));
        assert_eq!(few.first_unreadable, [4096..12288, 16384..20480]);
        let blocks: Vec<u64> = (0..10).map(|at| at * 2).chain([19, 20]).collect();
        let many = report(&blocks);
        assert_eq!((many.unreadable_ranges, many.first_unreadable.len()), (10, KEPT_RANGES));
        assert_eq!(
            many.first_unreadable.last(),
            Some(&(14 * 4096..15 * 4096)),
            "the ninth one is not its end"
        );
    }

    #[test]
    fn a_record_is_read_back_and_one_that_is_cut_off_counts_as_none() {
        let scratch = tempfile::tempdir().expect("a directory");
        let esp = Dir::open(scratch.path()).expect("there");
        assert_eq!(ScrubReport::read_from(&esp), None);
        let written = ScrubReport { last_unreadable: None, ..report(&[1, 2, 4]) };
        written.write_to(&esp).expect("written");
        assert_eq!(ScrubReport::read_from(&esp), Some(written.clone()));
        let text = written.encode();
        let header = text.find("unreadable").expect("there");
        for end in 0..header {
            assert_eq!(parse(&text[..end]), None, "cut at {end}");
        }
        ScrubReport::remove_from(&esp).expect("removed");
        assert_eq!(ScrubReport::read_from(&esp), None);
    }

    proptest! {
        #[test]
        fn any_text_is_a_report_or_none(end in "\\PC{0,40}(\n\\PC{0,20}){0,3}", cut in 0..220_usize) {
            let text = report(&[1, 9]).encode();
            let cut = cut.min(text.len());
            let text = format!("{}{end}\n", &text[..cut]);
            if let Some(report) = parse(&text) {
                let is_whole = report.first_unreadable.iter().all(|range| !range.is_empty());
                prop_assert!(is_whole && report.ended.is_some(), "{report:?}");
            }
        }
    }
}
