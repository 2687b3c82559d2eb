//! Where a node is told how to get into a cluster.

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::tree::{File, LoadError, Undecodable};
use thiserror::Error;
use zeroize::Zeroizing;

use super::{GoldenTicket, TicketError};

/// Where QEMU shows a file that it was given as `-fw_cfg name=opt/org.nodekeel/enrolment.pb,file=…`.
///
/// Names outside `opt/` are QEMU's own. *Source:* QEMU `docs/specs/fw_cfg.rst`; Linux `drivers/firmware/qemu_fw_cfg.c`.
pub const FIRMWARE: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/org.nodekeel/enrolment.pb/raw";

/// Largest configuration that is read: a ticket has a few certificates, and names of members.
const LIMIT: u64 = 1 << 20;

nodekeel_localstorage::layout! {
    /// In the node's directory on the EFI system partition: [extend](nodekeel_localstorage::tree::Directory::extend) it.
    pub struct EspEnrolment {
        /// How to get into a cluster. It holds keys.
        pub enrolment: File = "enrolment.pb", 0o600;
    }
}

/// One place where a configuration may be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EnrolmentSource {
    /// A file that the node keeps, on the EFI system partition.
    Kept(File),
    /// A file that the kernel shows, as [`FIRMWARE`]. Links to it are followed: the kernel makes them. It is absent until
    /// the kernel's `qemu_fw_cfg` is there: where that is a module, it has to be loaded before anybody looks, or a machine
    /// with a ticket founds a cluster.
    Firmware(PathBuf),
}

/// Why the configuration can't be had. It is never taken for absent then: that would found a cluster.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnrolmentError {
    /// It can't be read, and nothing is known of it. A retry may help.
    #[error("read {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It is there, and no ticket to join by. It is left as it is: have the ticket made again, or remove the file to
    /// found a cluster.
    #[error("use {}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TicketError,
    },
}

/// The places where a node looks, the first one that has something wins: none of the others is read then.
#[derive(Clone, Debug, Default)]
pub struct Enrolment {
    sources: Vec<EnrolmentSource>,
}

impl Enrolment {
    /// These, in their order.
    pub fn new(sources: impl IntoIterator<Item = EnrolmentSource>) -> Self {
        Self { sources: sources.into_iter().collect() }
    }

    /// The node's own file, then QEMU's.
    pub fn usual(kept: File) -> Self {
        Self::new([EnrolmentSource::Kept(kept), EnrolmentSource::Firmware(FIRMWARE.into())])
    }

    /// The ticket of the first place that has a configuration; none where all are without. It blocks.
    ///
    /// # Errors
    /// [`EnrolmentError`], of the first place that is not simply without.
    pub fn load(&self) -> Result<Option<Arc<GoldenTicket>>, EnrolmentError> {
        for source in &self.sources {
            if let Some(ticket) = source.load()? {
                return Ok(Some(Arc::new(ticket)));
            }
        }
        Ok(None)
    }
}

impl EnrolmentSource {
    fn load(&self) -> Result<Option<GoldenTicket>, EnrolmentError> {
        match self {
            Self::Kept(file) => kept(file),
            Self::Firmware(path) => match read(path).map_err(|source| unreadable(path, source))? {
                Some(content) => GoldenTicket::parse(&content)
                    .map(Some)
                    .map_err(|source| EnrolmentError::Malformed { path: path.clone(), source }),
                None => Ok(None),
            },
        }
    }
}

fn kept(file: &File) -> Result<Option<GoldenTicket>, EnrolmentError> {
    let mut wrong = None;
    let loaded = file.load(|content| {
        if content.len() as u64 > LIMIT {
            return Err(Undecodable::corrupted(TooLarge));
        }
        GoldenTicket::parse(content).map_err(|error| {
            wrong = Some(error.clone());
            Undecodable::corrupted(error)
        })
    });
    match (LoadError::optional(loaded), wrong) {
        (Ok(ticket), _) => Ok(ticket),
        (Err(_), Some(source)) => Err(EnrolmentError::Malformed { path: file.path().to_owned(), source }),
        (Err(error), None) => Err(unreadable(file.path(), error)),
    }
}

fn unreadable(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> EnrolmentError {
    EnrolmentError::Read { path: path.to_owned(), source: source.into() }
}

/// The content; none where there is no such file.
fn read(path: &Path) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut content = Zeroizing::new(Vec::new());
    file.take(LIMIT + 1).read_to_end(&mut content)?;
    match content.len() as u64 > LIMIT {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, TooLarge)),
        false => Ok(Some(content)),
    }
}

#[derive(Debug)]
struct TooLarge;

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it is larger than {LIMIT} bytes")
    }
}

impl std::error::Error for TooLarge {}
