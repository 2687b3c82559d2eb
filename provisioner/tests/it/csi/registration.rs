//! How the kubelet and the plugin find each other.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use nodekeel_provisioner::csi::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, ProbeRequest,
};
use nodekeel_provisioner::csi::testing::MemMounts;

use super::harness::{DRIVER, Running};

#[tokio::test]
async fn the_kubelet_finds_the_driver_and_its_node() {
    let (running, _) = Running::with_memory().await;
    assert!(!*running.known.borrow(), "nobody has said so yet");
    let mut kubelet = running.find().await;
    assert_eq!((kubelet.info.r#type.as_str(), kubelet.info.name.as_str()), ("CSIPlugin", DRIVER));
    assert_eq!(kubelet.info.endpoint, running.socket.display().to_string());
    assert_eq!(kubelet.info.supported_versions, ["1.0.0"]);
    let node = kubelet.register().await.expect("registered");
    assert_eq!((node.node_id.as_str(), node.accessible_topology), ("node-a", None));
    assert!(*running.known.borrow());
    // A restarted kubelet looks at the sockets that are there.
    running.find().await.register().await.expect("registered again");
    assert!(*running.known.borrow());
}

#[tokio::test]
async fn a_refusal_by_the_kubelet_makes_a_new_socket_and_is_taken_back() {
    let (mut running, _) = Running::with_memory().await;
    running.find().await.register().await.expect("registered");
    // A number alone may be given to the next file.
    let file = |path: &Path| {
        let file = fs::metadata(path).expect("a socket");
        (file.ino(), file.ctime(), file.ctime_nsec())
    };
    let (first, node) = (file(&running.registration), file(&running.socket));
    // The answer to a refusal may be cut off by what it causes.
    let _ = running.find().await.notify(false, "no such version").await;
    running.known.wait_for(|known| !known).await.expect("the plugin lives");
    let mut changes = running.supervisor.watch();
    let registration = |running: &Running| {
        let tree = running.supervisor.snapshot();
        tree.into_iter().find(|node| node.dn.as_ref() == "root.csi.registration").expect("in the tree")
    };
    while registration(&running).generation < 2
        || registration(&running).state != nodekeel_supervisor::State::Ready
    {
        changes.changed().await.expect("the tree lives");
    }
    let exits = registration(&running).exits;
    let told = format!("{:?}", exits.last().expect("an exit"));
    assert!(told.contains("the kubelet refuses the driver: no such version"), "{told}");
    assert_ne!(file(&running.registration), first, "a new socket");
    assert_eq!(file(&running.socket), node, "the old socket: calls aren't disturbed");
    running.find().await.register().await.expect("registered");
    assert!(*running.known.borrow());
}

#[tokio::test]
async fn sockets_are_roots_alone_and_go_with_the_plugin() {
    let (running, _) = Running::with_memory().await;
    for path in [&running.registration, &running.socket] {
        let file = fs::metadata(path).expect("a socket");
        assert!(file.file_type().is_socket());
        assert_eq!(file.mode() & 0o777, 0o600);
    }
    let report = running.supervisor.shutdown().await;
    assert!(report.stragglers.is_empty());
    assert!(!running.registration.exists() && !running.socket.exists());
    assert!(!*running.known.borrow(), "what is gone isn't known");
}

#[tokio::test]
async fn sockets_of_a_killed_instance_are_replaced() {
    let (running, _) = Running::with_memory().await;
    let sockets = [running.registration.clone(), running.socket.clone()];
    let kept = |number: usize| running.directory.path().join(format!("kept-{number}"));
    for (number, socket) in sockets.iter().enumerate() {
        fs::hard_link(socket, kept(number)).expect("link");
    }
    running.supervisor.shutdown().await;
    for (number, socket) in sockets.iter().enumerate() {
        fs::rename(kept(number), socket).expect("rename");
    }
    let (directory, store) = (running.directory.clone(), running.store.clone());
    let again = Running::start_in(directory, store, |_| std::sync::Arc::new(MemMounts::default())).await;
    again.find().await.register().await.expect("registered");
}

#[tokio::test]
async fn the_identity_is_the_drivers() {
    let (running, _) = Running::with_memory().await;
    let mut identity = running.identity().await;
    let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.expect("info").into_inner();
    assert_eq!(info.name, DRIVER);
    assert!(!info.vendor_version.is_empty());
    let asked = identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await;
    assert!(asked.expect("capabilities").into_inner().capabilities.is_empty());
    assert_eq!(identity.probe(ProbeRequest {}).await.expect("probe").into_inner().ready, Some(true));
}
