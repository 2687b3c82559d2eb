//! Pods that try to leave the quota of their volume: each way is stopped, or reported by the next audit of
//! limits; with the seccomp profile, each is stopped.
//!
//! A program in the pod (`escapes/quota_escape.c`) tries all ways in each container: as a user without
//! capabilities, as root, and as root with `CAP_SYS_ADMIN`, each with and without the profile.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testbed::guest::GuestBuilder;
use testbed::{ScratchDir, command_output, tools, wait_until};

use crate::cluster::{TIMEOUT, TestCluster, VolumeFileSystem, claim_manifest, with_cluster};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/escapes/quota_escape.c");
const PROGRAM_AT: &str = "/usr/lib/escape/quota-escape";
/// The interval of five seconds, and what the audit and the look at its result take on an emulated processor of a busy
/// machine.
const REPORT_WITHIN: Duration = Duration::from_secs(65);

/// One way out of a quota, and the results that the program may print.
struct EscapeWay {
    name: &'static str,
    /// Without the profile. An entry that escaped has to be reported.
    bare: &'static [&'static str],
    with_profile: &'static [&'static str],
}

const fn stopped_by_profile(name: &'static str, bare: &'static [&'static str]) -> EscapeWay {
    EscapeWay { name, bare, with_profile: &["ioctl EPERM"] }
}

/// Both volumes are on one file system, but in separate mounts.
const fn stopped_by_mounts(name: &'static str, bare: &'static [&'static str]) -> EscapeWay {
    EscapeWay { name, bare, with_profile: bare }
}

/// The ways that are the same on each file system.
const WAYS: [EscapeWay; 18] = [
    stopped_by_profile("project", &["escaped 1"]),
    stopped_by_profile("project-high-bits", &["escaped 1"]),
    stopped_by_profile("project-i386", &["escaped 1"]),
    stopped_by_profile("neighbour", &["escaped 1"]),
    // No audit sees a file without a name. It ends with the process that has it open.
    stopped_by_profile("removed-file", &["escaped 0"]),
    // A directory, and the file that was created in it.
    stopped_by_profile("inherit", &["escaped 2"]),
    stopped_by_profile("inherit-flags", &["escaped 2"]),
    stopped_by_profile("inherit-flags-i386", &["escaped 2"]),
    // From Linux 6.17 on.
    EscapeWay {
        name: "file-setattr",
        bare: &["escaped 1", "file_setattr ENOSYS"],
        with_profile: &["file_setattr EPERM", "file_setattr ENOSYS"],
    },
    stopped_by_mounts("link", &["linkat EXDEV"]),
    stopped_by_mounts("link-descriptor", &["linkat EXDEV"]),
    stopped_by_mounts("link-outside", &["linkat EXDEV"]),
    stopped_by_mounts("rename", &["renameat EXDEV"]),
    stopped_by_mounts("rename-directory", &["renameat EXDEV"]),
    stopped_by_mounts("rename-exchange", &["renameat2 EXDEV"]),
    EscapeWay { name: "uring-link", bare: &["linkat EXDEV"], with_profile: &["io_uring_setup EPERM"] },
    EscapeWay { name: "uring-rename", bare: &["renameat EXDEV"], with_profile: &["io_uring_setup EPERM"] },
    // A user can't create the device's node, root can't open it: devices are those of the container.
    EscapeWay {
        name: "loop-mount",
        bare: &["mknod EACCES", "open EPERM"],
        with_profile: &["mknod EACCES", "open EPERM"],
    },
];

/// Tries ways in a new directory of each volume, or all; returns the result of each.
fn try_ways(
    cluster: &TestCluster,
    container: &str,
    directory: &str,
    way: &str,
) -> Result<BTreeMap<String, String>> {
    let [own, other] = ["own", "other"].map(|volume| format!("/{volume}/{directory}"));
    let script = format!("mkdir {own} {other} && /quota-escape-program {own} {other} {way}");
    let text = cluster.exec("escape", container, &script)?;
    let result = |line: &str| line.split_once(' ').map(|(way, result)| (way.to_owned(), result.to_owned()));
    text.lines().map(|line| result(line).with_context(|| format!("read {line:?}"))).collect()
}

/// A metric of the last audit.
fn read_metric(cluster: &TestCluster, name: &str) -> Result<u64> {
    let text = cluster.node.run_shell("wget -qO- http://127.0.0.1:9810/metrics")?;
    let name = format!("controller_persistentvolume_{name} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&name));
    value.with_context(|| format!("provisionerd exports no {name}"))?.parse().context("read the metric")
}

/// Waits for an audit after which a metric has a value.
fn wait_metric(cluster: &TestCluster, name: &str, value: u64) -> Result<()> {
    wait_until(REPORT_WITHIN, "an audit to report what escaped", || {
        let found = read_metric(cluster, name)?;
        ensure!(found == value, "{name} is {found} instead of {value}");
        Ok(())
    })
}

#[test]
#[ignore = "soak: twenty ways in each of six containers, on XFS and ext4"]
fn a_pod_that_tries_to_leave_its_quota_is_stopped_or_reported() {
    /// Of both volumes.
    const LIMIT: u64 = 16 << 20;
    let scratch = ScratchDir::new().expect("a directory");
    let program = scratch.path().join("quota-escape");
    let mut compiler = Command::new(tools::find_tool(tools::CC).expect("a compiler"));
    // System calls of the i386 ABI need low addresses.
    compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-no-pie", "-o"]);
    command_output(compiler.arg(&program).arg(SOURCE)).unwrap();

    // Those with the profile come first: whatever they leave outside of limits would be reported.
    let mut containers = Vec::new();
    for (suffix, profile) in [
        ("profile", json!({ "type": "Localhost", "localhostProfile": "nodekeel-limits.json" })),
        ("bare", json!({ "type": "Unconfined" })),
    ] {
        for (user, mut security) in [
            ("user", json!({ "runAsUser": 1000, "runAsGroup": 1000, "capabilities": { "drop": ["ALL"] } })),
            ("root", json!({})),
            ("admin", json!({ "capabilities": { "add": ["SYS_ADMIN"] } })),
        ] {
            security["seccompProfile"] = profile.clone();
            containers.push((format!("{user}-{suffix}"), security));
        }
    }
    let privileged = ("privileged".to_owned(), json!({ "privileged": true }));
    let manifests = containers.iter().chain([&privileged]).map(|(name, security)| {
        json!({
            "name": name, "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
            "securityContext": security,
            "volumeMounts": [
                { "name": "own", "mountPath": "/own" },
                { "name": "other", "mountPath": "/other" },
                { "name": "program", "mountPath": "/quota-escape-program", "readOnly": true },
            ],
        })
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "escape", "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": manifests.collect::<Vec<_>>(),
            "volumes": [
                { "name": "own", "persistentVolumeClaim": { "claimName": "own" } },
                { "name": "other", "persistentVolumeClaim": { "claimName": "other" } },
                { "name": "program", "hostPath": { "path": PROGRAM_AT, "type": "File" } },
            ],
        },
    });
    let [own, other] = ["own", "other"].map(|name| claim_manifest(name, "nodekeel", LIMIT));
    let manifests = [own, other, pod];

    // Shared blocks count in each file that has them.
    for (file_system, reflink, copy) in [
        (VolumeFileSystem::Xfs, &["FICLONE ENOSPC"], &["copy_file_range ENOSPC"]),
        (VolumeFileSystem::Ext4, &["first copy EOPNOTSUPP"], &["copy_file_range EDQUOT"]),
    ] {
        let furnish = |guest: GuestBuilder| guest.add_file(PROGRAM_AT, &program);
        with_cluster(file_system, furnish, |cluster| {
            // An audit every few seconds instead of every six hours.
            let argument = json!([{
                "op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--audit-interval=5s",
            }]);
            let argument = format!("--patch={argument}");
            let of_daemon = ["--namespace=nodekeel", "daemonset/provisionerd"];
            cluster.kubectl(&[&["patch"][..], &of_daemon, &["--type=json", &argument]].concat())?;
            let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
            cluster.kubectl(&[&["rollout", "status"][..], &of_daemon, &[&timeout]].concat())?;
            cluster.wait_driver_registered()?;
            cluster.apply(&manifests)?;
            cluster.wait_running("escape")?;

            let mut escaped = 0;
            for (container, security) in &containers {
                let results = try_ways(cluster, container, container, "")?;
                let sharing = [stopped_by_mounts("reflink", reflink), stopped_by_mounts("copy", copy)];
                ensure!(results.len() == WAYS.len() + 2, "{container}: {results:?}");
                for EscapeWay { name, bare, with_profile } in WAYS.into_iter().chain(sharing) {
                    let result = results.get(name).with_context(|| format!("{name} was not tried"))?;
                    let is_bare = security["seccompProfile"]["type"] == "Unconfined";
                    let expected = if is_bare { bare } else { with_profile };
                    ensure!(expected.contains(&&**result), "{container}: {name}: {result}, not {expected:?}");
                    let count = result.strip_prefix("escaped ").map(str::parse::<u64>);
                    escaped += count.transpose().with_context(|| format!("read {result:?}"))?.unwrap_or(0);
                }
                // Not more, and more bytes than the volume may have.
                wait_metric(cluster, "uncounted_files{reason=\"escaped\"}", escaped)?;
                let bytes = read_metric(cluster, "uncounted_bytes{reason=\"escaped\"}")?;
                ensure!(escaped == 0 || bytes > LIMIT, "only {bytes} bytes are reported");
            }
            ensure!(cluster.daemon_log()?.contains("left the limits of their volume"), "the log lacks it");
            if file_system == VolumeFileSystem::Ext4 {
                return Ok(());
            }

            // Root can put a file back into its project, beyond the limit, which is reported; a user can't.
            let way = "project-and-back";
            ensure!(try_ways(cluster, "user-bare", way, way)?[way] == "ioctl ENOSPC", "a user returned");
            cluster.exec("escape", "user-bare", &format!("rm -r /own/{way} /other/{way}"))?;
            ensure!(try_ways(cluster, "root-bare", way, way)?[way] == "escaped 0", "root did not return");
            wait_metric(cluster, "over_limit{}", 1)?;
            cluster.exec("escape", "root-bare", &format!("rm -r /own/{way}"))?;
            // A privileged pod can mount a file system in a file of its volume; what is written to it counts as before.
            let way = "loop-mount";
            let results = try_ways(cluster, "privileged", way, way)?;
            ensure!(["fsync ENOSPC", "fsync EIO"].contains(&&*results[way]), "{results:?}");
            Ok(())
        });
    }
}
