//! `storage`: the data volume, and the keys that open it.

mod header;
mod passphrase;
mod reencrypt;
mod scrub;
mod view;

use std::time::Duration;

use clap::{Args, Subcommand};
use nodekeel_node::v1;

use self::header::HeaderCommand;
use self::passphrase::{PassphraseArgs, read_passphrase};
use self::reencrypt::{ReencryptArgs, describe_reencryption};
use self::scrub::{ScrubArgs, describe_scrub};
use self::view::{EncryptionView, SlotView, StorageChangeView, StorageView};
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::format_age;

/// Timeout of changes: each runs cryptsetup several times, and asks the cluster.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of a trim: some terabytes.
const TRIM_TIMEOUT: Duration = Duration::from_secs(30 * 60);

#[derive(Debug, Subcommand)]
pub(crate) enum StorageCommand {
    /// Show the data volume and its keys
    ///
    /// Exits with 6 unless it is open and without faults.
    Status,
    /// Open a locked volume by its recovery passphrase
    Unlock(PassphraseArgs),
    /// Give the volume new keys
    ///
    /// Returns when the former keys no longer open it. The recovery passphrase stays, and so does a key slot that noded
    /// did not add, which is named. An older copy of the
    /// header still opens by the former keys.
    Rotate(AuthorizationArgs),
    /// Add a recovery passphrase, and show it once
    ///
    /// Valid once you have typed it, see --confirm; the former passphrase is void then. Until then, the next one replaces it.
    Recovery(RecoveryArgs),
    /// Forget the faults of the disk
    ///
    /// What the kernel has reported of the volume's devices is a problem of the node until then: reads of data that nobody with
    /// the key has written, failed reads and writes, damages of the file system. It mends nothing.
    Acknowledge,
    /// Back up and restore the encryption header
    #[command(subcommand)]
    Header(HeaderCommand),
    /// Read all of the disk, to find faults
    ///
    /// Every block of the open volume, below its file system, so that a fault is found before a file is needed. What can't be
    /// read becomes a problem of the node. It goes on without nodectl; `storage status` has its progress.
    Scrub(ScrubArgs),
    /// Encrypt the disk with a new key
    ///
    /// A copy of the header that somebody has opens nothing then, with any key or passphrase. The volume stays in use, and gets new
    /// unlock keys first. It goes on without nodectl, and after a restart; `storage status` has its progress. Only for
    /// storage.encryption = "encrypted". A call while it runs follows it.
    Reencrypt(ReencryptArgs),
    /// Discard the free blocks of the disk
    ///
    /// Only where the configuration allows it (storage.discards): a reader of an encrypted disk then sees which blocks
    /// are free.
    Trim,
    /// Erase the disk that root.storage has refused
    ///
    /// Or one that it reads, without waiting for the end.
    Erase {
        /// Token that `storage status` shows
        token: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AuthorizationArgs {
    /// Authorize by the recovery passphrase
    ///
    /// For a volume that neither the node nor its cluster can open. Default: by the keys of both.
    #[arg(long)]
    recovery: bool,
    #[command(flatten)]
    passphrase: PassphraseArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RecoveryArgs {
    /// Confirm the newest passphrase by typing it
    ///
    /// The one before is void then.
    #[arg(long, conflicts_with = "recovery")]
    confirm: bool,
    #[command(flatten)]
    permit: AuthorizationArgs,
}

impl StorageCommand {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        api.raise_timeout(CHANGE_TIMEOUT);
        match self {
            Self::Status => show_status(api, printer).await,
            Self::Unlock(args) => unlock(api, &args, printer).await,
            Self::Rotate(args) => rotate(api, &args, printer).await,
            Self::Recovery(args) if args.confirm => confirm_recovery(api, &args, printer).await,
            Self::Recovery(args) => add_recovery(api, &args.permit, printer).await,
            Self::Acknowledge => acknowledge(api, printer).await,
            Self::Header(command) => command.run(api, printer).await,
            Self::Scrub(args) => args.run(api, printer).await,
            Self::Reencrypt(args) => args.run(api, printer).await,
            Self::Trim => trim(api, printer).await,
            Self::Erase { token } => erase(api, token, printer).await,
        }
    }
}

async fn show_status(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.storage(v1::StorageRequest {}).await).await?;
    let storage = StorageView::from(answer);
    if printer.is_json {
        printer.print_json(&storage)?;
    } else {
        let style = match &*storage.state {
            "open" => TextStyle::Good,
            "opening" => TextStyle::Pending,
            _ => TextStyle::Bad,
        };
        let state = printer.style_text(style, &escape_control(&storage.state));
        printer.print_line(&format!("{state}{}", describe_storage(&storage)))?;
        for line in detail_lines(&storage) {
            printer.print_line(&format!("  {line}"))?;
        }
        if let Some(encryption) = &storage.encryption {
            print_slots(&encryption.slots, printer)?;
        }
    }
    if storage.state == "open" && storage.faults.is_empty() { Ok(()) } else { Err(CommandError::NotHealthy) }
}

/// The place and the encryption of the volume, to print after its state.
fn describe_storage(storage: &StorageView) -> String {
    let at = storage.path.as_deref().map(|path| format!(" at {path}")).unwrap_or_default();
    let what = match &storage.encryption {
        Some(encryption) => format!(": {}", encryption.encryption),
        // A volume without keys is known to be one only while it is open and its header could be read.
        None if storage.state == "open" && storage.encryption_error.is_none() => {
            ": not encrypted by noded".to_owned()
        }
        None => String::new(),
    };
    escape_control(&format!("{at}{what}"))
}

fn detail_lines(storage: &StorageView) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(storage.detail.clone());
    lines.extend(storage.since_time.map(|since| format!("since {}", format_age(since))));
    if let (Some(done), Some(total)) = (storage.wiped_bytes, storage.wipe_bytes) {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        lines.push(format!("wipes the new volume: {:.1} of {:.1} GiB", gib(done), gib(total)));
    }
    lines.extend(storage.faults.iter().map(|fault| format!("fault        {fault}")));
    if !storage.faults.is_empty() {
        lines
            .push("to forget them, when files and disk are mended: `nodectl storage acknowledge`".to_owned());
    }
    lines.extend(storage.scrub.as_ref().map(|scrub| format!("scrub        {}", describe_scrub(scrub))));
    lines.extend(storage.last_scrub.as_ref().map(|scrub| format!("last scrub   {}", describe_scrub(scrub))));
    lines.extend(
        storage.reencryption.as_ref().map(|report| format!("re-encrypted {}", describe_reencryption(report))),
    );
    if storage.state == "locked" {
        lines.push("to open it: `nodectl storage unlock`".to_owned());
    }
    if storage.state == "lost" {
        lines.push("to give it up: `nodectl reset`".to_owned());
    }
    if let Some(token) = &storage.erase_token {
        let covers = if token.contains("-read-") { "every byte" } else { "samples" };
        lines.push(format!(
            "to erase what the disk has: `nodectl storage erase {token}` (a token of {covers} of it)"
        ));
    }
    lines.extend(storage.encryption_error.as_ref().map(|error| format!("its header: {error}")));
    if let Some(encryption) = &storage.encryption {
        let EncryptionView { device, volume, .. } = encryption;
        lines.push(format!("device       {device}, volume {volume}"));
        lines.push(format!("opened by    {}", describe_keys(encryption)));
        let keeper = if encryption.cold_start.as_deref() == Some("tang") { "tang" } else { "cluster" };
        lines.extend(describe_cluster_key(encryption).map(|text| format!("{keeper:<12} {text}")));
        if !encryption.both_headers {
            lines.push("header       one copy is damaged: the next change of a key repairs it".to_owned());
        }
        lines.extend(encryption.rollback.as_ref().map(|rollback| {
            format!(
                "header       was rolled back: {rollback}: `nodectl storage header restore FILE`, or, if it is to stay, \
                 `nodectl storage rotate --recovery`"
            )
        }));
        let tokens = encryption.foreign_tokens.iter();
        lines.extend(
            tokens.map(|token| format!("token        {token}, of another program: it stays, unused")),
        );
    }
    lines.iter().map(|line| escape_control(line)).collect()
}

