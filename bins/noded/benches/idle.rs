//! The cost of an idle noded: its wake-ups and its memory.

mod daemon;

use std::time::Duration;

use anyhow::Result;
use testbed::bench::{BenchRow, RowWriter};
use testbed::noded::EtcdPorts;
use testbed::{ScratchDir, process_cost, reserve_port};

use daemon::{NodedProcess, start_noded, wait_until_ready};

/// The time in which wake-ups are counted.
const MEASURE_TIME: Duration = Duration::from_secs(10);

/// The daemons have finished their start when noded is ready, but their first seconds are not idle, and tokio
/// keeps a blocking thread for ten seconds after its last use.
const SETTLE_TIME: Duration = Duration::from_secs(15);

/// Long enough, from the readiness of the daemons, for one health check of containerd.
const HEALTH_CHECK_TIME: Duration = Duration::from_secs(45);

/// Goal for the resident memory of a noded alone. Heap and stacks take less than 1 MiB of it (`/proc/PID/smaps`). The rest
/// becomes less only with the size of the program: the pages of it that the start has touched, which the kernel maps sixteen
/// at a time, and the tables that the loader relocates, which count as its own.
const MAX_MEMORY_KIB: f64 = 12.0 * 1024.0;

fn main() -> Result<()> {
    let mut rows = RowWriter::new("idle");
    let bare = "services.etcd.enable = false\nservices.containerd.enable = false\n";
    rows.add_rows(measure("alone", "a node without services", bare, false)?)?;
    let api = reserve_port()?;
    let member = format!(
        "cluster.address = \"127.0.0.1\"\ncluster.bootstrap = true\napi.address = \"{}\"\n",
        api.socket_address()
    );
    for (id, node, cluster) in [
        ("daemons", "a node with etcd and containerd, noded alone counted", ""),
        // It asks its etcd for its status every four seconds: etcd does not notify of an alarm.
        ("whole", "a member of its cluster, with containerd and its API, noded alone counted", &*member),
    ] {
        let ports = EtcdPorts::reserve();
        let config = format!("{cluster}{}", ports.section(""));
        rows.add_rows(measure(id, node, &config, true)?)?;
    }
    rows.finish()?;
    Ok(())
}

/// The rows of one configuration.
fn measure(id: &str, node: &str, config: &str, has_containerd: bool) -> Result<Vec<BenchRow>> {
    let scratch = ScratchDir::new()?;
    let noded = start_noded(scratch.path(), config)?;
    wait_until_ready(scratch.path())?;
    sleep(SETTLE_TIME);
    let seconds = MEASURE_TIME.as_secs();
    let idle = BenchRow::new(
        format!("wake_ups_{id}"),
        format!("{node}, idle for {seconds} s"),
        "wake-ups",
        count_wake_ups(&noded, MEASURE_TIME)? as f64,
    );
    let mut rows = vec![idle.limit(0.0).goal_at_most(0.0)];
    if has_containerd {
        let work = format!("{node}, {} s with one health check of containerd", HEALTH_CHECK_TIME.as_secs());
        rows.push(BenchRow::new(
            format!("wake_ups_{id}_asked"),
            work,
            "wake-ups",
            count_wake_ups(&noded, HEALTH_CHECK_TIME)? as f64,
        ));
    }
    let (memory, own) = (process_cost::resident_kib(noded.id())?, process_cost::anonymous_kib(noded.id())?);
    let resident =
        BenchRow::new(format!("memory_{id}"), format!("{node}, resident after that"), "KiB", memory as f64);
    // The rest is pages of the program and its libraries.
    let resident = resident.limit((memory - own) as f64);
    rows.push(if has_containerd { resident } else { resident.goal_at_most(MAX_MEMORY_KIB) });
    let work = format!("{node}, of that without the pages of program files, which are the limit above");
    rows.push(BenchRow::new(format!("memory_{id}_own"), work, "KiB", own as f64));
    noded.stop()?;
    Ok(rows)
}

/// The wake-ups of noded during this time.
fn count_wake_ups(noded: &NodedProcess, time: Duration) -> Result<u64> {
    let before = process_cost::count_wake_ups(noded.id())?;
    sleep(time);
    Ok(process_cost::count_wake_ups(noded.id())?.count_since(&before))
}

#[expect(clippy::disallowed_methods, reason = "the measured value is elapsed time")]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}
