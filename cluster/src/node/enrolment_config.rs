//! The places where a node finds its enrolment configuration.

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::tree::{DecodeError, LayoutFile, LoadError};
use thiserror::Error;
use zeroize::Zeroizing;

use super::{EnrolmentTicket, TicketError};

/// The path at which Linux shows a file that QEMU was given as `-fw_cfg name=opt/org.nodekeel/enrolment.pb,file=…`.
///
/// Names outside `opt/` are reserved for QEMU. *Source:* QEMU `docs/specs/fw_cfg.rst`; Linux
/// `drivers/firmware/qemu_fw_cfg.c`.
pub const FW_CFG_PATH: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/org.nodekeel/enrolment.pb/raw";

/// Largest configuration that is read: a ticket has a few certificates, and names of members.
const MAX_CONFIG_SIZE: u64 = 1 << 20;

nodekeel_localstorage::layout! {
    /// In the node's directory on the EFI system partition:
    /// [extend](nodekeel_localstorage::tree::LayoutDir::add_layout) it.
    pub struct EspEnrolment {
        /// The enrolment configuration. It holds private keys, or the text of a join ticket.
        pub enrolment: LayoutFile = "enrolment.pb", 0o600;
    }
}

/// A place where a configuration may be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EnrolmentSource {
    /// A file on the EFI system partition.
    EspFile(LayoutFile),
    /// A file that the kernel shows, such as [`FW_CFG_PATH`]. Links to it are followed: the kernel creates
    /// them. It is absent until the kernel's `qemu_fw_cfg` is loaded: if that is a module, load it before a
    /// node looks, or a host that is configured to bootstrap does so in spite of its ticket.
    FwCfg(PathBuf),
}

/// A failure to load the configuration. It is never treated as absent then: that would bootstrap a
/// cluster.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnrolmentConfigError {
    /// The file can't be read, and nothing is known of its content. A retry may help.
    #[error("can't read enrolment configuration {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file exists, but is not a valid ticket. It stays unchanged: have the ticket reissued, or remove the file
    /// to wait for another, or to bootstrap.
    #[error("can't parse enrolment configuration {}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The defect.
        source: TicketError,
    },
    /// There is no file for what a join ticket is redeemed for: QEMU's can't be written.
    #[error(
        "a join ticket needs an enrolment configuration that the node can write, on its EFI system partition"
    )]
    NoFile,
    /// The file can't be written. It is as it was.
    #[error("can't write enrolment configuration {}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: nodekeel_localstorage::Error,
    },
}

/// The places where a node looks for its configuration. The first that holds one wins: the others are not
/// read.
#[derive(Clone, Debug, Default)]
pub struct EnrolmentSources {
    sources: Vec<EnrolmentSource>,
}

impl EnrolmentSources {
    /// These sources, in their order.
    pub fn new(sources: impl IntoIterator<Item = EnrolmentSource>) -> Self {
        Self { sources: sources.into_iter().collect() }
    }

    /// The file on the EFI system partition, then QEMU's.
    pub fn default_sources(esp_file: LayoutFile) -> Self {
        Self::new([EnrolmentSource::EspFile(esp_file), EnrolmentSource::FwCfg(FW_CFG_PATH.into())])
    }

    /// The ticket of the first source that holds a configuration; `None` if none does. It blocks.
    ///
    /// # Errors
    /// [`EnrolmentConfigError`], of the first source that is not simply absent.
    pub fn load_ticket(&self) -> Result<Option<EnrolmentTicket>, EnrolmentConfigError> {
        for source in &self.sources {
            // An unreadable source is an error: the next one must not be used in its place.
            if let Some(ticket) = source.load_ticket()? {
                return Ok(Some(ticket));
            }
        }
        Ok(None)
    }

    /// Replaces the configuration of the file on the EFI system partition; creates it if another source has one. It blocks.
    ///
    /// # Errors
    /// [`EnrolmentConfigError::NoFile`], [`EnrolmentConfigError::Write`].
    pub(crate) fn write_config(&self, config: &[u8]) -> Result<(), EnrolmentConfigError> {
        let file = self.sources.iter().find_map(|source| match source {
            EnrolmentSource::EspFile(file) => Some(file),
            EnrolmentSource::FwCfg(_) => None,
        });
        let file = file.ok_or(EnrolmentConfigError::NoFile)?;
        file.write(config)
            .map_err(|source| EnrolmentConfigError::Write { path: file.path().to_owned(), source })
    }
}

impl EnrolmentSource {
    fn load_ticket(&self) -> Result<Option<EnrolmentTicket>, EnrolmentConfigError> {
        match self {
            Self::EspFile(file) => load_esp_file(file),
            Self::FwCfg(path) => match read_limited(path).map_err(|source| read_error(path, source))? {
                Some(content) => EnrolmentTicket::from_config(&content)
                    .map(Some)
                    .map_err(|source| EnrolmentConfigError::Malformed { path: path.clone(), source }),
                None => Ok(None),
            },
        }
    }
}

fn load_esp_file(file: &LayoutFile) -> Result<Option<EnrolmentTicket>, EnrolmentConfigError> {
    // `load_decoded` returns an error of its own type, so the defect of the ticket is kept here.
    let mut ticket_error = None;
    let loaded = file.load_decoded(|content| {
        if content.len() as u64 > MAX_CONFIG_SIZE {
            return Err(DecodeError::corrupted(TooLarge));
        }
        EnrolmentTicket::from_config(content).map_err(|error| {
            ticket_error = Some(error.clone());
            DecodeError::corrupted(error)
        })
    });
    match (LoadError::absent_as_none(loaded), ticket_error) {
        (Ok(ticket), _) => Ok(ticket),
        (Err(_), Some(source)) => {
            Err(EnrolmentConfigError::Malformed { path: file.path().to_owned(), source })
        }
        (Err(error), None) => Err(read_error(file.path(), error)),
    }
}

fn read_error(
    path: &Path,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EnrolmentConfigError {
    EnrolmentConfigError::Read { path: path.to_owned(), source: source.into() }
}

/// The content; `None` if the file does not exist.
fn read_limited(path: &Path) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let file_type = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata?.file_type(),
    };
    // Opening one waits for a writer, for ever.
    if file_type.is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a FIFO, and not a file"));
    }
    let file = fs::File::open(path)?;
    // One byte more than is allowed, so that a larger file is noticed without reading all of it.
    let mut content = Zeroizing::new(Vec::new());
    file.take(MAX_CONFIG_SIZE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_CONFIG_SIZE {
        Err(io::Error::new(io::ErrorKind::FileTooLarge, TooLarge))
    } else {
        Ok(Some(content))
    }
}

#[derive(Debug)]
struct TooLarge;

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "larger than {MAX_CONFIG_SIZE} bytes")
    }
}

impl std::error::Error for TooLarge {}
