//! The log of the kernel.

use std::fs::OpenOptions;
use std::io::Write as _;

use crate::harness::NodedProcess;

const CONFIG: &str = "services.etcd.enable = false\nservices.containerd.enable = false\nkernel.log = true\n";

fn write_kernel_record(text: &str) {
    let mut device = OpenOptions::new().write(true).open("/dev/kmsg").unwrap();
    device.write_all(format!("<3>{text}\n").as_bytes()).unwrap();
}

#[test]
#[ignore = "needs root: reads and writes /dev/kmsg"]
fn the_kernels_log_is_in_the_tree_once_and_not_on_stderr() {
    let node = NodedProcess::start(CONFIG);
    node.wait_ready("root.kernel");
    let texts = [1, 2].map(|n| format!("nodekeel-node test {} {n}", node.pid()));
    for text in &texts {
        write_kernel_record(text);
        let entry =
            node.follow(&["logs", "root.kernel", "-f"]).find_value(|entry| entry["message"] == text.as_str());
        assert_eq!((&entry["level"], &entry["dn"]), (&"error".into(), &"root.kernel".into()), "{entry}");
        node.ask(&["restart", "--wait", "root.kernel"]);
    }
    let log = node.ask(&["logs", "root.kernel"]);
    for text in &texts {
        assert_eq!(log.lines().filter(|line| line.contains(text.as_str())).count(), 1, "{log}");
    }
    let lines = node.stop();
    assert!(!lines.iter().any(|line| line.contains(&texts[0])), "{lines:#?}");
}
