use super::*;
use crate::output;

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
    command: [sh, -c, "echo hello from $(uname -r); exec sleep 1000000"]
"#;

#[test]
#[ignore = "needs kube and a node"]
fn a_pod_runs_in_the_guest_and_is_heard_and_entered_through_the_api() {
    let kube = Kube::start().unwrap();
    let node = GuestNode::builder().join(&kube).unwrap();
    kube.apply(POD).unwrap();
    kube.wait("pod", "default/hello", "condition=Ready").unwrap_or_else(|error| {
        let pod = output(kube.kubectl().args(["describe", "pod", "hello"]));
        panic!("{error:#}\n{pod:?}\n{}", node.log("kubelet").unwrap());
    });
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
    kube.delete("pod", "default/hello").unwrap();
    kube.until_gone("pod", "default/hello").unwrap();
}
