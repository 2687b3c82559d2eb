//! The daemon as a process.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{
    Config, ConfigVersion, Cri, Liveness, Place, Preseed, Runsc, Settings, version,
};
use nodekeel_supervisor::State;
use testbed::{Scratch, write_program};

use crate::harness::{Daemon, Release, bundles, busybox_layer, put, unique, until};

crate::on_both!(
    it_is_ready_when_it_tells_its_version_and_its_environment_is_exactly_two,
    a_stale_socket_is_in_nobodys_way,
    a_restart_leaves_containers_running,
    images_are_there_when_preseed_is_done,
    every_version_of_the_configuration_is_understood,
    one_that_hangs_is_killed_and_started_again,
    what_runsc_writes_is_in_the_journal,
    a_configuration_that_is_given_is_taken_as_it_is,
    a_configuration_that_is_refused_never_makes_it_ready,
    it_is_not_ready_before_its_socket_is_there,
);

async fn it_is_ready_when_it_tells_its_version_and_its_environment_is_exactly_two(release: Release) {
    let daemon = Daemon::start(release).await;
    let told = version(&daemon.place.socket()).await.unwrap();
    let expected = if release == Release::Debian { "1.6" } else { "v2.4" };
    assert!(told.starts_with(expected), "{told}");
    let environment = fs::read(format!("/proc/{}/environ", daemon.pid())).unwrap();
    let variables: BTreeMap<_, _> = String::from_utf8(environment)
        .unwrap()
        .split_terminator('\0')
        .map(|variable| {
            variable.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap()
        })
        .collect();
    let tmp = daemon.place.tmp().display().to_string();
    let expected = [("PATH".to_owned(), release.path()), ("TMPDIR".to_owned(), tmp)];
    assert_eq!(variables, BTreeMap::from(expected));
    daemon.stop().await;
}

/// Reference 13, `stale socket file`.
async fn a_stale_socket_is_in_nobodys_way(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    let place = Place::new(scratch.path().join("data"), scratch.path().join("run")).unwrap();
    fs::create_dir(place.run()).unwrap();
    drop(UnixListener::bind(place.socket()).unwrap());
    Daemon::start_with(release, scratch, |_| {}).await.stop().await;
}

async fn a_restart_leaves_containers_running(release: Release) {
    let daemon = Daemon::start(release).await;
    put(
        &daemon.scratch,
        "busybox.tar",
        &Archive::new(Shape::Layout).image(&["localhost/busybox:1"], &busybox_layer()).tar(),
    );
    daemon.preseed().run(&daemon.images().await).await.unwrap();
    let sleeper = unique();
    daemon.ctr(&["run", "--detach", "localhost/busybox:1", &sleeper, "/bin/busybox", "sleep", "1000"]);
    let tasks = daemon.ctr(&["tasks", "ls"]);
    assert!(tasks.contains("RUNNING"), "{tasks}");
    daemon.kill();
    daemon.until("root.containerd", 2, State::Ready).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks, "the same container, with the same pid");
    daemon.supervisor.restart("root.containerd").unwrap();
    daemon.until("root.containerd", 3, State::Ready).await;
    assert_eq!(daemon.ctr(&["tasks", "ls"]), tasks);
    daemon.ctr(&["tasks", "delete", "--force", &sleeper]);
    daemon.ctr(&["containers", "rm", &sleeper]);
    daemon.stop().await;
}

/// Reference 10: once more after the daemon's restart.
async fn images_are_there_when_preseed_is_done(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    put(
        &scratch,
        "pause.tar.gz",
        &Archive::new(Shape::Docker).image(&["registry.k8s.io/pause:3.10"], b"x").gzip(),
    );
    put(&scratch, "bad.tar", b"scribble");
    let directory = bundles(&scratch);
    let daemon = Daemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    daemon.until("root.containerd.preseed", 1, State::Done).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains("registry.k8s.io/pause:3.10"));
    daemon.kill();
    daemon.until("root.containerd", 2, State::Ready).await;
    daemon.until("root.containerd.preseed", 2, State::Done).await;
    daemon.stop().await;
}

async fn every_version_of_the_configuration_is_understood(release: Release) {
    let versions: &[ConfigVersion] = match release {
        Release::Debian => &[ConfigVersion::V2],
        Release::Newest => &[ConfigVersion::V2, ConfigVersion::V3],
    };
    for version in versions {
        let scratch = Arc::new(Scratch::new().unwrap());
        let conf = scratch.path().join("cni");
        let cri = Cri { cni_conf: conf, runsc: Some(Runsc::default()), ..Cri::default() };
        let settings = Settings { version: *version, cri: Some(cri) };
        let daemon = Daemon::start_with(release, scratch, |containerd| {
            containerd.config = Config::Settings(settings);
        })
        .await;
        let plugins = daemon.ctr(&["plugins", "ls"]);
        let is_on = |line: &str| line.contains("cri") && line.trim_end().ends_with("ok");
        assert!(plugins.lines().any(is_on), "{version:?}: {plugins}");
        let log = daemon.log("root.containerd");
        assert!(log.contains("io.containerd.runsc.v1"), "its settings are told: {log}");
        daemon.stop().await;
    }
}

