//! The disk of the volumes is not mounted, is lost while provisionerd runs, or belongs to another instance; the API server is
//! down.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;
use nodekeel_provisioner::{DriverName, SELECTED_NODE};
use serde_json::{Value, json};
use testbed::{
    Daemon, KubeDaemon, ScratchDir, UNREACHABLE_KUBECONFIG, command_output, reserve_port, wait_until,
};

use crate::cluster::{
    DRIVER, TIMEOUT, TestDaemon, event_notes, list_names, start_control_plane, wait_bound, wait_for,
    wait_logged, wait_phase,
};

/// The answer of the daemon's HTTP server.
fn http_get(address: SocketAddrV4, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
#[ignore = "needs kube and root: it mounts"]
fn an_unmounted_disk_is_reported_within_five_seconds_and_served_again_when_it_is_mounted() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "disk-node");
    let (disk, below) = (ScratchDir::new().expect("a directory"), daemon.base.path());
    let mount = || command_output(Command::new("mount").arg("--bind").arg(disk.path()).arg(below)).unwrap();
    let unmount = || command_output(Command::new("umount").arg("--lazy").arg(below)).unwrap();
    let port = reserve_port().expect("a port");
    let address = port.socket_address();
    let start = || daemon.start(&["--listen", &format!("{address}")], &[]);
    let get = |path: &str| http_get(address, path).expect("it listens");
    mount();
    let running = start();
    for name in ["deleted", "kept"] {
        daemon.create_claim(&kube, name, json!({}));
    }
    let [deleted, kept] = ["deleted", "kept"].map(|name| wait_bound(&kube, name));
    let file = disk.path().join("volumes").join(&kept).join("file");
    fs::write(&file, "data").expect("the volume is writable");

    // Lost while it serves: it stays up and reports it, and nothing is changed.
    unmount();
    let lost = Instant::now();
    for about in ["kept", &kept, "deleted", &deleted] {
        kube.wait_for_event(about, "VolumeConditionAbnormal").expect("reported");
    }
    assert!(lost.elapsed() <= Duration::from_secs(5), "{:?}: {:?}", lost.elapsed(), running.read_log());
    let ready = get("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("the disk of the volumes"), "{ready}");
    assert!(get("/metrics").contains("provisionerd_store_served{} 0"));
    kube.delete_object("pvc", "deleted").expect("deleted");
    // A new claim is given up for another node.
    daemon.create_claim(&kube, "waiting", json!({}));
    let selected = |claim: &Value| claim["metadata"]["annotations"][SELECTED_NODE].clone();
    wait_for(&kube, "pvc", "waiting", |claim| selected(claim).is_null());
    wait_phase(&kube, &deleted, "Released");

    // Not mounted at the start: the same.
    drop(running);
    let mut running = start();
    wait_logged(&running, "has no store-id");
    wait_phase(&kube, &deleted, "Released");
    assert_eq!(list_names(&below.join("volumes")), Vec::<String>::new());
    assert!(!below.join("store-id").exists());

    // Mounted again: the same process serves, the deletion ends, and the claim that selects it again gets its volume.
    mount();
    kube.wait_until_gone("pv", &deleted).unwrap();
    let select = json!({ "metadata": { "annotations": { SELECTED_NODE: daemon.node } } });
    kube.patch_object("pvc", "waiting", &select).expect("a patch");
    wait_bound(&kube, "waiting");
    for about in ["kept", &kept] {
        kube.wait_for_event(about, "VolumeConditionNormal").expect("reported");
    }
    assert_eq!(fs::read_to_string(&file).expect("it exists"), "data");
    assert_eq!(daemon.list_names("volumes").len(), 2);
    assert!(get("/metrics").contains("provisionerd_store_served{} 1"));
    assert_eq!(running.wait_for_exit(Duration::ZERO).expect("a status"), None);
    drop(running);
    unmount();
}

