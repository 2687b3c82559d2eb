//! Kills provisionerd around each step of a volume's life, on a real API server, and starts it again: nothing leaks, and
//! nothing is provisioned twice. Each life is that of a claim on a node of its own.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::Mutex;

use anyhow::ensure;
use nodekeel_provisioner::{
    BEING_DELETED, CONTENT_FINALIZER, DriverName, FINALIZER, IMAGE_FILE, KIND_ATTRIBUTE, MANAGED_BY_LABEL,
    SELECTED_NODE, VolumeStep,
};
use serde_json::{Value, json};
use testbed::{Daemon, FakeNode, KillPlace, KillTally, Kube, ScratchDir, leftovers, wait_until};

use crate::cluster::{
    DRIVER, TIMEOUT, TestDaemon, claim_manifest, create, install_snapshot_api, kill_rounds, list_names,
    moments_of, sized, start_control_plane, wait_bound, wait_for, wait_logged, wait_phase,
};
use crate::{capacity, import, moves};

/// The largest limit of a volume in bytes; a claim for a GiB does not fit.
const ROOM: (&str, &str) = ("PROVISIONERD_ROOM", "268435456");

/// How many lives are led at a time.
const PARALLEL: usize = 4;

const DIRECTORY_STEPS: [&str; 19] = [
    "CreateDirectory",
    "SetLimits",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "CreateEvent",
    "AddFinalizer",
    "MarkInfeasible",
    "MarkResize",
    "ResizeLimits",
    "UpdateVolume",
    "FinishResize",
    "RecordClaim",
    "CreateTrashEntry",
    "MoveToTrash",
    "DeletePersistentVolume",
    "RemoveFinalizer",
    "EraseContent",
    "ReleaseProject",
    "RemoveTrashEntry",
];

const CLONE_STEPS: [&str; 7] = [
    "CreateDirectory",
    "SetLimits",
    "CloneTree",
    "MarkUnpublished",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "MarkPublished",
];

const STRICT_STEPS: [&str; 16] = [
    "CreateDirectory",
    "SetLimits",
    "CreateImage",
    "FormatImage",
    "MarkUnpublished",
    "MarkKind",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "MarkPublished",
    "ResizeLimits",
    "GrowImage",
    "GrowDevice",
    "UpdateVolume",
    "MoveToTrash",
    "UnmarkKind",
    "EraseContent",
];

const SNAPSHOT_STEPS: [&str; 3] = ["CloneTree", "UpdateSnapshotStatus", "RemoveSnapshotFinalizer"];

/// Steps of lives that have no more of their own.
const OTHER_STEPS: [&str; 5] = ["SelectNode", "DeselectNode", "HandOverClaim", "MarkLost", "MarkCondition"];

/// This daemon has no kubelet: the tests of the mounter kill there, and those on a node.
const MOUNT_STEPS: [&str; 6] =
    ["CreateTarget", "AttachDevice", "MountVolume", "UnmountVolume", "RemoveTarget", "DetachDevice"];

#[test]
fn each_step_has_a_test_that_kills_there() {
    let here =
        [&DIRECTORY_STEPS[..], &CLONE_STEPS, &STRICT_STEPS, &SNAPSHOT_STEPS, &OTHER_STEPS, &MOUNT_STEPS];
    let elsewhere =
        [&import::COPY_STEPS[..], &import::MOVE_STEPS, &moves::STEPS, &capacity::PUBLICATION_STEPS];
    let mut killed = [here.concat(), elsewhere.concat()].concat();
    killed.sort_unstable();
    killed.dedup();
    let mut all = VolumeStep::ALL.map(|step| format!("{step:?}"));
    all.sort_unstable();
    assert_eq!(killed, all);
}

/// Leads a life for each moment around these steps, so many at a time.
fn kill_around(kube: &Kube, kind: &str, steps: &[&str], parallel: usize, life: impl Fn(&Life<'_>) + Sync) {
    let moments =
        (0..kill_rounds()).flat_map(|round| moments_of(steps).into_iter().map(move |it| (round, it)));
    let (moments, tally) = (Mutex::new(moments), Mutex::new(KillTally::default()));
    let next = || moments.lock().expect("no panic").next();
    std::thread::scope(|scope| {
        for _ in 0..parallel {
            scope.spawn(|| {
                while let Some((round, moment)) = next() {
                    let name = format!("{kind}-{}-{round}", moment.replace(' ', "-")).to_lowercase();
                    life(&Life { kube, daemon: TestDaemon::new(kube, &name), moment: &moment });
                    tally.lock().expect("no panic").record(KillPlace::Host, &moment);
                }
            });
        }
    });
    tally.into_inner().expect("no panic").print_lines();
}

/// A claim and a node of the same name, and the moment of the kill.
struct Life<'a> {
    kube: &'a Kube,
    daemon: TestDaemon,
    moment: &'a str,
}

