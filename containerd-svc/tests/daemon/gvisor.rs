//! gVisor, which needs more of the kernel than a container provides.

use std::time::Duration;

use nodekeel_containerd_svc::{ConfigVersion, CriSettings, RunscSettings};
use nodekeel_logtree::{EntryBody, Level, LogEntry, LogQuery};

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::{Release, Setup, pod_image};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs kernel with gvisor and 2 GiB of memory"]
async fn runsc_logs_of_a_container_come_through_the_file() {
    let mut setup = Setup::new(Release::Newest);
    let runsc = Some(RunscSettings { debug: true, ..RunscSettings::default() });
    let cri = CriSettings { runsc, sandbox_image: Some(POD_IMAGE.into()), ..setup.cri() };
    setup.enable_cri(ConfigVersion::V3, cri);
    let daemon = setup.start().await;
    daemon.put_bundle("pod.tar", &pod_image().to_tar());
    daemon.import_bundles().await;
    daemon.wait_ready("root.containerd.runsc", 1).await;

    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let pod = cri.run_pod("sandboxed", "runsc").await.unwrap();
    let container = cri.start_container(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
    let kernel = cri.exec_sync(&container, &["/bin/busybox", "dmesg"]).await;
    assert!(kernel.contains("Starting gVisor"), "{kernel}");

    let missing = cri.start_container(&pod, &["/bin/nothing"]).await.unwrap_err();
    assert!(missing.message().contains("/bin/nothing"), "the error of runsc reaches the caller: {missing}");

    let levels = || {
        let dn = "root.containerd.runsc".parse().unwrap();
        let entries = daemon.journal.open_reader(LogQuery::of_dn(dn)).unwrap().read_backlog();
        let is = |entry: &LogEntry, level| match &entry.body {
            EntryBody::Leveled(entry) => entry.level == level && entry.file.ends_with(".go"),
            _ => false,
        };
        [Level::Debug, Level::Info].map(|level| entries.iter().filter(|entry| is(entry, level)).count())
    };
    testbed::wait_until(Duration::from_secs(300), "lines of each level", || {
        let [debug, info] = levels();
        anyhow::ensure!(
            debug > 10 && info > 10,
            "{debug} and {info}: {}",
            daemon.log("root.containerd.runsc")
        );
        Ok(())
    })
    .unwrap();
    println!("{:?} lines of debug and info", levels());
    cri.remove_pod(pod).await;
    daemon.stop().await;
}
