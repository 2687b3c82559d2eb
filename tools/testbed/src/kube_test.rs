use anyhow::ensure;
use serde_json::json;

use super::*;
use crate::{leftovers, wait_until};

const CLAIM: &str = r#"
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: nobody}
provisioner: nobody.example.com
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: nobody
  resources: {requests: {storage: 1Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: default}
spec:
  containers: [{name: c, image: nothing, volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"#;

/// The annotation with the node that the scheduler has selected for a claim.
const SELECTED: &str = "volume.kubernetes.io/selected-node";

#[test]
#[ignore = "needs kube"]
fn a_claim_waits_for_its_pod_gets_a_node_and_survives_the_daemons() {
    let mut kube = Kube::start().unwrap();
    kube.create_fake_node(&FakeNode::new("node-a").with_driver("nobody.example.com")).unwrap();
    kube.apply_manifests(CLAIM).unwrap();
    let claim = kube.wait_for_object("pvc", "default/data", |claim| {
        claim["metadata"]["annotations"][SELECTED] == "node-a"
    });
    let uid = claim.unwrap()["metadata"]["uid"].clone();
    assert!(kube.wait_for_event("default/data", "ExternalProvisioning").is_ok());

    let mut watch = kube.watch_objects("pvc").unwrap();
    watch.next_change(Duration::from_secs(10)).unwrap();
    kube.restart_apiserver().unwrap();
    assert!(
        watch.wait_for_change(Duration::from_secs(30), |_| false).is_err(),
        "the watch outlived its server"
    );
    assert_eq!(kube.get_object("pvc", "default/data").unwrap()["metadata"]["uid"], uid);
    for part in [KubeDaemon::ControllerManager, KubeDaemon::Etcd] {
        kube.kill_daemon(part);
        kube.launch_daemon(part).unwrap();
        assert!(kube.launch_daemon(part).is_err(), "{part} was started twice");
    }
    // The other daemons have reconnected.
    kube.patch_object("pvc", "default/data", &json!({"metadata": {"annotations": {SELECTED: null}}}))
        .unwrap();
    kube.wait_for_object("pvc", "default/data", |claim| {
        claim["metadata"]["annotations"][SELECTED] == "node-a"
    })
    .unwrap();

    let mut directories = vec![kube.home.path().to_owned()];
    directories.extend(kube.daemons.values().map(|daemon| daemon.directory_path().to_owned()));
    drop(kube);
    for directory in directories {
        assert_eq!(leftovers::find_processes(&directory).unwrap(), []);
        assert!(!directory.exists());
    }
}

#[test]
#[ignore = "needs kube"]
fn users_have_the_permissions_of_their_roles_alone_and_lists_are_streamed() {
    let (account, node) = (KubeUser::service_account("kube-system", "reader"), KubeUser::for_node("node-a"));
    let kube = Kube::builder()
        .with_user(account.clone())
        .with_user(node.clone())
        .without_daemon(KubeDaemon::Scheduler)
        .without_daemon(KubeDaemon::ControllerManager)
        .start()
        .unwrap();
    let may = |user: &KubeUser, what: &[&str]| {
        let mut kubectl = kube.kubectl_as(&user.name).unwrap();
        kubectl.args(["auth", "can-i", "--quiet", "--all-namespaces"]).args(what).status().unwrap().success()
    };
    assert!(!may(&account, &["list", "persistentvolumes"]));
    kube.apply_manifests(
        r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [persistentvolumes], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: kube-system}]
"#,
    )
    .unwrap();
    // The server reads its roles by a watch.
    wait_until(Duration::from_secs(30), "the role", || {
        ensure!(may(&account, &["list", "persistentvolumes"]), "it may not list");
        Ok(())
    })
    .unwrap();
    assert!(!may(&account, &["delete", "persistentvolumes"]));
    assert!(may(&node, &["create", "nodes"]) && !may(&node, &["delete", "namespaces"]));
    assert!(kube.kubeconfig_file("somebody else").is_err());

    // A streamed list ends with its bookmark, which Debian's etcd can't give.
    let query = "watch=1&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan";
    let path = format!("/api/v1/namespaces?{query}&timeoutSeconds=10");
    let events = crate::command_output(kube.kubectl_command().args(["get", "--raw", &path])).unwrap();
    assert!(events.contains("k8s.io/initial-events-end") && !events.contains("ERROR"), "{events}");

    // A guest reaches this machine at another address.
    let config = kube.kubeconfig_for_guest(&node.name).unwrap();
    assert!(config.contains(&format!("https://10.0.2.2:{}", kube.api_port())));
    assert!(config.contains("certificate-authority-data") && !config.contains("/pki/"), "{config}");
}

#[test]
#[ignore = "needs kube"]
fn a_daemon_that_cannot_start_is_named_with_its_output() {
    let error = Kube::builder().with_argument(KubeDaemon::Apiserver, "--no-such-flag").start().unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("kube-apiserver") && text.contains("no-such-flag"), "{text}");
}