fn describe_keys(encryption: &EncryptionView) -> String {
    let cold_start = match encryption.cold_start.as_deref() {
        None => return "the node alone".to_owned(),
        Some("local") => "the node alone",
        Some("operator") => "an operator",
        Some("peers") => "the node, with the key from its peers",
        Some("tang") => return "the node and a Tang server together".to_owned(),
        Some(other) => other,
    };
    format!("node and cluster together; after a power cut, by {cold_start}")
}

fn describe_cluster_key(encryption: &EncryptionView) -> Option<String> {
    Some(match encryption.cluster_key.as_deref()? {
        "stored" => "has its half of the key".to_owned(),
        "incomplete" => format!(
            "has its half of the key, but not with each server: {}",
            encryption.cluster_key_detail.as_deref().unwrap_or_default()
        ),
        "lost" => "has lost its half of the key: `nodectl storage rotate --recovery`".to_owned(),
        "pending" => format!(
            "does not have its half of the key yet: {}",
            encryption.cluster_key_detail.as_deref().unwrap_or_default()
        ),
        _ if encryption.cold_start.as_deref() == Some("tang") => "no server was asked yet".to_owned(),
        _ => "the node is not in it yet".to_owned(),
    })
}

fn print_slots(slots: &[SlotView], printer: &mut Printer) -> Result<(), CommandError> {
    let row = |slot: &SlotView| {
        let by = match slot.kind.as_deref() {
            Some("local") => "node unlock key".to_owned(),
            Some("split") => "node and cluster unlock key".to_owned(),
            Some("recovery") => "recovery passphrase".to_owned(),
            Some(other) => escape_control(other),
            None if slot.stale => "(no name)".to_owned(),
            None => "a key that noded did not add".to_owned(),
        };
        let generation = if slot.kind.is_some() { slot.generation.to_string() } else { "-".to_owned() };
        let marks =
            [("has opened it", slot.opened), ("stale", slot.stale), ("not confirmed", slot.unconfirmed)];
        let marks: Vec<_> = marks.iter().filter(|mark| mark.1).map(|mark| mark.0).collect();
        [slot.slot.to_string(), by, generation, marks.join(", ")]
    };
    let rows: Vec<_> = slots.iter().map(|slot| (TextStyle::Plain, row(slot))).collect();
    Ok(printer.print_table(["SLOT", "OPENED BY", "GENERATION", ""], &rows)?)
}

