//! A kubelet's view of containerd: its CRI.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nodekeel_containerd_svc::{ConfigFragment, ContainerdConfig, ContainerdSettings, LivenessProbe};
use nodekeel_supervisor::{RunnableState, RunnableStatus};
use rstest::rstest;
use testbed::wait_until;

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{PRESEED, Setup, busybox_layer};
use crate::late_cri::{ListCount, start_proxy};

/// The lists of the CRI that lack the image.
const LATE_LISTS: usize = 3;

const WITHIN: Duration = Duration::from_secs(30);

fn cri_settings(setup: &Setup) -> ContainerdSettings {
    ContainerdSettings { cri: Some(setup.cri()), ..ContainerdSettings::default() }
}

/// A daemon with an image as a bundle, behind a proxy whose first lists of images lack it.
fn setup_behind_proxy(release: Release, image: &str, late_lists: usize) -> (Setup, ListCount) {
    let mut setup = Setup::new(release);
    let back = setup.path("back.sock");
    let lists = start_proxy(&setup.layout.socket_path(), &back, late_lists);
    setup.put_image("a.tar", image, b"a");
    setup.containerd.extra_args = vec!["--address".into(), back.into()];
    setup.containerd.config = ContainerdConfig::Settings(cri_settings(&setup));
    setup.enable_preseed();
    (setup, lists)
}

/// Review D8: the CRI lists the image late, each time.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn preseed_is_ready_only_when_the_cri_lists_its_images(#[values(Debian, Newest)] release: Release) {
    let (setup, lists) = setup_behind_proxy(release, "localhost/a:1", LATE_LISTS);
    let daemon = setup.launch();
    daemon.wait_ready(PRESEED, 1).await;
    let lists = lists.load(Ordering::Relaxed);
    assert!(lists > LATE_LISTS, "ready after {lists} lists, of which the first {LATE_LISTS} lack the image");
    daemon.stop().await;
}

/// The first is a name as `skopeo copy` writes it, the second has a layer that containerd does not unpack.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_bundle_that_containerd_refuses_is_named_and_holds_no_dependent(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    setup.put_image("a.tar", "docker.io/busybox:1", &busybox_layer());
    setup.put_image("b.tar", "localhost/b:1", &b"this is no tar ".repeat(100));
    setup.put_image("c.tar", "localhost/c:1", &busybox_layer());
    setup.containerd.config = ContainerdConfig::Settings(cri_settings(&setup));
    let preseed = setup.enable_preseed();
    let preseed = preseed.with_unpacking(true);
    setup.containerd.preseed = Some(preseed.clone());
    let daemon = setup.start().await;
    let start = Instant::now();
    daemon.wait_ready("root.dependent", 1).await;
    assert!(start.elapsed() < Duration::from_secs(5), "{:?} after containerd", start.elapsed());
    let problem = daemon.wait_problem(&preseed, "1 of 3 bundles are not imported").await;
    assert!(problem.contains("b.tar"), "{problem}");
    // The CRI also lists each image by its id.
    let mut names = daemon.image_names().await;
    names.retain(|name| !name.starts_with("sha256:"));
    assert_eq!(names, ["docker.io/library/busybox:1", "localhost/c:1"]);
    daemon.stop().await;
}

/// A kubelet that frees a full disk deletes many images, also while the first of them are imported again.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn an_image_deleted_before_the_cri_lists_it_counts_as_a_deleted_one(
    #[values(Debian, Newest)] release: Release,
) {
    const IMAGE: &str = "localhost/a:1";
    let (setup, lists) = setup_behind_proxy(release, IMAGE, usize::MAX);
    let daemon = setup.start().await;
    for _ in 0..2 {
        wait_until(WITHIN, "the import", || {
            let listed = daemon.ctr(&["images", "ls", "--quiet"]);
            anyhow::ensure!(listed.contains(IMAGE), "it lists {listed}");
            Ok(())
        })
        .unwrap();
        let before = lists.load(Ordering::Relaxed);
        wait_until(WITHIN, "a list of the CRI", || {
            anyhow::ensure!(lists.load(Ordering::Relaxed) > before, "it was not asked again");
            Ok(())
        })
        .unwrap();
        drop(daemon.ctr(&["images", "rm", "--sync", IMAGE]));
    }
    daemon.wait_preseed_pauses(IMAGE).await;
    daemon.stop().await;
}

