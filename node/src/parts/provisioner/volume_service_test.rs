use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::FileTypeExt as _;

use nix::sched::{CloneFlags, unshare};
use nodekeel_fsquota::Bytes;
use nodekeel_logtree::LogLimits;
use nodekeel_provisioner::csi::{MountRestrictions, TargetPath};
use nodekeel_provisioner::{CapacityPolicy, DriverName, ImageFormat, NodeName, VolumeId, VolumeStore as _};
use prometheus_client::registry::Registry;

use super::*;
use crate::config::AuditSettings;
use crate::parts::provisioner::image_support::ImageSupport;
use crate::search_path::SearchPath;

/// A provisioner of a directory without a quota, whose kubelet is below the same one.
fn open_service(scratch: &Path, stores: BTreeMap<StoreName, PathBuf>) -> VolumeService {
    let [directory, kubelet] = ["volumes", "kubelet"].map(|name| scratch.join(name));
    for directory in [&directory, &kubelet] {
        fs::create_dir(directory).expect("a directory");
    }
    let search = SearchPath::with_default_directories(None, None);
    let plan = ProvisionerPlan {
        kubeconfig: scratch.join("kubeconfig"),
        node: NodeName::try_new("node-a").expect("a name"),
        driver: DriverName::try_new("volumes.nodekeel").expect("a name"),
        directory: directory.clone(),
        stores,
        is_on_volume: false,
        limits: LimitEnforcement::None,
        kubelet: Some(kubelet),
        capacity: CapacityPolicy::default(),
        audit: AuditSettings::default(),
        images: ImageSupport::find(&search, Path::new("/dev/loop-control")),
    };
    let reports = ServiceReports {
        log_store: LogStore::new(LogLimits::default()),
        metrics: Arc::new(PrometheusMetrics::register_in(&mut Registry::default())),
        current: CurrentProvisioner::default(),
    };
    VolumeService::open(plan, reports, move || crate::data::open_directory(&directory)).expect("opened")
}

/// Publishes a block volume as the kubelet asks the plugin to, by noded's mounter and store.
fn publish_block_volume(scratch: &Path) {
    let service = open_service(scratch, BTreeMap::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let id = VolumeId::from_uid("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f").expect("a UUID");
    runtime.block_on(async {
        service.store.create_identity().await.expect("an identity");
        service.store.create_image(&id, ImageFormat::Block, Bytes(1 << 20)).await.expect("created");
    });
    let kubelet = service.plan.kubelet.clone().expect("it has one");
    let (deps, path) = (service.plugin_deps(&kubelet), kubelet.join("device"));
    let target = TargetPath::try_new(&kubelet, path.to_str().expect("UTF-8")).expect("a target");
    let volume = deps.volumes.open(&id).expect("opened");
    deps.mounter.mount(&volume, &target, MountRestrictions::default()).expect("mounted");
    assert!(fs::metadata(&path).expect("there").file_type().is_block_device());
    let size = File::open(&path).and_then(|mut device| device.seek(SeekFrom::End(0)));
    assert_eq!(size.expect("a size"), 1 << 20);
    deps.mounter.unmount(&target).expect("unmounted");
    assert!(!path.exists());
}

#[tokio::test]
async fn a_store_whose_directory_is_absent_keeps_no_other_from_being_opened() {
    let scratch = tempfile::tempdir().expect("a directory");
    let fast = StoreName::try_new("fast").expect("a name");
    let service = open_service(scratch.path(), [(fast, scratch.path().join("absent"))].into());
    assert!(service.store.list().await.is_ok());
    let [(_, store)] = &service.stores[..] else { panic!("{:?}", service.stores) };
    assert!(store.list().await.is_err() && store.watch_changes().is_some(), "it is looked for");
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_block_volume_becomes_a_device_for_the_kubelet() {
    let publish = || {
        unshare(CloneFlags::CLONE_NEWNS).expect("root may unshare");
        let nothing = None::<&str>;
        let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
        nix::mount::mount(nothing, "/", nothing, private, nothing).expect("make private");
        publish_block_volume(tempfile::tempdir().expect("a directory").path());
    };
    if let Err(panic) = std::thread::spawn(publish).join() {
        std::panic::resume_unwind(panic);
    }
}
