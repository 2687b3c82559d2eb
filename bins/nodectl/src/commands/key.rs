//! `key`: the key pair of an operator, for calls from another machine. No node is asked.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use nodekeel_node::access::PrivateKey;
use serde::Serialize;
use zeroize::Zeroizing;

use crate::error::CommandError;
use crate::output::Printer;
use crate::private_file::PrivateFile;

/// A key in PEM has 119 bytes; text before or after it may be a few more.
const MAX_KEY_BYTES: u64 = 4096;

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key pair; print its public key
    New {
        /// Output file; must not exist
        file: PathBuf,
    },
    /// Print the public key of a private key
    Show {
        /// File of the private key
        file: PathBuf,
    },
}

#[derive(Debug, Serialize)]
struct KeyView {
    file: String,
    key: String,
}

impl KeyCommand {
    pub(crate) fn run(self, printer: &mut Printer) -> Result<(), CommandError> {
        let (key, file) = match self {
            Self::New { file } => (write_new(&file)?, file),
            Self::Show { file } => (read_private_key(&file)?, file),
        };
        let key = key.public_key().to_string();
        printer.print_result(&KeyView { file: file.display().to_string(), key: key.clone() }, &key)
    }
}

fn write_new(path: &Path) -> Result<PrivateKey, CommandError> {
    let file_error = |source| CommandError::File { path: path.to_owned(), source };
    // Another key there may be the only one that a node admits.
    if std::fs::symlink_metadata(path).is_ok() {
        return Err(file_error(io::ErrorKind::AlreadyExists.into()));
    }
    let key = PrivateKey::generate().map_err(file_error)?;
    let mut file = PrivateFile::create(path).map_err(file_error)?;
    file.write_all(key.to_pem().as_bytes()).and_then(|()| file.commit()).map_err(file_error)?;
    Ok(key)
}

/// The private key in a file that its owner alone can read.
pub(crate) fn read_private_key(path: &Path) -> Result<PrivateKey, CommandError> {
    let file_error = |source| CommandError::File { path: path.to_owned(), source };
    // Before it is opened, which would wait for the writer of a pipe.
    let metadata = std::fs::metadata(path).map_err(file_error)?;
    if !metadata.is_file() {
        return Err(file_error(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(CommandError::OpenKeyFile { path: path.to_owned() });
    }
    let mut text = Zeroizing::new(Vec::new());
    let file = File::open(path).map_err(file_error)?;
    file.take(MAX_KEY_BYTES).read_to_end(&mut text).map_err(file_error)?;
    PrivateKey::from_pem(&text)
        .map_err(|source| file_error(io::Error::new(io::ErrorKind::InvalidData, source)))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_written_once_and_read_while_it_is_private() {
        let directory = testbed::ScratchDir::new().unwrap();
        let path = directory.path().join("operator.key");
        let key = write_new(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_private_key(&path).unwrap().public_key(), key.public_key());
        assert!(matches!(write_new(&path), Err(CommandError::File { .. })), "it replaces no key");
        assert_eq!(read_private_key(&path).unwrap().public_key(), key.public_key());
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(read_private_key(&path), Err(CommandError::OpenKeyFile { .. })));
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "no key").unwrap();
        assert!(matches!(read_private_key(&path), Err(CommandError::File { .. })));
        assert!(matches!(read_private_key(directory.path()), Err(CommandError::File { .. })));
        fs::remove_file(&path).unwrap();
        assert!(
            std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success()
        );
        assert!(matches!(read_private_key(&path), Err(CommandError::File { .. })), "it waits for no writer");
    }
}
