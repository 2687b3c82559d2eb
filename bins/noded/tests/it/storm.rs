//! A storm over a node: noded, its etcd and its services are killed and stopped at random.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::{leftovers, tools};

use crate::attacks::{VICTIM, notifier_config, write_programs};
use crate::harness::{EtcdPorts, NodedProcess, service_config, wait};
use crate::killed::{KilledNode, check_nothing_left, lock_script};

/// Seconds of the storm; `cargo xtask soak node-storm` takes ten minutes.
fn storm_time() -> Duration {
    let seconds = std::env::var("NODEKEEL_STORM_SECONDS").map_or(40, |seconds| seconds.parse().unwrap());
    Duration::from_secs(seconds)
}

/// Numbers of a sequence, which a failed run can be given again by `NODEKEEL_SEED`.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        let seed = std::env::var("NODEKEEL_SEED").map_or(7, |seed| seed.parse().unwrap());
        println!("NODEKEEL_SEED={seed}");
        Self(seed)
    }

    /// Of `[0, below)`. *Source:* Knuth's MMIX.
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Puts one key after the other into etcd until it is told to end, and returns the number of each that was acknowledged.
fn spawn_writer(ports: &EtcdPorts, ends: &Arc<AtomicBool>) -> JoinHandle<Vec<u32>> {
    let (endpoint, ends) = (ports.client.socket_address().to_string(), Arc::clone(ends));
    std::thread::spawn(move || {
        let etcdctl = tools::find_tool(tools::ETCDCTL).unwrap();
        let mut acknowledged = Vec::new();
        for number in 0.. {
            if ends.load(Ordering::Relaxed) {
                break;
            }
            let mut put = Command::new(&etcdctl);
            put.env("ETCDCTL_API", "3").args(["--endpoints", &endpoint, "--command-timeout", "2s", "put"]);
            put.args([format!("storm/{number}"), number.to_string()])
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            if put.status().unwrap().success() {
                acknowledged.push(number);
            }
        }
        acknowledged
    })
}

/// The pids of the running services that are kept, by DN.
fn kept_pids(node: &NodedProcess, kept: &[String]) -> BTreeMap<String, i32> {
    let pid_of = |dn: &String| {
        node.wait_ready(dn);
        let pid = node.wait_status(dn, |status| status["pid"].is_number())["pid"].as_i64().unwrap();
        (dn.clone(), i32::try_from(pid).unwrap())
    };
    kept.iter().map(pid_of).collect()
}

fn send(signal: Signal, pid: i32) {
    // It may have ended by itself.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Stops a process for a while.
fn pause(pid: i32, dice: &mut Dice) {
    send(Signal::SIGSTOP, pid);
    #[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
    std::thread::sleep(Duration::from_millis(dice.roll(2500)));
    send(Signal::SIGCONT, pid);
}

/// The pid of the etcd of a node.
fn etcd_pid(scratch: &Path) -> Option<i32> {
    let processes = leftovers::find_processes(scratch).unwrap();
    let is_etcd =
        |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "etcd");
    processes.into_iter().map(|process| process.pid).find(|pid| is_etcd(*pid))
}

fn count_descriptors(node: &NodedProcess) -> usize {
    let pid = fs::read_to_string(node.data().join("lock")).unwrap();
    fs::read_dir(format!("/proc/{}/fd", pid.trim())).unwrap().count()
}

