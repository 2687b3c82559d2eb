//! Pods, through the CRI.

use nodekeel_containerd_svc::{ConfigVersion, CriSettings, OomScorePolicy};
use rstest::rstest;
use testbed::tools;

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, TestDaemon, pod_image};

/// Starts a containerd without the capability, also if this process has it.
async fn start_without_capability(release: Release, oom_score: OomScorePolicy) -> TestDaemon {
    let mut setup = Setup::new(release);
    let cri = CriSettings { sandbox_image: Some(POD_IMAGE.into()), oom_score, ..setup.cri() };
    let version = if release == Debian { ConfigVersion::V2 } else { ConfigVersion::V3 };
    setup.enable_cri(version, cri);
    let setpriv = tools::find_tool(tools::SETPRIV).unwrap();
    setup.replace_program(&format!("exec {} --bounding-set=-sys_resource $real \"$@\"", setpriv.display()));
    let daemon = setup.start().await;
    daemon.put_bundle("pod.tar", &pod_image().to_tar());
    daemon.import_bundles().await;
    daemon
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn pods_start_without_cap_sys_resource_only_with_restricted_oom_scores(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = start_without_capability(release, OomScorePolicy::Free).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let rejected = cri.run_pod("free", "").await.err().expect("lowering the score is not permitted");
    assert!(rejected.message().contains("runc create failed"), "{rejected}");
    daemon.stop().await;

    // `detect` checks the capabilities of this process. *Source:* `linux/capability.h`, `CAP_SYS_RESOURCE`.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let has_sys_resource = u64::from_str_radix(capabilities.trim(), 16).unwrap() >> 24 & 1 == 1;
    let restricted = if has_sys_resource { OomScorePolicy::Restricted } else { OomScorePolicy::Detect };
    let daemon = start_without_capability(release, restricted).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let pod = cri.run_pod("restricted", "").await.unwrap();
    let container = cri.start_container(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
    assert_eq!(cri.exec_sync(&container, &["/bin/busybox", "echo", "running"]).await, "running\n");
    cri.remove_pod(pod).await;
    daemon.stop().await;
}
