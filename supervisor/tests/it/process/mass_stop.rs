//! Many processes that stop at the same time.

use std::time::{Duration, Instant};

use nodekeel_supervisor::Supervisor;

use crate::harness::parent_of;

use super::cgroup::runtime;
use super::{EXCLUSIVE, OutputBuffer, configured_cgroups, sh};

const PROCESSES: usize = 100;
const GRACE: Duration = Duration::from_secs(1);

/// Each kill looks at every process of the host, unless those at one instant share the look.
#[test]
fn a_hundred_processes_that_ignore_the_stop_signal_take_one_grace_period_together() {
    runtime().block_on(async {
        let _alone = EXCLUSIVE.lock().await;
        let output = OutputBuffer::default();
        let stubborn = sh("trap '' TERM; echo up; while :; do sleep 1000; done").grace_period(GRACE);
        let root = parent_of(move |ctx| {
            (0..PROCESSES).try_for_each(|number| ctx.run_child(format!("p{number}"), stubborn.clone()))
        });
        let builder = Supervisor::builder().cgroup_parent(configured_cgroups());
        let supervisor = builder.output_sink(output.clone().sink()).start(root);
        output.wait_count("up", PROCESSES).await;
        let (started, cpu) = (Instant::now(), cpu_time());
        let report = supervisor.shutdown().await;
        let (elapsed, cpu) = (started.elapsed(), cpu_time() - cpu);
        println!("{PROCESSES} stubborn processes: exit after {elapsed:?}, of which {cpu:?} CPU");
        assert!(report.stragglers.is_empty(), "{report:?}");
        assert!((GRACE..10 * GRACE).contains(&elapsed), "{elapsed:?}");
    });
}

/// The CPU time of this program.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("proc is mounted");
    let fields = stat[stat.rfind(')').expect("it has a name")..].split(' ');
    let ticks: u64 = fields.skip(12).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum();
    // proc(5): in ticks, which are 10 ms.
    Duration::from_millis(ticks * 10)
}