impl Life<'_> {
    fn name(&self) -> &str {
        &self.daemon.node
    }

    /// Starts provisionerd, which is not killed.
    fn start(&self) -> Daemon {
        self.daemon.start(&[], &[ROOM])
    }

    /// Starts provisionerd, which is started again once it was killed at the moment.
    fn start_to_be_killed(&self) -> Daemon {
        const AGAIN: &str = r#"PROVISIONERD_KILL_AT="$0" "$@"; test $? = 137 && exec "$@""#;
        let run = self.daemon.command(&["run", "--no-csi"]);
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", AGAIN, self.moment]).arg(run.get_program()).args(run.get_args());
        shell
            .env_clear()
            .envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .env(ROOM.0, ROOM.1);
        Daemon::start(shell, ScratchDir::new().expect("a directory"), || Ok(())).expect("provisionerd starts")
    }

    fn wait_killed(&self, process: &Daemon) {
        let line = wait_logged(process, "killed at ");
        assert!(line.ends_with(self.moment), "{line}");
    }

    fn wait_bound(&self) -> String {
        wait_bound(self.kube, self.name())
    }

    fn wait_claim(&self, is_so: impl FnMut(&Value) -> bool) -> Value {
        wait_for(self.kube, "pvc", self.name(), is_so)
    }

    /// Waits until the claim has this size, and nothing is in progress.
    fn wait_expanded(&self, size: &str) {
        self.wait_claim(|claim| {
            let status = &claim["status"];
            let is_idle = status["allocatedResourceStatuses"].is_null() && status["conditions"].is_null();
            status["capacity"]["storage"] == size && is_idle
        });
    }

    fn patch_claim(&self, patch: &Value) {
        self.kube.patch_object("pvc", self.name(), patch).expect("a patch");
    }

    fn patch_volume(&self, volume: &str, patch: &Value) {
        self.kube.patch_object("pv", volume, patch).expect("a patch");
    }

    /// Deletes a claim, and waits until its volume is removed.
    fn delete(&self, claim: &str, volume: &str) {
        self.kube.delete_object("pvc", claim).expect("deleted");
        self.wait_gone("pvc", claim);
        self.wait_gone("pv", volume);
    }

    fn wait_gone(&self, kind: &str, name: &str) {
        self.kube.wait_until_gone(kind, name).unwrap();
    }

    /// Waits until a subdirectory of the daemon's directory does not have this.
    fn wait_missing(&self, subdirectory: &str, is_so: impl Fn(&String) -> bool) {
        let missing = wait_until(TIMEOUT, subdirectory, || {
            let mut left = self.daemon.list_names(subdirectory);
            left.retain(&is_so);
            ensure!(left.is_empty(), "{}: {left:?} still exists", self.name());
            Ok(())
        });
        missing.unwrap();
    }

    /// Asserts that the claim has one volume.
    fn assert_provisioned_once(&self) {
        let volumes = self.kube.list_objects("pv").expect("a list").into_iter();
        let own = volumes.filter(|volume| volume["spec"]["claimRef"]["name"] == self.name()).count();
        assert_eq!((own, self.daemon.list_names("volumes").len()), (1, 1), "{}", self.name());
    }

    /// Waits until everything is erased, and ends provisionerd with SIGTERM.
    fn stop(&self, mut process: Daemon) {
        self.wait_missing(".trash", |_| true);
        let status = process.terminate(TIMEOUT).expect("a signal").expect("it ends");
        // A process that has just been started again may not handle the signal yet.
        let is_ended = status.code() == Some(0) || status.signal() == Some(15);
        assert!(is_ended, "{}: {status}: {}", self.name(), process.read_log().expect("a log"));
    }

    /// Stops provisionerd, and asserts that nothing is left.
    fn end(&self, process: Daemon) {
        self.stop(process);
        for place in ["volumes", "snapshots", ".new", ".trash", ".unpublished", "kinds"] {
            assert_eq!(self.daemon.list_names(place), Vec::<String>::new(), "{}: {place}", self.name());
        }
        // The number of a probe that was in use when the process ended is released by the next one, which probes, too.
        let limits = || list_names(self.daemon.limits.path());
        if !limits().is_empty() {
            let process = self.start();
            let released = wait_until(TIMEOUT, "the limits", || {
                let left = limits();
                ensure!(left.is_empty(), "{}: {left:?} still have limits", self.name());
                Ok(())
            });
            released.unwrap();
            self.stop(process);
        }
        assert_eq!(leftovers::find_mounts(self.daemon.base.path()).expect("the mounts").len(), 0);
    }
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_around_each_step_of_a_directory_leaks_nothing_and_provisions_nothing_twice() {
    let kube = start_control_plane();
    let immediate = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "immediate" },
        "provisioner": DRIVER, "allowVolumeExpansion": true,
    });
    create(&kube, &immediate);
    // A node that selects itself for claims must be alone.
    for (class, steps, parallel) in
        [("nodekeel", &DIRECTORY_STEPS[..], PARALLEL), ("immediate", &["SelectNode"], 1)]
    {
        kill_around(&kube, class, steps, parallel, |life| {
            let of_class = json!({ "spec": { "storageClassName": class } });
            if class == "immediate" {
                kube.create_fake_node(&FakeNode::new(life.name())).expect("a node");
            }
            let node = (class != "immediate").then_some(life.name());
            create(&kube, &claim_manifest(life.name(), node, of_class));
            let process = life.start_to_be_killed();
            let volume = life.wait_bound();
            let file = life.daemon.file_of(&volume);
            fs::write(&file, "data").expect("the volume is writable");
            life.assert_provisioned_once();

            life.patch_volume(&volume, &json!({ "metadata": { "finalizers": [] } }));
            wait_for(&kube, "pv", &volume, |volume| {
                volume["metadata"]["finalizers"]
                    .as_array()
                    .is_some_and(|all| all.iter().any(|it| it == FINALIZER))
            });

            life.patch_claim(&sized("1Gi"));
            life.wait_claim(|claim| {
                claim["status"]["allocatedResourceStatuses"]["storage"] == "ControllerResizeInfeasible"
            });
            life.patch_claim(&sized("2Mi"));
            life.wait_expanded("2Mi");
            assert_eq!(
                kube.get_object("pv", &volume).expect("it exists")["spec"]["capacity"]["storage"],
                "2Mi"
            );
            let [project] = &list_names(life.daemon.limits.path())[..] else { panic!("one project") };
            let limits = fs::read_to_string(life.daemon.limits.path().join(project)).expect("the limits");
            assert_eq!(limits, format!("{} 1024", 2 << 20));

            // The volume is retained for a second claim, and deleted with that.
            let reclaim = |policy: &str| {
                life.patch_volume(&volume, &json!({ "spec": { "persistentVolumeReclaimPolicy": policy } }));
            };
            reclaim("Retain");
            kube.delete_object("pvc", life.name()).expect("deleted");
            wait_phase(&kube, &volume, "Released");
            life.patch_volume(&volume, &json!({ "spec": { "claimRef": null } }));
            let second = format!("{}-second", life.name());
            let bound = json!({ "spec": { "volumeName": volume, "storageClassName": class } });
            let uid = create(&kube, &claim_manifest(&second, None, bound))["metadata"]["uid"].clone();
            let mark = DriverName::try_new(DRIVER).expect("a driver name").claim_annotation();
            wait_for(&kube, "pv", &volume, |volume| volume["metadata"]["annotations"][&mark] == uid);
            reclaim("Delete");
            assert_eq!(fs::read_to_string(&file).expect("the file exists"), "data");
            life.delete(&second, &volume);
            life.wait_killed(&process);
            life.end(process);
        });
    }

    kill_around(&kube, "large", &["DeselectNode"], PARALLEL, |life| {
        let process = life.start_to_be_killed();
        let volume = life.daemon.create_claim(&kube, life.name(), sized("1Gi"));
        life.wait_claim(|claim| claim["metadata"]["annotations"][SELECTED_NODE].is_null());
        assert_eq!(life.daemon.list_names("volumes"), Vec::<String>::new());
        life.delete(life.name(), &volume);
        life.wait_killed(&process);
        life.end(process);
    });
}

