//! `storage scrub`: reads all of the data volume.

use std::time::{Duration, SystemTime};

use clap::Args;
use nodekeel_fsquota::Bytes;
use nodekeel_node::v1;
use serde::Serialize;
use tokio::time::timeout;

use super::print_change;
use crate::api_client::{ApiClient, MessageStream};
use crate::error::CommandError;
use crate::output::{Printer, escape_control};
use crate::time::{format_age, format_duration, format_rfc3339, parse_duration};
use crate::wire::system_time;

#[derive(Debug, Args)]
pub(crate) struct ScrubArgs {
    /// Read at most this many bytes per second
    ///
    /// Like 50MiB or 1G; max for the speed of the disk. Default: at most a quarter of the disk's time.
    #[arg(long, value_parser = parse_rate)]
    rate: Option<u64>,
    /// Wait until it has ended
    ///
    /// At most this long, like 30s or 5m; without a duration, as long as it takes. Exits with 6 unless all of the disk was read.
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration, num_args = 0..=1)]
    wait: Option<Option<Duration>>,
    /// End the running scrub
    #[arg(long, conflicts_with_all = ["rate", "wait"])]
    cancel: bool,
}

fn parse_rate(text: &str) -> Result<u64, String> {
    if text == "max" {
        return Ok(u64::MAX);
    }
    let rate: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if rate.0 == 0 { Err("use at least one byte per second, or max".to_owned()) } else { Ok(rate.0) }
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct ScrubView {
    state: String,
    began: Option<String>,
    ended: Option<String>,
    device: String,
    done_bytes: u64,
    device_bytes: u64,
    left_seconds: Option<u64>,
    unreadable_ranges: u64,
    unreadable_bytes: u64,
    first_unreadable: Vec<RangeView>,
    #[serde(skip)]
    time: Option<SystemTime>,
}

/// Bytes of the device, without the end.
#[derive(Debug, Clone, Serialize)]
struct RangeView {
    start: u64,
    end: u64,
}

impl From<v1::StorageScrub> for ScrubView {
    fn from(scrub: v1::StorageScrub) -> Self {
        let (began, ended) = (system_time(scrub.began), system_time(scrub.ended));
        let ranges = scrub.first_unreadable.into_iter();
        Self {
            state: scrub.state,
            began: began.map(format_rfc3339),
            ended: ended.map(format_rfc3339),
            device: scrub.device,
            done_bytes: scrub.done_bytes,
            device_bytes: scrub.device_bytes,
            left_seconds: scrub.left_seconds,
            unreadable_ranges: scrub.unreadable_ranges,
            unreadable_bytes: scrub.unreadable_bytes,
            first_unreadable: ranges.map(|range| RangeView { start: range.start, end: range.end }).collect(),
            time: ended.or(began),
        }
    }
}

/// A scrub in one line.
pub(super) fn describe_scrub(scrub: &ScrubView) -> String {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let since = scrub.time.map(format_age).unwrap_or_default();
    let mut text = if scrub.ended.is_some() {
        format!("{}, {since} ago", scrub.state)
    } else {
        let percent = u128::from(scrub.done_bytes) * 100 / u128::from(scrub.device_bytes.max(1));
        let left = scrub.left_seconds.map(Duration::from_secs).map(format_duration);
        let left = left.map(|left| format!(", about {left} left")).unwrap_or_default();
        format!("{} for {since}: {percent} %{left}", scrub.state)
    };
    text += &format!(
        ": {:.1} of {:.1} GB of {} read",
        gigabytes(scrub.done_bytes),
        gigabytes(scrub.device_bytes),
        scrub.device
    );
    if scrub.unreadable_ranges == 0 {
        return text + ", all readable";
    }
    let places: Vec<_> = scrub.first_unreadable.iter().map(|range| range.start.to_string()).collect();
    let more = if scrub.unreadable_ranges > places.len() as u64 { ", …" } else { "" };
    text + &format!(", {} bytes unreadable: at byte {}{more}", scrub.unreadable_bytes, places.join(", "))
}

impl ScrubArgs {
    pub(super) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        if self.cancel {
            let request = v1::CancelStorageScrubRequest {};
            api.call(async |client| client.cancel_storage_scrub(request).await).await?;
            return print_change(printer, "canceled", "the scrub ends: `nodectl storage status`");
        }
        let request = v1::ScrubStorageRequest { bytes_per_second: self.rate };
        let mut reports = api.follow_stream(async |client| client.scrub_storage(request).await).await?;
        let Some(limit) = self.wait else {
            return print_change(
                printer,
                "scrubbing",
                "noded reads all of the data volume: `nodectl storage status` has its progress, and \
                 `nodectl storage scrub --cancel` ends it",
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
        printer.print_result(&last, &escape_control(&describe_scrub(&last)))?;
        let is_good = last.state == "complete" && last.unreadable_ranges == 0;
        if is_good { Ok(()) } else { Err(CommandError::NotHealthy) }
    }
}

/// Shows the progress on a terminal until the scrub has ended.
async fn follow(
    reports: &mut MessageStream<v1::StorageScrub>,
    last: &mut Option<ScrubView>,
    printer: &Printer,
) -> Result<(), CommandError> {
    let progress = printer.progress_line();
    while last.as_ref().is_none_or(|last| last.ended.is_none()) {
        let report = reports.next_message().await?.ok_or(CommandError::ConnectionLost)?;
        let scrub = ScrubView::from(report);
        let is_running = scrub.ended.is_none();
        progress.show(&if is_running { escape_control(&describe_scrub(&scrub)) } else { String::new() });
        *last = Some(scrub);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_quantity_or_the_speed_of_the_disk() {
        assert_eq!(parse_rate("max"), Ok(u64::MAX));
        assert_eq!(parse_rate("50MiB"), Ok(50 << 20));
        for text in ["0", "", "fast", "-1"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_scrub_says_how_far_it_is_or_was_and_what_it_could_not_read() {
        let running = v1::StorageScrub {
            state: "running".into(),
            began: Some(SystemTime::now().into()),
            device: "dm-1".into(),
            done_bytes: 1_000_000_000,
            device_bytes: 4_000_000_000,
            left_seconds: Some(192),
            ..Default::default()
        };
        let text = describe_scrub(&running.clone().into());
        assert_eq!(text, "running for 0s: 25 %, about 3m12s left: 1.0 of 4.0 GB of dm-1 read, all readable");
        let ended = v1::StorageScrub {
            state: "complete".into(),
            ended: Some(SystemTime::now().into()),
            unreadable_ranges: 2,
            unreadable_bytes: 8192,
            first_unreadable: vec![v1::ByteRange { start: 4096, end: 8192 }],
            ..running
        };
        let text = describe_scrub(&ended.into());
        assert!(text.starts_with("complete, 0s ago: 1.0 of 4.0 GB"), "{text}");
        assert!(text.ends_with(", 8192 bytes unreadable: at byte 4096, …"), "{text}");
    }
}
