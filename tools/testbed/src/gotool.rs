//! Daemons and tools that Debian lacks, or has in old versions: built once from pinned Go modules into the
//! cache.
//!
//! A set of programs is a Go module of this package (`tools/NAME/go.mod`, with every checksum in `go.sum`).
//! The directory's name has a hash of both files and of the flags, so another pin is another directory, and
//! an incomplete build is never found.

use std::path::PathBuf;

use anyhow::Result;
use sha2::{Digest as _, Sha256};

use crate::cache;

mod build;
mod go;

/// Programs that are built together.
#[derive(Clone, Copy, Debug)]
pub struct GoTools {
    /// The name of the set, as `kubernetes`.
    pub name: &'static str,
    /// Their version, as in upstream's tag without the `v`.
    pub version: &'static str,
    /// The programs.
    pub programs: &'static [GoProgram],
    go_mod: &'static str,
    go_sum: &'static str,
    /// The `main.go` of the module itself, whose package is `.`; empty if all programs are of other modules.
    main: &'static str,
    tags: &'static str,
    /// Linker flags beyond those that leave out symbols.
    ldflags: &'static str,
}

/// One program of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoProgram {
    /// The name of its file.
    pub file: &'static str,
    /// The Go package of its `main`, or of its tests.
    pub package: &'static str,
    /// Whether it is the package's tests, as a program.
    is_test: bool,
}

const fn go_program(file: &'static str, package: &'static str) -> GoProgram {
    GoProgram { file, package, is_test: false }
}

const fn go_test_program(file: &'static str, package: &'static str) -> GoProgram {
    GoProgram { file, package, is_test: true }
}

