//! Kills provisionerd at the moments of a volume's lifecycle, with limits and mounts of the kernel: nothing
//! leaks, and nothing is provisioned twice.
//!
//! Each start gets all remaining moments, so that a volume survives one kill after another.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nodekeel_provisioner::{FINALIZER, StepMoment, VolumeStep};
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::power_cut::selected_seed;
use testbed::{Guest, Kube, KubeUser};

use crate::cluster::{DRIVER, TIMEOUT, TestCluster, with_node};
use crate::disk::{VOLUMES, VolumeFileSystem, volume_directories};

const ACCOUNT: (&str, &str) = ("nodekeel", "provisionerd");
const PROGRAM_AT: &str = "/usr/bin/provisionerd";
const KUBECONFIG_AT: &str = "/etc/provisionerd.kubeconfig";
/// 128 + SIGKILL.
const KILLED: i32 = 137;
/// 128 + SIGTERM.
const TERMINATED: i32 = 143;
/// Timeout of a run.
const RUN_WITHIN: Duration = Duration::from_secs(1200);
const LIMIT: u64 = 8 << 20;
const CLASS: &str = "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: immediate}, provisioner: \
                     volumes.nodekeel}";

/// Counts in a file until a write fails.
const WRITER: &str =
    "number=0; while echo $number >>/data/numbers; do number=$((number + 1)); usleep 200000; done";

/// The manifest of a claim and a pod that writes to it.
fn claim_and_pod(name: &str) -> String {
    let claim = claim_manifest(name, "nodekeel");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "stay", "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "args": ["sh", "-c", WRITER],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        },
    });
    format!("{claim}\n---\n{pod}")
}

fn claim_manifest(name: &str, class: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "storageClassName": class,
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": LIMIT.to_string()}},
        },
    })
}

#[test]
#[ignore = "needs kube and a node"]
fn a_daemon_killed_around_some_steps_on_xfs_leaks_nothing_and_provisions_nothing_twice() {
    let seed = usize::try_from(selected_seed().expect("a seed")).expect("a small seed");
    let sample = all_moments().into_iter().skip(seed % SAMPLE).step_by(SAMPLE).collect();
    kill_at_moments(VolumeFileSystem::Xfs, sample);
}

#[test]
#[ignore = "soak"]
fn a_daemon_killed_at_each_moment_on_xfs_leaks_nothing_and_provisions_nothing_twice() {
    kill_at_moments(VolumeFileSystem::Xfs, all_moments());
}

#[test]
#[ignore = "soak"]
fn a_daemon_killed_at_each_moment_on_ext4_leaks_nothing_and_provisions_nothing_twice() {
    kill_at_moments(VolumeFileSystem::Ext4, all_moments());
}

/// One of so many moments is in the sample: a kill takes twenty seconds on an emulated node.
const SAMPLE: usize = 5;

/// Steps that no claim of this test reaches: those of imports, clones, snapshots and images, which tests of
/// theirs kill.
const ELSEWHERE: [&str; 18] = [
    "MoveToImport",
    "LimitTree",
    "CopyTree",
    "HandOverClaim",
    "CloneTree",
    "MarkUnpublished",
    "MarkPublished",
    "UpdateSnapshotStatus",
    "RemoveSnapshotFinalizer",
    "MarkLost",
    "AttachDevice",
    "DetachDevice",
    "CreateImage",
    "FormatImage",
    "GrowImage",
    "GrowDevice",
    "MarkKind",
    "UnmarkKind",
];

fn reached_steps() -> impl Iterator<Item = VolumeStep> {
    VolumeStep::ALL.into_iter().filter(|step| !ELSEWHERE.contains(&format!("{step:?}").as_str()))
}

/// Before and after each step.
fn all_moments() -> BTreeSet<String> {
    let sides = |step| [StepMoment::Before, StepMoment::After].map(|side| moment_name((side, step)));
    reached_steps().flat_map(sides).collect()
}

/// As provisionerd names it.
fn moment_name((side, step): (StepMoment, VolumeStep)) -> String {
    format!("{side:?} {step:?}")
}

