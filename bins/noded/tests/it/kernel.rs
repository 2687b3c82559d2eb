//! The log of the kernel.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::harness::{NodedProcess, service_config};

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

/// A cgroup of this machine's, outside of noded's, whose memory is limited.
struct ForeignCgroup(PathBuf);

impl ForeignCgroup {
    fn new(bytes: u64) -> Self {
        let name = format!("nodekeel-oom-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (root, limits) = if v1.is_dir() {
            (v1, ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"])
        } else {
            (Path::new("/sys/fs/cgroup"), ["memory.max", "memory.swap.max"])
        };
        let cgroup = Self(root.join(name));
        fs::create_dir(&cgroup.0).unwrap();
        fs::write(cgroup.0.join(limits[0]), bytes.to_string()).unwrap();
        // Where swap is not accounted for, it has no limit.
        let _ = fs::write(cgroup.0.join(limits[1]), bytes.to_string());
        cgroup
    }
}

impl Drop for ForeignCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
#[ignore = "needs root: it limits a cgroup, and reads /dev/kmsg"]
fn a_kill_for_memory_is_named_whoever_has_set_the_limit() {
    let cgroup = ForeignCgroup::new(30 << 20);
    let script = format!("echo $$ >{}/cgroup.procs; exec tail /dev/zero", cgroup.0.display());
    let node = NodedProcess::start(&format!(
        "{CONFIG}{}",
        service_config("tail", &script, "restart = \"never\"\ndepends_on = [\"kernel\"]")
    ));
    let reason = "killed by SIGKILL: out of memory, by the limit of a cgroup";
    node.wait_status("root.service.tail", |status| {
        status["exits"].as_array().is_some_and(|exits| exits.iter().any(|exit| exit["reason"] == reason))
    });
    let health = node.nodectl(&["health"]).stdout;
    assert!(health.contains(reason) && health.contains("`nodectl logs root.kernel --grep oom`"), "{health}");
    node.stop();
}
