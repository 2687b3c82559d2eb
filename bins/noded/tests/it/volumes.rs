//! The provisioner in noded: missing requirements, and a claim at a real API server.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use testbed::guest::disk::{FileSystem, GuestDisk};
use testbed::{FakeNode, Kube, KubeUser, ScratchDir, UNREACHABLE_KUBECONFIG};

use crate::harness::{NO_DAEMONS, NodedProcess, check, make_fifo, service_config, wait};

/// A directory on a file system without quotas on every test machine, as long as it exists.
struct WithoutQuotas(PathBuf);

impl WithoutQuotas {
    fn create(name: &str) -> Self {
        let path = PathBuf::from(format!("/dev/shm/nodekeel-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for WithoutQuotas {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

pub(crate) fn provisioner_config(kubeconfig: &Path, keys: &str) -> String {
    format!("{NO_DAEMONS}[provisioner]\nkubeconfig = {kubeconfig:?}\n{keys}\n")
}

/// A scratch directory with a kubeconfig in it, and the configuration of a provisioner with it.
fn unreachable_api_config(keys: &str) -> (ScratchDir, String) {
    let scratch = ScratchDir::new().unwrap();
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, UNREACHABLE_KUBECONFIG).unwrap();
    let config = provisioner_config(&kubeconfig, keys);
    (scratch, config)
}

#[test]
fn a_provisioner_with_missing_requirements_is_rejected_with_a_hint_for_each() {
    let scratch = ScratchDir::new().unwrap();
    let (absent, file) = (scratch.path().join("absent"), scratch.path().join("file"));
    fs::write(&file, "").unwrap();
    let directory = WithoutQuotas::create("rejected");
    let keys = format!("directory = {:?}\nkubelet = {file:?}", directory.0);
    let data = scratch.path().join("data");
    let refused = check(scratch.path(), &provisioner_config(&absent, &keys), &[]);
    assert_eq!(refused.code, Some(4), "{refused:#?}");
    let text = refused.stderr;
    let lines: Vec<_> = text.lines().collect();
    let [api, limits, kubelet] = lines[..] else { panic!("{text}") };
    assert!(
        api.starts_with("noded: provisioner: the kubeconfig ") && api.contains("correct it, or prov"),
        "{api}"
    );
    assert!(
        limits.starts_with("noded: provisioner: limits of volumes can't be enforced: /dev/shm/")
            && limits.contains(" is on "),
        "{limits}"
    );
    assert!(limits.contains("use XFS or ext4; or set provisioner.quota = \"none\""), "{limits}");
    assert!(
        kubelet
            .contains("file is not a directory: correct provisioner.kubelet, or set provisioner.csi = false"),
        "{kubelet}"
    );
    assert!(lines.iter().all(|line| line.ends_with("or run with --dev to skip it")), "{text}");
    let away = provisioner_config(&absent, "directory = \"/nowhere\"\nquota = \"none\"\ncsi = false");
    let refused = check(scratch.path(), &away, &[]);
    refused.assert_fails(4, "provisioner.directory /nowhere does not exist");
    assert!(!data.exists());
}

#[test]
fn dev_mode_skips_a_provisioner_without_quotas_or_api_with_the_reason() {
    let directory = WithoutQuotas::create("skipped");
    let (scratch, config) = unreachable_api_config(&format!("csi = false\ndirectory = {:?}", directory.0));
    let text = check(scratch.path(), &config, &["--dev"]).output();
    assert!(
        text.contains("root.provisioner         skipped: limits of volumes can't be enforced: "),
        "{text}"
    );

    let scratch = ScratchDir::new().unwrap();
    let config = provisioner_config(&scratch.path().join("absent"), "csi = false\nquota = \"none\"");
    let node = NodedProcess::start_in(scratch, &config, &["--dev"]);
    assert!(node.ask(&["tree"]).contains("the kubeconfig "), "the tree shows the reason");
    assert!(node.ask(&["logs", "root.provisioner"]).contains("skipped: the kubeconfig "));
    let refused = node.nodectl(&["start", "root.provisioner"]);
    refused.assert_fails(1, "root.provisioner is skipped: the kubeconfig ");
    assert!(!node.data().join("data/volumes").exists(), "a skipped service creates nothing");
    node.stop();
}

#[test]
fn a_provisioner_without_quotas_runs_only_when_configured_and_logs_it() {
    let (scratch, config) = unreachable_api_config("csi = false\nquota = \"none\"");
    let data = scratch.path().join("data");
    let text = check(scratch.path(), &config, &[]).output();
    let says = format!(
        "root.provisioner         volumes of volumes.nodekeel for node node, in {}, WITHOUT LIMITS",
        data.join("data/volumes").display()
    );
    assert!(text.contains(&says), "{text}");
    assert!(!data.exists());

    let node = NodedProcess::start_in(scratch, &config, &[]);
    let log = node.follow(&["logs", "-f", "root.provisioner"]);
    log.find_value(|entry| entry.to_string().contains("have NO LIMITS: provisioner.quota is"));
    let mode = fs::metadata(data.join("data/volumes")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    // The API server does not answer: the provisioner is not ready, reports why, and affects no other
    // runnable.
    let follow = node.follow(&["logs", "-f", "--children", "root.provisioner"]);
    follow.find_value(|entry| {
        entry.to_string().contains("127.0.0.1:1") || entry.to_string().contains("onnect")
    });
    assert_ne!(node.status("root.provisioner")["state"], "ready");
    assert_eq!(node.status("root")["state"], "ready");
    drop(follow);
    node.stop();
}

/// Waits until the runnable waits for something with this text.
fn wait_for_reason(node: &NodedProcess, dn: &str, text: &str) {
    node.follow(&["tree", "--watch"]).find_value(|tree| {
        let nodes = tree.as_array().unwrap();
        nodes.iter().any(|node| node["dn"] == dn && node["waiting_for"].to_string().contains(text))
    });
}

#[test]
#[ignore = "needs root: the provisioner mounts volumes"]
fn a_kubelet_that_is_not_there_yet_is_waited_for_in_the_tree() {
    let (scratch, config) = unreachable_api_config("quota = \"none\"");
    let kubelet = scratch.path().join("lib/kubelet");
    // The kubelet of this node is a service of this node: it makes its directories when it starts.
    let makes = format!(
        "read line; /bin/mkdir -p {0}/pods; read line; /bin/mkdir {0}/plugins_registry",
        kubelet.display()
    );
    let gate = make_fifo(scratch.path(), "gate");
    let script = format!("exec < {}; {makes}; exec sleep 1000", gate.display());
    let config = format!("{config}kubelet = {kubelet:?}\n{}", service_config("kubelet", &script, ""));
    check(scratch.path(), &config, &[]).output();
    let node = NodedProcess::start_in(scratch, &config, &[]);
    let mut gate = File::options().write(true).open(gate).unwrap();
    for missing in ["pods", "plugins_registry"] {
        wait_for_reason(
            &node,
            "root.provisioner",
            &format!("the kubelet to create {}: start the kubelet", kubelet.join(missing).display()),
        );
        assert_eq!(kubelet.exists(), missing != "pods", "only the kubelet creates its directory");
        gate.write_all(b"go\n").unwrap();
    }
    node.wait_for_event("root.provisioner.csi", 1, "ready");
    assert!(kubelet.join("plugins/volumes.nodekeel/csi.sock").exists());
    node.stop();
}

#[test]
fn a_kubeconfig_without_a_ca_on_a_machine_without_root_certificates_says_so() {
    let (scratch, config) = unreachable_api_config("csi = false\nquota = \"none\"");
    let mut node = NodedProcess::spawn(scratch, &config, &[], |command| {
        command.env("SSL_CERT_FILE", "/nowhere/certs.pem").env("SSL_CERT_DIR", "/nowhere/certs");
    });
    node.wait_for_line("control socket at");
    node.wait_for_event("root.provisioner", 1, "exited");
    let status = node.status("root.provisioner");
    let reason = status["exits"][0]["reason"].as_str().unwrap();
    let says = "names no certificate-authority, and this machine has no root certificates: \
        add certificate-authority to it, or install root certificates (Debian: ca-certificates)";
    assert!(reason.contains(says), "{reason}");
    node.stop();
}

#[test]
fn volumes_in_use_by_another_program_are_rejected() {
    let (scratch, config) = unreachable_api_config("csi = false\nquota = \"none\"");
    let volumes = scratch.path().join("volumes");
    fs::create_dir(&volumes).unwrap();
    let config = config + &format!("directory = {volumes:?}\n");
    let first = NodedProcess::start_in(scratch, &config, &[]);
    let other = ScratchDir::new().unwrap();
    let mut second = NodedProcess::spawn(other, &config, &[], |_| {});
    let (status, lines) = second.wait_end();
    assert_eq!(status.code(), Some(4), "{lines:#?}");
    let says = "are in use by another program: stop it, or set provisioner.directory to another directory";
    assert!(lines.iter().any(|line| line.contains(says)), "{lines:#?}");
    first.stop();
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn a_kernel_that_enforces_limits_is_detected_and_missing_mount_options_are_reported() {
    let mounted = GuestDisk::acquire().unwrap().format_and_mount(FileSystem::Xfs, "prjquota").unwrap();
    let (_scratch, config) = unreachable_api_config("csi = false");
    let text = check(mounted.mount_point(), &config, &[]).output();
    let says = format!("limited by project quotas of xfs at {}", mounted.mount_point().display());
    assert!(text.contains(&says), "{text}");

    let disk = mounted.unmount().unwrap();
    let mounted = disk.mount_existing(FileSystem::Xfs, "noquota").unwrap();
    let refused = check(mounted.mount_point(), &config, &[]);
    refused.assert_fails(4, "is mounted without project quotas: ");
    refused.assert_fails(4, "prjquota");
}

const MANIFESTS: [&str; 3] = [
    include_str!("../../../../deploy/namespace.yaml"),
    include_str!("../../../../deploy/rbac.yaml"),
    include_str!("../../../../deploy/csidriver.yaml"),
];

/// A claim for 64 MiB, and its class.
pub(crate) const CLASS_AND_CLAIM: &str = r#"
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

/// A control plane for a noded, and the kubeconfig of its provisioner.
pub(crate) fn start_api_server() -> (Kube, PathBuf) {
    let account = KubeUser::service_account("nodekeel", "provisionerd");
    let kube = Kube::builder().with_user(account.clone()).start().unwrap();
    MANIFESTS.iter().for_each(|manifests| kube.apply_manifests(manifests).unwrap());
    kube.create_fake_node(&FakeNode::new("node").with_driver("volumes.nodekeel")).unwrap();
    let kubeconfig = kube.kubeconfig_file(&account.name).unwrap();
    (kube, kubeconfig)
}

/// Creates the claim, and waits until it is bound.
pub(crate) fn bind_claim(kube: &Kube, manifests: &str) -> Value {
    kube.apply_manifests(manifests).unwrap();
    kube.wait_for_object("pvc", "default/data", |claim| claim["status"]["phase"] == "Bound").unwrap()
}

/// A control plane, and a noded that provisions its claims without a quota.
fn start_node_at_api_server() -> (Kube, NodedProcess) {
    let (kube, kubeconfig) = start_api_server();
    let node = NodedProcess::start(&provisioner_config(&kubeconfig, "csi = false\nquota = \"none\""));
    (kube, node)
}

#[test]
#[ignore = "needs kube"]
fn volumes_whose_store_was_lost_are_served_again_once_it_is_back() {
    let (kube, node) = start_node_at_api_server();
    let claim = bind_claim(&kube, CLASS_AND_CLAIM);
    let volume = claim["spec"]["volumeName"].as_str().unwrap();
    let store_id = node.data().join("data/volumes/store-id");
    let away = store_id.with_extension("away");
    fs::rename(&store_id, &away).unwrap();
    // The mounts have not changed, so the next use of the store notices it.
    kube.delete_object("pvc", "default/data").unwrap();
    kube.wait_for_object("pv", volume, |volume| volume["status"]["phase"] == "Released").unwrap();
    wait("the store to be reported as lost", || {
        let log = node.ask(&["logs", "--children", "root.provisioner"]);
        anyhow::ensure!(log.contains("mount their disk again"), "{log}");
        Ok(())
    });
    fs::rename(&away, &store_id).unwrap();
    kube.wait_until_gone("pv", volume).unwrap();
    node.stop();
}

#[test]
#[ignore = "needs kube"]
fn a_claim_becomes_a_volume_and_its_deletion_removes_everything_created_for_it() {
    let (kube, node) = start_node_at_api_server();
    node.wait_for_event("root.provisioner", 1, "ready");
    assert!(node.ask(&["tree"]).contains("└─ controller"));

    let claim = bind_claim(&kube, CLASS_AND_CLAIM);
    let volume = claim["spec"]["volumeName"].as_str().unwrap();
    let made = kube.get_object("pv", volume).unwrap();
    assert_eq!(volume, format!("pvc-{}", claim["metadata"]["uid"].as_str().unwrap()));
    assert_eq!(
        (&made["spec"]["capacity"]["storage"], &made["spec"]["csi"]["driver"]),
        (&"64Mi".into(), &"volumes.nodekeel".into())
    );
    assert!(made["spec"]["nodeAffinity"].to_string().contains("\"node\""), "{made}");
    let base = node.data().join("data/volumes");
    assert!(base.join("volumes").join(volume).is_dir());
    let log = node.ask(&["logs", "root.provisioner"]);
    assert!(log.contains(volume) && log.contains("is NOT limited: a limit of 64Mi was requested"), "{log}");

    // After a restart the runnable lists again and continues.
    node.ask(&["restart", "root.provisioner"]);
    node.wait_for_event("root.provisioner", 2, "ready");
    kube.delete_object("pvc", "default/data").unwrap();
    kube.wait_until_gone("pv", volume).unwrap();
    wait("the deletion", || {
        let count = |name| fs::read_dir(base.join(name)).unwrap().count();
        let left: usize = ["volumes", ".new", ".trash"].map(count).iter().sum();
        anyhow::ensure!(left == 0, "{left} are left");
        Ok(())
    });
    node.stop();
}
