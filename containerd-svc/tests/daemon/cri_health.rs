//! A kubelet's view of containerd: its CRI.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ContainerdConfig, ContainerdSettings, CriSettings, LivenessProbe, Preseed};
use nodekeel_supervisor::RunnableState;
use testbed::{ScratchDir, write_program};

use crate::cri::CriClient;
use crate::harness::{Release, TestDaemon, bundle_dir, put_bundle, wait_node};

crate::on_both!(
    the_cri_lists_every_image_when_preseed_is_done,
    a_daemon_whose_cri_does_not_load_never_becomes_ready,
    a_daemon_that_loses_its_cri_is_restarted,
    a_cri_that_an_import_disables_is_not_waited_for,
);

const IMAGES: usize = 60;

fn cri_settings(scratch: &ScratchDir) -> ContainerdSettings {
    let cri = CriSettings { cni_conf: scratch.path().join("cni"), ..CriSettings::default() };
    ContainerdSettings { cri: Some(cri), ..ContainerdSettings::default() }
}

/// Review D8.
async fn the_cri_lists_every_image_when_preseed_is_done(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    for number in 0..IMAGES {
        let name = format!("localhost/image-{number}:1");
        let archive =
            ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[&name], name.as_bytes());
        put_bundle(&scratch, &format!("image-{number}.tar"), &archive.to_tar());
    }
    let (settings, directory) = (cri_settings(&scratch), bundle_dir(&scratch));
    let daemon = TestDaemon::launch(release, scratch, |containerd| {
        containerd.config = ContainerdConfig::Settings(settings);
        containerd.preseed = Some(Preseed::new(directory));
    });
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Done).await;
    let listed = CriClient::list_images(&daemon.layout.socket_path()).await;
    assert_eq!(listed.len(), IMAGES, "{listed:?}");
    daemon.stop().await;
}

/// Review D7: containerd itself answers, and its CRI plugin did not load.
async fn a_daemon_whose_cri_does_not_load_never_becomes_ready(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let settings = cri_settings(&scratch);
    let daemon = TestDaemon::launch(release, scratch, |containerd| {
        let text = settings.render_toml(&containerd.layout).replace("\"overlayfs\"", "\"nowhere\"");
        containerd.config = ContainerdConfig::Verbatim { text, runsc: false };
    });
    let settled = |node: &nodekeel_supervisor::RunnableStatus| {
        !node.exits.is_empty() || node.state == RunnableState::Ready
    };
    let node = wait_node(&daemon.supervisor, "root.containerd", settled).await.unwrap();
    assert_ne!(node.state, RunnableState::Ready, "{node:?}");
    let exit = node.exits[0].exit.to_string();
    assert!(exit.contains("CRI") && exit.contains("disabled_plugins"), "{exit}");
    daemon.stop().await;
}

/// Review D7: a script replaces the daemon by one that answers without a CRI.
async fn a_daemon_that_loses_its_cri_is_restarted(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let settings = cri_settings(&scratch);
    let [without, program, gate] =
        ["no-cri.toml", "containerd", "gate"].map(|name| scratch.path().join(name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &gate, rustix::fs::Mode::RWXU).unwrap();
    let real = release.programs().join("containerd");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *'config dump') exec {real} \"$@\" ;; esac\n{real} \"$@\" & pid=$!\ntrap 'kill $pid; wait $pid; exit' TERM\nread go <{gate}\n\
         kill $pid\nwait $pid\nexec {real} \"$@\" --config {without}\n",
        real = real.display(),
        gate = gate.display(),
        without = without.display(),
    );
    write_program(&program, &script).unwrap();
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        let plain = ContainerdSettings::default().render_toml(&containerd.layout);
        std::fs::write(&without, plain).unwrap();
        containerd.binary = program;
        containerd.config = ContainerdConfig::Settings(settings);
        let (period, timeout) = (Duration::from_millis(500), Duration::from_secs(2));
        containerd.liveness = Some(LivenessProbe { period, timeout, tolerated_failures: 8 });
    })
    .await;
    tokio::task::spawn_blocking(move || std::fs::write(gate, "go\n")).await.unwrap().unwrap();
    let node = wait_node(&daemon.supervisor, "root.containerd", |node| !node.exits.is_empty()).await.unwrap();
    let exit = node.exits[0].exit.to_string();
    assert!(exit.contains("liveness probes") && exit.contains("call the CRI"), "{exit}");
    daemon.wait_state("root.containerd", 2, RunnableState::Ready).await;
    daemon.stop().await;
}

/// The directory's pattern is imported by the file that containerd gets.
async fn a_cri_that_an_import_disables_is_not_waited_for(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let imported = scratch.path().join("imported");
    std::fs::create_dir(&imported).unwrap();
    let disables = "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
    std::fs::write(imported.join("no-cri.toml"), disables).unwrap();
    let settings = cri_settings(&scratch);
    let directory = bundle_dir(&scratch);
    let image = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/a:1"], b"a");
    put_bundle(&scratch, "a.tar", &image.to_tar());
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        let text = settings.render_toml(&containerd.layout);
        let text = format!("imports = [\"{}/*.toml\"]\n{text}", imported.display());
        containerd.config = ContainerdConfig::Verbatim { text, runsc: false };
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Done).await;
    daemon.stop().await;
}