fn kill_at_moments(file_system: VolumeFileSystem, moments: BTreeSet<String>) {
    let kube = Kube::builder().with_user(KubeUser::service_account(ACCOUNT.0, ACCOUNT.1));
    let furnish = |kube: &Kube, guest: GuestBuilder| {
        let kubeconfig = kube.kubeconfig_for_guest(&KubeUser::service_account(ACCOUNT.0, ACCOUNT.1).name)?;
        let guest = guest.add_program(PROGRAM_AT, env!("CARGO_BIN_EXE_provisionerd"));
        Ok(guest.add_text(KUBECONFIG_AT, 0o600, kubeconfig))
    };
    with_node(file_system, kube, furnish, |cluster| {
        for manifest in [
            include_str!("../../../../deploy/namespace.yaml"),
            include_str!("../../../../deploy/rbac.yaml"),
            include_str!("../../../../deploy/csidriver.yaml"),
            include_str!("../../../../deploy/storageclass.yaml"),
            CLASS,
        ] {
            cluster.kube.apply_manifests(manifest)?;
        }
        let count = moments.len();
        let program = DaemonRunner::new(moments);
        std::thread::scope(|scope| {
            let guest = cluster.node.guest();
            let runs = scope.spawn(|| program.run(guest));
            let lived = run_lifecycles(cluster, &program);
            program.is_to_end.store(true, Ordering::SeqCst);
            // It may just have been killed.
            let _ = cluster.node.run_shell("kill -TERM $(pidof provisionerd)");
            let ran = runs.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            lived.and(ran).with_context(|| program.output())
        })?;
        println!("{count} kills: nothing leaked, nothing provisioned twice");
        Ok(())
    });
}

/// provisionerd as a process on the node, restarted after each kill.
struct DaemonRunner {
    pending: Mutex<BTreeSet<String>>,
    output: Mutex<Vec<String>>,
    is_to_end: AtomicBool,
}

impl DaemonRunner {
    fn new(moments: BTreeSet<String>) -> Self {
        Self { pending: Mutex::new(moments), output: Mutex::default(), is_to_end: AtomicBool::new(false) }
    }

    /// Runs provisionerd until it should stop.
    fn run(&self, guest: &Guest) -> Result<()> {
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
                self.output.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
            })?;
            match died {
                Some(moment) if code == KILLED => ensure!(self.pending().remove(&moment), "{moment:?} again"),
                None if code == 0 => return Ok(()),
                // SIGTERM arrived before its handler was installed.
                None if code == TERMINATED && self.is_to_end.load(Ordering::SeqCst) => return Ok(()),
                died => bail!("provisionerd exited with {code} at {died:?}"),
            }
        }
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn output(&self) -> String {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }
}

/// Runs volume lifecycles until provisionerd was killed at each moment.
fn run_lifecycles(cluster: &TestCluster, program: &DaemonRunner) -> Result<()> {
    cluster.wait_driver_registered()?;
    cluster.times.log_step("driver registered");
    let others = ["DeselectNode", "SelectNode", "RecordClaim", "RemoveCapacity"];
    let is_of_others = |moment: &String| others.iter().any(|step| moment.ends_with(step));
    for number in 0.. {
        let before = program.pending().len();
        check_claim_with_pod(cluster, &format!("data-{number}"))?;
        let after = program.pending().clone();
        cluster.times.log_step(&format!("a volume lifecycle with {} kills", before - after.len()));
        if after.iter().all(is_of_others) {
            break;
        }
        ensure!(after.len() < before, "never reached {after:?}");
    }
    check_claim_without_space(cluster, program)?;
    check_claim_without_pod(cluster)?;
    check_rebound_volume(cluster)?;
    check_removed_class(cluster)?;
    cluster.times.log_step("a claim without space, and one without a pod");
    let never = program.pending().clone();
    ensure!(never.is_empty(), "never reached {never:?}");
    Ok(())
}

/// The capacity of a class is published, and removed with the class.
fn check_removed_class(cluster: &TestCluster) -> Result<()> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "temporary"},
        "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
    });
    let is_published = || {
        let objects = cluster.kube.list_objects("csistoragecapacities")?;
        Ok(objects.iter().any(|object| object["storageClassName"] == "temporary"))
    };
    cluster.kube.apply_manifests(&class.to_string())?;
    cluster.wait_equal("the capacity to be published", &true, is_published)?;
    cluster.kube.delete_object("storageclass", "temporary")?;
    cluster.wait_equal("the capacity to be removed", &false, is_published)
}

