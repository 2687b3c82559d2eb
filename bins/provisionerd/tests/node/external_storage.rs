//! Kubernetes' end-to-end tests of a CSI driver (`External.Storage`), against the image of provisionerd in a
//! cluster of one node.
//!
//! The node boots once. Several processes run the specs, a few each: pods mostly wait, so more than one spec fits
//! on an emulated node. The results are in `tmp/external-storage/` of the target directory, a file for each image, so that an
//! interrupted run resumes where it ended. A failed spec runs again. `NODEKEEL_EXTERNAL_STORAGE` limits a run to the specs
//! whose names contain it, or to a `slice` of each kind; `all` does not.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::gotool::{KUBERNETES_E2E, SNAPSHOT_CONTROLLER, SNAPSHOT_CRDS};
use testbed::guest::GuestBuilder;
use testbed::{BUSYBOX_IMAGE, ContainerImage, Daemon, ScratchDir, command_output};

use crate::cluster::{DRIVER, VolumeFileSystem, image_file, with_cluster};

const FILTER: &str = "NODEKEEL_EXTERNAL_STORAGE";
const SLICE: &str = "slice";
/// The suites of a slice, as the names of their specs have them, and the number of specs of each.
const KINDS: [&str; 7] =
    ["provisioning", "volume-expand", "snapshottable", "topology", "capacity", "ephemeral", "multiVolume"];
const SLICE_OF_KIND: usize = 7;
/// Parts of the names of specs for which the driver has no volumes: they would be skipped.
const UNSUPPORTED: [&str; 5] = ["(ntfs)", "(ext3)", "(ext4)", "(xfs)", "Pre-provisioned PV"];
const AGNHOST_AT: &str = "/usr/lib/agnhost.tar";
const AGNHOST_IMAGE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// Further names of busybox: those of the suite's pods.
const BUSYBOX_ALIASES: [&str; 4] = [
    "registry.k8s.io/e2e-test-images/busybox:1.36.1-1",
    "registry.k8s.io/e2e-test-images/busybox:1.37.0-1",
    "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0",
    "registry.k8s.io/pause:3.10.2",
];
/// With more, the emulated processor is the limit.
const PROCESSES: usize = 4;
/// An interrupted run loses the results of this many for each process.
const SPECS_OF_PROCESS: usize = 3;

/// Specs that need what this cluster does not have, by a part of their names.
const EXCLUSIONS: [(&str, &str); 2] = [
    ("any volume data source", "the images of its populator and its validator are on the network"),
    ("while kubelet is down", "it stops the kubelet by SSH; the tests of this package kill it in the guest"),
];

/// The class of the specs about modified volumes: one inode per 2 KiB of their claims is the default.
const ATTRIBUTES_CLASS: &str = "
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: nodekeel-suite}
driverName: volumes.nodekeel
parameters: {inodes: '5000'}
";