/// Review D7: containerd itself answers, and its CRI plugin did not load.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_daemon_whose_cri_does_not_load_never_becomes_ready(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    let text = cri_settings(&setup).render_toml(&setup.layout).replace("\"overlayfs\"", "\"nowhere\"");
    setup.containerd.config = ContainerdConfig::Verbatim { text, runsc: false };
    let daemon = setup.launch();
    let settled = |node: &RunnableStatus| !node.exits.is_empty() || node.state == RunnableState::Ready;
    let node = daemon.wait_for("root.containerd", settled).await;
    assert_ne!(node.state, RunnableState::Ready, "{node:?}");
    let exit = node.exits[0].exit.to_string();
    assert!(exit.contains("CRI") && exit.contains("disabled_plugins"), "{exit}");
    daemon.stop().await;
}

/// Review D7: a script replaces the daemon by one that answers without a CRI.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_daemon_that_loses_its_cri_is_restarted(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    let (without, gate) = (setup.path("no-cri.toml"), setup.create_gate());
    fs::write(&without, ContainerdSettings::default().render_toml(&setup.layout)).unwrap();
    setup.replace_program(&format!(
        "case \"$*\" in *'config dump'|--version) exec $real \"$@\" ;; esac\n$real \"$@\" & pid=$!\n\
         trap 'kill $pid; wait $pid; exit' TERM\nread go <{}\nkill $pid\nwait $pid\n\
         exec $real \"$@\" --config {}",
        gate.display(),
        without.display(),
    ));
    setup.containerd.config = ContainerdConfig::Settings(cri_settings(&setup));
    let (period, timeout) = (Duration::from_millis(500), Duration::from_secs(2));
    setup.containerd.liveness = Some(LivenessProbe { period, timeout, failure_threshold: 9 });
    let daemon = setup.start().await;
    tokio::task::spawn_blocking(move || fs::write(gate, "go\n")).await.unwrap().unwrap();
    let node = daemon.wait_for("root.containerd", |node| !node.exits.is_empty()).await;
    let exit = node.exits[0].exit.to_string();
    assert!(exit.contains("liveness probes") && exit.contains("call the CRI"), "{exit}");
    daemon.wait_ready("root.containerd", 2).await;
    daemon.stop().await;
}

/// The directory's pattern is imported by the file that containerd gets.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_cri_that_an_import_disables_is_not_waited_for(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    let imported = setup.path("imported");
    fs::create_dir(&imported).unwrap();
    let disables = "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
    fs::write(imported.join("no-cri.toml"), disables).unwrap();
    setup.put_image("a.tar", "localhost/a:1", b"a");
    let text = cri_settings(&setup).render_toml(&setup.layout);
    let text = format!("imports = [\"{}/*.toml\"]\n{text}", imported.display());
    setup.containerd.config = ContainerdConfig::Verbatim { text, runsc: false };
    setup.enable_preseed();
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    daemon.stop().await;
}

/// Also without a version in the settings: each release gets its own.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn layers_are_unpacked_by_the_snapshotter_of_an_operators_fragment(
    #[values(Debian, Newest)] release: Release,
) {
    let (version, table) = match release {
        Debian => (2, "io.containerd.grpc.v1.cri'.containerd"),
        Newest => (3, "io.containerd.cri.v1.images'"),
    };
    let mut setup = Setup::new(release);
    let fragment = format!("version = {version}\n[plugins.'{table}]\nsnapshotter = 'native'\n");
    let fragments = vec![ConfigFragment::parse("native.toml", &fragment).unwrap()];
    setup.containerd.config =
        ContainerdConfig::Settings(ContainerdSettings { fragments, ..cri_settings(&setup) });
    setup.put_image("busybox.tar", "localhost/busybox:1", &busybox_layer());
    setup.enable_preseed();
    setup.containerd.preseed = setup.containerd.preseed.map(|preseed| preseed.with_unpacking(true));
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    let written = fs::read_to_string(daemon.layout.data().config.path()).unwrap();
    assert!(written.contains(&format!("version = {version}\n")), "{written}");
    let count = |name: &str| daemon.ctr(&["snapshots", "--snapshotter", name, "ls"]).lines().count() - 1;
    assert_eq!(["native", "overlayfs"].map(count), [1, 0]);
    daemon.stop().await;
}
