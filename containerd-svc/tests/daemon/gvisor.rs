//! gVisor, which needs more of the kernel than a container provides.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::{
    ConfigVersion, ContainerdConfig, ContainerdSettings, CriSettings, RunscSettings,
};
use nodekeel_logtree::{EntryBody, Level, LogEntry, LogQuery};
use nodekeel_supervisor::RunnableState;
use testbed::ScratchDir;

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::{Release, TestDaemon, pod_image, put_bundle, run_async};

#[test]
#[ignore = "needs kernel with gvisor and 2 GiB of memory"]
fn runsc_logs_of_a_container_come_through_the_fifo() {
    run_async(async {
        let scratch = Arc::new(ScratchDir::new().unwrap());
        let cri = CriSettings {
            cni_conf: scratch.path().join("cni"),
            runsc: Some(RunscSettings { debug: true, ..RunscSettings::default() }),
            sandbox_image: Some(POD_IMAGE.into()),
            ..CriSettings::default()
        };
        let daemon = TestDaemon::start_with(Release::Newest, scratch, |containerd| {
            containerd.config =
                ContainerdConfig::Settings(ContainerdSettings { version: ConfigVersion::V3, cri: Some(cri) });
        })
        .await;
        put_bundle(&daemon.scratch, "pod.tar", &pod_image().to_tar());
        daemon.preseed().run(&daemon.images().await).await.unwrap();
        daemon.wait_state("root.containerd.runsc", 1, RunnableState::Ready).await;

        let cri = CriClient::connect(&daemon.layout.socket_path()).await;
        let pod = cri.run_pod("sandboxed", "runsc").await.unwrap();
        let container = cri.start_container(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
        let kernel = cri.exec_sync(&container, &["/bin/busybox", "dmesg"]).await;
        assert!(kernel.contains("Starting gVisor"), "{kernel}");

        let missing = cri.start_container(&pod, &["/bin/nothing"]).await.unwrap_err();
        assert!(
            missing.message().contains("/bin/nothing"),
            "the error of runsc reaches the caller: {missing}"
        );

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
    });
}