/// With a full disk, the node is deselected for a claim, also when provisionerd is killed.
fn check_claim_without_space(cluster: &TestCluster, program: &DaemonRunner) -> Result<()> {
    cluster.node.run_shell(&format!("cd {VOLUMES}; {FILL_DISK_SCRIPT}"))?;
    cluster.kube.apply_manifests(&claim_and_pod("late"))?;
    cluster.wait_equal("the node to be deselected", &false, || {
        Ok(program.pending().iter().any(|moment| moment.ends_with("DeselectNode")))
    })?;
    cluster.kube.delete_object("pod", "default/late")?;
    cluster.kube.delete_object("pvc", "default/late")?;
    cluster.wait_gone("pvc", "late")?;
    cluster.node.run_shell(&format!("cd {VOLUMES}; rm fill rest"))?;
    assert_nothing_left(cluster)
}

/// Fills most of the disk at once, then the rest, including the space reserved for root.
const FILL_DISK_SCRIPT: &str = "fallocate -l $((($(df -k . | awk 'END { print $4 }') - 65536) * 1024)) fill && \
                    for size in 1M 4k; do dd if=/dev/zero bs=$size >>rest; done; test -e rest";

/// A claim without a selected node gets one.
fn check_claim_without_pod(cluster: &TestCluster) -> Result<()> {
    cluster.kube.apply_manifests(&claim_manifest("alone", "immediate").to_string())?;
    let volume = wait_bound(cluster, "alone")?;
    cluster.kube.delete_object("pvc", "default/alone")?;
    cluster.wait_gone("pv", &volume)?;
    assert_nothing_left(cluster)
}

/// A volume is retained, given to a second claim, and deleted with that.
fn check_rebound_volume(cluster: &TestCluster) -> Result<()> {
    let (kube, policy) = (&cluster.kube, |policy| json!({"spec": {"persistentVolumeReclaimPolicy": policy}}));
    kube.apply_manifests(&claim_manifest("first", "immediate").to_string())?;
    let volume = wait_bound(cluster, "first")?;
    kube.patch_object("pv", &volume, &policy("Retain"))?;
    kube.delete_object("pvc", "default/first")?;
    let is_released = |volume: &Value| volume["status"]["phase"] == "Released";
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_released)?;
    kube.patch_object("pv", &volume, &json!({"spec": {"claimRef": null}}))?;
    let mut second = claim_manifest("second", "immediate");
    second["spec"]["volumeName"] = json!(volume);
    kube.apply_manifests(&second.to_string())?;
    wait_bound(cluster, "second")?;
    let annotation = format!("{DRIVER}/claim-uid");
    let is_recorded = |volume: &Value| volume["metadata"]["annotations"][&annotation].is_string();
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_recorded)?;
    kube.patch_object("pv", &volume, &policy("Delete"))?;
    kube.delete_object("pvc", "default/second")?;
    cluster.wait_gone("pv", &volume)?;
    assert_nothing_left(cluster)
}

/// A volume is created, mounted, written to, loses its finalizer for a moment, and is deleted.
fn check_claim_with_pod(cluster: &TestCluster, name: &str) -> Result<()> {
    let (kube, node) = (&cluster.kube, &cluster.node);
    kube.apply_manifests(&claim_and_pod(name))?;
    let volume = wait_bound(cluster, name)?;
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    kube.wait_for_object_within(TIMEOUT, "pod", &format!("default/{name}"), is_ready)?;
    cluster.exec(name, "echo data >/data/file")?;
    kube.patch_object("pv", &volume, &json!({"metadata": {"finalizers": []}}))?;
    let is_protected = |volume: &Value| {
        let mut all = volume["metadata"]["finalizers"].as_array().into_iter().flatten();
        all.any(|one| one == FINALIZER)
    };
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_protected)?;
    expand_claim(cluster, name)?;
    ensure!(cluster.exec(name, "cat /data/file")? == "data\n", "the volume lost its data");
    kube.delete_object("pod", &format!("default/{name}"))?;
    cluster.wait_gone("pod", name)?;
    let mounts = format!("grep -c /{volume}/mount /proc/self/mountinfo || true");
    cluster
        .wait_equal("the mounts to go", &"0".to_owned(), || Ok(node.run_shell(&mounts)?.trim().to_owned()))?;
    kube.delete_object("pvc", &format!("default/{name}"))?;
    cluster.wait_gone("pv", &volume)?;
    assert_nothing_left(cluster)
}

