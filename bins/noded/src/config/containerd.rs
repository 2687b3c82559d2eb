//! `[services.containerd]`: a containerd of the node's own.

use std::path::PathBuf;

use nodekeel_containerd_svc::{Cri, Runtime};
use serde::Deserialize;

use super::graph::{Wrong, check_absolute, check_program, wrong};

/// `[services.containerd]`: a containerd of its own, apart from any other on the machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContainerdConfig {
    /// Whether to run it.
    pub enable: bool,
    /// The program; `None` is to search for `containerd`.
    pub binary: Option<PathBuf>,
    /// A directory with images, `NAMESPACE/NAME.tar`, that are there when `root.containerd.preseed` is done.
    pub preseed: Option<PathBuf>,
    /// Whether the layers of those images are unpacked at once, so that the first container needn't wait for it.
    pub unpack: bool,
    /// Kubernetes' runtime interface, which a kubelet of this machine needs; `None` is none.
    pub cri: Option<Cri>,
    /// A configuration of containerd's own to use instead of noded's, but for root, state and address.
    pub config: Option<PathBuf>,
    /// Arguments after the node's own.
    pub extra_args: Vec<String>,
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self {
            enable: true,
            binary: None,
            preseed: None,
            unpack: false,
            cri: None,
            config: None,
            extra_args: Vec::new(),
        }
    }
}

const TABLE: &str = "services.containerd";

/// Checks what no field can know alone.
pub(super) fn check(containerd: &ContainerdConfig) -> Result<(), Wrong> {
    check_program(TABLE, containerd.binary.as_deref(), &containerd.extra_args)?;
    let cri = containerd.cri.as_ref();
    for (field, path) in [
        ("preseed", containerd.preseed.as_ref()),
        ("config", containerd.config.as_ref()),
        ("cri.cni_bin", cri.map(|cri| &cri.cni_bin)),
        ("cri.cni_conf", cri.map(|cri| &cri.cni_conf)),
    ] {
        path.map_or(Ok(()), |path| check_absolute(&format!("{TABLE}.{field}"), path))?;
    }
    if containerd.unpack && containerd.preseed.is_none() {
        return wrong(
            format!("{TABLE}.unpack"),
            format!("is about the images of {TABLE}.preseed, which is not given"),
        );
    }
    if containerd.config.is_some() && cri.is_some() {
        return wrong(
            format!("{TABLE}.config"),
            format!("is used instead of [{TABLE}.cri]; give one of the two"),
        );
    }
    if cri.is_some_and(|cri| cri.default_runtime == Runtime::Runsc && cri.runsc.is_none()) {
        return wrong(
            format!("{TABLE}.cri.default_runtime"),
            format!("\"runsc\" is not among the runtimes; add [{TABLE}.cri.runsc]"),
        );
    }
    Ok(())
}