async fn unlock(
    api: &mut ApiClient,
    args: &PassphraseArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let passphrase = Some(read_passphrase(args)?);
    let request = v1::UnlockStorageRequest { passphrase };
    api.call(async |client| client.unlock_storage(request).await).await?;
    print_change(printer, "unlocked", "the data volume is open")
}

async fn rotate(
    api: &mut ApiClient,
    args: &AuthorizationArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = v1::RotateStorageKeysRequest { passphrase: read_permit(args)? };
    let rotated = api.call(async |client| client.rotate_storage_keys(request).await).await?;
    let foreign = describe_foreign_slots(&rotated.foreign_slots);
    let text = format!("the data volume has new keys; its recovery passphrase is the same{foreign}");
    print_change(printer, "rotated", &text)
}

/// The key slots that stay, as the end of a sentence.
fn describe_foreign_slots(slots: &[u32]) -> String {
    let names: Vec<_> = slots.iter().map(u32::to_string).collect();
    match names.as_slice() {
        [] => String::new(),
        _ => format!(
            "; noded did not add key slot {}, which stays, and opens the volume: remove it with `cryptsetup luksKillSlot`",
            names.join(", ")
        ),
    }
}

async fn add_recovery(
    api: &mut ApiClient,
    args: &AuthorizationArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = v1::AddRecoveryPassphraseRequest { passphrase: read_permit(args)? };
    let answer = api.call(async |client| client.add_recovery_passphrase(request).await).await?;
    let passphrase = answer.passphrase.unwrap_or_default().text;
    if printer.is_json {
        let done = StorageChangeView { done: "added", passphrase: Some(&passphrase), ..Default::default() };
        return Ok(printer.print_json(&done)?);
    }
    // On a line of its own, to be copied as a whole.
    printer.print_line(&escape_control(&passphrase))?;
    let hint = "keep it away from this node: it is not shown again. It counts when you have typed it: `nodectl storage recovery --confirm`";
    Ok(printer.print_line(hint)?)
}

async fn confirm_recovery(
    api: &mut ApiClient,
    args: &RecoveryArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let passphrase = Some(read_passphrase(&args.permit.passphrase)?);
    let request = v1::ConfirmRecoveryPassphraseRequest { passphrase };
    api.call(async |client| client.confirm_recovery_passphrase(request).await).await?;
    print_change(printer, "confirmed", "this is the recovery passphrase; an older one is void")
}

async fn acknowledge(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let request = v1::AcknowledgeStorageRequest {};
    let faults = api.call(async |client| client.acknowledge_storage(request).await).await?.faults;
    let lines: Vec<String> = faults.iter().map(|fault| escape_control(&format!("forgot {fault}"))).collect();
    let text = if lines.is_empty() { "the data volume has no faults".to_owned() } else { lines.join("\n") };
    let done = StorageChangeView { done: "acknowledged", faults, ..Default::default() };
    printer.print_result(&done, &text)
}

async fn trim(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    api.raise_timeout(TRIM_TIMEOUT);
    let answer = api.call(async |client| client.trim_storage(v1::TrimStorageRequest {}).await).await?;
    let trimmed_bytes = Some(answer.trimmed_bytes);
    let done = StorageChangeView { done: "trimmed", trimmed_bytes, ..Default::default() };
    printer.print_result(&done, &format!("trimmed {} bytes of the data volume", answer.trimmed_bytes))
}

