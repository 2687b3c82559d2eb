//! By what an archive is compressed, told by its first bytes.

use std::io::{self, BufReader, Chain, Cursor, Read};

use flate2::bufread::MultiGzDecoder;

use super::error::StreamError;

/// The largest window of zstd that is given memory, as a power of two: 128 MiB, what `zstd` itself takes unasked.
const ZSTD_WINDOW_LOG: u32 = 27;

/// How much of the file is read at a time.
const BUFFER: usize = 256 << 10;

/// What the longest magic number needs.
const HEAD: usize = 6;

type Whole<R> = BufReader<Chain<Cursor<Vec<u8>>, R>>;

/// The decompressed bytes of a file.
pub(super) enum Stream<R: Read> {
    Raw(Whole<R>),
    Gzip(Box<MultiGzDecoder<Whole<R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, Whole<R>>>),
}

/// How some bytes begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    Other(&'static str),
}

impl Compression {
    /// *Source:* RFC 1952, RFC 8878, xz-file-format.txt, bzip2's and lz4's headers.
    pub(crate) fn of(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Other("xz"),
            [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', ..] => Self::Other("bzip2"),
            [0x04, 0x22, 0x4d, 0x18, ..] => Self::Other("lz4"),
            [b'P', b'K', 3, 4, ..] => Self::Other("zip"),
            _ => Self::None,
        }
    }
}

impl<R: Read> Stream<R> {
    /// Looks at the first bytes.
    pub(super) fn open(mut file: R) -> Result<Self, StreamError> {
        let mut head = Vec::with_capacity(HEAD);
        file.by_ref().take(HEAD as u64).read_to_end(&mut head).map_err(StreamError::Io)?;
        let compression = Compression::of(&head);
        let whole = BufReader::with_capacity(BUFFER, Cursor::new(head).chain(file));
        Ok(match compression {
            Compression::None => Self::Raw(whole),
            Compression::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(whole))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(whole).map_err(StreamError::Io)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(StreamError::Io)?;
                Self::Zstd(Box::new(decoder))
            }
            Compression::Other(found) => return Err(StreamError::Compression { found }),
        })
    }

    /// Whether what is behind the end of the tar tells if all was well: a checksum.
    pub(super) fn ends_with_checksum(&self) -> bool {
        !matches!(self, Self::Raw(_))
    }

    /// What an error of reading at this place means.
    pub(super) fn failed(&self, source: io::Error, at: u64) -> StreamError {
        let is_of_file = matches!(self, Self::Raw(_)) || source.raw_os_error().is_some();
        match source.kind() {
            io::ErrorKind::UnexpectedEof => StreamError::Truncated { at },
            _ if is_of_file => StreamError::Io(source),
            _ => StreamError::Decompress { at, source },
        }
    }
}

impl<R: Read> Read for Stream<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Raw(stream) => stream.read(buffer),
            Self::Gzip(stream) => stream.read(buffer),
            Self::Zstd(stream) => stream.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        for (head, name) in
            [(&b"\xfd7zXZ\0"[..], "xz"), (b"BZh91AY", "bzip2"), (b"\x04\x22\x4d\x18..", "lz4")]
        {
            let error = Stream::open(head).err().expect("it is not understood");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn everything_else_is_taken_as_it_is() {
        for head in [&b""[..], b"x", b"index.json", b"\x28\xb5", b"\x1f"] {
            let mut text = Vec::new();
            Stream::open(head).expect("raw").read_to_end(&mut text).expect("read");
            assert_eq!(text, head);
        }
    }
}
