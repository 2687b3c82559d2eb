//! The daemon process.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{
    ConfigVersion, ContainerdConfig, ContainerdSettings, CriSettings, LivenessProbe, RunscSettings,
    daemon_version,
};
use nodekeel_supervisor::{RunnableState, WaitReason};
use rstest::rstest;
use testbed::{command_output, tools};

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{PRESEED, Setup, busybox_layer, unique_name};

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn the_daemon_is_ready_when_it_answers_and_has_two_environment_variables(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    let answer = daemon_version(&daemon.layout.socket_path()).await.unwrap();
    let expected = if release == Debian { "1.6" } else { "v2.4" };
    assert!(answer.starts_with(expected), "{answer}");
    let environment = fs::read(format!("/proc/{}/environ", daemon.pid())).unwrap();
    let variables: BTreeMap<_, _> = String::from_utf8(environment)
        .unwrap()
        .split_terminator('\0')
        .map(|variable| {
            variable.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap()
        })
        .collect();
    let tmp = daemon.layout.run().tmp.path().display().to_string();
    let expected = [("PATH".to_owned(), release.path()), ("TMPDIR".to_owned(), tmp)];
    assert_eq!(variables, BTreeMap::from(expected));
    daemon.stop().await;
}

/// Reference 13, `stale socket file`.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_stale_socket_does_not_prevent_a_start(#[values(Debian, Newest)] release: Release) {
    let setup = Setup::new(release);
    fs::create_dir(setup.layout.run_dir()).unwrap();
    drop(UnixListener::bind(setup.layout.socket_path()).unwrap());
    setup.start().await.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_restart_leaves_containers_running(#[values(Debian, Newest)] release: Release) {
    let daemon = Setup::new(release).start().await;
    daemon.put_image("busybox.tar", "localhost/busybox:1", &busybox_layer());
    daemon.import_bundles().await;
    let sleeper = unique_name();
    daemon.ctr(&["run", "--detach", "localhost/busybox:1", &sleeper, "/bin/busybox", "sleep", "1000"]);
    let tasks = daemon.ctr(&["tasks", "ls"]);
    assert!(tasks.contains("RUNNING"), "{tasks}");
    daemon.kill();
    daemon.wait_ready("root.containerd", 2).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks, "the same container, with the same pid");
    daemon.supervisor.restart_runnable("root.containerd").unwrap();
    daemon.wait_ready("root.containerd", 3).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks);
    daemon.ctr(&["tasks", "delete", "--force", &sleeper]);
    daemon.ctr(&["containers", "rm", &sleeper]);
    daemon.stop().await;
}

/// Reference 10: once more after the daemon's restart.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn images_are_listed_when_preseed_is_ready(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    let pause = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive);
    setup.put_bundle("pause.tar.gz", &pause.with_image(&["registry.k8s.io/pause:3.10"], b"x").to_gzip());
    setup.enable_preseed();
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("registry.k8s.io/pause:3.10"));
    // A bundle that comes later, complete at once, is imported without a restart.
    daemon.put_image(".late", "localhost/late:1", b"late");
    fs::rename(daemon.bundle_path(".late"), daemon.bundle_path("late.tar")).unwrap();
    testbed::wait_until(Duration::from_secs(30), "the image", || {
        let images = daemon.ctr(&["images", "ls", "--quiet"]);
        anyhow::ensure!(images.contains("localhost/late:1"), "{images}");
        Ok(())
    })
    .unwrap();
    daemon.kill();
    daemon.wait_ready("root.containerd", 2).await;
    daemon.wait_ready(PRESEED, 2).await;
    daemon.stop().await;
}

/// Review D8.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_failed_bundle_releases_the_dependents_and_is_named_until_it_is_repaired(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    let pause = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive).with_image(&["pause:3.10"], b"x");
    setup.put_bundle("pause.tar", &pause.to_tar());
    setup.put_bundle("bad.tar", b"scribble");
    let bundles = setup.enable_preseed();
    let daemon = setup.start().await;
    daemon.wait_ready("root.dependent", 1).await;
    let text = daemon.wait_problem(&bundles, "1 of 2 bundles are not imported").await;
    assert!(text.contains("k8s.io/bad.tar") && text.contains("archive truncated"), "{text}");
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("pause:3.10"));
    fs::rename(daemon.bundle_path("pause.tar"), daemon.bundle_path("bad.tar")).unwrap();
    daemon.wait_imported(&bundles).await;
    let preseed = daemon.status(PRESEED).unwrap();
    assert_eq!(
        (preseed.generation, preseed.state),
        (1, RunnableState::Ready),
        "it has been ready all the time"
    );
    daemon.stop().await;
}