#[test]
#[ignore = "needs kube"]
fn a_disk_that_is_back_before_the_next_start_is_reported_as_normal_once() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "return-node");
    let create_volumes = |names: [&str; 2]| {
        for name in names {
            daemon.create_claim(&kube, name, json!({}));
        }
        names.map(|name| wait_bound(&kube, name))
    };
    let running = daemon.start(&[], &[]);
    let [first, second] = create_volumes(["first", "second"]);
    let reported = ["first", &first, "second", &second];
    drop(running);

    // A directory without the store's identity is what an unmounted disk leaves.
    let store_id = daemon.base.path().join("store-id");
    let away = store_id.with_extension("away");
    fs::rename(&store_id, &away).expect("moved away");
    let running = daemon.start(&[], &[]);
    for about in reported {
        kube.wait_for_event(about, "VolumeConditionAbnormal").expect("reported");
    }
    drop(running);
    fs::rename(&away, &store_id).expect("moved back");

    let running = daemon.start(&[], &[]);
    for about in reported {
        kube.wait_for_event(about, "VolumeConditionNormal").expect("reported");
    }
    let mark = DriverName::try_new(DRIVER).expect("a driver name").condition_annotation();
    for volume in [&first, &second] {
        wait_for(&kube, "pv", volume, |volume| volume["metadata"]["annotations"][&mark].is_null());
    }
    drop(running);

    // It serves a claim long after it knows that all is well.
    let _running = daemon.start(&[], &[]);
    let [third, _] = create_volumes(["third", "fourth"]);
    let reported = reported.map(|about| (about, 1)).into_iter();
    for (about, count) in reported.chain([("third", 0), (third.as_str(), 0)]) {
        assert_eq!(event_notes(&kube, about, "VolumeConditionNormal").len(), count, "{about}");
    }
}

#[test]
fn a_second_instance_with_another_directory_at_the_same_kubelet_is_rejected() {
    let scratch = ScratchDir::new().expect("a directory");
    let kubelet = scratch.path().join("kubelet");
    for below in ["pods", "plugins_registry"] {
        fs::create_dir_all(kubelet.join(below)).expect("a directory");
    }
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, UNREACHABLE_KUBECONFIG).expect("written");
    let [first, second] = [(); 2].map(|()| TestDaemon::with_kubeconfig(&kubeconfig, "node-a"));
    let kubelet_text = kubelet.display().to_string();
    let run = ["run", "--log-format=json", "--kubelet", &kubelet_text];
    let socket = kubelet.join("plugins").join(DRIVER).join("csi.sock");
    let listens = || {
        ensure!(socket.exists(), "no socket");
        Ok(())
    };
    let home = ScratchDir::new().expect("a directory");
    let _running = Daemon::start(first.command(&run), home, listens).expect("it starts");
    let rejected = second.command(&run).stdin(Stdio::null()).output().expect("provisionerd runs");
    let text = String::from_utf8_lossy(&rejected.stderr);
    assert_eq!(rejected.status.code(), Some(5), "{text}");
    let line = text.lines().find(|line| line.starts_with("provisionerd: ")).expect("a message");
    assert!(line.contains("another instance serves this driver"), "{line}");
}

#[test]
#[ignore = "needs kube"]
fn an_api_server_that_is_down_is_reported_by_readyz_and_metrics_within_five_seconds() {
    let mut kube = start_control_plane();
    let port = reserve_port().expect("a port");
    let address = port.socket_address();
    let daemon = TestDaemon::new(&kube, "health-node");
    let running = daemon.start(&["--listen", &format!("{address}")], &[]);
    let wait = |code: &str, up: &str, within: Duration| {
        let answer = wait_until(within, code, || {
            let answer = http_get(address, "/readyz")?;
            ensure!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{answer}");
            Ok(answer)
        });
        let metrics = http_get(address, "/metrics").expect("it listens");
        assert!(metrics.contains(&format!("provisionerd_api_server_up {up}")), "{metrics}");
        (answer.unwrap_or_else(|error| panic!("{error:#}: {:?}", running.read_log())), metrics)
    };
    wait("200", "1", TIMEOUT);
    kube.kill_daemon(KubeDaemon::Apiserver);
    let (answer, metrics) = wait("503", "0", Duration::from_secs(5));
    assert!(answer.contains("the API server ("), "{answer}");
    assert!(metrics.contains("controller_api_errors_total{call="), "{metrics}");
    kube.launch_daemon(KubeDaemon::Apiserver).expect("it starts again");
    wait("200", "1", Duration::from_secs(60));
}
