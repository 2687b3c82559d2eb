//! The daemon process.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{
    ConfigVersion, ContainerdConfig, ContainerdSettings, CriSettings, DirectoryLayout, LivenessProbe,
    Preseed, RunscSettings, daemon_version,
};
use nodekeel_supervisor::{RunnableState, RunnableStatus};
use testbed::{ScratchDir, write_program};

use crate::harness::{Release, TestDaemon, bundle_dir, busybox_layer, put_bundle, unique_name, wait_node};

crate::on_both!(
    the_daemon_is_ready_when_it_answers_and_has_two_environment_variables,
    a_stale_socket_does_not_prevent_a_start,
    a_restart_leaves_containers_running,
    images_are_listed_when_preseed_is_ready,
    a_failed_bundle_releases_the_dependents_and_is_named_until_it_is_repaired,
    a_missing_preseed_directory_is_named_and_holds_the_dependents_and_an_empty_one_is_named,
    every_config_version_is_accepted,
    an_unresponsive_daemon_is_killed_and_restarted,
    runsc_lines_are_in_the_journal,
    a_verbatim_configuration_is_used_unchanged,
    a_rejected_configuration_never_becomes_ready,
    the_daemon_is_not_ready_before_its_socket_exists,
);

async fn the_daemon_is_ready_when_it_answers_and_has_two_environment_variables(release: Release) {
    let daemon = TestDaemon::start(release).await;
    let answer = daemon_version(&daemon.layout.socket_path()).await.unwrap();
    let expected = if release == Release::Debian { "1.6" } else { "v2.4" };
    assert!(answer.starts_with(expected), "{answer}");
    let environment = fs::read(format!("/proc/{}/environ", daemon.pid())).unwrap();
    let variables: BTreeMap<_, _> = String::from_utf8(environment)
        .unwrap()
        .split_terminator('\0')
        .map(|variable| {
            variable.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap()
        })
        .collect();
    let tmp = daemon.layout.temp_dir().display().to_string();
    let expected = [("PATH".to_owned(), release.path()), ("TMPDIR".to_owned(), tmp)];
    assert_eq!(variables, BTreeMap::from(expected));
    daemon.stop().await;
}

/// Reference 13, `stale socket file`.
async fn a_stale_socket_does_not_prevent_a_start(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let layout = DirectoryLayout::new(scratch.path().join("data"), scratch.path().join("run")).unwrap();
    fs::create_dir(layout.run_dir()).unwrap();
    drop(UnixListener::bind(layout.socket_path()).unwrap());
    TestDaemon::start_with(release, scratch, |_| {}).await.stop().await;
}

async fn a_restart_leaves_containers_running(release: Release) {
    let daemon = TestDaemon::start(release).await;
    put_bundle(
        &daemon.scratch,
        "busybox.tar",
        &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
            .with_image(&["localhost/busybox:1"], &busybox_layer())
            .to_tar(),
    );
    daemon.preseed().run(&daemon.images().await).await.unwrap();
    let sleeper = unique_name();
    daemon.ctr(&["run", "--detach", "localhost/busybox:1", &sleeper, "/bin/busybox", "sleep", "1000"]);
    let tasks = daemon.ctr(&["tasks", "ls"]);
    assert!(tasks.contains("RUNNING"), "{tasks}");
    daemon.kill();
    daemon.wait_state("root.containerd", 2, RunnableState::Ready).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks, "the same container, with the same pid");
    daemon.supervisor.restart_runnable("root.containerd").unwrap();
    daemon.wait_state("root.containerd", 3, RunnableState::Ready).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks);
    daemon.ctr(&["tasks", "delete", "--force", &sleeper]);
    daemon.ctr(&["containers", "rm", &sleeper]);
    daemon.stop().await;
}

/// Reference 10: once more after the daemon's restart.
async fn images_are_listed_when_preseed_is_ready(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    put_bundle(
        &scratch,
        "pause.tar.gz",
        &ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive)
            .with_image(&["registry.k8s.io/pause:3.10"], b"x")
            .to_gzip(),
    );
    let directory = bundle_dir(&scratch);
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Ready).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("registry.k8s.io/pause:3.10"));
    daemon.kill();
    daemon.wait_state("root.containerd", 2, RunnableState::Ready).await;
    daemon.wait_state("root.containerd.preseed", 2, RunnableState::Ready).await;
    daemon.stop().await;
}