/// The others are imported once what is required has released the dependents, and can't take them back.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn required_images_are_imported_first_and_only_they_are_waited_for(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    setup.put_image("a.tar", "localhost/a:1", b"a");
    setup.put_image("z.tar", "localhost/z:1", b"z");
    let required = ["localhost/z:1", "absent.tar"].map(|text| text.parse().unwrap());
    let preseed = setup.enable_preseed().with_required(required);
    setup.containerd.preseed = Some(preseed.clone());
    let daemon = setup.start().await;
    daemon.wait_ready("root.dependent", 1).await;
    daemon.wait_problem(&preseed, "absent.tar is required, and in no bundle").await;
    drop(daemon.ctr(&["images", "rm", "--sync", "localhost/a:1"]));
    testbed::wait_until(Duration::from_secs(60), "the import of what is not required", || {
        anyhow::ensure!(daemon.ctr(&["images", "ls", "--quiet"]).contains("localhost/a:1"));
        Ok(())
    })
    .unwrap();
    let status = daemon.status(PRESEED).unwrap();
    assert_eq!((status.generation, status.state), (1, RunnableState::Ready), "{status:?}");
    daemon.stop().await;
}

/// The directory of a disk that is not mounted.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_missing_preseed_directory_is_named_and_holds_the_dependents_and_an_empty_one_is_named(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    let directory = setup.path("preseed");
    let bundles = setup.enable_preseed();
    let daemon = setup.start().await;
    let path = directory.display().to_string();
    let text = daemon.wait_problem(&bundles, "No such file").await;
    assert!(text.contains(&path), "{text}");
    let node = daemon.status(PRESEED).unwrap();
    assert!(matches!(&node.waiting_for, WaitReason::Condition(reason) if **reason == *text), "{node:?}");
    let dependent = daemon.status("root.dependent").unwrap();
    assert_eq!(dependent.state, RunnableState::New, "{dependent:?}");
    // Each is noticed at once: the pauses between the attempts double.
    fs::create_dir(&directory).unwrap();
    daemon.wait_problem(&bundles, "is empty").await;
    daemon.wait_ready("root.dependent", 1).await;
    daemon.put_image("a.tar", "localhost/a:1", b"a");
    daemon.wait_imported(&bundles).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("localhost/a:1"));
    let away = directory.with_extension("away");
    for _ in 0..5 {
        fs::rename(&directory, &away).unwrap();
        daemon.wait_problem(&bundles, "No such file").await;
        assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("localhost/a:1"), "absence is no deletion");
        fs::rename(&away, &directory).unwrap();
        daemon.wait_imported(&bundles).await;
    }
    // A disk that is mounted over it is no event of the directory.
    let mount = |arguments: &[&str]| {
        command_output(Command::new(tools::find_tool(tools::MOUNT).unwrap()).args(arguments).arg(&directory))
            .unwrap()
    };
    mount(&["-t", "tmpfs", "-o", "mode=755", "tmpfs"]);
    daemon.wait_problem(&bundles, "is empty").await;
    daemon.put_image("b.tar", "localhost/b:1", b"b");
    daemon.wait_imported(&bundles).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("localhost/b:1"));
    let node = daemon.status(PRESEED).unwrap();
    assert_eq!((node.generation, node.state), (1, RunnableState::Ready), "{node:?}");
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn every_config_version_is_accepted(#[values(Debian, Newest)] release: Release) {
    let versions: &[ConfigVersion] = match release {
        Debian => &[ConfigVersion::V2],
        Newest => &[ConfigVersion::V2, ConfigVersion::V3],
    };
    for version in versions {
        let mut setup = Setup::new(release);
        setup.enable_cri(*version, CriSettings { runsc: Some(RunscSettings::default()), ..setup.cri() });
        let daemon = setup.start().await;
        let plugins = daemon.ctr(&["plugins", "ls"]);
        let is_on = |line: &str| line.contains("cri") && line.trim_end().ends_with("ok");
        assert!(plugins.lines().any(is_on), "{version:?}: {plugins}");
        let log = daemon.log("root.containerd");
        assert!(log.contains("io.containerd.runsc.v1"), "the log has its settings: {log}");
        daemon.stop().await;
    }
}

