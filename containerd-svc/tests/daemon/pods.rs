//! Pods, through the CRI.

use std::path::Path;
use std::sync::Arc;

use nodekeel_containerd_svc::{
    ConfigVersion, ContainerdConfig, ContainerdSettings, CriSettings, OomScorePolicy,
};
use testbed::{ScratchDir, tools, write_program};

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::{Release, TestDaemon, pod_image, put_bundle};

crate::on_both!(pods_start_without_cap_sys_resource_only_with_restricted_oom_scores);

/// *Source:* `linux/capability.h`, `CAP_SYS_RESOURCE`.
fn has_sys_resource() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(value.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Starts a containerd without the capability, also if this process has it.
async fn start_without_capability(release: Release, oom_score: OomScorePolicy) -> TestDaemon {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let cri = CriSettings {
        cni_conf: scratch.path().join("cni"),
        sandbox_image: Some(POD_IMAGE.into()),
        oom_score,
        ..CriSettings::default()
    };
    let version = if release == Release::Debian { ConfigVersion::V2 } else { ConfigVersion::V3 };
    let without = scratch.path().join("without");
    let (setpriv, real) = (tools::find_tool(tools::SETPRIV).unwrap(), release.programs().join("containerd"));
    let script = format!("exec {} --bounding-set=-sys_resource {} \"$@\"", setpriv.display(), real.display());
    write_program(Path::new(&without), &format!("#!/bin/sh\n{script}\n")).unwrap();
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.binary = without;
        containerd.config = ContainerdConfig::Settings(ContainerdSettings { version, cri: Some(cri) });
    })
    .await;
    put_bundle(&daemon.scratch, "pod.tar", &pod_image().to_tar());
    daemon.preseed().run(&daemon.images().await).await.unwrap();
    daemon
}

async fn pods_start_without_cap_sys_resource_only_with_restricted_oom_scores(release: Release) {
    let daemon = start_without_capability(release, OomScorePolicy::Free).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let rejected = cri.run_pod("free", "").await.err().expect("lowering the score is not permitted");
    assert!(rejected.message().contains("runc create failed"), "{rejected}");
    daemon.stop().await;

    // `detect` checks the capabilities of this process.
    let restricted = if has_sys_resource() { OomScorePolicy::Restricted } else { OomScorePolicy::Detect };
    let daemon = start_without_capability(release, restricted).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let pod = cri.run_pod("restricted", "").await.unwrap();
    let container = cri.start_container(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
    assert_eq!(cri.exec_sync(&container, &["/bin/busybox", "echo", "running"]).await, "running\n");
    cri.remove_pod(pod).await;
    daemon.stop().await;
}
