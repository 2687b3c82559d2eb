//! A kubelet's view of containerd: its CRI.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ContainerdConfig, ContainerdSettings, CriSettings, LivenessProbe, Preseed};
use nodekeel_supervisor::{RunnableState, RunnableStatus, WaitReason};
use testbed::{ScratchDir, wait_until, write_program};

use crate::harness::{Release, TestDaemon, bundle_dir, put_bundle, wait_node};
use crate::late_cri::start_proxy;

crate::on_both!(
    preseed_is_ready_only_when_the_cri_lists_its_images,
    an_image_deleted_before_the_cri_lists_it_counts_as_a_deleted_one,
    a_daemon_whose_cri_does_not_load_never_becomes_ready,
    a_daemon_that_loses_its_cri_is_restarted,
    a_cri_that_an_import_disables_is_not_waited_for,
);

/// The lists of the CRI that lack the image.
const LATE_LISTS: usize = 3;

const WITHIN: Duration = Duration::from_secs(30);

fn cri_settings(scratch: &ScratchDir) -> ContainerdSettings {
    let cri = CriSettings { cni_conf: scratch.path().join("cni"), ..CriSettings::default() };
    ContainerdSettings { cri: Some(cri), ..ContainerdSettings::default() }
}

/// Review D8: the CRI lists the image late, each time.
async fn preseed_is_ready_only_when_the_cri_lists_its_images(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let back = scratch.path().join("back.sock");
    let lists = start_proxy(&scratch.path().join("run/containerd.sock"), &back, LATE_LISTS);
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/a:1"], b"a");
    put_bundle(&scratch, "a.tar", &archive.to_tar());
    let (settings, directory) = (cri_settings(&scratch), bundle_dir(&scratch));
    let daemon = TestDaemon::launch(release, scratch, |containerd| {
        containerd.extra_args = vec!["--address".into(), back.into()];
        containerd.config = ContainerdConfig::Settings(settings);
        containerd.preseed = Some(Preseed::new(directory));
    });
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Ready).await;
    let lists = lists.load(Ordering::Relaxed);
    assert!(lists > LATE_LISTS, "ready after {lists} lists, of which the first {LATE_LISTS} lack the image");
    daemon.stop().await;
}

/// A kubelet that frees a full disk deletes many images, also while the first of them are imported again.
async fn an_image_deleted_before_the_cri_lists_it_counts_as_a_deleted_one(release: Release) {
    const IMAGE: &str = "localhost/a:1";
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let back = scratch.path().join("back.sock");
    let lists = start_proxy(&scratch.path().join("run/containerd.sock"), &back, usize::MAX);
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[IMAGE], b"a");
    put_bundle(&scratch, "a.tar", &archive.to_tar());
    let (settings, directory) = (cri_settings(&scratch), bundle_dir(&scratch));
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.extra_args = vec!["--address".into(), back.into()];
        containerd.config = ContainerdConfig::Settings(settings);
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    for _ in 0..2 {
        let has_image = || {
            let listed = daemon.ctr(&["images", "ls", "--quiet"]);
            anyhow::ensure!(listed.contains(IMAGE), "it lists {listed}");
            Ok(())
        };
        wait_until(WITHIN, "the import", has_image).unwrap();
        let before = lists.load(Ordering::Relaxed);
        let is_awaited = || {
            anyhow::ensure!(lists.load(Ordering::Relaxed) > before, "it was not asked again");
            Ok(())
        };
        wait_until(WITHIN, "a list of the CRI", is_awaited).unwrap();
        drop(daemon.ctr(&["images", "rm", "--sync", IMAGE]));
    }
    let is_waiting = |node: &RunnableStatus| {
        let WaitReason::Condition(reason) = &node.waiting_for else { return false };
        reason.contains(IMAGE) && reason.contains("10 minutes")
    };
    let waiting = wait_node(&daemon.supervisor, "root.containerd.preseed", is_waiting).await.unwrap();
    assert_eq!((waiting.generation, waiting.exits.len()), (1, 0), "{waiting:?}");
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
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Ready).await;
    daemon.stop().await;
}
