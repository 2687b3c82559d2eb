//! `storage header`: the encryption header as a file.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use nodekeel_node::v1;

use super::{AuthorizationArgs, StorageChangeView, read_permit};
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::Printer;
use crate::private_file::PrivateFile;

/// More than a header has: the node checks its size.
const MAX_BYTES: u64 = (16 << 20) + 1;

#[derive(Debug, Subcommand)]
pub(crate) enum HeaderCommand {
    /// Copy the header to a file
    ///
    /// As `cryptsetup luksHeaderBackup` does. Who has the file, and a key or passphrase of this time, opens the volume forever,
    /// also after its keys were rotated: keep it like a key, and make a new one after each change of the keys.
    Backup {
        /// File to write; - for the standard output
        ///
        /// Its owner alone reads it.
        file: PathBuf,
    },
    /// Write a copy to the disk
    ///
    /// The volume must not be open (`nodectl stop root.storage`). The copy must be of this node's volume, and opens by the node's
    /// own key or, with --recovery, by a passphrase of its time. Killed, it is repeated.
    Restore(RestoreArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// File of `storage header backup` or `cryptsetup luksHeaderBackup`
    file: PathBuf,
    /// Restore also an older copy
    ///
    /// One that is older than the newest header of this node: the keys and passphrases of that time open the volume again. Then `storage rotate --recovery`.
    #[arg(long)]
    older: bool,
    #[command(flatten)]
    permit: AuthorizationArgs,
}

impl HeaderCommand {
    pub(super) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        match self {
            Self::Backup { file } => back_up(api, &file, printer).await,
            Self::Restore(args) => restore(api, args, printer).await,
        }
    }
}

async fn back_up(api: &mut ApiClient, file: &Path, printer: &mut Printer) -> Result<(), CommandError> {
    let request = v1::BackUpStorageHeaderRequest {};
    let answer = api.call(async |client| client.back_up_storage_header(request).await).await?;
    if file == Path::new("-") {
        let mut output = io::stdout().lock();
        return Ok(output.write_all(&answer.header).and_then(|()| output.flush())?);
    }
    PrivateFile::create(file)
        .and_then(|mut new| new.write_all(&answer.header).and_then(|()| new.commit()))
        .map_err(|source| CommandError::File { path: file.to_owned(), source })?;
    let done = StorageChangeView { done: "backed-up", ..Default::default() };
    let text = format!(
        "wrote the header of volume {} to {}; with a key or passphrase of this time, it opens the volume forever",
        answer.volume,
        file.display()
    );
    printer.print_result(&done, &text)
}

async fn restore(api: &mut ApiClient, args: RestoreArgs, printer: &mut Printer) -> Result<(), CommandError> {
    let file_error = |source| CommandError::File { path: args.file.clone(), source };
    let mut header = Vec::new();
    File::open(&args.file)
        .and_then(|file| file.take(MAX_BYTES).read_to_end(&mut header))
        .map_err(file_error)?;
    let passphrase = read_permit(&args.permit)?;
    let request = v1::RestoreStorageHeaderRequest { header, passphrase, allow_older: args.older };
    api.call(async |client| client.restore_storage_header(request).await).await?;
    let done = StorageChangeView { done: "restored", ..Default::default() };
    printer.print_result(&done, "the header is restored; see `nodectl storage status`")
}
