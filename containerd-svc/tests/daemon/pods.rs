//! Pods, as the kubelet asks for them.

use std::path::Path;
use std::sync::Arc;

use nodekeel_containerd_svc::{Config, ConfigVersion, Cri as CriSettings, OomScore, Settings};
use testbed::{Scratch, tools, write_program};

use crate::cri::{Cri, IMAGE};
use crate::harness::{Daemon, Release, pod_image, put};

crate::on_both!(pods_start_without_the_right_to_lower_a_score_only_where_they_are_restricted);

/// *Source:* `linux/capability.h`, `CAP_SYS_RESOURCE`.
fn may_lower_scores() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let told = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(told.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// A containerd that has not the capability, whether this process has it or not.
async fn start(release: Release, oom_score: OomScore) -> Daemon {
    let scratch = Arc::new(Scratch::new().unwrap());
    let cri = CriSettings {
        cni_conf: scratch.path().join("cni"),
        sandbox_image: Some(IMAGE.into()),
        oom_score,
        ..CriSettings::default()
    };
    let version = if release == Release::Debian { ConfigVersion::V2 } else { ConfigVersion::V3 };
    let without = scratch.path().join("without");
    let (setpriv, real) = (tools::find(tools::SETPRIV).unwrap(), release.programs().join("containerd"));
    let script = format!("exec {} --bounding-set=-sys_resource {} \"$@\"", setpriv.display(), real.display());
    write_program(Path::new(&without), &format!("#!/bin/sh\n{script}\n")).unwrap();
    let daemon = Daemon::start_with(release, scratch, |containerd| {
        containerd.binary = without;
        containerd.config = Config::Settings(Settings { version, cri: Some(cri) });
    })
    .await;
    put(&daemon.scratch, "pod.tar", &pod_image().tar());
    daemon.preseed().run(&daemon.images().await).await.unwrap();
    daemon
}

async fn pods_start_without_the_right_to_lower_a_score_only_where_they_are_restricted(release: Release) {
    let daemon = start(release, OomScore::Free).await;
    let cri = Cri::connect(&daemon.place.socket()).await;
    let refused = cri.run_pod("free", "").await.err().expect("a lower score is not allowed");
    assert!(refused.message().contains("runc create failed"), "{refused}");
    daemon.stop().await;

    // What it finds out by itself is of its own process.
    let restricted = if may_lower_scores() { OomScore::Restricted } else { OomScore::Detect };
    let daemon = start(release, restricted).await;
    let cri = Cri::connect(&daemon.place.socket()).await;
    let pod = cri.run_pod("restricted", "").await.unwrap();
    let container = cri.start(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
    assert_eq!(cri.say(&container, &["/bin/busybox", "echo", "it runs"]).await, "it runs\n");
    cri.remove(pod).await;
    daemon.stop().await;
}
