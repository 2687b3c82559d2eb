//! The command line of `storage`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum StorageCommand {
    /// Show what opens the data volume
    ///
    /// Exits with 6 unless it is open.
    Status,
    /// Open a locked volume by its recovery passphrase
    Unlock(PassphraseArgs),
    /// Give the volume new keys
    ///
    /// Returns when the former keys no longer open it. The recovery passphrase stays. A copy of the header that somebody
    /// has made before still opens by the former keys.
    Rotate(PermitArgs),
    /// Add a recovery passphrase, and show it once
    ///
    /// It counts, and the one before is void, when it is typed: see --confirm. Until then, the next one replaces it.
    Recovery(RecoveryArgs),
    /// Discard the free blocks of the disk
    ///
    /// Only where the configuration allows it (storage.discards): a reader of an encrypted disk then sees which blocks
    /// are free.
    Trim,
    /// Erase the disk that root.storage has refused
    Erase {
        /// What the disk has, as status shows it
        token: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PassphraseArgs {
    /// File with the recovery passphrase
    ///
    /// Default: a prompt, or the standard input if it is not a terminal.
    #[arg(long, value_name = "FILE")]
    pub(crate) passphrase_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PermitArgs {
    /// Permit it by the recovery passphrase
    ///
    /// Where neither the node nor its cluster has a key that opens the volume. Default: by the keys of both.
    #[arg(long)]
    pub(crate) recovery: bool,
    #[command(flatten)]
    pub(crate) passphrase: PassphraseArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RecoveryArgs {
    /// Confirm the newest one by typing it
    ///
    /// The one before is void then.
    #[arg(long, conflicts_with = "recovery")]
    pub(crate) confirm: bool,
    #[command(flatten)]
    pub(crate) permit: PermitArgs,
}
