//! Kills provisionerd around the steps of a directory's life under a kubelet, with limits and mounts of the kernel: nothing
//! leaks, and nothing is provisioned twice. The kills of other volumes are in `tests/it/crash.rs` and in the tests of the
//! provisioner.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nodekeel_provisioner::FINALIZER;
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::power_cut::selected_seed;
use testbed::{Guest, KillPlace, KillTally, Kube, KubeUser, wait_until};

use crate::cluster::{
    DRIVER, TIMEOUT, TestCluster, VOLUMES, VolumeFileSystem, claim_manifest, pod_manifest, with_node,
};

/// How often a stress run goes through all moments on both file systems; without, it is a sample on XFS: a kill takes twenty
/// seconds on an emulated node.
const ROUNDS_VARIABLE: &str = "NODEKEEL_NODE_VOLUME_KILLS";
/// One of so many moments is in the sample.
const SAMPLE: usize = 16;

/// The steps of a directory with a pod.
const STEPS: [&str; 23] = [
    "PublishCapacity",
    "CreateDirectory",
    "SetLimits",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "CreateEvent",
    "AddFinalizer",
    "CreateTarget",
    "MountVolume",
    "MarkResize",
    "ResizeLimits",
    "UpdateVolume",
    "FinishResize",
    "MarkInfeasible",
    "UnmountVolume",
    "RemoveTarget",
    "CreateTrashEntry",
    "MoveToTrash",
    "DeletePersistentVolume",
    "RemoveFinalizer",
    "EraseContent",
    "ReleaseProject",
    "RemoveTrashEntry",
];

const PROGRAM_AT: &str = "/usr/bin/provisionerd";
const KUBECONFIG_AT: &str = "/etc/provisionerd.kubeconfig";

/// provisionerd as a process of the node, which is started again after each kill: with all moments that are pending, so that
/// a volume survives one kill after another.
#[derive(Default)]
struct DaemonRunner {
    pending: BTreeSet<String>,
    tally: KillTally,
    output: Vec<String>,
    is_to_end: bool,
}

fn lock(runner: &Mutex<DaemonRunner>) -> MutexGuard<'_, DaemonRunner> {
    runner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs provisionerd until it is to end.
fn run_daemon(runner: &Mutex<DaemonRunner>, guest: &Guest) -> Result<()> {
    /// Timeout of one process.
    const RUN_WITHIN: Duration = Duration::from_secs(3600);
    while !lock(runner).is_to_end {
        let mut command = Command::new(PROGRAM_AT);
        command.args(["run", "--driver", DRIVER, "--node", testbed::GUEST_NODE, "--directory", VOLUMES]);
        command.args(["--kubeconfig", KUBECONFIG_AT]);
        let pending = lock(runner).pending.iter().cloned().collect::<Vec<_>>().join(",");
        if !pending.is_empty() {
            command.env("PROVISIONERD_KILL_AT", pending);
        }
        let mut died = None;
        let code = guest.start_command(&command)?.wait_for_exit(RUN_WITHIN, |line| {
            let killed = line.strip_prefix("killed at ").and_then(|rest| rest.split_once(": "));
            died = died.take().or(killed.map(|(_, moment)| moment.to_owned()));
            lock(runner).output.push(line.to_owned());
        })?;
        match died {
            // 128 + SIGKILL.
            Some(moment) if code == 137 => {
                let mut runner = lock(runner);
                ensure!(runner.pending.remove(&moment), "{moment:?} again");
                runner.tally.record(KillPlace::Guest, &moment);
            }
            // By the test, with 128 + SIGTERM before its handler was installed.
            None if [0, 143].contains(&code) => {}
            died => bail!("provisionerd exited with {code} at {died:?}"),
        }
    }
    Ok(())
}