#[test]
#[ignore = "sampled: needs root and etcd: it makes cgroups"]
fn a_storm_of_kills_and_pauses_loses_no_acknowledged_write_and_leaves_nothing() {
    let ports = EtcdPorts::reserve();
    let mut plan =
        KilledNode::new(false, format!("services.containerd.enable = false\n{}", ports.section("")));
    let scratch = plan.create_scratch();
    write_programs(scratch.path());
    let fast = "backoff = { initial = \"10ms\", max = \"200ms\" }";
    let mut kept = vec![VICTIM.to_owned()];
    for number in 0..3 {
        let (k, f) = (format!("k{number}"), format!("f{number}"));
        let running = lock_script(scratch.path(), &k, "setsid sleep 1000 & exec sleep 1000");
        let forking = lock_script(scratch.path(), &f, "setsid sleep 1000 & sleep 0.5; exit 1");
        let of = format!("directory = {:?}\n{fast}", scratch.path());
        plan.config += &service_config(&k, &running, &format!("{of}\nkeep = true"));
        plan.config += &service_config(&f, &forking, &of);
        kept.push(format!("root.service.{k}"));
    }
    plan.config += &notifier_config(scratch.path(), &format!("keep = true\nwatchdog = \"2s\"\n{fast}"));
    let mut node = plan.start(scratch);
    node.wait_ready("root.etcd");
    let mut pids = kept_pids(&node, &kept);
    let descriptors = count_descriptors(&node);
    let ends = Arc::new(AtomicBool::new(false));
    let writer = spawn_writer(&ports, &ends);
    let (mut dice, started, mut acts) = (Dice::new(), Instant::now(), [0; 5]);
    while started.elapsed() < storm_time() {
        #[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
        std::thread::sleep(Duration::from_millis(dice.roll(800)));
        let act = usize::try_from(dice.roll(5)).unwrap();
        acts[act] += 1;
        let dn = kept[usize::try_from(dice.roll(4)).unwrap()].clone();
        match act {
            0 => {
                let scratch = node.kill();
                node = plan.start(scratch);
            }
            1 => pause(node_pid(&node), &mut dice),
            2 => {
                send(Signal::SIGKILL, pids[&dn]);
                pids.remove(&dn);
            }
            3 => etcd_pid(node.scratch.path()).into_iter().for_each(|pid| send(Signal::SIGKILL, pid)),
            _ => etcd_pid(node.scratch.path()).into_iter().for_each(|pid| pause(pid, &mut dice)),
        }
        let doubled = fs::read_to_string(node.scratch.path().join("doubled")).unwrap_or_default();
        assert_eq!(doubled, "", "{acts:?}: two of one service were running");
        if act < 2 || !pids.contains_key(&dn) {
            let now = kept_pids(&node, &kept);
            for (dn, pid) in &pids {
                assert_eq!(now[dn], *pid, "{acts:?}: {dn} is the same process");
            }
            pids = now;
        }
    }
    ends.store(true, Ordering::Relaxed);
    let acknowledged = writer.join().unwrap();
    node.wait_ready("root.etcd");
    let found = ports.etcdctl(&["get", "--prefix", "storm/", "--print-value-only"]);
    let found: std::collections::BTreeSet<u32> = found.lines().map(|line| line.parse().unwrap()).collect();
    let lost: Vec<_> = acknowledged.iter().filter(|number| !found.contains(number)).collect();
    println!(
        "{:?}: {} kills and {} pauses of noded, {} kills of services, {} kills and {} pauses of etcd; {} writes acknowledged, lost {lost:?}",
        started.elapsed(),
        acts[0],
        acts[1],
        acts[2],
        acts[3],
        acts[4],
        acknowledged.len()
    );
    assert!(lost.is_empty() && !acknowledged.is_empty());
    kept_pids(&node, &kept);
    wait("the descriptors of the start", || {
        let now = count_descriptors(&node);
        // One more or less of each kind: connections of health checks come and go.
        anyhow::ensure!(now <= descriptors + 4, "{now} descriptors, and {descriptors} after the first start");
        Ok(())
    });
    let sockets = node.data().join("run/notify");
    let path = node.scratch.path().to_owned();
    check_nothing_left(&mut node);
    assert_eq!(leftovers::find_processes(&path).unwrap().len(), 0, "no process is left");
    assert_eq!(fs::read_dir(sockets).unwrap().count(), 0, "no socket is left");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
    assert_eq!(plan.cgroups_left(), [""; 0]);
}

fn node_pid(node: &NodedProcess) -> i32 {
    fs::read_to_string(node.data().join("lock")).unwrap().trim().parse().unwrap()
}
