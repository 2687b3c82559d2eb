//! The compression of an archive, detected by its magic bytes.

use std::io::{self, BufReader, Chain, Cursor, Read};

use flate2::bufread::MultiGzDecoder;

use super::error::ArchiveError;

/// zstd's text for a larger window.
///
/// *Source:* `ERR_getErrorString` of `ZSTD_error_frameParameter_windowTooLarge`, in zstd's `error_private.c`.
const ZSTD_WINDOW_ERROR: &str = "Frame requires too much memory for decoding";

/// Bytes read from the file at a time.
const READ_BUFFER_BYTES: usize = 256 << 10;

/// Length of the longest magic number.
const MAGIC_BYTES: usize = 6;

/// Binary logarithm of the largest zstd window that gets memory.
type WindowLog = u32;

type BufferedFile<R> = BufReader<Chain<Cursor<Vec<u8>>, R>>;

/// The decompressed bytes of a file.
pub(super) enum DecompressedStream<R: Read> {
    Raw(BufferedFile<R>),
    Gzip(Box<MultiGzDecoder<BufferedFile<R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufferedFile<R>>>, WindowLog),
}

/// The compression that some magic bytes stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    Unsupported(&'static str),
}

impl Compression {
    /// *Source:* RFC 1952, RFC 8878, xz-file-format.txt, bzip2's and lz4's headers.
    pub(crate) fn detect(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // The second is a skippable frame, which may precede the data. *Source:* RFC 8878, 3.1.2.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Unsupported("xz"),
            [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', ..] => Self::Unsupported("bzip2"),
            [0x04, 0x22, 0x4d, 0x18, ..] => Self::Unsupported("lz4"),
            [b'P', b'K', 3, 4, ..] => Self::Unsupported("zip"),
            _ => Self::None,
        }
    }
}

impl<R: Read> DecompressedStream<R> {
    /// Detects the compression by the magic bytes. A zstd window may have as many bytes.
    pub(super) fn open(mut file: R, zstd_window: u64) -> Result<Self, ArchiveError> {
        let mut head = Vec::with_capacity(MAGIC_BYTES);
        file.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut head).map_err(ArchiveError::Io)?;
        let compression = Compression::detect(&head);
        // The decompressor reads the magic bytes again, which need not be possible in the file itself.
        let buffered = BufReader::with_capacity(READ_BUFFER_BYTES, Cursor::new(head).chain(file));
        Ok(match compression {
            Compression::None => Self::Raw(buffered),
            // A gzip file may have several members, one after the other. *Source:* RFC 1952, section 2.2.
            Compression::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(buffered))),
            Compression::Zstd => {
                let mut decoder =
                    zstd::stream::read::Decoder::with_buffer(buffered).map_err(ArchiveError::Io)?;
                // The frame states its own window: without this limit, it would decide how much memory the
                // import takes.
                //
                // *Source:* `ZSTD_WINDOWLOG_ABSOLUTEMIN` and `ZSTD_WINDOWLOG_MAX_64` in zstd.h.
                let window_log = zstd_window.max(1).ilog2().clamp(10, 31);
                decoder.window_log_max(window_log).map_err(ArchiveError::Io)?;
                Self::Zstd(Box::new(decoder), window_log)
            }
            Compression::Unsupported(found) => return Err(ArchiveError::Compression { found }),
        })
    }

    /// Returns whether a checksum follows the end of the tar.
    pub(super) fn ends_with_checksum(&self) -> bool {
        !matches!(self, Self::Raw(_))
    }

    /// Classifies a read error at this position.
    pub(super) fn read_error(&self, source: io::Error, at: u64) -> ArchiveError {
        // A decompressor passes on errors of the file, which have a number of the kernel, unlike its own.
        let is_of_file = matches!(self, Self::Raw(_)) || source.raw_os_error().is_some();
        match (source.kind(), self) {
            (io::ErrorKind::UnexpectedEof, _) => ArchiveError::Truncated { at },
            (_, Self::Zstd(_, log)) if source.to_string() == ZSTD_WINDOW_ERROR => {
                ArchiveError::Window { at, log: *log }
            }
            _ if is_of_file => ArchiveError::Io(source),
            _ => ArchiveError::Decompress { at, source },
        }
    }
}

impl<R: Read> Read for DecompressedStream<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Raw(stream) => stream.read(buffer),
            Self::Gzip(stream) => stream.read(buffer),
            Self::Zstd(stream, _) => stream.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_compression_is_named_in_the_error() {
        for (head, name) in
            [(&b"\xfd7zXZ\0"[..], "xz"), (b"BZh91AY", "bzip2"), (b"\x04\x22\x4d\x18..", "lz4")]
        {
            let error = DecompressedStream::open(head, 0).err().expect("unsupported");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn unknown_magic_bytes_are_read_uncompressed() {
        for head in [&b""[..], b"x", b"index.json", b"\x28\xb5", b"\x1f"] {
            let mut text = Vec::new();
            DecompressedStream::open(head, 0).expect("raw").read_to_end(&mut text).expect("read");
            assert_eq!(text, head);
        }
    }
}
