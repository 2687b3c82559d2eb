//! The demo's volume: a claim at a real API server becomes a directory of the node, and is deleted.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testbed::{FakeNode, Kube, KubeUser, command_output, wait_until};

use super::node::{DemoNode, TreeWatch};
use super::{DemoClock, READY_WITHIN, indent};

/// The node's name, here and in its configuration.
pub(super) const NODE: &str = "demo";
/// The name in deploy/csidriver.yaml and deploy/storageclass.yaml.
const DRIVER: &str = "volumes.nodekeel";
const GONE_WITHIN: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
const CLAIM: &str = "default/data";
/// How large the claim is.
const SIZE: usize = 64 * MIB;

/// The shipped manifests of the driver.
const MANIFESTS: [&str; 4] = [
    include_str!("../../../../deploy/namespace.yaml"),
    include_str!("../../../../deploy/rbac.yaml"),
    include_str!("../../../../deploy/csidriver.yaml"),
    include_str!("../../../../deploy/storageclass.yaml"),
];

const CLAIM_AND_POD: &str = r#"
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec:
  storageClassName: nodekeel
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: app, namespace: default}
spec:
  containers: [{name: app, image: none, volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"#;

/// A control plane with the driver, and the node as an object in it.
#[derive(Debug)]
pub(super) struct ControlPlane {
    kube: Kube,
    kubeconfig: PathBuf,
    /// Whether volumes have no limits on this machine.
    is_unlimited: bool,
}

impl ControlPlane {
    /// Starts it.
    pub(super) fn start(clock: &DemoClock) -> Result<Self> {
        clock.print_step(
            "start a Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler",
        );
        // The user with the permissions of deploy/rbac.yaml.
        let account = KubeUser::service_account("nodekeel", "provisionerd");
        let kube = Kube::builder().with_user(account.clone()).start()?;
        for manifests in MANIFESTS {
            kube.apply_manifests(manifests)?;
        }
        kube.create_fake_node(&FakeNode::new(NODE).with_driver(DRIVER))?;
        let version = command_output(kube.kubectl_command().args(["version", "--output=json"]))?;
        let version: Value = serde_json::from_str(&version).context("kubectl prints JSON")?;
        let version = version["serverVersion"]["gitVersion"].as_str().unwrap_or("?").to_owned();
        clock.print_step(&format!(
            "Kubernetes {version} answers at {}; it knows the driver {DRIVER}",
            kube.api_url()
        ));
        let kubeconfig = kube.kubeconfig_file(&account.name)?;
        Ok(Self { kube, kubeconfig, is_unlimited: false })
    }

    /// The directory of all its files, which is removed with it.
    pub(super) fn home(&self) -> Option<&Path> {
        self.kubeconfig.parent()
    }

    /// Adds the provisioner to the configuration of the node, which is stopped: with limits where noded finds that they
    /// would bind, else without, and prints why.
    pub(super) fn configure(&mut self, node: &DemoNode, clock: &DemoClock) -> Result<()> {
        let text = fs::read_to_string(&node.config).context("read the node's configuration")?;
        let check_with = |quota: &str| {
            let kubeconfig = &self.kubeconfig;
            // Without a kubelet, no pod can mount the volume.
            node.write_config(&format!(
                "{text}\n[provisioner]\nkubeconfig = {kubeconfig:?}\ncsi = false\nquota = {quota:?}\n"
            ))?;
            node.check_config()
        };
        let found = check_with("require")?;
        let Some(reason) = skip_reason(&found) else {
            clock.print_step("noded check: volumes can be limited here");
            return Ok(());
        };
        clock.print_step("noded check: limits can't bind here, so the demo's volume has none");
        println!("    {reason}");
        let found = check_with("none")?;
        ensure!(skip_reason(&found).is_none(), "volumes are not possible here:\n{found}");
        self.is_unlimited = true;
        Ok(())
    }

    /// Shows a volume from its claim to its deletion.
    pub(super) fn show_volume(&self, node: &DemoNode, tree: &mut TreeWatch, clock: &DemoClock) -> Result<()> {
        tree.wait_until(READY_WITHIN, "root.provisioner is ready", |tree| tree.is_ready("root.provisioner"))?;
        clock.print_step("root.provisioner has listed the API server's objects; claim 64 MiB for a pod");
        let start = Instant::now();
        self.kube.apply_manifests(CLAIM_AND_POD)?;
        let claim = self.kube.wait_for_object("pvc", CLAIM, |claim| claim["status"]["phase"] == "Bound")?;
        let volume = claim["spec"]["volumeName"].as_str().context("a bound claim names its volume")?;
        let seconds = start.elapsed().as_secs_f64();
        clock.print_step(&format!("the claim is bound, within {seconds:.1} s of its creation"));
        let columns = "custom-columns=CLAIM:.spec.claimRef.name,VOLUME:.metadata.name,SIZE:.spec.capacity.storage,\
                       DRIVER:.spec.csi.driver,NODE:.spec.nodeAffinity.required.nodeSelectorTerms[0].\
                       matchExpressions[0].values[0],RECLAIM:.spec.persistentVolumeReclaimPolicy";
        print!(
            "{}",
            indent(&command_output(self.kube.kubectl_command().args(["get", "pv", volume, "-o", columns]))?)
        );
        let directory = node.data.join("data/volumes/volumes").join(volume);
        ensure!(directory.is_dir(), "find {}", directory.display());
        println!("    its directory: {}", directory.display());
        self.fill_volume(&directory, clock)?;
        print!(
            "{}",
            indent(&command_output(node.nodectl_command().args([
                "logs",
                "--children",
                "root.provisioner",
                "-n",
                "4"
            ]))?)
        );
        self.delete_claim(volume, &directory, clock)
    }

    /// Writes more than the claim's size, where a limit stops it.
    fn fill_volume(&self, directory: &Path, clock: &DemoClock) -> Result<()> {
        if self.is_unlimited {
            clock.print_step("nothing enforces its 64 MiB on this machine, and the node's log reports that");
            return Ok(());
        }
        let path = directory.join("fill");
        let mut file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let block = vec![0_u8; MIB];
        for written in 0..2 * SIZE / MIB {
            match file.write_all(&block).and_then(|()| file.sync_data()) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                    clock
                        .print_step(&format!("the kernel stopped a file in it after {written} MiB: {error}"));
                    return Ok(());
                }
                Err(error) => return Err(error).with_context(|| format!("write {}", path.display())),
            }
        }
        clock.print_step("nothing stopped a file in it: on ext4, limits bind every user but root");
        Ok(())
    }

    fn delete_claim(&self, volume: &str, directory: &Path, clock: &DemoClock) -> Result<()> {
        clock.print_step("delete the pod and the claim");
        let gone = ["delete", "pod/app", "pvc/data", "--grace-period=0", "--force"];
        command_output(self.kube.kubectl_command().args(gone))?;
        self.kube.wait_until_gone("pv", volume)?;
        wait_until(GONE_WITHIN, "the directory to go", || {
            ensure!(!directory.exists(), "{} is still there", directory.display());
            Ok(())
        })?;
        let base = directory.parent().and_then(Path::parent).context("volumes lie in a directory")?;
        wait_until(GONE_WITHIN, "what is left of it to be erased", || {
            let left = remaining_entries(base)?;
            ensure!(left.is_empty(), "left: {left:?}");
            Ok(())
        })?;
        clock.print_step("the claim, the volume and its directory are gone");
        Ok(())
    }
}

/// The entries of the directories of volumes, of new and of deleted ones.
fn remaining_entries(base: &Path) -> Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    for place in ["volumes", ".new", ".trash"] {
        let place = base.join(place);
        let entries = fs::read_dir(&place).with_context(|| format!("list {}", place.display()))?;
        left.extend(entries.flatten().map(|entry| entry.path()));
    }
    Ok(left)
}

/// The reason for which `noded check --dev` would skip the provisioner.
fn skip_reason(found: &str) -> Option<&str> {
    let line = found.lines().find(|line| line.starts_with("root.provisioner "))?;
    line.split_once(" skipped: ").map(|(_, reason)| reason)
}
