use std::path::PathBuf;

use super::*;
use crate::{command_output, wait_until};

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: hello, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: localhost/busybox:1
    imagePullPolicy: Never
    args: [sh, -c, "echo hello from $(uname -r); exec sleep 1000000"]
"#;

/// It asks the API server who it is.
const WHOAMI_POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: whoami, namespace: default}
spec:
  restartPolicy: Never
  containers: [{name: c, image: "localhost/kubectl:1", imagePullPolicy: Never}]
"#;

fn archive_kubectl(kube: &Kube, directory: &ScratchDir) -> PathBuf {
    let archive = directory.path().join("kubectl.tar");
    let asks = ["/bin/kubectl", "auth", "whoami", "--output=jsonpath={.status.userInfo.username}"];
    let image = ContainerImage::new("localhost/kubectl:1")
        .add_file("bin/kubectl", kube.programs().program_path("kubectl"));
    image.with_entrypoint(asks).write_archive(&archive).unwrap();
    archive
}

#[test]
#[ignore = "needs kube and a node"]
fn pods_in_the_guest_are_reached_by_logs_and_exec_and_reach_the_api_as_their_account() {
    let kube = Kube::builder().with_service_accounts().start().unwrap();
    let directory = ScratchDir::new().unwrap();
    let start = std::time::Instant::now();
    let mut node = GuestNode::builder().with_image(archive_kubectl(&kube, &directory)).join(&kube).unwrap();
    println!("the node is ready after {:?}", start.elapsed());
    kube.apply_manifests(POD).unwrap();
    kube.apply_manifests(WHOAMI_POD).unwrap();
    wait_for_pod(&kube, &node, "hello", |pod| pod["status"]["containerStatuses"][0]["ready"] == true);
    let release = node.run_shell("uname -r").unwrap();
    let said = command_output(kube.kubectl_command().args(["logs", "hello"])).unwrap();
    assert_eq!(said, format!("hello from {release}"));
    let inside = command_output(kube.kubectl_command().args(["exec", "hello", "--", "hostname"])).unwrap();
    assert_eq!(inside.trim(), "hello");
    // Quotas are enforced where pods and volumes are.
    let mounts = node.run_shell("cat /proc/mounts").unwrap();
    assert!(
        mounts.lines().any(|line| line.contains(" /var/lib xfs ") && line.contains("prjquota")),
        "{mounts}"
    );
    wait_for_pod(&kube, &node, "whoami", |pod| pod["status"]["phase"] == "Succeeded");
    let said = command_output(kube.kubectl_command().args(["logs", "whoami"])).unwrap();
    assert_eq!(said, "system:serviceaccount:default:default");
    // A restarted kubelet finds its pod again.
    node.kill_kubelet().unwrap();
    node.start_kubelet().unwrap();
    // It finds its pods a moment after it answers.
    let inside = wait_until(Duration::from_secs(60), "the kubelet to know its pod", || {
        command_output(kube.kubectl_command().args(["exec", "hello", "--", "cat", "/proc/1/comm"]))
    })
    .unwrap();
    assert_eq!(inside.trim(), "sleep");
    assert_eq!(
        kube.get_object("pod", "default/hello").unwrap()["status"]["containerStatuses"][0]["restartCount"],
        0
    );
    kube.delete_object("pod", "default/hello").unwrap();
    kube.wait_until_gone("pod", "default/hello").unwrap();
}

/// Waits for a pod; a timeout reports the kubelet's log.
fn wait_for_pod(kube: &Kube, node: &GuestNode, name: &str, is_so: impl FnMut(&serde_json::Value) -> bool) {
    let within = Duration::from_secs(180);
    kube.wait_for_object_within(within, "pod", &format!("default/{name}"), is_so).unwrap_or_else(|error| {
        let pod = command_output(kube.kubectl_command().args(["describe", "pod", name])).unwrap_or_default();
        panic!("{error:#}\n{pod}\n{}", node.tail_log("kubelet").unwrap_or_default());
    });
}
