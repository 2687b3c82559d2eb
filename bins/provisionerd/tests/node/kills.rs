//! provisionerd killed at each moment of a volume's life, where limits and mounts are the kernel's: nothing leaks, and nothing
//! is made twice.
//!
//! It is armed with all moments that are left, so that a volume outlives one death after another.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nodekeel_provisioner::{FINALIZER, Moment, Step};
use serde_json::{Value, json};
use testbed::{Guest, Kube, User};

use crate::cluster::{Cluster, Content, DRIVER, WITHIN, with_node};
use crate::disk::{FileSystem, VOLUMES, directories};

const ACCOUNT: (&str, &str) = ("nodekeel", "provisionerd");
const PROGRAM_AT: &str = "/usr/bin/provisionerd";
const KUBECONFIG_AT: &str = "/etc/provisionerd.kubeconfig";
/// 128 + SIGKILL.
const KILLED: i32 = 137;
/// 128 + SIGTERM.
const TERMINATED: i32 = 143;
/// Longer than all of it takes.
const RUN_WITHIN: Duration = Duration::from_secs(1200);
const LIMIT: u64 = 32 << 20;
const CLASS: &str = "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: immediate}, provisioner: \
                     volumes.nodekeel}";

/// A claim, and a pod that uses it.
fn user(name: &str) -> String {
    let claim = claim(name, "nodekeel");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "stay", "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        },
    });
    format!("{claim}\n---\n{pod}")
}

fn claim(name: &str, class: &str) -> Value {
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
fn killed_at_each_moment_on_xfs_it_leaks_nothing_and_makes_nothing_twice() {
    kill_everywhere(FileSystem::Xfs);
}

#[test]
#[ignore = "soak"]
fn killed_at_each_moment_on_ext4_it_leaks_nothing_and_makes_nothing_twice() {
    kill_everywhere(FileSystem::Ext4);
}

fn kill_everywhere(file_system: FileSystem) {
    let kube = Kube::builder().user(User::service_account(ACCOUNT.0, ACCOUNT.1));
    let furnish = |kube: &Kube| {
        let user = User::service_account(ACCOUNT.0, ACCOUNT.1).name;
        let program = Content::Program(env!("CARGO_BIN_EXE_provisionerd").into());
        let kubeconfig = Content::Text(kube.kubeconfig_for_guest(&user)?);
        Ok(vec![(PROGRAM_AT, program), (KUBECONFIG_AT, kubeconfig)])
    };
    with_node(file_system, kube, furnish, |cluster| {
        for manifest in [
            include_str!("../../../../deploy/namespace.yaml"),
            include_str!("../../../../deploy/rbac.yaml"),
            include_str!("../../../../deploy/csidriver.yaml"),
            include_str!("../../../../deploy/storageclass.yaml"),
            CLASS,
        ] {
            cluster.kube.apply(manifest)?;
        }
        let program = Program::default();
        std::thread::scope(|scope| {
            let guest = cluster.node.guest();
            let runs = scope.spawn(|| program.run(guest));
            let lived = lives(cluster, &program);
            program.is_to_end.store(true, Ordering::SeqCst);
            // It may have been killed in this moment.
            let _ = cluster.node.shell("kill -TERM $(pidof provisionerd)");
            let ran = runs.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            lived.and(ran).with_context(|| program.said())
        })?;
        println!("{} kills: nothing leaked, nothing provisioned twice", moments().len());
        Ok(())
    });
}

/// The moments at which it is killed: before and after each step.
fn moments() -> BTreeSet<String> {
    let sides = |step| [Moment::Before, Moment::After].map(|side| format!("{side:?} {step:?}"));
    Step::ALL.into_iter().flat_map(sides).collect()
}

/// provisionerd as a process of the node, which is started again when it has been killed.
struct Program {
    pending: Mutex<BTreeSet<String>>,
    said: Mutex<Vec<String>>,
    is_to_end: AtomicBool,
}

impl Default for Program {
    fn default() -> Self {
        Self { pending: Mutex::new(moments()), said: Mutex::default(), is_to_end: AtomicBool::new(false) }
    }
}

impl Program {
    /// Runs it until it is asked to end.
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
            let code = guest.start(&command)?.wait(RUN_WITHIN, |line| {
                let told = line.strip_prefix("killed at ").and_then(|rest| rest.split_once(": "));
                died = died.take().or(told.map(|(_, moment)| moment.to_owned()));
                self.said.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
            })?;
            match died {
                Some(moment) if code == KILLED => ensure!(self.pending().remove(&moment), "{moment:?} again"),
                None if code == 0 => return Ok(()),
                // It was asked to end before it listened.
                None if code == TERMINATED && self.is_to_end.load(Ordering::SeqCst) => return Ok(()),
                died => bail!("it ended with {code} at {died:?}"),
            }
        }
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }
}

