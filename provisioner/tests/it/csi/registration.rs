//! Registration of the plugin with the kubelet.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use nodekeel_provisioner::csi::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, PluginCapability, ProbeRequest, plugin_capability,
};
use nodekeel_provisioner::csi::testing::MemMounter;

use super::harness::{DRIVER, TestPlugin};

#[tokio::test]
async fn the_kubelet_finds_the_driver_and_its_node() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    assert!(!*plugin.registered.borrow(), "not registered yet");
    let mut kubelet = plugin.discover_plugin().await;
    assert_eq!((kubelet.info.r#type.as_str(), kubelet.info.name.as_str()), ("CSIPlugin", DRIVER));
    assert_eq!(kubelet.info.endpoint, plugin.socket.display().to_string());
    assert_eq!(kubelet.info.supported_versions, ["1.0.0"]);
    let node = kubelet.register_plugin().await.expect("registered");
    let topology = node.accessible_topology.expect("a topology").segments;
    let key = format!("topology.{DRIVER}/node");
    assert_eq!((node.node_id.as_str(), topology), ("node-a", [(key, "node-a".to_owned())].into()));
    assert!(*plugin.registered.borrow());
    // A restarted kubelet registers the existing sockets.
    plugin.discover_plugin().await.register_plugin().await.expect("registered again");
    assert!(*plugin.registered.borrow());
}

#[tokio::test]
async fn a_rejected_registration_creates_a_new_socket_and_can_succeed_later() {
    let (mut plugin, _) = TestPlugin::start_in_memory().await;
    plugin.discover_plugin().await.register_plugin().await.expect("registered");
    // The next file may reuse an inode number, so compare times, too.
    let file = |path: &Path| {
        let file = fs::metadata(path).expect("a socket");
        (file.ino(), file.ctime(), file.ctime_nsec())
    };
    let (first, node) = (file(&plugin.registration), file(&plugin.socket));
    // The rejection restarts the server, which may cut off the answer.
    let _ = plugin.discover_plugin().await.notify_registration(false, "no such version").await;
    plugin.registered.wait_for(|known| !known).await.expect("the plugin is running");
    let mut changes = plugin.supervisor.watch_changes();
    let registration = |plugin: &TestPlugin| {
        let tree = plugin.supervisor.snapshot();
        tree.into_iter().find(|node| node.dn.as_ref() == "root.csi.registration").expect("in the tree")
    };
    while registration(&plugin).generation < 2
        || registration(&plugin).state != nodekeel_supervisor::RunnableState::Ready
    {
        changes.changed().await.expect("the tree is running");
    }
    let exits = registration(&plugin).exits;
    let exit = format!("{:?}", exits.last().expect("an exit"));
    assert!(
        exit.contains("the kubelet rejected the registration of the CSI driver: no such version"),
        "{exit}"
    );
    assert_ne!(file(&plugin.registration), first, "a new socket");
    assert_eq!(file(&plugin.socket), node, "the old socket: calls continue");
    plugin.discover_plugin().await.register_plugin().await.expect("registered");
    assert!(*plugin.registered.borrow());
}

#[tokio::test]
async fn sockets_are_private_to_root_and_removed_with_the_plugin() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    for path in [&plugin.registration, &plugin.socket] {
        let file = fs::metadata(path).expect("a socket");
        assert!(file.file_type().is_socket());
        assert_eq!(file.mode() & 0o777, 0o600);
    }
    let report = plugin.supervisor.shutdown().await;
    assert!(report.stragglers.is_empty());
    assert!(!plugin.registration.exists() && !plugin.socket.exists());
    assert!(!*plugin.registered.borrow(), "a stopped plugin is not registered");
}

#[tokio::test]
async fn sockets_of_a_killed_instance_are_replaced() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    let sockets = [plugin.registration.clone(), plugin.socket.clone()];
    let kept = |number: usize| plugin.directory.path().join(format!("kept-{number}"));
    for (number, socket) in sockets.iter().enumerate() {
        fs::hard_link(socket, kept(number)).expect("link");
    }
    plugin.supervisor.shutdown().await;
    for (number, socket) in sockets.iter().enumerate() {
        fs::rename(kept(number), socket).expect("rename");
    }
    let (directory, store) = (plugin.directory.clone(), plugin.store.clone());
    let again = TestPlugin::start_in(directory, store, |_| std::sync::Arc::new(MemMounter::default())).await;
    again.discover_plugin().await.register_plugin().await.expect("registered");
}

#[tokio::test]
async fn the_identity_service_names_the_driver() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    let mut identity = plugin.identity_client().await;
    let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.expect("info").into_inner();
    assert_eq!(info.name, DRIVER);
    assert!(!info.vendor_version.is_empty());
    let asked = identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await;
    let capabilities = asked.expect("capabilities").into_inner().capabilities;
    let constraints = plugin_capability::service::Type::VolumeAccessibilityConstraints.into();
    let service = plugin_capability::Service { r#type: constraints };
    let expected = PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) };
    assert_eq!(capabilities, [expected], "a volume is on one node only, and there is no controller service");
    assert_eq!(identity.probe(ProbeRequest {}).await.expect("probe").into_inner().ready, Some(true));
}