/// Review D8.
async fn a_failed_bundle_releases_the_dependents_and_is_named_until_it_is_repaired(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let pause = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive).with_image(&["pause:3.10"], b"x");
    put_bundle(&scratch, "pause.tar", &pause.to_tar());
    put_bundle(&scratch, "bad.tar", b"scribble");
    let bad = bundle_dir(&scratch).join("k8s.io/bad.tar");
    let bundles = Preseed::new(bundle_dir(&scratch));
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(bundles.clone());
    })
    .await;
    let preseed = "root.containerd.preseed";
    let node = wait_node(&daemon.supervisor, preseed, |node| node.failures >= 3).await.unwrap();
    for exit in &node.exits {
        let text = exit.exit.to_string();
        assert!(
            text.contains("1 of 2 bundles are not imported") && text.contains("k8s.io/bad.tar"),
            "{text}"
        );
        assert!(text.contains("archive truncated"), "also where it is not read again: {text}");
    }
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("pause:3.10"));
    fs::rename(bad.with_file_name("pause.tar"), bad).unwrap();
    daemon.wait_imported(&bundles).await;
    daemon.stop().await;
}

/// The directory of a disk that is not mounted.
async fn a_missing_preseed_directory_is_named_and_holds_the_dependents_and_an_empty_one_is_named(
    release: Release,
) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let directory = bundle_dir(&scratch);
    let preseed = "root.containerd.preseed";
    let bundles = Preseed::new(&directory);
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(bundles.clone());
    })
    .await;
    let failed = |node: &RunnableStatus| node.failures >= 3;
    let node = wait_node(&daemon.supervisor, preseed, failed).await.unwrap();
    let path = directory.display().to_string();
    for exit in &node.exits {
        let text = exit.exit.to_string();
        assert!(text.contains(&path) && text.contains("No such file"), "{text}");
    }
    let tree = daemon.supervisor.snapshot();
    let dependent = tree.iter().find(|node| *node.dn == *"root.dependent").unwrap();
    assert_eq!(dependent.state, RunnableState::New, "{dependent:?}");
    fs::create_dir(&directory).unwrap();
    let is_named = |node: &RunnableStatus| {
        node.exits.last().is_some_and(|exit| exit.exit.to_string().contains("is empty"))
    };
    wait_node(&daemon.supervisor, preseed, is_named).await.unwrap();
    daemon.wait_state("root.dependent", 1, RunnableState::Ready).await;
    put_bundle(
        &daemon.scratch,
        "a.tar",
        &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/a:1"], b"a").to_tar(),
    );
    daemon.wait_imported(&bundles).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("localhost/a:1"));
    daemon.stop().await;
}

async fn every_config_version_is_accepted(release: Release) {
    let versions: &[ConfigVersion] = match release {
        Release::Debian => &[ConfigVersion::V2],
        Release::Newest => &[ConfigVersion::V2, ConfigVersion::V3],
    };
    for version in versions {
        let scratch = Arc::new(ScratchDir::new().unwrap());
        let conf = scratch.path().join("cni");
        let cri =
            CriSettings { cni_conf: conf, runsc: Some(RunscSettings::default()), ..CriSettings::default() };
        let settings = ContainerdSettings { version: *version, cri: Some(cri) };
        let daemon = TestDaemon::start_with(release, scratch, |containerd| {
            containerd.config = ContainerdConfig::Settings(settings);
        })
        .await;
        let plugins = daemon.ctr(&["plugins", "ls"]);
        let is_on = |line: &str| line.contains("cri") && line.trim_end().ends_with("ok");
        assert!(plugins.lines().any(is_on), "{version:?}: {plugins}");
        let log = daemon.log("root.containerd");
        assert!(log.contains("io.containerd.runsc.v1"), "the log has its settings: {log}");
        daemon.stop().await;
    }
}

/// Reference 13, `daemon hangs`.
async fn an_unresponsive_daemon_is_killed_and_restarted(release: Release) {
    let liveness = LivenessProbe {
        period: Duration::from_millis(100),
        timeout: Duration::from_secs(2),
        tolerated_failures: 2,
    };
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let daemon =
        TestDaemon::start_with(release, scratch, |containerd| containerd.liveness = Some(liveness)).await;
    let pid = daemon.pid();
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    daemon.wait_state("root.containerd", 2, RunnableState::Ready).await;
    assert_ne!(daemon.pid(), pid);
    daemon.stop().await;
}

