//! gVisor, which needs more of the kernel than a container gives.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::{Config, ConfigVersion, Cri as CriSettings, Runsc, Settings};
use nodekeel_logtree::{Body, Entry, Level, Query};
use nodekeel_supervisor::State;
use testbed::Scratch;

use crate::cri::{Cri, IMAGE};
use crate::harness::{Daemon, Release, pod_image, put, run};

#[test]
#[ignore = "needs kernel with gvisor and 2 GiB of memory"]
fn what_runsc_logs_of_a_container_comes_through_the_fifo() {
    run(async {
        let scratch = Arc::new(Scratch::new().unwrap());
        let cri = CriSettings {
            cni_conf: scratch.path().join("cni"),
            runsc: Some(Runsc { debug: true, ..Runsc::default() }),
            sandbox_image: Some(IMAGE.into()),
            ..CriSettings::default()
        };
        let daemon = Daemon::start_with(Release::Newest, scratch, |containerd| {
            containerd.config = Config::Settings(Settings { version: ConfigVersion::V3, cri: Some(cri) });
        })
        .await;
        put(&daemon.scratch, "pod.tar", &pod_image().tar());
        daemon.preseed().run(&daemon.images().await).await.unwrap();
        daemon.until("root.containerd.runsc", 1, State::Ready).await;

        let cri = Cri::connect(&daemon.place.socket()).await;
        let pod = cri.run_pod("sandboxed", "runsc").await.unwrap();
        let container = cri.start(&pod, &["/bin/busybox", "sleep", "1000"]).await.unwrap();
        let kernel = cri.say(&container, &["/bin/busybox", "dmesg"]).await;
        assert!(kernel.contains("Starting gVisor"), "{kernel}");

        let missing = cri.start(&pod, &["/bin/nothing"]).await.unwrap_err();
        assert!(missing.message().contains("/bin/nothing"), "what runsc says reaches who asks: {missing}");

        let levels = || {
            let dn = "root.containerd.runsc".parse().unwrap();
            let entries = daemon.journal.read(Query::new(dn)).unwrap().backlog();
            let is = |entry: &Entry, level| match &entry.body {
                Body::Leveled(entry) => entry.level == level && entry.file.ends_with(".go"),
                _ => false,
            };
            [Level::Debug, Level::Info].map(|level| entries.iter().filter(|entry| is(entry, level)).count())
        };
        testbed::wait_until(Duration::from_secs(60), "lines of each level", || {
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
        cri.remove(pod).await;
        daemon.stop().await;
    });
}
