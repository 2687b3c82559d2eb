//! `[services.containerd]`: a containerd of the node's own.

use std::path::{Path, PathBuf};

use nodekeel_containerd_svc::{CgroupDriver, Cri, OomScore, Runsc, Runtime};
use serde::Deserialize;

use super::graph::{Wrong, check_nul, check_program, wrong};

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
    /// Kubernetes' runtime interface, which a kubelet of this machine needs; `None` is none.
    pub cri: Option<CriConfig>,
    /// A configuration of containerd's own to use instead of noded's, but for root, state and address.
    pub config: Option<PathBuf>,
    /// Arguments after the node's own.
    pub extra_args: Vec<String>,
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self { enable: true, binary: None, preseed: None, cri: None, config: None, extra_args: Vec::new() }
    }
}

/// `[services.containerd.cri]`: it is served where this is given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CriConfig {
    /// Which runtime pods have that name none.
    pub runtime: RuntimeName,
    /// Who makes the cgroups of pods; the kubelet must be told the same.
    pub cgroups: CgroupDriverName,
    /// The image in which a pod's namespaces live; `None` is containerd's own, from the network.
    pub sandbox_image: Option<String>,
    /// Where the plugins of pods' networks are.
    pub cni_bin: PathBuf,
    /// Where their configuration is.
    pub cni_conf: PathBuf,
    /// gVisor beside runc; `None` is none.
    pub runsc: Option<RunscConfig>,
}

impl Default for CriConfig {
    fn default() -> Self {
        let Cri { cni_bin, cni_conf, .. } = Cri::default();
        Self {
            runtime: RuntimeName::Runc,
            cgroups: CgroupDriverName::Cgroupfs,
            sandbox_image: None,
            cni_bin,
            cni_conf,
            runsc: None,
        }
    }
}

/// A program that runs containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RuntimeName {
    /// `"runc"`: namespaces of the node's kernel.
    Runc,
    /// `"runsc"`: gVisor.
    Runsc,
}

/// Who makes the cgroups of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CgroupDriverName {
    /// `"cgroupfs"`: the runtime, by itself.
    Cgroupfs,
    /// `"systemd"`: systemd.
    Systemd,
}

/// `[services.containerd.cri.runsc]`: pods can have gVisor where this is given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunscConfig {
    /// How gVisor gets at system calls.
    pub platform: String,
    /// Whether it tells what helps those who look for a fault in it.
    pub debug: bool,
}

impl Default for RunscConfig {
    fn default() -> Self {
        let Runsc { platform, debug } = Runsc::default();
        Self { platform, debug }
    }
}

impl CriConfig {
    /// What containerd is told of it.
    pub(crate) fn settings(&self) -> Cri {
        Cri {
            default_runtime: match self.runtime {
                RuntimeName::Runc => Runtime::Runc,
                RuntimeName::Runsc => Runtime::Runsc,
            },
            runsc: self
                .runsc
                .as_ref()
                .map(|runsc| Runsc { platform: runsc.platform.clone(), debug: runsc.debug }),
            cgroups: match self.cgroups {
                CgroupDriverName::Cgroupfs => CgroupDriver::Cgroupfs,
                CgroupDriverName::Systemd => CgroupDriver::Systemd,
            },
            oom_score: OomScore::Detect,
            sandbox_image: self.sandbox_image.clone(),
            cni_bin: self.cni_bin.clone(),
            cni_conf: self.cni_conf.clone(),
        }
    }
}

const TABLE: &str = "services.containerd";

/// Checks what no field can know alone.
pub(super) fn check(containerd: &ContainerdConfig) -> Result<(), Wrong> {
    check_program(TABLE, containerd.binary.as_deref(), &containerd.extra_args)?;
    check_absolute("preseed", containerd.preseed.as_deref())?;
    check_absolute("config", containerd.config.as_deref())?;
    let Some(cri) = &containerd.cri else { return Ok(()) };
    if containerd.config.is_some() {
        return wrong(
            format!("{TABLE}.config"),
            format!("is used instead of [{TABLE}.cri]; give one of the two"),
        );
    }
    check_absolute("cri.cni_bin", Some(&cri.cni_bin))?;
    check_absolute("cri.cni_conf", Some(&cri.cni_conf))?;
    if cri.runtime == RuntimeName::Runsc && cri.runsc.is_none() {
        return wrong(
            format!("{TABLE}.cri.runtime"),
            format!("\"runsc\" is not among the runtimes; add [{TABLE}.cri.runsc]"),
        );
    }
    Ok(())
}

fn check_absolute(field: &str, path: Option<&Path>) -> Result<(), Wrong> {
    let Some(path) = path else { return Ok(()) };
    let field = format!("{TABLE}.{field}");
    check_nul(&field, path.to_str())?;
    match path.is_absolute() {
        true => Ok(()),
        false => wrong(field, format!("{:?} is not absolute", path.display().to_string())),
    }
}
