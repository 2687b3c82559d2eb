//! Pods that try to leave the quota of their volume: each way is stopped, or reported by the next audit of
//! limits; with the seccomp profile, each is stopped.
//!
//! A program in the pod (`escapes/quota_escape.c`) tries all ways in each container: as a user without
//! capabilities, as root, and as root with `CAP_SYS_ADMIN`, each with and without the profile.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::{ScratchDir, command_output, tools, wait_until};

use crate::deployment::{TIMEOUT, TestCluster, claim_manifest, with_cluster_and};
use crate::disk::VolumeFileSystem;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/escapes/quota_escape.c");
const PROGRAM_AT: &str = "/usr/lib/escape/quota-escape";
/// Of both volumes.
const LIMIT: u64 = 16 << 20;
const AUDIT_INTERVAL: Duration = Duration::from_secs(5);
/// The interval, and what the audit and the look at its result take on an emulated processor of a busy machine.
const REPORT_WITHIN: Duration = Duration::from_secs(AUDIT_INTERVAL.as_secs() + 60);

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

/// The ways by shared blocks, which count in each file that has them.
fn sharing_ways(file_system: VolumeFileSystem) -> [EscapeWay; 2] {
    let [reflink, copy]: [&[&str]; 2] = match file_system {
        VolumeFileSystem::Xfs => [&["FICLONE ENOSPC"], &["copy_file_range ENOSPC"]],
        VolumeFileSystem::Ext4 => [&["first copy EOPNOTSUPP"], &["copy_file_range EDQUOT"]],
    };
    [stopped_by_mounts("reflink", reflink), stopped_by_mounts("copy", copy)]
}

/// A container of the pod, which tries all ways.
struct EscapeContainer {
    name: String,
    has_profile: bool,
    security: Value,
}

/// Those with the profile come first: whatever they leave outside of limits would be reported.
fn containers() -> Vec<EscapeContainer> {
    let users = [
        ("user", json!({"runAsUser": 1000, "runAsGroup": 1000, "capabilities": {"drop": ["ALL"]}})),
        ("root", json!({})),
        ("admin", json!({"capabilities": {"add": ["SYS_ADMIN"]}})),
    ];
    let with_profile = |has_profile: bool| {
        users.clone().map(move |(user, mut security)| {
            let (name, profile) = if has_profile {
                ("profile", json!({"type": "Localhost", "localhostProfile": "nodekeel-limits.json"}))
            } else {
                ("bare", json!({"type": "Unconfined"}))
            };
            security["seccompProfile"] = profile;
            EscapeContainer { name: format!("{user}-{name}"), has_profile, security }
        })
    };
    with_profile(true).into_iter().chain(with_profile(false)).collect()
}

#[test]
#[ignore = "soak: twenty ways in each of six containers"]
fn a_pod_that_tries_to_leave_its_quota_on_xfs_is_stopped_or_reported() {
    try_all_ways(VolumeFileSystem::Xfs);
}

#[test]
#[ignore = "soak: twenty ways in each of six containers"]
fn a_pod_that_tries_to_leave_its_quota_on_ext4_is_stopped_or_reported() {
    try_all_ways(VolumeFileSystem::Ext4);
}

fn try_all_ways(file_system: VolumeFileSystem) {
    let add_program =
        |guest: GuestBuilder, scratch: &ScratchDir| Ok(guest.add_file(PROGRAM_AT, compile_program(scratch)?));
    with_cluster_and(file_system, add_program, |cluster| {
        shorten_audit_interval(cluster)?;
        start_pod(cluster)?;
        let mut escaped = 0;
        for container in containers() {
            escaped += try_to_escape(cluster, &container)?;
            wait_reported(cluster, &container.name, escaped)?;
        }
        let log = cluster.daemon_log()?;
        ensure!(log.contains("left the limits of their volume"), "the log does not say that files escaped");
        if file_system == VolumeFileSystem::Xfs {
            check_return_to_project(cluster)?;
            check_privileged_loop(cluster)?;
        }
        Ok(())
    });
}

