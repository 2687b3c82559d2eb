//! Nodes that exist as objects only.

use anyhow::Result;
use serde_json::json;

use super::{Kube, KubeDaemon};

/// A node without a machine: pods are placed on it, and never run.
#[derive(Clone, Debug)]
pub struct FakeNode {
    name: String,
    drivers: Vec<String>,
}

impl FakeNode {
    /// A node of this name, which is also its host name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), drivers: Vec::new() }
    }

    /// Registers a CSI driver on it, with the topology label that the kubelet would add for this workspace's
    /// driver.
    #[must_use]
    pub fn with_driver(mut self, driver: impl Into<String>) -> Self {
        self.drivers.push(driver.into());
        self
    }

    fn manifests(&self) -> [serde_json::Value; 2] {
        let mut labels = serde_json::Map::new();
        labels.insert(HOST_NAME.into(), self.name.clone().into());
        for driver in &self.drivers {
            labels.insert(topology_key(driver), self.name.clone().into());
        }
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
        });
        let driver = |driver: &String| json!({"name": driver, "nodeID": self.name, "topologyKeys": [topology_key(driver)]});
        let drivers: Vec<_> = self.drivers.iter().map(driver).collect();
        let csi = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
            "metadata": {"name": self.name}, "spec": {"drivers": drivers},
        });
        [node, csi]
    }
}

/// The label of the provisioner's volumes. *Source:* `DriverName::topology_key`.
fn topology_key(driver: &str) -> String {
    format!("topology.{driver}/node")
}

/// *Source:* kubernetes.io, well-known labels.
const HOST_NAME: &str = "kubernetes.io/hostname";
/// On every new node that has not reported yet that it is ready; the controller manager removes it.
const NOT_READY: &str = "node.kubernetes.io/not-ready";

impl Kube {
    /// Creates a fake node with its CSINode; pods can be placed on it when this returns.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn create_fake_node(&self, node: &FakeNode) -> Result<()> {
        for manifest in node.manifests() {
            self.apply_manifests(&manifest.to_string())?;
        }
        let resources = json!({"cpu": "64", "memory": "256Gi", "pods": "10000", "ephemeral-storage": "1Ti"});
        let ready = json!({"type": "Ready", "status": "True", "reason": "Fake", "message": "it only exists"});
        let status = json!({"status": {
            "capacity": resources, "allocatable": resources, "conditions": [ready],
            "addresses": [{"type": "Hostname", "address": node.name}],
        }});
        self.patch_status("node", &node.name, &status)?;
        if self.daemon(KubeDaemon::ControllerManager).is_none() {
            return self.patch_object("node", &node.name, &json!({"spec": {"taints": null}}));
        }
        let is_tainted = |node: &serde_json::Value| {
            let taints = node["spec"]["taints"].as_array();
            taints.is_some_and(|taints| taints.iter().any(|taint| taint["key"] == NOT_READY))
        };
        self.wait_for_object("node", &node.name, |node| !is_tainted(node)).map(drop)
    }
}
