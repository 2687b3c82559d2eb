use super::*;
use crate::{output, wait_until};

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

#[test]
#[ignore = "needs kube and a node"]
fn a_pod_runs_in_the_guest_and_is_heard_and_entered_through_the_api() {
    let kube = Kube::start().unwrap();
    let start = std::time::Instant::now();
    let mut node = GuestNode::builder().join(&kube).unwrap();
    println!("the node is ready after {:?}", start.elapsed());
    kube.apply(POD).unwrap();
    runs(&kube, &node, "hello", |pod| pod["status"]["containerStatuses"][0]["ready"] == true);
    let release = node.shell("uname -r").unwrap();
    let said = output(kube.kubectl().args(["logs", "hello"])).unwrap();
    assert_eq!(said, format!("hello from {release}"));
    let inside = output(kube.kubectl().args(["exec", "hello", "--", "hostname"])).unwrap();
    assert_eq!(inside.trim(), "hello");
    // Quotas are enforced where pods and volumes lie.
    let mounts = node.shell("cat /proc/mounts").unwrap();
    assert!(
        mounts.lines().any(|line| line.contains(" /var/lib xfs ") && line.contains("prjquota")),
        "{mounts}"
    );
    // Its kubelet may die, and finds the pod again.
    node.kill_kubelet().unwrap();
    node.start_kubelet().unwrap();
    // It learns of its pods a moment after it answers.
    let inside = wait_until(Duration::from_secs(60), "the kubelet to know its pod", || {
        output(kube.kubectl().args(["exec", "hello", "--", "cat", "/proc/1/comm"]))
    })
    .unwrap();
    assert_eq!(inside.trim(), "sleep");
    assert_eq!(
        kube.get("pod", "default/hello").unwrap()["status"]["containerStatuses"][0]["restartCount"],
        0
    );
    kube.delete("pod", "default/hello").unwrap();
    kube.until_gone("pod", "default/hello").unwrap();
}

const WHO: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: who, namespace: default}
spec:
  restartPolicy: Never
  containers: [{name: c, image: "localhost/kubectl:1", imagePullPolicy: Never}]
"#;

#[test]
#[ignore = "needs kube and a node"]
fn a_pod_of_an_image_of_ones_own_reaches_the_api_as_its_account() {
    let kube = Kube::builder().service_accounts().start().unwrap();
    let directory = Scratch::new().unwrap();
    let archive = directory.path().join("kubectl.tar");
    let asks = ["/bin/kubectl", "auth", "whoami", "--output=jsonpath={.status.userInfo.username}"];
    let image = Image::new("localhost/kubectl:1").file("bin/kubectl", kube.programs().path("kubectl"));
    image.entrypoint(asks).write(&archive).unwrap();
    let node = GuestNode::builder().image(archive).join(&kube).unwrap();
    kube.apply(WHO).unwrap();
    runs(&kube, &node, "who", |pod| pod["status"]["phase"] == "Succeeded");
    let said = output(kube.kubectl().args(["logs", "who"])).unwrap();
    assert_eq!(said, "system:serviceaccount:default:default");
}

/// Waits for a pod; where it doesn't come, what the kubelet said tells why.
fn runs(kube: &Kube, node: &GuestNode, name: &str, is_so: impl FnMut(&serde_json::Value) -> bool) {
    let within = Duration::from_secs(180);
    kube.until_within(within, "pod", &format!("default/{name}"), is_so).unwrap_or_else(|error| {
        let pod = output(kube.kubectl().args(["describe", "pod", name])).unwrap_or_default();
        panic!("{error:#}\n{pod}\n{}", node.log("kubelet").unwrap_or_default());
    });
}
