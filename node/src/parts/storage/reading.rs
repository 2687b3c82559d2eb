//! The reading of a whole disk, which shows whether it is blank: for people who wait for it.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nodekeel_localstorage::volume::ReadingProgress;

/// The reading of a disk, as far as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadingStatus {
    pub(super) device: PathBuf,
    pub(super) progress: ReadingProgress,
    /// The time that the rest takes at the speed until now; `None` before there is one.
    pub(super) left: Option<Duration>,
    /// By this token an operator gives the disk up, without waiting.
    pub(super) erase_token: Option<String>,
    /// The token of an earlier reading: it counts if the disk still has the same contents.
    pub(super) read_token: Option<String>,
}

/// As the end of a sentence about root.storage: "is reading …".
impl fmt::Display for ReadingStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadingProgress { read_bytes, disk_bytes, first_data, .. } = self.progress;
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        let percent = u128::from(read_bytes) * 100 / u128::from(disk_bytes.max(1));
        write!(f, "is reading {} ", self.device.display())?;
        match first_data {
            None => f.write_str("to see whether it is blank")?,
            Some(offset) => write!(f, "for the token that names all of it: it has data at byte {offset}")?,
        }
        write!(f, ": {percent} %, {:.1} of {:.1} GB", gigabytes(read_bytes), gigabytes(disk_bytes))?;
        match self.left.map(|left| left.as_secs().div_ceil(60)) {
            None => Ok(()),
            Some(minutes) if minutes < 60 => write!(f, ", about {minutes} min left"),
            Some(minutes) => write!(f, ", about {} h {} min left", minutes / 60, minutes % 60),
        }
    }
}

/// Measures the speed of a reading.
#[derive(Debug)]
pub(super) struct ReadingSpeed {
    /// When this process has begun, and what was read before.
    begun: Option<(Instant, u64)>,
}

impl ReadingSpeed {
    pub(super) const fn new() -> Self {
        Self { begun: None }
    }

    /// The time that the rest takes at the speed until now.
    pub(super) fn time_left(&mut self, progress: ReadingProgress, now: Instant) -> Option<Duration> {
        // Another reading of this attempt begins anew.
        let begun = self.begun.filter(|(_, read_before)| progress.read_bytes >= *read_before);
        let (begun, read_before) = *self.begun.insert(begun.unwrap_or((now, progress.read_bytes)));
        let read = progress.read_bytes - read_before;
        let left = progress.disk_bytes - progress.read_bytes;
        let seconds = now.duration_since(begun).as_secs_f64() * left as f64 / read as f64;
        // Before the first bytes, there is no speed.
        (read > 0).then(|| Duration::try_from_secs_f64(seconds).ok())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library alone makes one.
    fn progress(read_bytes: u64, first_data: Option<u64>) -> ReadingProgress {
        ReadingProgress::new(read_bytes, 4_000_000_000_000, first_data)
    }

    #[test]
    fn a_reading_says_how_far_it_is_and_how_long_it_takes() {
        let (mut speed, begun) = (ReadingSpeed::new(), Instant::now());
        let mut text = |read: u64, first_data, seconds| {
            let progress = progress(read, first_data);
            let left = speed.time_left(progress, begun + Duration::from_secs(seconds));
            ReadingStatus { device: "/dev/sdb".into(), progress, left, erase_token: None, read_token: None }
                .to_string()
        };
        // It resumes at 400 GB.
        let at = "is reading /dev/sdb to see whether it is blank: ";
        assert_eq!(text(400_000_000_000, None, 0), format!("{at}10 %, 400.0 of 4000.0 GB"));
        let later = text(480_000_000_000, None, 400);
        assert_eq!(later, format!("{at}12 %, 480.0 of 4000.0 GB, about 4 h 54 min left"));
        let at = "is reading /dev/sdb for the token that names all of it: it has data at byte 512: ";
        let end = text(3_990_000_000_000, Some(512), 18_000);
        assert_eq!(end, format!("{at}99 %, 3990.0 of 4000.0 GB, about 1 min left"));
    }
}
