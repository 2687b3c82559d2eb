//! The paths of a control plane's programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::gotool::{self, GoTools};

/// All programs of a control plane and its callers.
const PROGRAMS: [&str; 6] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"];

/// The programs of one version of Kubernetes.
#[derive(Clone, Debug)]
pub struct KubePrograms {
    paths: Vec<(&'static str, PathBuf)>,
}

impl KubePrograms {
    /// Finds them: all of them in `NODEKEEL_KUBE_BIN` where that is set; else those of `KUBEBUILDER_ASSETS`
    /// (which usually has etcd, the API server and kubectl alone); the others come from the cache, and are
    /// built into it first where they don't exist.
    ///
    /// # Errors
    /// `NODEKEEL_KUBE_BIN` lacks a program, or one can't be built.
    pub fn locate() -> Result<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        Self::locate_by(set("NODEKEEL_KUBE_BIN"), set("KUBEBUILDER_ASSETS"), &mut |tools| {
            tools.program_directory()
        })
    }

    fn locate_by(
        own: Option<OsString>,
        assets: Option<OsString>,
        build: &mut dyn FnMut(&GoTools) -> Result<PathBuf>,
    ) -> Result<Self> {
        let mut paths = Vec::new();
        for program in PROGRAMS {
            paths.push((
                program,
                find_program(program, own.as_deref().map(Path::new), assets.as_deref(), build)?,
            ));
        }
        Ok(Self { paths })
    }

    /// One of them, by the name of its file: `etcd`, `kube-apiserver`, `kube-controller-manager`,
    /// `kube-scheduler`, `kubectl`, `kubelet`.
    ///
    /// # Panics
    /// The name is not one of these.
    pub fn program_path(&self, program: &str) -> &Path {
        let found = self.paths.iter().find(|(name, _)| *name == program);
        found.map(|(_, path)| path.as_path()).expect("the program is one of PROGRAMS")
    }
}

fn find_program(
    program: &str,
    own: Option<&Path>,
    assets: Option<&std::ffi::OsStr>,
    build: &mut dyn FnMut(&GoTools) -> Result<PathBuf>,
) -> Result<PathBuf> {
    if let Some(directory) = own {
        let path = directory.join(program);
        ensure!(path.is_file(), "NODEKEEL_KUBE_BIN is set, but {} is not a file", path.display());
        return Ok(path);
    }
    let asset = assets.map(|directory| Path::new(directory).join(program)).filter(|path| path.is_file());
    match asset {
        Some(path) => Ok(path),
        None if program == "etcd" => Ok(build(&gotool::ETCD)?.join(program)),
        None => Ok(build(&gotool::KUBERNETES)?.join(program)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn built(tools: &GoTools) -> Result<PathBuf> {
        Ok(Path::new("/built").join(tools.name))
    }

    #[test]
    fn missing_programs_are_built() {
        let programs = KubePrograms::locate_by(None, None, &mut built).unwrap();
        assert_eq!(programs.program_path("etcd"), Path::new("/built/etcd/etcd"));
        assert_eq!(programs.program_path("kubelet"), Path::new("/built/kubernetes/kubelet"));
    }

    #[test]
    fn programs_of_assets_are_preferred() {
        let assets = tempfile::tempdir().unwrap();
        fs::write(assets.path().join("kube-apiserver"), "").unwrap();
        let programs = KubePrograms::locate_by(None, Some(assets.path().into()), &mut built).unwrap();
        assert_eq!(programs.program_path("kube-apiserver"), assets.path().join("kube-apiserver"));
        assert_eq!(programs.program_path("kube-scheduler"), Path::new("/built/kubernetes/kube-scheduler"));
    }

    #[test]
    fn a_given_directory_must_have_all_programs() {
        let own = tempfile::tempdir().unwrap();
        let lacking = |_: &GoTools| panic!("nothing is built where a directory is given");
        let error = KubePrograms::locate_by(Some(own.path().into()), None, &mut { lacking }).unwrap_err();
        assert!(error.to_string().contains("NODEKEEL_KUBE_BIN"), "{error}");
        for program in PROGRAMS {
            fs::write(own.path().join(program), "").unwrap();
        }
        let programs = KubePrograms::locate_by(Some(own.path().into()), None, &mut { lacking }).unwrap();
        assert_eq!(programs.program_path("kubectl"), own.path().join("kubectl"));
    }
}