async fn runsc_lines_are_in_the_journal(release: Release) {
    use std::io::Write as _;
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let cri = CriSettings {
        cni_conf: scratch.path().join("cni"),
        runsc: Some(RunscSettings::default()),
        ..CriSettings::default()
    };
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.config = ContainerdConfig::Settings(ContainerdSettings {
            cri: Some(cri),
            ..ContainerdSettings::default()
        });
    })
    .await;
    daemon.wait_state("root.containerd.runsc", 1, RunnableState::Ready).await;
    let mut fifo = fs::File::options().append(true).open(daemon.layout.runsc_log_path()).unwrap();
    writeln!(fifo, "I1121 18:01:02.123456   12345 boot.go:52] hello from the sandbox").unwrap();
    testbed::wait_until(Duration::from_secs(10), "the line", || {
        let log = daemon.log("root.containerd.runsc");
        anyhow::ensure!(log.contains("hello from the sandbox"), "{log}");
        Ok(())
    })
    .unwrap();
    daemon.stop().await;
}

async fn a_verbatim_configuration_is_used_unchanged(release: Release) {
    for runsc in [true, false] {
        let scratch = Arc::new(ScratchDir::new().unwrap());
        let mut config_text = String::new();
        let daemon = TestDaemon::start_with(release, scratch, |containerd| {
            config_text = ContainerdSettings::default().render_toml(&containerd.layout)
                + "[debug]\nlevel = \"debug\"\n";
            containerd.config = ContainerdConfig::Verbatim { text: config_text.clone(), runsc };
        })
        .await;
        assert_eq!(fs::read_to_string(daemon.layout.config_path()).unwrap(), config_text);
        let log = daemon.log("root.containerd");
        assert!(log.contains("level=debug"), "the given log level applies: {log}");
        if runsc {
            daemon.wait_state("root.containerd.runsc", 1, RunnableState::Ready).await;
        }
        let tree = daemon.supervisor.snapshot();
        let has_runnable = tree.iter().any(|node| *node.dn == *"root.containerd.runsc");
        assert_eq!((has_runnable, daemon.layout.runsc_log_path().exists()), (runsc, runsc));
        assert!(!daemon.layout.runsc_config_path().exists(), "the shim's configuration is the caller's");
        daemon.stop().await;
    }
}

/// Reference 13, `config rejected`: consecutive failures increase the backoff.
async fn a_rejected_configuration_never_becomes_ready(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let daemon = TestDaemon::launch(release, scratch, |containerd| {
        containerd.config = ContainerdConfig::Verbatim { text: "version = [".into(), runsc: false };
    });
    let node = wait_node(&daemon.supervisor, "root.containerd", |node| node.failures >= 3).await.unwrap();
    assert!(node.exits.iter().all(|exit| exit.state == RunnableState::Dead), "{node:?}");
    let log = daemon.log("root.containerd");
    assert!(log.contains("toml"), "the log has the reason: {log}");
    daemon.stop().await;
}

/// Reference 10: the socket appears late.
async fn the_daemon_is_not_ready_before_its_socket_exists(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let [gate, late] = ["gate", "late"].map(|name| scratch.path().join(name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &gate, rustix::fs::Mode::RWXU).unwrap();
    let real = release.programs().join("containerd");
    let script = format!("read go <{}\nexec {} \"$@\"", gate.display(), real.display());
    write_program(&late, &format!("#!/bin/sh\n{script}\n")).unwrap();
    let daemon = TestDaemon::launch(release, scratch, |containerd| containerd.binary = late);
    // The open returns once the script reads.
    let mut gate = tokio::task::spawn_blocking(move || fs::File::options().write(true).open(gate))
        .await
        .unwrap()
        .unwrap();
    let tree = daemon.supervisor.snapshot();
    let state = tree.iter().find(|node| *node.dn == *"root.containerd").unwrap().state;
    assert_eq!(state, RunnableState::New, "running, but not ready");
    std::io::Write::write_all(&mut gate, b"go\n").unwrap();
    daemon.wait_state("root.containerd", 1, RunnableState::Ready).await;
    daemon.stop().await;
}