async fn erase(api: &mut ApiClient, token: String, printer: &mut Printer) -> Result<(), CommandError> {
    let request = v1::EraseStorageRequest { token };
    api.call(async |client| client.erase_storage(request).await).await?;
    print_change(
        printer,
        "erasing",
        "root.storage erases the disk, and creates the data volume: `nodectl storage status`",
    )
}

fn print_change(printer: &mut Printer, done: &str, text: &str) -> Result<(), CommandError> {
    printer.print_result(&StorageChangeView { done, ..Default::default() }, text)
}

/// The passphrase that authorizes a change, if the operator asks to type it.
fn read_permit(args: &AuthorizationArgs) -> Result<Option<v1::RecoveryPassphrase>, CommandError> {
    // A given file is a request to authorize by its passphrase, too.
    let is_given = args.recovery || args.passphrase.passphrase_file.is_some();
    is_given.then(|| read_passphrase(&args.passphrase)).transpose()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn encrypted() -> v1::StorageEncryption {
        v1::StorageEncryption {
            device: "/dev/vdb".into(),
            volume: "8f0f".into(),
            encryption: "encrypted".into(),
            keys: "split".into(),
            cold_start: "operator".into(),
            has_both_headers: true,
            cluster_key: "stored".into(),
            ..Default::default()
        }
    }

    fn lines(answer: v1::StorageResponse) -> Vec<String> {
        let view = StorageView::from(answer);
        let first = format!("{}{}", view.state, describe_storage(&view));
        [first].into_iter().chain(detail_lines(&view)).collect()
    }

    #[test]
    fn a_volume_says_what_opens_it_and_who_has_the_key() {
        let open = v1::StorageResponse {
            state: "open".into(),
            path: "/data".into(),
            encryption: Some(encrypted()),
            ..Default::default()
        };
        assert_eq!(
            lines(open),
            [
                "open at /data: encrypted",
                "device       /dev/vdb, volume 8f0f",
                "opened by    node and cluster together; after a power cut, by an operator",
                "cluster      has its half of the key",
            ]
        );
        let plain = v1::StorageResponse { state: "open".into(), path: "/data".into(), ..Default::default() };
        assert_eq!(lines(plain), ["open at /data: not encrypted by noded"]);
    }

    #[test]
    fn a_volume_that_is_not_open_says_why_and_what_to_type() {
        let locked = v1::StorageResponse {
            state: "locked".into(),
            detail: "no key\u{1b}".into(),
            since: Some(UNIX_EPOCH.into()),
            ..Default::default()
        };
        let shown = lines(locked);
        assert_eq!(shown[1], "no key\\u{1b}", "a terminal is controlled");
        assert!(
            shown[2].starts_with("since ") && shown[3].ends_with("`nodectl storage unlock`"),
            "{shown:?}"
        );
        let closed = v1::StorageResponse {
            state: "closed".into(),
            detail: "the disk has an ext4".into(),
            erase_token: "ext-sampled-1".into(),
            ..Default::default()
        };
        assert!(
            lines(closed)[2].ends_with("`nodectl storage erase ext-sampled-1` (a token of samples of it)")
        );
        let reading = v1::StorageResponse {
            state: "opening".into(),
            detail: "is reading /dev/vdb to see whether it is blank: 12 %".into(),
            erase_token: "unread-sampled-2".into(),
            ..Default::default()
        };
        assert!(lines(reading)[2].contains("`nodectl storage erase unread-sampled-2`"));
        let named = describe_foreign_slots(&[3, 5]);
        assert!(named.starts_with("; noded did not add key slot 3, 5, which stays"), "{named}");
        let wiping = v1::StorageResponse {
            state: "opening".into(),
            wiped_bytes: Some(1 << 29),
            wipe_bytes: Some(1 << 31),
            ..Default::default()
        };
        assert_eq!(lines(wiping)[1], "wipes the new volume: 0.5 of 2.0 GiB");
    }

    #[test]
    fn the_clusters_half_is_stored_pending_or_lost() {
        let shown = |state: &str| {
            let cluster_key_detail = "no leader".into();
            let encryption =
                v1::StorageEncryption { cluster_key: state.into(), cluster_key_detail, ..encrypted() };
            describe_cluster_key(&encryption.into())
        };
        assert!(shown("pending").unwrap().ends_with("yet: no leader"));
        assert!(shown("incomplete").unwrap().ends_with("each server: no leader"));
        assert!(shown("lost").unwrap().contains("`nodectl storage rotate --recovery`"));
        assert_eq!(shown("unknown").unwrap(), "the node is not in it yet");
        assert_eq!(shown(""), None);
    }
}