/// Labels a snapshot content that refers to an existing snapshot with its node: with several nodes, an administrator
/// does. The suite creates such contents without it.
const SNAPSHOT_LABEL: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: label-snapshots}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
      - apiGroups: [snapshot.storage.k8s.io]
        apiVersions: [v1]
        operations: [CREATE]
        resources: [volumesnapshotcontents]
  matchConditions:
    - name: refers-to-a-snapshot
      expression: has(object.spec.source.snapshotHandle) && !has(object.metadata.labels)
  mutations:
    - patchType: JSONPatch
      jsonPatch:
        expression: >-
          [JSONPatch{op: "add", path: "/metadata/labels",
          value: {"snapshot.storage.kubernetes.io/managed-by": "guest"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: label-snapshots}
spec: {policyName: label-snapshots}
"#;

/// The driver as the suite wants it described. What is not named here is not supported, among it access from several
/// nodes, limits of volumes per node, ephemeral inline volumes, two PersistentVolumes of one directory, and a choice of
/// the file system without a class of strict volumes.
///
/// *Source:* Kubernetes 1.36, `test/e2e/storage/external/external.go` and `framework/testdriver.go`.
fn driver_definition() -> Value {
    json!({
        "StorageClass": {"FromExistingClassName": "nodekeel"},
        "SnapshotClass": {"FromExistingClassName": "nodekeel"},
        "VolumeAttributesClass": {"FromExistingClassName": "nodekeel-suite"},
        "DriverInfo": {
            "Name": DRIVER,
            // Room for the largest file.
            "SupportedSizeRange": {"Min": "128Mi"},
            "MaxFileSize": 100 << 20,
            "SupportedFsType": {"": {}},
            "SupportedMountOption": {"nodev": {}, "nosuid": {}},
            "TopologyKeys": [format!("topology.{DRIVER}/node")],
            "Capabilities": {
                "persistence": true,
                "block": true,
                "exec": true,
                "fsGroup": true,
                "multipods": true,
                "singleNodeVolume": true,
                "capReadOnlyMany": true,
                "readWriteOncePod": true,
                "topology": true,
                "capacity": true,
                "controllerExpansion": true,
                "nodeExpansion": true,
                "onlineExpansion": true,
                "offlineExpansion": true,
                "snapshotDataSource": true,
                "pvcDataSource": true,
            },
            "StressTestOptions": {"NumPods": 3, "NumRestarts": 3},
            "VolumeSnapshotStressTestOptions": {"NumPods": 3, "NumSnapshots": 3},
            "VolumeModifyStressTestOptions": {"NumPods": 3},
        },
    })
}

/// How a spec has ended, by its name: `passed`, or a reason after `skipped: ` or `failed: `.
type Results = BTreeMap<String, String>;

/// Runs the suite's program, and gives how the chosen specs have ended.
fn run_suite(program: &mut Command, report: &Path, arguments: &[&str]) -> Result<Results> {
    // It fails if a spec fails, so the report counts.
    let run =
        command_output(program.args(arguments).arg(format!("--ginkgo.json-report={}", report.display())));
    let text = fs::read(report).map_err(|error| run.err().unwrap_or_else(|| error.into()))?;
    let suites: Vec<Value> = serde_json::from_slice(&text).context("read the suite's report")?;
    let specs = suites.iter().flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
    let (mut results, mut setup) = (Results::new(), Vec::new());
    for spec in specs {
        let message = spec["Failure"]["Message"].as_str().unwrap_or_default();
        let result = match spec["State"].as_str().unwrap_or_default() {
            "passed" => "passed".to_owned(),
            // It was not chosen, or the process ended early.
            "skipped" if message.is_empty() => continue,
            "skipped" => format!("skipped: {}", message.trim().lines().next().unwrap_or_default()),
            state => format!("failed: {state}: {message}\n{}", spec["CapturedGinkgoWriterOutput"]),
        };
        // Others are the suite's setup and its end.
        if spec["LeafNodeType"] != "It" {
            setup.extend(result.starts_with("failed").then_some(result));
            continue;
        }
        let texts = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten();
        let texts: Vec<&str> = texts.chain([&spec["LeafNodeText"]]).filter_map(Value::as_str).collect();
        results.insert(texts.join(" "), result);
    }
    ensure!(!results.is_empty() || setup.is_empty(), "the suite did not start: {setup:?}");
    Ok(results)
}

/// The specs that a filter chooses.
fn choose_specs(listed: impl Iterator<Item = String>, filter: &str) -> Vec<String> {
    let mut specs: Vec<_> =
        listed.filter(|spec| ["all", SLICE].contains(&filter) || spec.contains(filter)).collect();
    if filter == SLICE {
        specs.retain(|spec| !UNSUPPORTED.iter().any(|part| spec.contains(part)));
        // Neighbours by name are much alike.
        specs.sort_by_key(|spec| {
            let mut hasher = DefaultHasher::new();
            spec.hash(&mut hasher);
            hasher.finish()
        });
        let mut left = KINDS.map(|kind| (format!("] {kind} "), SLICE_OF_KIND));
        specs.retain(|spec| {
            let kind = left.iter_mut().find(|(kind, count)| *count > 0 && spec.contains(kind.as_str()));
            kind.map(|(_, count)| *count -= 1).is_some()
        });
    }
    specs
}

#[test]
#[ignore = "soak"]
fn the_end_to_end_suite_of_csi_drivers_passes() {
    let scratch = ScratchDir::new().expect("a directory");
    let archive = scratch.path().join("agnhost.tar");
    let agnhost = KUBERNETES_E2E.program_path("agnhost").expect("agnhost");
    // Its pods run shell scripts, too.
    let image =
        ContainerImage::busybox().expect("busybox").with_name(AGNHOST_IMAGE).add_file("agnhost", agnhost);
    image.with_entrypoint(["/agnhost"]).with_command(["pause"]).write_archive(&archive).expect("an image");
    let furnish = |guest: GuestBuilder| guest.with_memory(3 << 30).add_file(AGNHOST_AT, &archive);
    with_cluster(VolumeFileSystem::Xfs, furnish, |cluster| {
        cluster.run_ctr(&["import", AGNHOST_AT])?;
        BUSYBOX_ALIASES.iter().try_for_each(|alias| cluster.run_ctr(&["tag", BUSYBOX_IMAGE, alias]))?;
        // The kinds of the snapshot API and the snapshot-controller, as the README of `deploy/` asks for.
        let kube = &cluster.kube;
        SNAPSHOT_CRDS.iter().try_for_each(|manifest| kube.apply_manifests(manifest))?;
        for kind in ["volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"] {
            let name = format!("{kind}.snapshot.storage.k8s.io");
            kube.wait_for_condition("customresourcedefinition", &name, "condition=Established")?;
        }
        kube.apply_manifests(include_str!("../../../../deploy/snapshots/snapshotclass.yaml"))?;
        kube.apply_manifests(SNAPSHOT_LABEL)?;
        kube.apply_manifests(ATTRIBUTES_CLASS)?;
        let kubeconfig = format!("--kubeconfig={}", kube.kubeconfig_file("admin")?.display());
        let mut controller = Command::new(SNAPSHOT_CONTROLLER.program_path("snapshot-controller")?);
        controller.args([
            kubeconfig.as_str(),
            "--enable-distributed-snapshotting=true",
            "--leader-election=false",
        ]);
        let _controller = Daemon::start(controller, ScratchDir::new()?, || Ok(()))?;

        let definition = scratch.path().join("driver.json");
        fs::write(&definition, driver_definition().to_string())?;
        let program = KUBERNETES_E2E.program_path("e2e.test")?;
        let kubectl = kube.programs().program_path("kubectl").display().to_string();
        let run_count = AtomicUsize::new(0);
        let run = |arguments: &[&str]| {
            let mut command = Command::new(&program);
            command.current_dir(scratch.path()).args([&kubeconfig, &format!("--kubectl-path={kubectl}")]);
            command.arg(format!("--storage.testdriver={}", definition.display()));
            command.args(["--provider=skeleton", "--ginkgo.no-color", "--ginkgo.timeout=1h"]);
            let number = run_count.fetch_add(1, Ordering::SeqCst);
            run_suite(&mut command, &scratch.path().join(format!("report-{number}.json")), arguments)
        };
        let filter = std::env::var(FILTER).unwrap_or_else(|_| "all".into());
        let listed = run(&["--ginkgo.dry-run", "--ginkgo.focus=External.Storage"])?.into_keys();
        let specs = choose_specs(listed, &filter);
        ensure!(!specs.is_empty(), "no spec contains {filter:?}, the value of {FILTER}");

        let mut hasher = DefaultHasher::new();
        (fs::read(image_file()?)?, driver_definition().to_string()).hash(&mut hasher);
        let stored = Path::new(env!("CARGO_TARGET_TMPDIR")).join("external-storage");
        fs::create_dir_all(&stored)?;
        let stored = stored.join(format!("{:x}.json", hasher.finish()));
        let mut results: Results =
            serde_json::from_slice(&fs::read(&stored).unwrap_or_default()).unwrap_or_default();
        for spec in &specs {
            if let Some((_, reason)) = EXCLUSIONS.iter().find(|(part, _)| spec.contains(part)) {
                results.insert(spec.clone(), format!("skipped: {reason}"));
            }
        }
        let is_pending =
            |spec: &&String| results.get(*spec).is_none_or(|result| result.starts_with("failed"));
        let mut pending: Vec<String> = specs.iter().filter(is_pending).cloned().collect();
        // The fast ones first.
        pending.sort_by_key(|spec| spec.contains("[Slow]"));
        // By the tags that Kubernetes gives to those that disturb others.
        let (alone, together): (Vec<_>, Vec<_>) =
            pending.into_iter().partition(|spec| spec.contains("[Serial]") || spec.contains("[Disruptive]"));
        let results = Mutex::new(results);
        for (specs, count, processes) in [(together, SPECS_OF_PROCESS, PROCESSES), (alone, 1, 1)] {
            let batches = Mutex::new(specs.chunks(count));
            let next = || batches.lock().expect("no panic").next();
            let work = || -> Result<()> {
                while let Some(batch) = next() {
                    let patterns: Vec<_> = batch.iter().map(|name| quote_pattern(name)).collect();
                    let ended = run(&[&format!("--ginkgo.focus=(?:{})$", patterns.join("|"))])?;
                    let mut results = results.lock().expect("no panic");
                    for (name, result) in ended.into_iter().filter(|(name, _)| batch.contains(name)) {
                        println!("    {name}: {}", result.lines().next().unwrap_or_default());
                        results.insert(name, result);
                    }
                    // At once, as the run can be interrupted at any time.
                    let partial = stored.with_extension("partial");
                    fs::write(&partial, serde_json::to_vec_pretty(&*results)?)?;
                    fs::rename(&partial, &stored)?;
                }
                Ok(())
            };
            std::thread::scope(|scope| {
                let workers: Vec<_> = (0..processes).map(|_| scope.spawn(work)).collect();
                workers.into_iter().try_for_each(|worker| worker.join().expect("no panic"))
            })?;
        }
        let results = results.into_inner().expect("no panic");
        let passed = specs.iter().filter(|spec| results.get(*spec).is_some_and(|result| result == "passed"));
        println!("    {} of {} specs passed", passed.count(), specs.len());
        let is_well = |spec: &&String| results.get(*spec).is_some_and(|result| !result.starts_with("failed"));
        let failed: Vec<_> = specs.iter().filter(|spec| !is_well(spec)).collect();
        ensure!(failed.is_empty(), "{} specs failed, see {}: {failed:#?}", failed.len(), stored.display());
        Ok(())
    });
}

/// A regular expression that only this text matches. The suite's names have more spaces in its reports than where it compares.
fn quote_pattern(text: &str) -> String {
    let quote = |letter: char| match letter {
        letter if letter.is_ascii_punctuation() => format!("\\{letter}"),
        letter => letter.to_string(),
    };
    let words = text.split_whitespace().map(|word| word.chars().map(quote).collect());
    words.collect::<Vec<String>>().join(" +")
}