fn compile_program(scratch: &ScratchDir) -> Result<PathBuf> {
    let program = scratch.path().join("quota-escape");
    let mut compiler = Command::new(tools::find_tool(tools::CC)?);
    // System calls of the i386 ABI need low addresses.
    compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-no-pie", "-o"]);
    command_output(compiler.arg(&program).arg(SOURCE)).context("compile quota_escape.c")?;
    Ok(program)
}

/// Has provisionerd audit limits every few seconds instead of every six hours.
fn shorten_audit_interval(cluster: &TestCluster) -> Result<()> {
    let argument = format!("--audit-interval={}s", AUDIT_INTERVAL.as_secs());
    let patch = json!([{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": argument}]);
    let kubectl = |arguments: &[&str]| {
        let mut command = cluster.kube.kubectl_command();
        command_output(command.arg("--namespace=nodekeel").args(arguments)).map(drop)
    };
    kubectl(&["patch", "daemonset/provisionerd", "--type=json", &format!("--patch={patch}")])?;
    let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
    kubectl(&["rollout", "status", "daemonset/provisionerd", &timeout])?;
    cluster.wait_driver_registered()?;
    cluster.times.log_step("audit interval shortened");
    Ok(())
}

/// Starts a pod with two volumes in each of its containers.
fn start_pod(cluster: &TestCluster) -> Result<()> {
    let claim = |name: &str| claim_manifest(name, "nodekeel", LIMIT);
    let privileged = EscapeContainer {
        name: "privileged".into(),
        has_profile: false,
        security: json!({"privileged": true}),
    };
    let containers: Vec<_> = containers().into_iter().chain([privileged]).map(container_manifest).collect();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "escape", "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": containers,
            "volumes": [
                {"name": "own", "persistentVolumeClaim": {"claimName": "own"}},
                {"name": "other", "persistentVolumeClaim": {"claimName": "other"}},
                {"name": "program", "hostPath": {"path": PROGRAM_AT, "type": "File"}},
            ],
        },
    });
    cluster
        .kube
        .apply_manifests(&[claim("own"), claim("other"), pod].map(|it| it.to_string()).join("\n---\n"))?;
    let is_ready = |pod: &Value| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        statuses.is_some_and(|all| !all.is_empty() && all.iter().all(|one| one["ready"] == true))
    };
    cluster.kube.wait_for_object_within(TIMEOUT, "pod", "default/escape", is_ready)?;
    cluster.times.log_step("pod ready");
    Ok(())
}

fn container_manifest(container: EscapeContainer) -> Value {
    json!({
        "name": container.name, "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
        "securityContext": container.security,
        "volumeMounts": [
            {"name": "own", "mountPath": "/own"},
            {"name": "other", "mountPath": "/other"},
            {"name": "program", "mountPath": "/quota-escape-program", "readOnly": true},
        ],
    })
}

/// Tries ways in a new directory of each volume; returns the result of each.
fn run_program(
    cluster: &TestCluster,
    (container, directory): (&str, &str),
    ways: &str,
) -> Result<BTreeMap<String, String>> {
    let [own, other] = ["own", "other"].map(|volume| format!("/{volume}/{directory}"));
    let script = format!("mkdir {own} {other} && /quota-escape-program {own} {other} {ways}");
    let text = exec_in(cluster, container, &script)?;
    println!("{container}:\n{text}");
    let result = |line: &str| line.split_once(' ').map(|(way, result)| (way.to_owned(), result.to_owned()));
    text.lines().map(|line| result(line).with_context(|| format!("read {line:?}"))).collect()
}

/// Tries the only way that it names.
fn run_way(cluster: &TestCluster, container: &str, way: &str) -> Result<String> {
    let results = run_program(cluster, (container, way), way)?;
    results.into_values().next().with_context(|| format!("{way} was not tried"))
}