/// Goes through lives of volumes until it was killed at each moment.
fn lives(cluster: &Cluster, program: &Program) -> Result<()> {
    cluster.driver_known()?;
    cluster.times.took("provisionerd known");
    let is_of_others = |moment: &String| moment.ends_with("GiveUpNode") || moment.ends_with("TakeNode");
    for number in 0.. {
        let before = program.pending().len();
        one_that_is_used(cluster, &format!("data-{number}"))?;
        let after = program.pending().clone();
        cluster.times.took(&format!("a volume's life with {} kills", before - after.len()));
        if after.iter().all(is_of_others) {
            break;
        }
        ensure!(after.len() < before, "it never comes to {after:?}");
    }
    one_without_room(cluster, program)?;
    one_without_a_pod(cluster)?;
    cluster.times.took("a claim without room, and one without a pod");
    let never = program.pending().clone();
    ensure!(never.is_empty(), "it never comes to {never:?}");
    Ok(())
}

/// The node is given up for a claim as long as its disk is full, whoever dies.
fn one_without_room(cluster: &Cluster, program: &Program) -> Result<()> {
    cluster.node.shell(&format!("cd {VOLUMES}; {FILL}"))?;
    cluster.kube.apply(&user("late"))?;
    cluster.eventually("the node to be given up", &false, || {
        Ok(program.pending().iter().any(|moment| moment.ends_with("GiveUpNode")))
    })?;
    cluster.kube.delete("pod", "default/late")?;
    cluster.kube.delete("pvc", "default/late")?;
    cluster.gone("pvc", "late")?;
    cluster.node.shell(&format!("cd {VOLUMES}; rm fill rest"))?;
    nothing_is_left(cluster)
}

/// Takes nearly all room at once, then what is left and what is kept for root.
const FILL: &str = "fallocate -l $((($(df -k . | awk 'END { print $4 }') - 65536) * 1024)) fill && \
                    for size in 1M 4k; do dd if=/dev/zero bs=$size >>rest; done; test -e rest";

/// A node is taken for a claim that has none.
fn one_without_a_pod(cluster: &Cluster) -> Result<()> {
    cluster.kube.apply(&claim("alone", "immediate").to_string())?;
    let volume = bound(cluster, "alone")?;
    cluster.kube.delete("pvc", "default/alone")?;
    cluster.gone("pv", &volume)?;
    nothing_is_left(cluster)
}

/// Made, mounted, written to, without its finalizer for a moment, and gone.
fn one_that_is_used(cluster: &Cluster, name: &str) -> Result<()> {
    let (kube, node) = (&cluster.kube, &cluster.node);
    kube.apply(&user(name))?;
    let volume = bound(cluster, name)?;
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    kube.until_within(WITHIN, "pod", &format!("default/{name}"), is_ready)?;
    cluster.exec(name, "echo data >/data/file")?;
    kube.patch("pv", &volume, &json!({"metadata": {"finalizers": []}}))?;
    let is_protected = |volume: &Value| {
        let mut all = volume["metadata"]["finalizers"].as_array().into_iter().flatten();
        all.any(|one| one == FINALIZER)
    };
    kube.until_within(WITHIN, "pv", &volume, is_protected)?;
    ensure!(cluster.exec(name, "cat /data/file")? == "data\n", "the volume has lost what was written");
    kube.delete("pod", &format!("default/{name}"))?;
    cluster.gone("pod", name)?;
    let mounts = format!("grep -c /{volume}/mount /proc/self/mountinfo || true");
    cluster.eventually("the mounts to go", &"0".to_owned(), || Ok(node.shell(&mounts)?.trim().to_owned()))?;
    kube.delete("pvc", &format!("default/{name}"))?;
    cluster.gone("pv", &volume)?;
    nothing_is_left(cluster)
}

/// Waits until a claim is bound to the one volume that there is, and gives its name.
fn bound(cluster: &Cluster, claim: &str) -> Result<String> {
    let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    let claim = cluster.kube.until_within(WITHIN, "pvc", &format!("default/{claim}"), is_bound)?;
    let volume = claim["spec"]["volumeName"].as_str().context("a bound claim has a volume")?.to_owned();
    let made = cluster.kube.list("pv")?.len();
    ensure!(made == 1, "{made} PersistentVolumes were made");
    let there = directories(&cluster.node)?;
    ensure!(there == [format!("volumes/{volume}")], "the directories are {there:?}");
    let limits = cluster.file_system.limits(&cluster.node)?;
    ensure!(limits == [(LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
    Ok(volume)
}

fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    cluster.eventually("the directories to go", &Vec::new(), || directories(&cluster.node))?;
    cluster.eventually("the limits to go", &Vec::new(), || cluster.file_system.limits(&cluster.node))?;
    let volumes = cluster.kube.list("pv")?;
    ensure!(volumes.is_empty(), "PersistentVolumes are left: {volumes:?}");
    Ok(())
}
