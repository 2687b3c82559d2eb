//! The speed of a scrub of the data volume beside dd, which reads the same mapping.
//!
//! `cargo xtask bench scrub` runs it in a guest.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::node::NodeHandle;
use nodekeel_node::v1::ScrubStorageRequest;
use testbed::bench::{BenchRow, RowWriter, median};
use testbed::guest::disk::GuestDisk;
use testbed::{ScratchDir, command_output};
use tokio::time::timeout;

const ROUNDS: usize = 5;
/// Longer than the start of a node in an emulated guest.
const OPEN_WITHIN: Duration = Duration::from_secs(300);
/// Goal for the speed, beside that of dd.
const MIN_SPEED: f64 = 0.8;

#[tokio::main]
async fn main() -> Result<()> {
    let disk = GuestDisk::acquire()?;
    let scratch = ScratchDir::new()?;
    let config = format!(
        "services.etcd.enable = false\nservices.containerd.enable = false\n[storage]\nkind = \"disk\"\n\
         device = {:?}\nencryption = \"encrypted\"\nkeys = \"local\"\n",
        disk.device_path()
    );
    let data = scratch.path().join("data");
    let node = NodeHandle::builder("bench.toml", &config).data(&data).start()?;
    timeout(OPEN_WITHIN, node.wait_ready("root.storage")).await.context("the volume opens")?;
    let mut client = client::connect(node.control_socket()).await?;

    let (mut scrubbed, mut read) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        scrubbed.push(scrub(&mut client).await?);
        read.push(read_mapping()?);
    }
    node.shutdown().await;
    let mut rows = RowWriter::new("scrub");
    let (ours, dd) = (median(&scrubbed), median(&read));
    let row = BenchRow::new("scrub", "read all of an encrypted volume of 1 GiB", "ms", ours);
    rows.add_rows([row.peer("dd iflag=direct", "coreutils", dd).goal_at_most(dd / MIN_SPEED)])?;
    rows.finish().map(drop)
}

/// A scrub at the speed of the disk, in milliseconds.
async fn scrub(client: &mut NodeClient) -> Result<f64> {
    let start = Instant::now();
    let request = ScrubStorageRequest { bytes_per_second: Some(u64::MAX) };
    let mut reports = client.scrub_storage(request).await?.into_inner();
    let mut last = None;
    while let Some(report) = reports.message().await? {
        last = Some(report);
    }
    let last = last.context("a scrub reports its end")?;
    ensure!(last.state == "complete" && last.unreadable_ranges == 0, "{last:?}");
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// The same by dd.
fn read_mapping() -> Result<f64> {
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/mapper/nodekeel-data", "of=/dev/null", "bs=1M", "iflag=direct", "status=none"]);
    let start = Instant::now();
    command_output(&mut dd)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}
