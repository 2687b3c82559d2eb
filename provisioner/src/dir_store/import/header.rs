//! The first line of the stream of a volume that moves to another node.

use std::io::{self, Read};

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use serde::{Deserialize, Serialize};

use crate::store::VolumeUsage;

/// Maximum length of a header.
const MAX_BYTES: usize = 4096;

/// The version of headers.
const FORMAT: u32 = 1;

/// What a volume may have used beyond its capacity: file systems round limits up to their blocks, which have at most 64 KiB.
const ROUNDING: u64 = 64 << 10;

/// What the node of a volume that moves says of it, before its tree: one line of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MoveHeader {
    format: u32,
    /// Its limit of inodes.
    inodes: Option<u64>,
    used_bytes: u64,
    used_inodes: u64,
}

impl MoveHeader {
    /// That of a volume with these limits and this usage.
    pub fn new(volume: &VolumeUsage) -> Self {
        let VolumeUsage { limits, usage } = volume;
        Self {
            format: FORMAT,
            inodes: limits.inodes.map(|inodes| inodes.0),
            used_bytes: usage.bytes.0,
            used_inodes: usage.inodes.0,
        }
    }

    /// Reads a header, and nothing after it.
    ///
    /// # Errors
    /// That of the reader; [`io::ErrorKind::InvalidData`]: there is none, or it is one of another release.
    pub fn read(from: &mut dyn Read) -> io::Result<Self> {
        let (mut line, mut byte) = (Vec::new(), [0]);
        loop {
            from.read_exact(&mut byte)?;
            match byte {
                [b'\n'] => break,
                _ if line.len() >= MAX_BYTES => return Err(io::ErrorKind::InvalidData.into()),
                [byte] => line.push(byte),
            }
        }
        let header: Self = serde_json::from_slice(&line)?;
        if header.format == FORMAT { Ok(header) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// The header with its line feed.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("a header is JSON") + "\n"
    }

    /// The limits of the volume on the other node: those that its PersistentVolume promises, and those inodes that it has where
    /// that promises none.
    ///
    /// # Errors
    /// The usage: it is more than the limits.
    pub fn limits(&self, promised: QuotaLimits) -> Result<QuotaLimits, QuotaUsage> {
        let usage = QuotaUsage { bytes: Bytes(self.used_bytes), inodes: Inodes(self.used_inodes) };
        let inodes = promised.inodes.or(self.inodes.filter(|inodes| *inodes > 0).map(Inodes));
        let most = promised.bytes.unwrap_or_default().0.saturating_add(ROUNDING);
        let fits = usage.bytes.0 <= most && inodes.is_none_or(|inodes| usage.inodes <= inodes);
        if fits { Ok(QuotaLimits { inodes, ..promised }) } else { Err(usage) }
    }
}

/// Checks that a header is one that is written as it was read, or rejected, and that nothing after it is read.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_move_header(bytes: &[u8]) {
    let mut rest = bytes;
    if let Ok(header) = MoveHeader::read(&mut rest) {
        assert_eq!(MoveHeader::read(&mut header.to_line().as_bytes()).ok(), Some(header));
        let read = &bytes[..bytes.len() - rest.len()];
        assert_eq!(read.iter().filter(|byte| **byte == b'\n').count(), 1, "one line");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_one_short_line_of_this_release() {
        let limits = QuotaLimits { bytes: Some(Bytes(9)), inodes: Some(Inodes(7)) };
        let usage = QuotaUsage { bytes: Bytes(5), inodes: Inodes(2) };
        let header = MoveHeader::new(&VolumeUsage { limits, usage });
        let line = header.to_line();
        assert_eq!(line, "{\"format\":1,\"inodes\":7,\"usedBytes\":5,\"usedInodes\":2}\n");
        let stream = line.clone() + "rest";
        let mut stream = stream.as_bytes();
        assert_eq!((MoveHeader::read(&mut stream).expect("a header"), stream), (header, &b"rest"[..]));
        let newer = line.replace(":1,", ":2,");
        let more = line.replace('}', ",\"more\":1}");
        for bad in ["", &line[..20], "{}\n", &newer, &more, &"x".repeat(2 * MAX_BYTES)] {
            MoveHeader::read(&mut bad.as_bytes()).expect_err("no header");
        }
    }

    #[test]
    fn a_volume_gets_what_its_persistent_volume_promises_if_that_is_enough() {
        let header = |inodes, bytes, used| {
            let limits = QuotaLimits { bytes: Some(Bytes(1)), inodes };
            let usage = QuotaUsage { bytes: Bytes(bytes), inodes: Inodes(used) };
            MoveHeader::new(&VolumeUsage { limits, usage })
        };
        let promised = |inodes| QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes };
        let (seven, nine) = (Some(Inodes(7)), Some(Inodes(9)));
        for (header, of_class, given) in [
            (header(seven, 5, 2), None, Ok(promised(seven))),
            (header(seven, 5, 2), nine, Ok(promised(nine))),
            (header(None, 5, 2), None, Ok(promised(None))),
            (header(seven, (1 << 20) + 4096, 2), None, Ok(promised(seven))),
        ] {
            assert_eq!(header.limits(promised(of_class)), given);
        }
        header(seven, 2 << 20, 2).limits(promised(None)).expect_err("it is being expanded");
        header(seven, 5, 8).limits(promised(None)).expect_err("too many files");
    }
}
