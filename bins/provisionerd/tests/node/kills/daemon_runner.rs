//! provisionerd as a process on the node, which is killed at moments and started again.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use testbed::{Guest, KillPlace, KillTally, wait_until};

use crate::deployment::{DRIVER, TIMEOUT, TestCluster};
use crate::disk::VOLUMES;

pub(super) const PROGRAM_AT: &str = "/usr/bin/provisionerd";
pub(super) const KUBECONFIG_AT: &str = "/etc/provisionerd.kubeconfig";

/// 128 + SIGKILL.
const KILLED: i32 = 137;
/// 128 + SIGTERM.
const TERMINATED: i32 = 143;
/// Timeout of one process.
const RUN_WITHIN: Duration = Duration::from_secs(3600);

/// Each start gets all moments that are pending, so that a volume survives one kill after another.
#[derive(Default)]
pub(super) struct DaemonRunner {
    pending: Mutex<BTreeSet<String>>,
    tally: Mutex<KillTally>,
    output: Mutex<Vec<String>>,
    is_to_end: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DaemonRunner {
    /// Runs provisionerd until it should end.
    pub(super) fn run(&self, guest: &Guest) -> Result<()> {
        while !self.is_to_end.load(Ordering::SeqCst) {
            let pending = self.pending().iter().cloned().collect::<Vec<_>>();
            let mut command = Command::new(PROGRAM_AT);
            command.args(["run", "--driver", DRIVER, "--node", testbed::GUEST_NODE, "--directory", VOLUMES]);
            command.args(["--kubeconfig", KUBECONFIG_AT]);
            if !pending.is_empty() {
                command.env("PROVISIONERD_KILL_AT", pending.join(","));
            }
            let mut died = None;
            let code = guest.start_command(&command)?.wait_for_exit(RUN_WITHIN, |line| {
                let killed = line.strip_prefix("killed at ").and_then(|rest| rest.split_once(": "));
                died = died.take().or(killed.map(|(_, moment)| moment.to_owned()));
                lock(&self.output).push(line.to_owned());
            })?;
            match died {
                Some(moment) if code == KILLED => {
                    ensure!(self.pending().remove(&moment), "{moment:?} again");
                    lock(&self.tally).record(KillPlace::Guest, &moment);
                }
                // By `restart` or `end`, also before its handler of SIGTERM was installed.
                None if code == 0 || code == TERMINATED => {}
                died => bail!("provisionerd exited with {code} at {died:?}"),
            }
        }
        Ok(())
    }

    /// The moments at which it was not killed yet.
    pub(super) fn pending(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.pending)
    }

    /// Has it killed at these moments, too.
    pub(super) fn add_moments(&self, cluster: &TestCluster, moments: BTreeSet<String>) -> Result<()> {
        self.pending().extend(moments);
        self.restart(cluster)
    }

    /// Stops it, and so starts it again.
    pub(super) fn restart(&self, cluster: &TestCluster) -> Result<()> {
        // It may just be starting.
        wait_until(TIMEOUT, "provisionerd to get a signal", || {
            cluster.node.run_shell("kill -TERM $(pidof provisionerd)").map(drop)
        })
    }

    /// Ends it.
    pub(super) fn end(&self, cluster: &TestCluster) {
        self.is_to_end.store(true, Ordering::SeqCst);
        // It may just have been killed.
        let _ = cluster.node.run_shell("kill -TERM $(pidof provisionerd)");
    }

    /// Waits until it was killed at all moments of a step; of every step for "".
    pub(super) fn wait_killed(&self, cluster: &TestCluster, step: &str) -> Result<()> {
        let pending = || {
            let pending = self.pending();
            Ok(pending.iter().filter(|moment| moment.ends_with(step)).cloned().collect::<Vec<_>>())
        };
        cluster.wait_equal("the last kills", &Vec::new(), pending)
    }

    /// The kills so far.
    pub(super) fn tally(&self) -> KillTally {
        lock(&self.tally).clone()
    }

    /// The output of all processes.
    pub(super) fn output(&self) -> String {
        lock(&self.output).join("\n")
    }
}