/// A claim is expanded under its pod, which writes: once further than possible, and then to twice its size.
fn expand_claim(cluster: &TestCluster, name: &str) -> Result<()> {
    let (kube, claim) = (&cluster.kube, format!("default/{name}"));
    let request = |size: String| {
        kube.patch_object("pvc", &claim, &json!({"spec": {"resources": {"requests": {"storage": size}}}}))
    };
    request("100Ti".to_owned())?;
    let is_infeasible = |claim: &Value| {
        claim["status"]["allocatedResourceStatuses"]["storage"] == "ControllerResizeInfeasible"
    };
    kube.wait_for_object_within(TIMEOUT, "pvc", &claim, is_infeasible)?;
    request((2 * LIMIT).to_string())?;
    let is_expanded = |claim: &Value| {
        let status = &claim["status"];
        status["capacity"]["storage"] == "16Mi" && status["allocatedResourceStatuses"].is_null()
    };
    kube.wait_for_object_within(TIMEOUT, "pvc", &claim, is_expanded)?;
    let limits = cluster.file_system.kernel_limits(&cluster.node)?;
    ensure!(limits == [((2 * LIMIT) >> 10, 2 * LIMIT / 2048)], "the kernel has {limits:?}");
    let size = cluster.exec(name, "df -k /data | awk 'END { print $2 * 1024 }'")?;
    ensure!(size.trim() == (2 * LIMIT).to_string(), "the pod sees a size of {size}");
    check_writer(cluster, name)
}

/// Checks that no write of the pod has failed: it wrote number after number, and writes on.
fn check_writer(cluster: &TestCluster, name: &str) -> Result<()> {
    let numbers = || -> Result<Vec<usize>> {
        let text = cluster.exec(name, "cat /data/numbers")?;
        text.lines().map(|line| line.parse().with_context(|| format!("read {line:?}"))).collect()
    };
    let written = numbers()?;
    ensure!(written.iter().copied().eq(0..written.len()), "the pod has written {written:?}");
    cluster.wait_equal("the pod to write on", &true, || Ok(numbers()?.len() > written.len()))?;
    let pod = cluster.kube.get_object("pod", &format!("default/{name}"))?;
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == 0, "the pod has restarted {restarts} times");
    Ok(())
}

/// Waits until a claim is bound to the only volume, and returns the name of the volume.
fn wait_bound(cluster: &TestCluster, claim: &str) -> Result<String> {
    let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    let claim = cluster.kube.wait_for_object_within(TIMEOUT, "pvc", &format!("default/{claim}"), is_bound)?;
    let volume = claim["spec"]["volumeName"].as_str().context("a bound claim has a volume")?.to_owned();
    let count = cluster.kube.list_objects("pv")?.len();
    ensure!(count == 1, "{count} PersistentVolumes were created");
    let there = volume_directories(&cluster.node)?;
    ensure!(there == [format!("volumes/{volume}")], "the directories are {there:?}");
    let limits = cluster.file_system.kernel_limits(&cluster.node)?;
    ensure!(limits == [(LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
    Ok(volume)
}

fn assert_nothing_left(cluster: &TestCluster) -> Result<()> {
    cluster.wait_equal("the directories to go", &Vec::new(), || volume_directories(&cluster.node))?;
    cluster
        .wait_equal("the limits to go", &Vec::new(), || cluster.file_system.kernel_limits(&cluster.node))?;
    let volumes = cluster.kube.list_objects("pv")?;
    ensure!(volumes.is_empty(), "PersistentVolumes remain: {volumes:?}");
    Ok(())
}