fn exec_in(cluster: &TestCluster, container: &str, script: &str) -> Result<String> {
    let mut kubectl = cluster.kube.kubectl_command();
    kubectl.args(["exec", "escape", "--container", container, "--", "sh", "-c", script]);
    command_output(&mut kubectl).with_context(|| format!("run {script:?} in the container {container}"))
}

/// Tries all ways, checks each result, and returns how many files and directories have escaped.
fn try_to_escape(cluster: &TestCluster, container: &EscapeContainer) -> Result<u64> {
    let results = run_program(cluster, (&container.name, &container.name), "")?;
    let ways: Vec<_> = WAYS.into_iter().chain(sharing_ways(cluster.file_system)).collect();
    ensure!(
        results.len() == ways.len(),
        "{}: {} ways instead of {}",
        container.name,
        results.len(),
        ways.len()
    );
    let mut escaped = 0;
    for way in ways {
        let result = results.get(way.name).with_context(|| format!("{} was not tried", way.name))?;
        let expected = if container.has_profile { way.with_profile } else { way.bare };
        ensure!(
            expected.contains(&&**result),
            "{}: {}: {result}, not {expected:?}",
            container.name,
            way.name
        );
        let count = result.strip_prefix("escaped ").map(str::parse::<u64>);
        escaped += count.transpose().with_context(|| format!("read {result:?}"))?.unwrap_or(0);
    }
    cluster.times.log_step(&format!("{}: {escaped} files and directories escaped", container.name));
    Ok(escaped)
}

/// Waits until an audit has reported so many files and directories, not more, and more bytes than the volume may have.
fn wait_reported(cluster: &TestCluster, container: &str, escaped: u64) -> Result<()> {
    let start = Instant::now();
    wait_metric(cluster, "uncounted_files{reason=\"escaped\"}", escaped)?;
    let bytes = read_metric(cluster, "uncounted_bytes{reason=\"escaped\"}")?;
    ensure!(escaped == 0 || bytes > LIMIT, "only {bytes} bytes are reported");
    cluster.times.log_duration(&format!("{container}: {escaped} reported"), start.elapsed());
    Ok(())
}

/// Waits for an audit after which a metric has a value.
fn wait_metric(cluster: &TestCluster, name: &str, value: u64) -> Result<()> {
    wait_until(REPORT_WITHIN, "an audit to report what escaped", || {
        let found = read_metric(cluster, name)?;
        ensure!(found == value, "{name} is {found} instead of {value}");
        Ok(())
    })
}

/// A metric of the last audit.
fn read_metric(cluster: &TestCluster, name: &str) -> Result<u64> {
    let text = cluster.node.run_shell("wget -qO- http://127.0.0.1:9810/metrics")?;
    let name = format!("controller_persistentvolume_{name} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&name));
    value.with_context(|| format!("provisionerd exports no {name}"))?.parse().context("read the metric")
}

/// Root can put a file back into its project, beyond the limit, which is reported; a user can't.
fn check_return_to_project(cluster: &TestCluster) -> Result<()> {
    let way = "project-and-back";
    let result = run_way(cluster, "user-bare", way)?;
    ensure!(result == "ioctl ENOSPC", "{way}: {result}");
    exec_in(cluster, "user-bare", &format!("rm -r /own/{way} /other/{way}"))?;
    let result = run_way(cluster, "root-bare", way)?;
    ensure!(result == "escaped 0", "{way}: {result}");
    wait_metric(cluster, "over_limit{}", 1)?;
    exec_in(cluster, "root-bare", &format!("rm -r /own/{way}"))?;
    cluster.times.log_step("root: a volume over its limit reported");
    Ok(())
}

/// A privileged pod can mount a file system in a file of its volume; what is written to it counts as before.
fn check_privileged_loop(cluster: &TestCluster) -> Result<()> {
    let result = run_way(cluster, "privileged", "loop-mount")?;
    ensure!(["fsync ENOSPC", "fsync EIO"].contains(&&*result), "loop-mount: {result}");
    cluster.times.log_step("privileged: a loop device stopped at the limit");
    Ok(())
}
