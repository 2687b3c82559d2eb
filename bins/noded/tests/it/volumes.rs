//! The provisioner under noded: what it lacks, and what it makes of a claim at a real API server.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use testbed::guest::inside::{Disk, FileSystem};
use testbed::{FakeNode, Kube, Scratch, User, wait_until};

use crate::harness::{BARE, HANG, Noded, failed, noded};

/// A kubeconfig of an API server that answers nobody.
const NOWHERE: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n\
    clusters: [{name: k, cluster: {server: \"https://127.0.0.1:1\"}}]\nusers: [{name: u, user: {}}]\n";

/// A file system without quotas, wherever a test runs.
const WITHOUT_QUOTAS: &str = "/dev/shm";

fn section(kubeconfig: &Path, keys: &str) -> String {
    format!("{BARE}[provisioner]\nkubeconfig = {kubeconfig:?}\n{keys}\n")
}

/// A scratch directory with a kubeconfig in it, and the configuration of a provisioner with it.
fn nowhere(keys: &str) -> (Scratch, String) {
    let scratch = Scratch::new().unwrap();
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, NOWHERE).unwrap();
    let config = section(&kubeconfig, keys);
    (scratch, config)
}

/// What `noded check` says: standard output, or where it refuses, standard error and the exit code.
fn check(scratch: &Path, config: &str, data: &Path, dev: bool) -> Result<String, (String, Option<i32>)> {
    let file = scratch.join("noded.toml");
    fs::write(&file, config).unwrap();
    let mut args = vec!["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
    args.extend(dev.then_some("--dev"));
    let output = noded(&args).output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(failed(&output)),
    }
}

#[test]
fn a_provisioner_that_lacks_something_is_refused_with_a_line_for_each_and_what_to_do() {
    let scratch = Scratch::new().unwrap();
    let absent = scratch.path().join("absent");
    let keys = format!("directory = {WITHOUT_QUOTAS:?}\nkubelet = {absent:?}");
    let data = scratch.path().join("data");
    let (text, code) = check(scratch.path(), &section(&absent, &keys), &data, false).unwrap_err();
    assert_eq!(code, Some(4), "{text}");
    let lines: Vec<_> = text.lines().collect();
    let [api, limits, kubelet] = lines[..] else { panic!("{text}") };
    assert!(
        api.starts_with("noded: provisioner: the kubeconfig ") && api.contains("correct it, or prov"),
        "{api}"
    );
    assert!(
        limits.starts_with("noded: provisioner: volumes can't have limits that bind: /dev/shm is on "),
        "{limits}"
    );
    assert!(limits.contains("use XFS or ext4; or set provisioner.quota = \"none\""), "{limits}");
    assert!(
        kubelet.contains("start the kubelet") && kubelet.contains("provisioner.csi = false"),
        "{kubelet}"
    );
    assert!(lines.iter().all(|line| line.ends_with("or run with --dev to skip it")), "{text}");
    let away = section(&absent, "directory = \"/nowhere\"\nquota = \"none\"\ncsi = false");
    let (text, _) = check(scratch.path(), &away, &data, false).unwrap_err();
    assert!(text.contains("there is no directory /nowhere, which is provisioner.directory"), "{text}");
    assert!(!data.exists());
}

#[test]
fn in_dev_a_provisioner_without_quotas_or_api_is_skipped_with_the_reason() {
    let (scratch, config) = nowhere(&format!("csi = false\ndirectory = {WITHOUT_QUOTAS:?}"));
    let text = check(scratch.path(), &config, &scratch.path().join("data"), true).unwrap();
    assert!(
        text.contains("root.provisioner         skipped: volumes can't have limits that bind: "),
        "{text}"
    );

    let scratch = Scratch::new().unwrap();
    let config = section(&scratch.path().join("absent"), "csi = false\nquota = \"none\"");
    let mut node = Noded::spawn(scratch, &config, &["--dev"], |_| {});
    node.wait_for_line("control socket at");
    assert!(node.ask(&["tree"]).contains("the kubeconfig "), "the tree says why");
    assert!(node.ask(&["logs", "root.provisioner"]).contains("skipped: the kubeconfig "));
    let (text, code) = failed(&node.nodectl(&["start", "root.provisioner"]));
    assert_ne!(code, Some(0));
    assert!(text.contains("root.provisioner is skipped: the kubeconfig "), "{text}");
    assert!(!node.data().join("volumes").exists(), "what is skipped makes nothing");
    node.stop();
}

#[test]
fn without_quotas_it_runs_only_where_told_to_and_says_so() {
    let (scratch, config) = nowhere("csi = false\nquota = \"none\"");
    let data = scratch.path().join("data");
    let text = check(scratch.path(), &config, &data, false).unwrap();
    let says = format!(
        "root.provisioner         volumes of volumes.nodekeel for node node, in {}, WITHOUT LIMITS",
        data.join("volumes").display()
    );
    assert!(text.contains(&says), "{text}");
    assert!(!data.exists());

    let node = Noded::start_in(scratch, &config, &[]);
    let log = node.ask(&["logs", "root.provisioner"]);
    assert!(log.contains("have NO LIMITS: provisioner.quota is \"none\""), "{log}");
    let mode = fs::metadata(data.join("volumes")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    // Nobody answers: it isn't ready, says why, and keeps nothing else from running or from stopping.
    let follow = node.follow(&["logs", "-f", "--children", "root.provisioner"]);
    follow.find(|entry| entry.to_string().contains("127.0.0.1:1") || entry.to_string().contains("onnect"));
    let tree = node.ask(&["-o", "json", "tree"]);
    let tree: serde_json::Value = serde_json::from_str(&tree).unwrap();
    let state =
        |dn: &str| tree.as_array().unwrap().iter().find(|node| node["dn"] == dn).unwrap()["state"].clone();
    assert_ne!(state("root.provisioner"), "ready", "{tree}");
    assert_eq!(state("root"), "ready");
    drop(follow);
    node.stop();
}

#[test]
fn volumes_that_another_program_has_are_refused() {
    let (scratch, config) = nowhere("csi = false\nquota = \"none\"");
    let volumes = scratch.path().join("volumes");
    fs::create_dir(&volumes).unwrap();
    let config = config + &format!("directory = {volumes:?}\n");
    let first = Noded::start_in(scratch, &config, &[]);
    let other = Scratch::new().unwrap();
    let mut second = Noded::spawn(other, &config, &[], |_| {});
    let (status, lines) = second.wait();
    assert_eq!(status.code(), Some(4), "{lines:#?}");
    let says = "are used by another program; end it, or set provisioner.directory to another directory";
    assert!(lines.iter().any(|line| line.contains(says)), "{lines:#?}");
    first.stop();
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn a_kernel_that_enforces_limits_is_known_and_what_else_must_be_mounted_is_said() {
    let mounted = Disk::take().unwrap().mount(FileSystem::Xfs, "prjquota").unwrap();
    let (scratch, config) = nowhere("csi = false");
    let data = mounted.path().join("data");
    let text = check(scratch.path(), &config, &data, false).unwrap();
    assert!(
        text.contains(&format!("limited by project quotas of xfs at {}", mounted.path().display())),
        "{text}"
    );
    let node = Noded::spawn(Scratch::new().unwrap(), &config, &[], |command| {
        command.arg("--data").arg(&data);
    });
    drop(node);

    let disk = mounted.unmount().unwrap();
    let mounted = disk.mount_existing(FileSystem::Xfs, "noquota").unwrap();
    let (text, code) = check(scratch.path(), &config, &mounted.path().join("data"), false).unwrap_err();
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("is mounted without project quotas: ") && text.contains("prjquota"), "{text}");
}

const MANIFESTS: [&str; 3] = [
    include_str!("../../../../deploy/namespace.yaml"),
    include_str!("../../../../deploy/rbac.yaml"),
    include_str!("../../../../deploy/csidriver.yaml"),
];

const CLASS_AND_CLAIM: &str = r#"
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: here}
provisioner: volumes.nodekeel
volumeBindingMode: Immediate
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec:
  storageClassName: here
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
"#;

#[test]
#[ignore = "needs kube"]
fn a_claim_becomes_a_volume_of_the_node_and_goes_with_all_that_was_made_for_it() {
    let account = User::service_account("nodekeel", "provisionerd");
    let kube = Kube::builder().user(account.clone()).start().unwrap();
    MANIFESTS.iter().for_each(|manifests| kube.apply(manifests).unwrap());
    kube.fake_node(&FakeNode::new("node").driver("volumes.nodekeel")).unwrap();
    let kubeconfig = kube.kubeconfig(&account.name).unwrap();
    let node = Noded::start(&section(&kubeconfig, "csi = false\nquota = \"none\""));
    node.wait_for_event("root.provisioner", 1, "ready");
    assert!(node.ask(&["tree"]).contains("└─ controller"));

    kube.apply(CLASS_AND_CLAIM).unwrap();
    let claim = kube.until("pvc", "default/data", |claim| claim["status"]["phase"] == "Bound").unwrap();
    let volume = claim["spec"]["volumeName"].as_str().unwrap();
    let made = kube.get("pv", volume).unwrap();
    assert_eq!(volume, format!("pvc-{}", claim["metadata"]["uid"].as_str().unwrap()));
    assert_eq!(
        (&made["spec"]["capacity"]["storage"], &made["spec"]["csi"]["driver"]),
        (&"64Mi".into(), &"volumes.nodekeel".into())
    );
    assert!(made["spec"]["nodeAffinity"].to_string().contains("\"node\""), "{made}");
    let base = node.data().join("volumes");
    assert!(base.join("volumes").join(volume).is_dir());
    let log = node.ask(&["logs", "root.provisioner"]);
    assert!(log.contains(volume) && log.contains("is NOT held to the limit of 64Mi"), "{log}");

    // A restart of the runnable lists anew and goes on.
    node.ask(&["restart", "root.provisioner"]);
    node.wait_for_event("root.provisioner", 2, "ready");
    kube.delete("pvc", "default/data").unwrap();
    kube.until_gone("pv", volume).unwrap();
    let left = || {
        let all = ["volumes", ".new", ".trash"].map(|name| fs::read_dir(base.join(name)).unwrap().count());
        all.iter().sum::<usize>()
    };
    wait_until(HANG, "the erasure", || match left() {
        0 => Ok(()),
        left => anyhow::bail!("{left} are left"),
    })
    .unwrap();
    node.stop();
}