/// The patch of a claim that is a clone of another one.
fn clone_of(source: &str) -> Value {
    json!({ "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": source } } })
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_around_each_step_of_a_clone_leaves_it_complete_or_nothing_of_it() {
    let kube = start_control_plane();
    // One that is abandoned is deleted before provisionerd starts again: no claim needs the copy, which is not empty.
    for (kind, is_abandoned) in [("clone", false), ("abandoned", true)] {
        kill_around(&kube, kind, &CLONE_STEPS, PARALLEL, |life| {
            let process = life.start();
            let source = format!("{}-source", life.name());
            let of_source = life.daemon.create_claim(&kube, &source, json!({}));
            wait_bound(&kube, &source);
            fs::write(life.daemon.file_of(&of_source), "data").expect("the volume is writable");
            life.stop(process);

            let clone = || life.daemon.create_claim(&kube, life.name(), clone_of(&source));
            let (process, of_clone) = if is_abandoned {
                let mut killed = life.daemon.start(&[], &[ROOM, ("PROVISIONERD_KILL_AT", life.moment)]);
                let of_clone = clone();
                let status = killed.wait_for_exit(TIMEOUT).expect("a status").expect("it is killed");
                assert_eq!(status.signal(), Some(9), "{}: {status}", life.name());
                kube.delete_object("pvc", life.name()).expect("deleted");
                life.wait_gone("pvc", life.name());
                (life.start(), of_clone)
            } else {
                let process = life.start_to_be_killed();
                let of_clone = clone();
                life.wait_bound();
                let copied =
                    fs::read_to_string(life.daemon.file_of(&of_clone)).expect("the copy has its file");
                assert_eq!(copied, "data", "{}", life.name());
                // Only then, a mark of the copy is removed.
                life.wait_killed(&process);
                life.delete(life.name(), &of_clone);
                (process, of_clone)
            };
            // With or without a PersistentVolume of the copy.
            life.wait_missing("volumes", |name| *name == of_clone);
            life.wait_gone("pv", &of_clone);
            assert_eq!(fs::read_to_string(life.daemon.file_of(&of_source)).expect("the source"), "data");
            life.delete(&source, &of_source);
            life.end(process);
        });
    }

    // The volume of the source is on another node, whose provisioner does not run.
    kill_around(&kube, "foreign", &["HandOverClaim"], PARALLEL, |life| {
        let [source, elsewhere] = ["source", "elsewhere"].map(|what| format!("{}-{what}", life.name()));
        let topology = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
        let is_elsewhere = json!({ "key": topology, "operator": "In", "values": [elsewhere] });
        let foreign = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": source },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": { "storage": "1Mi" },
                "claimRef": { "namespace": "default", "name": source },
                "csi": { "driver": DRIVER, "volumeHandle": source },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [is_elsewhere] }] } },
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "nodekeel",
            },
        });
        create(&kube, &foreign);
        create(&kube, &claim_manifest(&source, None, json!({ "spec": { "volumeName": source } })));
        wait_bound(&kube, &source);
        let process = life.start_to_be_killed();
        life.daemon.create_claim(&kube, life.name(), clone_of(&source));
        life.wait_claim(|claim| claim["metadata"]["annotations"][SELECTED_NODE] == elsewhere.as_str());
        life.wait_killed(&process);
        for claim in [life.name(), &source] {
            kube.delete_object("pvc", claim).expect("deleted");
        }
        kube.delete_object("pv", &source).expect("deleted");
        life.wait_gone("pv", &source);
        life.end(process);
    });
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_around_each_step_of_a_strict_volume_leaks_nothing_and_provisions_nothing_twice() {
    /// Where a pod writes: behind what the file system has at its beginning.
    const PLACE: u64 = 7 << 20;
    let kube = start_control_plane();
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "strict" },
        "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": true,
        "parameters": { "strict": "true" },
    });
    create(&kube, &class);
    kill_around(&kube, "strict", &STRICT_STEPS, PARALLEL, |life| {
        let process = life.start_to_be_killed();
        let mut patch = sized("8Mi");
        patch["spec"]["storageClassName"] = "strict".into();
        let volume = life.daemon.create_claim(&kube, life.name(), patch);
        life.wait_bound();
        life.assert_provisioned_once();
        let image = life.daemon.file_of(&volume).with_file_name(IMAGE_FILE);
        let image = fs::File::options().read(true).write(true).open(image).expect("the image");
        image.write_all_at(b"data", PLACE).expect("it has its size");

        life.patch_claim(&sized("16Mi"));
        life.wait_expanded("16Mi");
        let mut data = [0; 4];
        image.read_exact_at(&mut data, PLACE).expect("read");
        assert_eq!(
            (&data, image.metadata().expect("metadata").len()),
            (b"data", 16 << 20),
            "{}",
            life.name()
        );
        let object = kube.get_object("pv", &volume).expect("it exists");
        assert_eq!(object["spec"]["csi"]["volumeAttributes"][KIND_ATTRIBUTE], "ext4", "{}", life.name());
        let mark = fs::read_to_string(life.daemon.base.path().join("kinds").join(&volume)).expect("a mark");
        assert_eq!(mark, "ext4\n", "{}", life.name());

        life.delete(life.name(), &volume);
        life.wait_killed(&process);
        // The last process may not have swept yet.
        for place in [".new", ".unpublished", "kinds"] {
            life.wait_missing(place, |_| true);
        }
        life.end(process);
    });
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_around_each_step_of_a_snapshot_leaves_it_complete_or_nothing_of_it() {
    const KIND: &str = "volumesnapshotcontent";
    let kube = start_control_plane();
    install_snapshot_api(&kube);
    kill_around(&kube, "snapshot", &SNAPSHOT_STEPS, PARALLEL, |life| {
        let (process, name) = (life.start(), life.name());
        let volume = life.daemon.create_claim(&kube, name, json!({}));
        life.wait_bound();
        fs::write(life.daemon.file_of(&volume), "data").expect("the volume is writable");
        life.stop(process);

        // The test does what the snapshot-controller does.
        let uid = volume.strip_prefix("pvc-").expect("the UID of its claim");
        let content = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": { "name": name, "labels": { MANAGED_BY_LABEL: name }, "finalizers": [CONTENT_FINALIZER] },
            "spec": {
                "deletionPolicy": "Delete",
                "driver": DRIVER,
                "source": { "volumeHandle": volume },
                "volumeSnapshotRef": { "name": name, "namespace": "default", "uid": uid },
            },
        });
        let process = life.start_to_be_killed();
        create(&kube, &content);
        wait_for(&kube, KIND, name, |content| {
            content["status"]["readyToUse"] == true && content["status"]["snapshotHandle"].is_string()
        });
        let file = life.daemon.base.path().join("snapshots").join(format!("snap-{uid}")).join("file");
        assert_eq!(fs::read_to_string(file).expect("the snapshot has its file"), "data", "{name}");
        let deleted = json!({ "metadata": { "annotations": { BEING_DELETED: "yes" } } });
        kube.patch_object(KIND, name, &deleted).expect("a patch");
        kube.delete_object(KIND, name).expect("deleted");
        life.wait_gone(KIND, name);
        life.wait_killed(&process);
        life.delete(name, &volume);
        life.end(process);
    });
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_while_it_takes_a_mark_back_takes_it_back_at_the_next_start() {
    let kube = start_control_plane();
    let driver = DriverName::try_new(DRIVER).expect("a driver name");
    // The disk was declared lost, or the volume reported as abnormal, and is there.
    for (kind, step, mark) in [
        ("lost", "MarkLost", driver.lost_annotation()),
        ("abnormal", "MarkCondition", driver.condition_annotation()),
    ] {
        kill_around(&kube, kind, &[step], PARALLEL, |life| {
            let process = life.start();
            let volume = life.daemon.create_claim(&kube, life.name(), json!({}));
            life.wait_bound();
            life.stop(process);
            let store = fs::read_to_string(life.daemon.base.path().join("store-id")).expect("an identity");
            life.patch_volume(&volume, &json!({ "metadata": { "annotations": { &mark: store.trim() } } }));

            let process = life.start_to_be_killed();
            wait_for(&kube, "pv", &volume, |volume| volume["metadata"]["annotations"][&mark].is_null());
            life.wait_killed(&process);
            life.delete(life.name(), &volume);
            life.end(process);
        });
    }
}
