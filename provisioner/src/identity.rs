//! The driver and the node that a provisioner serves, and the names by which objects belong to them.

use crate::name::{DriverName, NodeName, StoreName};

/// Names the driver that must provision a claim. *Source:* Kubernetes, "well-known labels, annotations and
/// taints".
pub const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The beta name of [`STORAGE_PROVISIONER`]; read if the stable annotation is missing.
pub const BETA_STORAGE_PROVISIONER: &str = "volume.beta.kubernetes.io/storage-provisioner";

/// Names the node on which a claim's volume must be created.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// Names the driver that provisioned a volume.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The node label that the node affinity of volumes of release 0.1.0 refers to; later ones refer to
/// [`DriverName::topology_key`].
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// The finalizer that keeps a deleted PersistentVolume until its data are removed.
///
/// The same as that of the Kubernetes external-provisioner, which tools and administrators know.
pub const FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// The driver and the node whose claims and volumes a provisioner serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvisionerIdentity {
    /// The driver that claims and volumes name.
    pub driver: DriverName,
    /// The node of the volumes: the value of its label [`DriverName::topology_key`], which their node affinity
    /// refers to and which the kubelet sets.
    pub node: NodeName,
    /// The finalizer that volumes get, usually [`FINALIZER`]. With `None`, a volume's data leak if its object
    /// is deleted by hand before its claim.
    pub finalizer: Option<String>,
    /// The store of the volumes, one of several on the node. `None` is the one without a name: that of the classes that name
    /// none.
    pub store: Option<StoreName>,
}

impl ProvisionerIdentity {
    /// The same driver and node, with another one of its stores.
    pub(crate) fn with_store(&self, store: Option<StoreName>) -> Self {
        Self { store, ..self.clone() }
    }

    /// Returns whether a label names this node, in a node affinity of this release or of an earlier one.
    pub(crate) fn is_label_of_node(&self, key: &str, values: &[String]) -> bool {
        (key == HOSTNAME || key == self.driver.topology_key()) && values == [self.node.as_str()]
    }
}