/// Reference 13, `daemon hangs`.
async fn one_that_hangs_is_killed_and_started_again(release: Release) {
    let liveness = Liveness { every: Duration::from_millis(100), within: Duration::from_secs(2), owed: 2 };
    let scratch = Arc::new(Scratch::new().unwrap());
    let daemon =
        Daemon::start_with(release, scratch, |containerd| containerd.liveness = Some(liveness)).await;
    let pid = daemon.pid();
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    daemon.until("root.containerd", 2, State::Ready).await;
    assert_ne!(daemon.pid(), pid);
    daemon.stop().await;
}

async fn what_runsc_writes_is_in_the_journal(release: Release) {
    use std::io::Write as _;
    let scratch = Arc::new(Scratch::new().unwrap());
    let cri = Cri { cni_conf: scratch.path().join("cni"), runsc: Some(Runsc::default()), ..Cri::default() };
    let daemon = Daemon::start_with(release, scratch, |containerd| {
        containerd.config = Config::Settings(Settings { cri: Some(cri), ..Settings::default() });
    })
    .await;
    daemon.until("root.containerd.runsc", 1, State::Ready).await;
    let mut fifo = fs::File::options().append(true).open(daemon.place.runsc_log()).unwrap();
    writeln!(fifo, "I1121 18:01:02.123456   12345 boot.go:52] hello from the sandbox").unwrap();
    testbed::wait_until(Duration::from_secs(10), "the line", || {
        let log = daemon.log("root.containerd.runsc");
        anyhow::ensure!(log.contains("hello from the sandbox"), "{log}");
        Ok(())
    })
    .unwrap();
    daemon.stop().await;
}

async fn a_configuration_that_is_given_is_taken_as_it_is(release: Release) {
    for runsc in [true, false] {
        let scratch = Arc::new(Scratch::new().unwrap());
        let mut given = String::new();
        let daemon = Daemon::start_with(release, scratch, |containerd| {
            given = Settings::default().render(&containerd.place) + "[debug]\nlevel = \"debug\"\n";
            containerd.config = Config::Given { text: given.clone(), runsc };
        })
        .await;
        assert_eq!(fs::read_to_string(daemon.place.config()).unwrap(), given);
        let log = daemon.log("root.containerd");
        assert!(log.contains("level=debug"), "it is what it says: {log}");
        if runsc {
            daemon.until("root.containerd.runsc", 1, State::Ready).await;
        }
        let tree = daemon.supervisor.snapshot();
        let has_runnable = tree.iter().any(|node| *node.dn == *"root.containerd.runsc");
        assert_eq!((has_runnable, daemon.place.runsc_log().exists()), (runsc, runsc));
        assert!(!daemon.place.runsc_config().exists(), "that is whose configuration it is");
        daemon.stop().await;
    }
}

/// Reference 13, `config rejected`: failures in a row are what a backoff grows by.
async fn a_configuration_that_is_refused_never_makes_it_ready(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    let daemon = Daemon::launch(release, scratch, |containerd| {
        containerd.config = Config::Given { text: "version = [".into(), runsc: false };
    });
    let node = until(&daemon.supervisor, "root.containerd", |node| node.failures >= 3).await.unwrap();
    assert!(node.exits.iter().all(|exit| exit.state == State::Dead), "{node:?}");
    let log = daemon.log("root.containerd");
    assert!(log.contains("toml"), "it says why: {log}");
    daemon.stop().await;
}

/// Reference 10: the socket comes late.
async fn it_is_not_ready_before_its_socket_is_there(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    let [gate, late] = ["gate", "late"].map(|name| scratch.path().join(name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &gate, rustix::fs::Mode::RWXU).unwrap();
    let real = release.programs().join("containerd");
    let script = format!("read go <{}\nexec {} \"$@\"", gate.display(), real.display());
    write_program(&late, &format!("#!/bin/sh\n{script}\n")).unwrap();
    let daemon = Daemon::launch(release, scratch, |containerd| containerd.binary = late);
    // It is open once the script reads.
    let mut gate = tokio::task::spawn_blocking(move || fs::File::options().write(true).open(gate))
        .await
        .unwrap()
        .unwrap();
    let tree = daemon.supervisor.snapshot();
    let state = tree.iter().find(|node| *node.dn == *"root.containerd").unwrap().state;
    assert_eq!(state, State::New, "it runs, and is not ready");
    std::io::Write::write_all(&mut gate, b"go\n").unwrap();
    daemon.until("root.containerd", 1, State::Ready).await;
    daemon.stop().await;
}