/// The control plane, the kubelet and kubectl. Without the linker flags they report v0.0.0.
pub const KUBERNETES: GoTools = GoTools {
    name: "kubernetes",
    version: "1.36.3",
    programs: &[
        go_program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
        go_program("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
        go_program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
        go_program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
        go_program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    ],
    go_mod: include_str!("../tools/kubernetes/go.mod"),
    go_sum: include_str!("../tools/kubernetes/go.sum"),
    main: "",
    tags: "",
    ldflags: "-X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 \
              -X k8s.io/component-base/version.gitMinor=36",
};

/// Kubernetes' end-to-end tests, and the program of their pods. They run for hours, so they are not one of
/// [`ALL`], which each test run has.
pub const KUBERNETES_E2E: GoTools = GoTools {
    name: "kubernetes-e2e",
    version: KUBERNETES.version,
    programs: &[
        go_program("agnhost", "k8s.io/kubernetes/test/images/agnhost"),
        go_test_program("e2e.test", "k8s.io/kubernetes/test/e2e"),
    ],
    go_mod: include_str!("../tools/kubernetes-e2e/go.mod"),
    go_sum: include_str!("../tools/kubernetes-e2e/go.sum"),
    main: "",
    tags: "",
    ldflags: KUBERNETES.ldflags,
};

/// The provisioner of k3s, which a bench compares; not one of [`ALL`], since no test runs it.
pub const LOCAL_PATH_PROVISIONER: GoTools = GoTools {
    name: "local-path-provisioner",
    version: "0.0.30",
    programs: &[go_program("local-path-provisioner", "github.com/rancher/local-path-provisioner")],
    go_mod: include_str!("../tools/local-path-provisioner/go.mod"),
    go_sum: include_str!("../tools/local-path-provisioner/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// An etcd that has what an API server of that age requests: with Debian's 3.4 a streamed list (WatchList)
/// ends in an error event, because it lacks `RequestWatchProgress`.
pub const ETCD: GoTools = GoTools {
    name: "etcd",
    version: "3.7.3",
    programs: &[
        go_program("etcd", "go.etcd.io/etcd/server/v3"),
        go_program("etcdctl", "go.etcd.io/etcd/etcdctl/v3"),
        go_program("etcdutl", "go.etcd.io/etcd/etcdutl/v3"),
    ],
    go_mod: include_str!("../tools/etcd/go.mod"),
    go_sum: include_str!("../tools/etcd/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// The releases between Debian's etcd and [`ETCD`], by which a cluster is upgraded; not of [`ALL`], since `cargo xtask soak`
/// alone runs them.
pub const FORMER_ETCDS: [GoTools; 2] = [
    GoTools {
        name: "etcd-3.5",
        version: "3.5.35",
        programs: &[go_program("etcd", "go.etcd.io/etcd/server/v3")],
        go_mod: include_str!("../tools/etcd-3.5/go.mod"),
        go_sum: include_str!("../tools/etcd-3.5/go.sum"),
        main: "",
        tags: "",
        ldflags: "",
    },
    GoTools {
        name: "etcd-3.6",
        version: "3.6.16",
        programs: &[go_program("etcd", "go.etcd.io/etcd/server/v3")],
        go_mod: include_str!("../tools/etcd-3.6/go.mod"),
        go_sum: include_str!("../tools/etcd-3.6/go.sum"),
        main: "",
        tags: "",
        ldflags: "",
    },
];

/// A checker of linearizability, which reads a history of writes and reads from its standard input.
pub const PORCUPINE: GoTools = GoTools {
    name: "porcupine",
    version: "1.3.1",
    programs: &[go_program("porcupine", ".")],
    go_mod: include_str!("../tools/porcupine/go.mod"),
    go_sum: include_str!("../tools/porcupine/go.sum"),
    main: include_str!("../tools/porcupine/main.go"),
    tags: "",
    ldflags: "",
};

/// The container runtime of a node in a guest; it calls Debian's runc.
pub const CONTAINERD: GoTools = GoTools {
    name: "containerd",
    version: "2.4.2",
    programs: &[
        go_program("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
        go_program(
            "containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        ),
        go_program("ctr", "github.com/containerd/containerd/v2/cmd/ctr"),
    ],
    go_mod: include_str!("../tools/containerd/go.mod"),
    go_sum: include_str!("../tools/containerd/go.sum"),
    main: "",
    tags: "no_btrfs",
    ldflags: "-X github.com/containerd/containerd/v2/version.Version=v2.4.2",
};

/// gVisor, and the shim by which containerd runs it. Its module has no releases: the version is that of a
/// day.
pub const GVISOR: GoTools = GoTools {
    name: "gvisor",
    version: "0.0.0-20260905035102",
    programs: &[
        go_program("runsc", "gvisor.dev/gvisor/runsc"),
        go_program("containerd-shim-runsc-v1", "gvisor.dev/gvisor/shim"),
    ],
    go_mod: include_str!("../tools/gvisor/go.mod"),
    go_sum: include_str!("../tools/gvisor/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// The conformance tests of CSI drivers.
pub const CSI_SANITY: GoTools = GoTools {
    name: "csi-sanity",
    version: "5.6.0",
    programs: &[go_program("csi-sanity", "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity")],
    go_mod: include_str!("../tools/csi-sanity/go.mod"),
    go_sum: include_str!("../tools/csi-sanity/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// Renders and checks the chart of `deploy/helm`.
pub const HELM: GoTools = GoTools {
    name: "helm",
    version: "4.3.1",
    programs: &[go_program("helm", "helm.sh/helm/v4/cmd/helm")],
    go_mod: include_str!("../tools/helm/go.mod"),
    go_sum: include_str!("../tools/helm/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// The controller of the snapshot API, of which a cluster has one; its CustomResourceDefinitions are in
/// [`SNAPSHOT_CRDS`].
pub const SNAPSHOT_CONTROLLER: GoTools = GoTools {
    name: "snapshot-controller",
    version: "8.7.0",
    programs: &[go_program(
        "snapshot-controller",
        "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
    )],
    go_mod: include_str!("../tools/snapshot-controller/go.mod"),
    go_sum: include_str!("../tools/snapshot-controller/go.sum"),
    main: "",
    tags: "",
    ldflags: "",
};

/// The kinds of the snapshot API, as manifests. *Source:* external-snapshotter, `client/config/crd`.
pub const SNAPSHOT_CRDS: [&str; 3] = [
    include_str!("../tools/snapshot-controller/crds/volumesnapshotclasses.yaml"),
    include_str!("../tools/snapshot-controller/crds/volumesnapshotcontents.yaml"),
    include_str!("../tools/snapshot-controller/crds/volumesnapshots.yaml"),
];

/// Those that a test run needs.
pub const ALL: [GoTools; 8] =
    [ETCD, PORCUPINE, KUBERNETES, CONTAINERD, GVISOR, CSI_SANITY, HELM, SNAPSHOT_CONTROLLER];

impl GoTools {
    /// The directory with the programs, which are built first where they don't exist yet. Progress goes to
    /// standard error; of two concurrent processes, one waits for the other.
    ///
    /// # Errors
    /// Go is missing, or the build failed; with its output.
    pub fn program_directory(&self) -> Result<PathBuf> {
        cache::make_entry(&self.entry_name(), |partial| build::build_tools(self, partial))
    }

    /// One of the programs, built first where it doesn't exist yet.
    ///
    /// # Errors
    /// As [`program_directory`](Self::program_directory).
    ///
    /// # Panics
    /// The module has no such program.
    pub fn program_path(&self, file: &str) -> Result<PathBuf> {
        assert!(self.programs.iter().any(|program| program.file == file), "{} has no {file}", self.name);
        Ok(self.program_directory()?.join(file))
    }

    /// Its name in the cache, which changes with each input of the build, but for the Go that builds them.
    fn entry_name(&self) -> String {
        let mut hash = Sha256::new();
        let programs: String = self.programs.iter().map(|p| format!("{} {}\n", p.file, p.package)).collect();
        for part in [
            self.go_mod,
            self.go_sum,
            self.tags,
            self.ldflags,
            &programs,
            build::FLAGS,
            std::env::consts::ARCH,
        ]
        .into_iter()
        .chain(Some(self.main).filter(|main| !main.is_empty()))
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let key: String = hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}-{}-{key}", self.name, self.version)
    }
}

/// *Source:* the names of Go's `GOARCH`, which OCI uses, too.
pub(crate) fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_pins_the_version_that_it_says_and_lists_its_programs_as_tools() {
        for tools in ALL.into_iter().chain(FORMER_ETCDS).chain([KUBERNETES_E2E, LOCAL_PATH_PROVISIONER]) {
            let pin = format!(" v{}", tools.version);
            assert!(tools.go_mod.contains(&pin), "{} does not pin {pin}", tools.name);
            for program in tools.programs {
                assert!(tools.go_mod.contains(program.package), "{} is no tool", program.file);
            }
            assert!(!tools.go_sum.is_empty());
        }
    }

    #[test]
    fn the_fetched_go_is_new_enough_for_every_module() {
        let patch = |go: &str| go.strip_prefix("1.26.").unwrap().parse::<u32>().unwrap();
        let fetched = go::TOOLCHAIN.strip_prefix("go").unwrap();
        for tools in ALL.into_iter().chain([KUBERNETES_E2E, LOCAL_PATH_PROVISIONER]) {
            let needed = tools.go_mod.lines().find_map(|line| line.strip_prefix("go ")).unwrap();
            assert!(patch(needed) <= patch(fetched), "{} needs Go {needed}", tools.name);
        }
    }

    #[test]
    #[ignore = "needs go"]
    fn built_tools_run_and_know_their_versions() {
        let csi = CSI_SANITY.program_path("csi-sanity").unwrap();
        let help = std::process::Command::new(csi).arg("--help").output().unwrap();
        assert!(String::from_utf8_lossy(&help.stderr).contains("csi.endpoint"));
        let etcd = crate::command_output(
            std::process::Command::new(ETCD.program_path("etcd").unwrap()).arg("--version"),
        );
        assert!(etcd.unwrap().contains(ETCD.version));
    }
}
