//! An initramfs: the kernel's cpio format, written without the program of that name.

use std::io::{Result, Write};

/// Writes entries, then the trailer with [`Archive::finish`]. Directories come before what they hold.
///
/// *Source:* Documentation/driver-api/early-userspace/buffer-format.rst of Linux: `newc`, magic 070701.
#[derive(Debug)]
pub(super) struct Archive<W> {
    to: W,
    written: usize,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CONSOLE: u32 = 0o020_600;
/// Major and minor number of `/dev/console`.
///
/// *Source:* Documentation/admin-guide/devices.txt of Linux.
const CONSOLE_DEVICE: (u32, u32) = (5, 1);

impl<W: Write> Archive<W> {
    pub(super) fn new(to: W) -> Self {
        Self { to, written: 0, entries: 0 }
    }

    pub(super) fn directory(&mut self, path: &str) -> Result<()> {
        self.entry(path, DIRECTORY, &[], (0, 0))
    }

    pub(super) fn program(&mut self, path: &str, content: &[u8]) -> Result<()> {
        self.entry(path, PROGRAM, content, (0, 0))
    }

    pub(super) fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.entry(path, LINK, target.as_bytes(), (0, 0))
    }

    /// `/dev/console`, which the kernel opens for its first process before that can mount anything.
    pub(super) fn console(&mut self) -> Result<()> {
        self.entry("dev/console", CONSOLE, &[], CONSOLE_DEVICE)
    }

    pub(super) fn finish(mut self) -> Result<()> {
        self.entries = 0;
        self.entry("TRAILER!!!", 0, &[], (0, 0))?;
        self.to.flush()
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8], device: (u32, u32)) -> Result<()> {
        self.entries += 1;
        let (size, name) = (content.len() as u32, path.len() as u32 + 1);
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name, 0];
        let fields: String = fields.iter().map(|field| format!("{field:08X}")).collect();
        self.write(format!("070701{fields}{path}\0").as_bytes())?;
        self.write(content)
    }

    /// Header with name, and content, both end on a multiple of four.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.to.write_all(bytes)?;
        self.written += bytes.len();
        let padding = self.written.next_multiple_of(4) - self.written;
        self.written += padding;
        self.to.write_all(&[0; 3][..padding])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_and_the_trailer_closes() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.directory("a").unwrap();
        archive.program("a/bc", b"hello").unwrap();
        archive.finish().unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let headers: Vec<usize> = text.match_indices("070701").map(|(at, _)| at).collect();
        // 110 bytes of header, the name with its zero, and the content, each rounded up to four.
        assert_eq!(headers, [0, 112, 112 + 116 + 8]);
        assert!(text[112..].starts_with("07070100000002000081ED"), "{text}");
        assert_eq!(&text[112 + 116..][..8], "hello\0\0\0");
        assert!(text.ends_with("TRAILER!!!\0\0\0\0"), "{text:?}");
    }
}
