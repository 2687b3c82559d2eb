//! The paths of a control plane's programs.

use std::path::PathBuf;

use anyhow::Result;

use crate::gotool;

/// The programs of one version of Kubernetes, and its etcd.
#[derive(Clone, Debug)]
pub struct KubePrograms {
    etcd: PathBuf,
    kubernetes: PathBuf,
}

impl KubePrograms {
    /// Finds them in the cache, into which they are built first where they don't exist.
    ///
    /// # Errors
    /// One can't be built.
    pub fn locate() -> Result<Self> {
        let (etcd, kubernetes) = (gotool::ETCD.program_directory()?, gotool::KUBERNETES.program_directory()?);
        Ok(Self { etcd, kubernetes })
    }

    /// One of them, by the name of its file: `etcd`, `kube-apiserver`, `kube-controller-manager`,
    /// `kube-scheduler`, `kubectl`, `kubelet`.
    pub fn program_path(&self, program: &str) -> PathBuf {
        if program == "etcd" { self.etcd.join(program) } else { self.kubernetes.join(program) }
    }
}