/// Reference 13, `daemon hangs`.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn an_unresponsive_daemon_is_killed_and_restarted(#[values(Debian, Newest)] release: Release) {
    let liveness = LivenessProbe {
        period: Duration::from_millis(100),
        timeout: Duration::from_secs(2),
        failure_threshold: 3,
    };
    let mut setup = Setup::new(release);
    setup.containerd.liveness = Some(liveness);
    let daemon = setup.start().await;
    let pid = daemon.pid();
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    daemon.wait_ready("root.containerd", 2).await;
    assert_ne!(daemon.pid(), pid);
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn runsc_lines_are_in_the_journal(#[values(Debian, Newest)] release: Release) {
    use std::io::Write as _;
    let mut setup = Setup::new(release);
    let cri = CriSettings { runsc: Some(RunscSettings::default()), ..setup.cri() };
    setup.enable_cri(ConfigVersion::default(), cri);
    let daemon = setup.start().await;
    daemon.wait_ready("root.containerd.runsc", 1).await;
    let mut log = fs::File::options().append(true).open(daemon.layout.runsc_log_path()).unwrap();
    writeln!(log, "I1121 18:01:02.123456   12345 boot.go:52] hello from the sandbox").unwrap();
    testbed::wait_until(Duration::from_secs(10), "the line", || {
        let log = daemon.log("root.containerd.runsc");
        anyhow::ensure!(log.contains("hello from the sandbox"), "{log}");
        Ok(())
    })
    .unwrap();
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_verbatim_configuration_is_used_unchanged(#[values(Debian, Newest)] release: Release) {
    for runsc in [true, false] {
        let mut setup = Setup::new(release);
        let config_text =
            ContainerdSettings::default().render_toml(&setup.layout) + "[debug]\nlevel = \"debug\"\n";
        setup.containerd.config = ContainerdConfig::Verbatim { text: config_text.clone(), runsc };
        let daemon = setup.start().await;
        assert_eq!(fs::read_to_string(daemon.layout.data().config.path()).unwrap(), config_text);
        let log = daemon.log("root.containerd");
        assert!(log.contains("level=debug"), "the given log level applies: {log}");
        if runsc {
            daemon.wait_ready("root.containerd.runsc", 1).await;
        }
        let has_runnable = daemon.status("root.containerd.runsc").is_some();
        assert_eq!((has_runnable, daemon.layout.runsc_log_path().exists()), (runsc, runsc));
        assert!(!daemon.layout.runsc_config_path().exists(), "the shim's configuration is the caller's");
        daemon.stop().await;
    }
}

/// Reference 13, `config rejected`: consecutive failures increase the backoff.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_rejected_configuration_never_becomes_ready(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    setup.containerd.config = ContainerdConfig::Verbatim { text: "version = [".into(), runsc: false };
    let daemon = setup.launch();
    daemon.wait_failed().await;
    let log = daemon.log("root.containerd");
    assert!(log.contains("toml"), "the log has the reason: {log}");
    daemon.stop().await;
}

/// Reference 10: the socket appears late.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn the_daemon_is_not_ready_before_its_socket_exists(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    let gate = setup.create_gate();
    setup.replace_program(&format!("read go <{}\nexec $real \"$@\"", gate.display()));
    let daemon = setup.launch();
    // The open returns once the script reads.
    let mut gate = tokio::task::spawn_blocking(move || fs::File::options().write(true).open(gate))
        .await
        .unwrap()
        .unwrap();
    let state = daemon.status("root.containerd").unwrap().state;
    assert_eq!(state, RunnableState::New, "running, but not ready");
    std::io::Write::write_all(&mut gate, b"go\n").unwrap();
    daemon.wait_ready("root.containerd", 1).await;
    daemon.stop().await;
}
