//! `storage reencrypt`: gives the data volume a new volume key.

use std::time::{Duration, SystemTime};

use clap::Args;
use nodekeel_node::v1;
use serde::Serialize;
use tokio::time::timeout;

use super::passphrase::{PassphraseArgs, read_passphrase};
use super::print_change;
use crate::api_client::{ApiClient, MessageStream};
use crate::error::CommandError;
use crate::output::{Printer, escape_control};
use crate::time::{format_age, format_duration, format_rfc3339, parse_duration};
use crate::wire::{non_empty, system_time};

#[derive(Debug, Args)]
pub(crate) struct ReencryptArgs {
    /// Keep the recovery passphrase, by typing it
    ///
    /// Its key slot is lost otherwise, and has to be named with --drop-slot.
    #[arg(long)]
    recovery: bool,
    #[command(flatten)]
    passphrase: PassphraseArgs,
    /// Key slot that may be lost
    ///
    /// By its number; of a recovery passphrase or of another program. May be repeated. `storage status` shows the slots.
    #[arg(long, value_name = "N")]
    drop_slot: Vec<u32>,
    /// Wait until it has ended
    ///
    /// At most this long, like 30s or 5m; without a duration, as long as it takes. Exits with 6 unless all of the disk has the new key.
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration, num_args = 0..=1)]
    wait: Option<Option<Duration>>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct ReencryptionView {
    state: String,
    reason: Option<String>,
    began: Option<String>,
    done_bytes: u64,
    total_bytes: u64,
    left_seconds: Option<u64>,
    #[serde(skip)]
    time: Option<SystemTime>,
}

impl From<v1::StorageReencryption> for ReencryptionView {
    fn from(report: v1::StorageReencryption) -> Self {
        let began = system_time(report.began);
        Self {
            state: report.state,
            reason: non_empty(report.reason),
            began: began.map(format_rfc3339),
            done_bytes: report.done_bytes,
            total_bytes: report.total_bytes,
            left_seconds: report.left_seconds,
            time: began,
        }
    }
}

/// A re-encryption in one line.
pub(super) fn describe_reencryption(report: &ReencryptionView) -> String {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let mut text = report.state.clone();
    text.extend(report.time.map(|began| format!(" for {}", format_age(began))));
    if report.total_bytes > 0 {
        let percent = u128::from(report.done_bytes) * 100 / u128::from(report.total_bytes);
        let (done, total) = (gigabytes(report.done_bytes), gigabytes(report.total_bytes));
        text += &format!(": {percent} %, {done:.1} of {total:.1} GB have the new key");
    }
    let left = report.left_seconds.map(Duration::from_secs).map(format_duration);
    text.extend(left.map(|left| format!(", about {left} left")));
    text.extend(report.reason.as_ref().map(|reason| format!(": {reason}")));
    text
}

impl ReencryptArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let is_given = self.recovery || self.passphrase.passphrase_file.is_some();
        let passphrase = is_given.then(|| read_passphrase(&self.passphrase)).transpose()?;
        let request = v1::ReencryptStorageRequest { passphrase, drop_slots: self.drop_slot };
        let mut reports = api.follow_stream(async |client| client.reencrypt_storage(request).await).await?;
        let Some(limit) = self.wait else {
            return print_change(
                printer,
                "reencrypting",
                "noded encrypts all of the data volume with a new key, and continues after a restart: `nodectl storage status` has \
                 its progress. Back the header up when it is complete; older backups are void then",
            );
        };
        let mut last = None;
        let has_ended = match limit {
            None => follow(&mut reports, &mut last, printer).await,
            // The last report before the time was up is the result.
            Some(limit) => timeout(limit, follow(&mut reports, &mut last, printer)).await.unwrap_or(Ok(())),
        };
        has_ended?;
        let last = last.ok_or(CommandError::ConnectionLost)?;
        printer.print_result(&last, &escape_control(&describe_reencryption(&last)))?;
        if last.state == "complete" { Ok(()) } else { Err(CommandError::NotHealthy) }
    }
}

/// Shows the progress on a terminal until it has ended.
async fn follow(
    reports: &mut MessageStream<v1::StorageReencryption>,
    last: &mut Option<ReencryptionView>,
    printer: &Printer,
) -> Result<(), CommandError> {
    let progress = printer.progress_line();
    while last.as_ref().is_none_or(|last| last.state == "running") {
        let report = reports.next_message().await?.ok_or(CommandError::ConnectionLost)?;
        let report = ReencryptionView::from(report);
        let is_running = report.state == "running";
        progress.show(&if is_running {
            escape_control(&describe_reencryption(&report))
        } else {
            String::new()
        });
        *last = Some(report);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reencryption_says_how_far_it_is_and_why_it_does_not_go_on() {
        let running = v1::StorageReencryption {
            state: "running".into(),
            began: Some(SystemTime::now().into()),
            done_bytes: 1_000_000_000,
            total_bytes: 4_000_000_000,
            left_seconds: Some(192),
            ..Default::default()
        };
        let shown = |report: v1::StorageReencryption| describe_reencryption(&report.into());
        assert_eq!(
            shown(running.clone()),
            "running for 0s: 25 %, 1.0 of 4.0 GB have the new key, about 3m12s left"
        );
        let failed = v1::StorageReencryption {
            state: "failed".into(),
            reason: "no key".into(),
            began: None,
            left_seconds: None,
            ..running
        };
        assert_eq!(shown(failed), "failed: 25 %, 1.0 of 4.0 GB have the new key: no key");
        let complete = v1::StorageReencryption { state: "complete".into(), ..Default::default() };
        assert_eq!(shown(complete), "complete");
    }
}
