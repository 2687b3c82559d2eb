//! The disk of the volumes is not mounted, is lost while provisionerd runs, or belongs to another instance.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use nodekeel_provisioner::DriverName;
use testbed::{KubeDaemon, ScratchDir};

use crate::client_cluster::{
    self as cluster, TIMEOUT, TestDaemon, annotation, delete_claim, list_names, run_with_daemon, volume_name,
    volumes_api, wait_bound, wait_object, wait_phase, wait_volume_gone,
};

fn mount(arguments: &[&str], directory: &Path) {
    let done = Command::new("mount").args(arguments).arg(directory).status().expect("mount runs");
    assert!(done.success());
}

fn unmount(arguments: &[&str], directory: &Path) {
    let done = Command::new("umount").args(arguments).arg(directory).status().expect("umount runs");
    assert!(done.success());
}

/// Waits until an object has an event with a reason.
async fn wait_event(client: &kube::Client, about: &str, reason: &str) {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let mut seen = pin!(watcher(events, watcher::Config::default()).default_backoff().applied_objects());
    let is_wanted = |event: &Event| {
        let name = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
        name == Some(about) && event.reason.as_deref() == Some(reason)
    };
    let wait = async {
        while let Some(event) = seen.next().await {
            if event.is_ok_and(|event| is_wanted(&event)) {
                return;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("no {reason} on {about}"));
}

/// Creates two claims, and returns their volumes.
async fn create_volumes(client: &kube::Client, daemon: &TestDaemon, names: [&str; 2]) -> [String; 2] {
    for name in names {
        daemon.create_claim(client, name).await;
    }
    [wait_bound(client, names[0]).await, wait_bound(client, names[1]).await].map(|claim| volume_name(&claim))
}

/// Unmounts the disk of a daemon that serves it: it stays up, and says so on each of these objects.
async fn lose_disk(client: &kube::Client, daemon: &TestDaemon, port: u16, reported: [&str; 4]) {
    unmount(&["--lazy"], daemon.base.path());
    let lost = Instant::now();
    for about in reported {
        wait_event(client, about, "VolumeConditionAbnormal").await;
    }
    println!("reported after {:?}", lost.elapsed());
    assert!(lost.elapsed() <= Duration::from_secs(5), "{:?}: {}", lost.elapsed(), daemon.log_text());
    let ready = http_get(port, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("the disk of the volumes"), "{ready}");
    assert!(http_get(port, "/metrics").contains("provisionerd_store_served{} 0"));
}

/// Waits until a daemon that was started without its disk has found that out. Its log has what its former incarnations wrote.
fn wait_rejected(daemon: &TestDaemon, former: &str) {
    let reported = testbed::wait_until(TIMEOUT, "the store to be rejected", || {
        anyhow::ensure!(daemon.log_text()[former.len()..].contains("has no store-id"), "not reported");
        Ok(())
    });
    reported.unwrap_or_else(|error| panic!("{error:#}: {}", daemon.log_text()));
}

#[test]
#[ignore = "needs kube and root: it mounts"]
fn an_unmounted_disk_is_reported_within_five_seconds_and_served_again_when_it_is_mounted() {
    let disk = ScratchDir::new().expect("a directory");
    let disk_text = disk.path().to_str().expect("UTF-8");
    let port = free_port();
    run_with_daemon("disk-node", async |client, daemon| {
        let below = daemon.base.path().to_owned();
        mount(&["--bind", disk_text], &below);
        let mut child = daemon.start_listening(&format!("127.0.0.1:{port}"));
        let [deleted, kept] = create_volumes(&client, &daemon, ["deleted", "kept"]).await;
        let file = disk.path().join("volumes").join(&kept).join("file");
        fs::write(&file, "data").expect("the volume is writable");

        // Lost while it serves: nothing is changed.
        lose_disk(&client, &daemon, port, ["kept", &kept, "deleted", &deleted]).await;
        delete_claim(&client, "deleted").await;
        daemon.create_claim(&client, "waiting").await;
        wait_phase(&client, &deleted, "Released").await;

        // Not mounted at the start: the same.
        child.kill().await.expect("killed");
        let former = daemon.log_text();
        let mut child = daemon.start_listening(&format!("127.0.0.1:{port}"));
        wait_rejected(&daemon, &former);
        wait_phase(&client, &deleted, "Released").await;
        assert_eq!(list_names(&below.join("volumes")), Vec::<String>::new());
        assert!(!below.join("store-id").exists());

        // Mounted again: the same process serves, the deletion ends, and the claim gets its volume.
        mount(&["--bind", disk_text], &below);
        wait_volume_gone(&client, &deleted).await;
        wait_bound(&client, "waiting").await;
        for about in ["kept", &kept] {
            wait_event(&client, about, "VolumeConditionNormal").await;
        }
        assert_eq!(fs::read_to_string(&file).expect("it exists"), "data");
        assert_eq!(daemon.list_names("volumes").len(), 2);
        assert!(child.try_wait().expect("a status").is_none(), "{}", daemon.log_text());
        assert!(http_get(port, "/metrics").contains("provisionerd_store_served{} 1"));
        child.kill().await.expect("killed");
        unmount(&[], &below);
    });
}

/// How many events of a reason there are about an object.
async fn count_events(client: &kube::Client, about: &str, reason: &str) -> usize {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let listed = events.list(&ListParams::default()).await.expect("a list");
    let is_counted = |event: &&Event| {
        let name = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
        name == Some(about) && event.reason.as_deref() == Some(reason)
    };
    listed.items.iter().filter(is_counted).count()
}

/// Waits until no mark says that a volume was reported as abnormal.
async fn wait_unmarked(client: &kube::Client, volume: &str) {
    let mark = DriverName::try_new(cluster::DRIVER).expect("a driver name").condition_annotation();
    let is_unmarked = |volume: Option<&_>| volume.is_some() && annotation(volume, &mark).is_none();
    wait_object(&volumes_api(client), volume, is_unmarked).await;
}

#[test]
#[ignore = "needs kube"]
fn a_disk_that_is_back_before_the_next_start_is_reported_as_normal_once() {
    run_with_daemon("return-node", async |client, daemon| {
        let mut child = daemon.start(&[]);
        let [first, second] = create_volumes(&client, &daemon, ["first", "second"]).await;
        let reported = ["first", &first, "second", &second];
        child.kill().await.expect("killed");

        // A directory without the store's identity is what an unmounted disk leaves.
        let store_id = daemon.base.path().join("store-id");
        let away = store_id.with_extension("away");
        fs::rename(&store_id, &away).expect("moved away");
        let mut child = daemon.start(&[]);
        for about in reported {
            wait_event(&client, about, "VolumeConditionAbnormal").await;
        }
        child.kill().await.expect("killed");
        fs::rename(&away, &store_id).expect("moved back");

        let mut child = daemon.start(&[]);
        for about in reported {
            wait_event(&client, about, "VolumeConditionNormal").await;
        }
        for volume in [&first, &second] {
            wait_unmarked(&client, volume).await;
        }
        child.kill().await.expect("killed");

        // It serves a claim long after it knows that all is well.
        let mut child = daemon.start(&[]);
        let [third, _] = create_volumes(&client, &daemon, ["third", "fourth"]).await;
        for (about, count) in
            reported.map(|about| (about, 1)).into_iter().chain([("third", 0), (third.as_str(), 0)])
        {
            let normal = count_events(&client, about, "VolumeConditionNormal").await;
            assert_eq!(normal, count, "{about}: {}", daemon.log_text());
        }
        child.kill().await.expect("killed");
    });
}

#[test]
fn a_second_instance_with_another_directory_at_the_same_kubelet_is_rejected() {
    let kubelet = tempfile::tempdir().expect("a directory");
    for below in ["pods", "plugins_registry"] {
        fs::create_dir(kubelet.path().join(below)).expect("a directory");
    }
    let kubeconfig = crate::messages::unreachable_kubeconfig();
    let start = |directory: &Path, quota_dir: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        command.args(["run", "--listen=127.0.0.1:0", "--node=node-a", "--log-format=json", "--kubelet"]);
        command.arg(kubelet.path()).arg("--directory").arg(directory);
        command.arg("--kubeconfig").arg(kubeconfig.path()).env_clear().env("PROVISIONERD_BOOKS", quota_dir);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let [first, second, quota_dir] = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
    let mut running = start(first.path(), quota_dir.path()).spawn().expect("provisionerd starts");
    let socket = kubelet.path().join("plugins/volumes.nodekeel/csi.sock");
    let listening = testbed::wait_until(TIMEOUT, "the plugin to listen", || {
        anyhow::ensure!(socket.exists(), "no socket");
        Ok(())
    });
    let mut rejected = start(second.path(), quota_dir.path()).spawn().expect("provisionerd starts");
    let exited = testbed::wait_until(Duration::from_secs(30), "the second instance to exit", || {
        anyhow::ensure!(rejected.try_wait()?.is_some(), "it runs");
        Ok(())
    });
    for child in [&mut running, &mut rejected] {
        let _ = child.kill();
    }
    let _ = running.wait();
    let output = rejected.wait_with_output().expect("it has exited");
    listening.and(exited).unwrap_or_else(|error| panic!("{error:#}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{text}");
    let line = text.lines().find(|line| line.starts_with("provisionerd: ")).expect("a message");
    assert!(line.contains("another instance serves this driver"), "{line}");
}

/// A port that nothing listens on.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port()
}

/// The answer of the daemon's HTTP server.
fn http_get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
#[ignore = "needs kube"]
fn an_api_server_that_is_down_is_reported_by_readyz_and_metrics_within_five_seconds() {
    let mut kube = cluster::start_control_plane();
    let port = free_port();
    let daemon = TestDaemon::new(&cluster::account_kubeconfig(&kube), "health-node".to_owned());
    let runtime = cluster::test_runtime();
    let _running = runtime.block_on(async { daemon.start_listening(&format!("127.0.0.1:{port}")) });
    let wait = |ready: bool, within: Duration| {
        let code = if ready { "200" } else { "503" };
        testbed::wait_until(within, &format!("/readyz to answer {code}"), || {
            anyhow::ensure!(TcpStream::connect(("127.0.0.1", port)).is_ok(), "not listening yet");
            let answer = http_get(port, "/readyz");
            anyhow::ensure!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{answer}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.log_text()));
    };
    let up = || http_get(port, "/metrics").contains("provisionerd_api_server_up 1");
    wait(true, TIMEOUT);
    assert!(up());
    kube.kill_daemon(KubeDaemon::Apiserver);
    wait(false, Duration::from_secs(5));
    assert!(!up() && http_get(port, "/readyz").contains("the API server ("), "{}", http_get(port, "/readyz"));
    assert!(http_get(port, "/metrics").contains("controller_api_errors_total{call="));
    kube.launch_daemon(KubeDaemon::Apiserver).expect("it starts again");
    wait(true, Duration::from_secs(60));
    assert!(up());
}