/// Creates, uses, expands and deletes a volume with its pod.
fn live_through(cluster: &TestCluster, name: &str) -> Result<()> {
    const LIMIT: u64 = 8 << 20;
    /// Counts in a file until a write fails.
    const WRITER: &str =
        "number=0; while echo $number >>/data/numbers; do number=$((number + 1)); usleep 200000; done";
    let kube = &cluster.kube;
    let exec = |script: &str| cluster.exec(name, "stay", script);
    let check_limits = |bytes: u64| {
        let limits = cluster.kernel_limits()?;
        ensure!(limits == [(bytes >> 10, bytes / 2048)], "the kernel has {limits:?}");
        Ok(())
    };
    let mut pod = pod_manifest(name);
    pod["spec"]["containers"][0]["args"] = json!(["sh", "-c", WRITER]);
    cluster.apply(&[claim_manifest(name, "nodekeel", LIMIT), pod])?;
    let volume = cluster.wait_bound(name)?;
    ensure!(kube.list_objects("pv")?.len() == 1, "several PersistentVolumes were created");
    let there = cluster.volume_directories()?;
    ensure!(there == [format!("volumes/{volume}")], "the directories are {there:?}");
    check_limits(LIMIT)?;
    cluster.wait_running(name)?;
    exec("echo data >/data/file")?;
    kube.patch_object("pv", &volume, &json!({ "metadata": { "finalizers": [] } }))?;
    cluster.wait_for("pv", &volume, |volume| {
        volume["metadata"]["finalizers"].as_array().is_some_and(|all| all.iter().any(|one| one == FINALIZER))
    })?;

    // Expanded under its pod, which writes: once further than possible, and then to twice its size.
    let request = |size: &str| {
        kube.patch_object(
            "pvc",
            name,
            &json!({ "spec": { "resources": { "requests": { "storage": size } } } }),
        )
    };
    request("100Ti")?;
    cluster.wait_for("pvc", name, |claim| {
        claim["status"]["allocatedResourceStatuses"]["storage"] == "ControllerResizeInfeasible"
    })?;
    request("16Mi")?;
    cluster.wait_for("pvc", name, |claim: &Value| {
        let status = &claim["status"];
        status["capacity"]["storage"] == "16Mi" && status["allocatedResourceStatuses"].is_null()
    })?;
    check_limits(2 * LIMIT)?;
    let size = exec("df -k /data | awk 'END { print $2 * 1024 }'")?;
    ensure!(size.trim() == (2 * LIMIT).to_string(), "the pod sees a size of {size}");
    // No write of the pod has failed: it wrote number after number, and writes on.
    let numbers = || -> Result<Vec<usize>> {
        let text = exec("cat /data/numbers")?;
        text.lines().map(|line| line.parse().with_context(|| format!("read {line:?}"))).collect()
    };
    let written = numbers()?;
    ensure!(written.iter().copied().eq(0..written.len()), "the pod has written {written:?}");
    cluster.wait_equal("the pod to write on", &true, || Ok(numbers()?.len() > written.len()))?;
    let pod = kube.get_object("pod", name)?;
    ensure!(pod["status"]["containerStatuses"][0]["restartCount"] == 0, "the pod has restarted");
    ensure!(exec("cat /data/file")? == "data\n", "the volume lost its data");

    cluster.delete("pod", name)?;
    let mounts = format!("grep -c /{volume}/mount /proc/self/mountinfo || true");
    cluster.wait_equal("the mounts to go", &"0\n".to_owned(), || cluster.node.run_shell(&mounts))?;
    kube.delete_object("pvc", name)?;
    cluster.wait_gone("pv", &volume)?;
    cluster.wait_nothing_left()?;
    ensure!(kube.list_objects("pv")?.is_empty(), "PersistentVolumes remain");
    Ok(())
}

#[test]
#[ignore = "sampled: needs kube and a node"]
fn a_daemon_killed_around_the_steps_of_a_directory_with_a_pod_leaks_nothing_and_provisions_nothing_twice() {
    let rounds = std::env::var(ROUNDS_VARIABLE).ok().map(|count| count.parse::<usize>().expect("a number"));
    let all = STEPS.iter().flat_map(|step| ["Before", "After"].map(|side| format!("{side} {step}")));
    let (file_systems, moments): (_, Vec<_>) = match rounds {
        Some(_) => (&[VolumeFileSystem::Xfs, VolumeFileSystem::Ext4][..], all.collect()),
        None => {
            let seed = usize::try_from(selected_seed().expect("a seed")).expect("a small seed");
            (&[VolumeFileSystem::Xfs][..], all.skip(seed % SAMPLE).step_by(SAMPLE).collect())
        }
    };
    for file_system in file_systems {
        let account = KubeUser::service_account("nodekeel", "provisionerd");
        let user = account.name.clone();
        let furnish = |kube: &Kube, guest: GuestBuilder| {
            let guest = guest.add_program(PROGRAM_AT, env!("CARGO_BIN_EXE_provisionerd"));
            Ok(guest.add_text(KUBECONFIG_AT, 0o600, kube.kubeconfig_for_guest(&user)?))
        };
        with_node(*file_system, Kube::builder().with_user(account), furnish, |cluster| {
            for manifest in [
                include_str!("../../../../deploy/namespace.yaml"),
                include_str!("../../../../deploy/rbac.yaml"),
                include_str!("../../../../deploy/csidriver.yaml"),
                include_str!("../../../../deploy/storageclass.yaml"),
            ] {
                cluster.kube.apply_manifests(manifest)?;
            }
            let runner = Mutex::new(DaemonRunner::default());
            let terminate = || cluster.node.run_shell("kill -TERM $(pidof provisionerd)").map(drop);
            std::thread::scope(|scope| {
                let guest = cluster.node.guest();
                let runs = scope.spawn(|| run_daemon(&runner, guest));
                let lived = (0..rounds.unwrap_or(1)).try_for_each(|round| {
                    lock(&runner).pending.extend(moments.iter().cloned());
                    // It may just be starting.
                    wait_until(TIMEOUT, "provisionerd to get a signal", terminate)?;
                    cluster.wait_driver_registered()?;
                    for number in 0.. {
                        let before = lock(&runner).pending.len();
                        live_through(cluster, &format!("data-{round}-{number}"))?;
                        let left = lock(&runner).pending.clone();
                        if left.is_empty() {
                            break;
                        }
                        ensure!(left.len() < before, "never reached {left:?}");
                    }
                    Ok(())
                });
                lock(&runner).is_to_end = true;
                // It may just have been killed.
                let _ = terminate();
                let ran = runs.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                lived.and(ran).with_context(|| lock(&runner).output.join("\n"))
            })?;
            lock(&runner).tally.print_lines();
            Ok(())
        });
    }
}
