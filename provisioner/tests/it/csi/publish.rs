//! The calls of the node service.

use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use nodekeel_fsquota::{Bytes, Inodes, QuotaUsage};
use nodekeel_provisioner::csi::proto::csi::node_service_capability::{Type, rpc};
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::proto::csi::volume_usage::Unit;
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::csi::testing::MemMounter;
use nodekeel_provisioner::csi::{
    FileId, MountRestrictions, TargetMount, TargetMountError, TargetPath, VolumeMounter,
};
use nodekeel_provisioner::{ImageFormat, OpenVolume, VolumeKind, VolumeStore as _};
use tonic::Code;

use super::harness::{PublishSite, TestPlugin, id, mount_capability, publish_message, publish_message_of};

#[tokio::test]
async fn a_second_publish_does_not_stack_mounts() {
    let PublishSite { mounts, path, plugin, volume, mut node, .. } = TestPlugin::start_with_volume().await;
    for _ in 0..3 {
        assert_eq!(node.publish(&volume, &path).await, Ok(()));
        assert_eq!(mounts.stack_depth(&plugin.target_path("a")), 1);
    }
    for _ in 0..2 {
        assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
        assert!(!mounts.has_directory(&plugin.target_path("a")), "the target is removed, too");
    }
}

#[tokio::test]
async fn a_restarted_plugin_finds_what_is_mounted() {
    let (plugin, mounts) = TestPlugin::start_in_memory().await;
    let (volume, path) = (plugin.create_volume(1).await, plugin.pod_path("a"));
    assert_eq!(plugin.node_client().await.publish(&volume, &path).await, Ok(()));
    plugin.supervisor.shutdown().await;
    let shared = mounts.clone();
    let again =
        TestPlugin::start_in(plugin.directory.clone(), plugin.store.clone(), move |_| Arc::new(shared)).await;
    let mut node = again.node_client().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.stack_depth(&again.target_path("a")), 1);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.stack_depth(&again.target_path("a")), 0);
}

#[tokio::test]
async fn a_different_publish_at_a_target_is_rejected_and_the_mount_stays() {
    let (plugin, mounts) = TestPlugin::start_in_memory().await;
    let (one, two, path) =
        (plugin.create_volume(1).await, plugin.create_volume(2).await, plugin.pod_path("a"));
    let mut node = plugin.node_client().await;
    assert_eq!(node.publish(&one, &path).await, Ok(()));
    assert_eq!(node.publish(&two, &path).await, Err(Code::AlreadyExists));
    let mut read_only = publish_message(&one, &path, Mode::SingleNodeMultiWriter);
    read_only.readonly = true;
    assert_eq!(node.send_publish(read_only.clone()).await, Err(Code::AlreadyExists));
    let mut no_exec = publish_message(&one, &path, Mode::SingleNodeMultiWriter);
    no_exec.volume_capability = Some(mount_capability(Mode::SingleNodeMultiWriter, &["noexec"]));
    assert_eq!(node.send_publish(no_exec).await, Err(Code::AlreadyExists));
    let mounted =
        mounts.find_mount(&plugin.target_path("a")).expect("mount in memory").expect("the first mount");
    assert!(
        !mounted.flags.read_only && mounted.flags.no_suid && mounted.flags.no_dev && !mounted.flags.no_exec
    );
    assert_eq!(node.unpublish(&one, &path).await, Ok(()));
    assert_eq!(node.send_publish(read_only).await, Ok(()));
}

#[tokio::test]
async fn a_volume_for_one_pod_is_published_once() {
    let (plugin, mounts) = TestPlugin::start_in_memory().await;
    let volume = plugin.create_volume(1).await;
    let [a, b] = ["a", "b"].map(|pod| plugin.pod_path(pod));
    let mut node = plugin.node_client().await;
    for mode in [Mode::SingleNodeSingleWriter, Mode::SingleNodeWriter, Mode::SingleNodeReaderOnly] {
        assert_eq!(node.send_publish(publish_message(&volume, &a, mode)).await, Ok(()));
        assert_eq!(
            node.send_publish(publish_message(&volume, &a, mode)).await,
            Ok(()),
            "repeating it succeeds"
        );
        assert_eq!(
            node.send_publish(publish_message(&volume, &b, mode)).await,
            Err(Code::FailedPrecondition)
        );
        assert!(!mounts.has_directory(&plugin.target_path("b")));
        assert_eq!(node.unpublish(&volume, &a).await, Ok(()));
        assert_eq!(node.send_publish(publish_message(&volume, &b, mode)).await, Ok(()));
        assert_eq!(node.unpublish(&volume, &b).await, Ok(()));
    }
    for mode in [Mode::SingleNodeMultiWriter, Mode::MultiNodeReaderOnly] {
        assert_eq!(node.send_publish(publish_message(&volume, &a, mode)).await, Ok(()));
        assert_eq!(node.send_publish(publish_message(&volume, &b, mode)).await, Ok(()));
        let is_read_only = |pod| mounts.list_mounts()[&plugin.target_path(pod)].flags.read_only;
        assert_eq!([is_read_only("a"), is_read_only("b")], [mode == Mode::MultiNodeReaderOnly; 2]);
        assert_eq!(node.unpublish(&volume, &a).await, Ok(()));
        assert_eq!(node.unpublish(&volume, &b).await, Ok(()));
    }
}

#[tokio::test]
async fn unknown_volumes_and_bad_requests_change_nothing() {
    let PublishSite { mounts, path, plugin, volume, mut node, .. } = TestPlugin::start_with_volume().await;
    assert_eq!(node.publish(&id(9), &path).await, Err(Code::NotFound));
    assert_eq!(node.stats(&id(9), &path).await, Err(Code::NotFound));
    assert_eq!(node.stats(&volume, &path).await, Err(Code::NotFound), "not mounted");
    for hostile in [".", "..", "../x", "/", "a\0b", &"x".repeat(4096)] {
        let mut message = publish_message(&volume, &path, Mode::SingleNodeWriter);
        message.volume_id = hostile.into();
        assert_eq!(node.send_publish(message).await, Err(Code::NotFound), "{hostile:?}");
    }
    for outside in [
        "/etc/x",
        "relative",
        &format!("{path}/../../../../etc"),
        &plugin.kubelet_dir().display().to_string(),
    ] {
        assert_eq!(node.publish(&volume, outside).await, Err(Code::InvalidArgument), "{outside:?}");
        assert_eq!(node.unpublish(&volume, outside).await, Err(Code::InvalidArgument), "{outside:?}");
        assert_eq!(node.stats(&volume, outside).await, Err(Code::NotFound), "{outside:?}");
    }
    assert_eq!(node.send_publish(NodePublishVolumeRequest::default()).await, Err(Code::InvalidArgument));
    let empty = node.0.node_unpublish_volume(NodeUnpublishVolumeRequest::default()).await;
    assert_eq!(empty.expect_err("empty").code(), Code::InvalidArgument);
    let empty = node.0.node_get_volume_stats(NodeGetVolumeStatsRequest::default()).await;
    assert_eq!(empty.expect_err("empty").code(), Code::InvalidArgument);
    assert!(mounts.list_mounts().is_empty());
}

#[tokio::test]
async fn a_removed_volume_can_still_be_unpublished() {
    let PublishSite { mounts, path, plugin, volume, mut node, .. } = TestPlugin::start_with_volume().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    std::fs::remove_dir(plugin.volumes.path(&volume)).expect("remove");
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert!(mounts.list_mounts().is_empty());
}

#[tokio::test]
async fn stacked_mounts_of_an_older_driver_are_all_unmounted() {
    let PublishSite { plugin: _plugin, mounts, path, target, volume, mut node, .. } =
        TestPlugin::start_with_volume().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    let there = mounts.find_mount(&target).expect("mount in memory").expect("a mount");
    mounts.stack_mount(&target, there);
    assert_eq!(mounts.stack_depth(&target), 2);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.stack_depth(&target), 0);
}

#[tokio::test]
async fn a_mount_that_does_not_show_the_volume_is_not_unmounted() {
    let PublishSite { plugin: _plugin, mounts, path, target, volume, mut node, .. } =
        TestPlugin::start_with_volume().await;
    let other = FileId { device: 1, inode: 2 };
    mounts.stack_mount(&target, TargetMount { volume: other, flags: MountRestrictions::default() });
    assert_eq!(node.unpublish(&volume, &path).await, Err(Code::FailedPrecondition));
    assert_eq!(mounts.stack_depth(&target), 1);
}

#[tokio::test]
async fn a_failed_or_busy_mount_is_reported_and_can_be_retried() {
    let PublishSite { plugin: _plugin, mounts, path, target, volume, mut node, .. } =
        TestPlugin::start_with_volume().await;
    mounts.fail_next(io::ErrorKind::OutOfMemory);
    assert_eq!(node.publish(&volume, &path).await, Err(Code::Internal));
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    mounts.set_busy(&target, true);
    assert_eq!(node.unpublish(&volume, &path).await, Err(Code::Unavailable));
    mounts.set_busy(&target, false);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
}

#[tokio::test]
async fn volume_stats_report_the_quota() {
    let PublishSite { path, plugin, volume, mut node, .. } = TestPlugin::start_with_volume().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    plugin.store.set_usage(&volume, QuotaUsage { bytes: Bytes(3 << 20), inodes: Inodes(96) });
    let rows = node.stats(&volume, &path).await.expect("stats");
    let row = |unit: Unit| {
        let row = rows.iter().find(|row| row.unit() == unit).expect("a row");
        (row.total, row.used, row.available)
    };
    assert_eq!(row(Unit::Bytes), (8 << 20, 3 << 20, 5 << 20));
    assert_eq!(row(Unit::Inodes), (4096, 96, 4000));
    plugin.store.set_usage(&volume, QuotaUsage { bytes: Bytes(9 << 20), inodes: Inodes(5000) });
    let rows = node.stats(&volume, &path).await.expect("stats");
    assert!(rows.iter().all(|row| row.available == 0), "{rows:?}");
}

#[tokio::test]
async fn a_volume_is_published_as_what_the_store_and_its_object_say() {
    let (plugin, mounts) = TestPlugin::start_in_memory().await;
    let block = plugin.create_image(1, ImageFormat::Block).await;
    let (strict, directory) =
        (plugin.create_image(2, ImageFormat::Ext4).await, plugin.create_volume(3).await);
    let mut node = plugin.node_client().await;
    let kinds = [
        (block, VolumeKind::Image(ImageFormat::Block)),
        (strict, VolumeKind::Image(ImageFormat::Ext4)),
        (directory, VolumeKind::Directory),
    ];
    for (id, kind) in &kinds {
        for (_, said) in &kinds {
            let path = plugin.pod_path(said.as_str());
            let expected = if said == kind { Ok(()) } else { Err(Code::FailedPrecondition) };
            let message = publish_message_of(id, &path, *said);
            assert_eq!(node.send_publish(message.clone()).await, expected, "a {kind} as {said}");
            assert_eq!(node.send_publish(message).await, expected, "again");
            assert_eq!(mounts.list_mounts().len(), usize::from(said == kind));
            assert_eq!(node.unpublish(id, &path).await, Ok(()));
        }
    }
    let path = plugin.pod_path("a");
    assert_eq!(node.publish(&kinds[0].0, &path).await, Err(Code::FailedPrecondition), "without the kind");
}

#[tokio::test]
async fn the_stats_of_a_block_volume_are_its_size() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    let (block, path) = (plugin.create_image(1, ImageFormat::Block).await, plugin.pod_path("a"));
    let mut node = plugin.node_client().await;
    assert_eq!(node.stats(&block, &path).await, Err(Code::NotFound), "not published");
    let message = publish_message_of(&block, &path, VolumeKind::Image(ImageFormat::Block));
    assert_eq!(node.send_publish(message).await, Ok(()));
    let rows = node.stats(&block, &path).await.expect("stats");
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].unit(), rows[0].total, rows[0].used, rows[0].available),
        (Unit::Bytes, 8 << 20, 0, 0)
    );
}

#[tokio::test]
async fn a_published_volume_that_is_lost_is_abnormal_and_another_is_not_found() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    let volume = plugin.create_volume(1).await;
    // As the kubelet's paths, it names the volume.
    let path = plugin.pod_path(volume.as_str());
    let mut node = plugin.node_client().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    assert!(!node.condition(&volume, &path).await.expect("stats").abnormal);
    plugin.store.remove(&volume).await.expect("lost");
    let condition = node.condition(&volume, &path).await.expect("stats");
    assert!(condition.abnormal && condition.message.contains("restore it from a backup"), "{condition:?}");
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert_eq!(node.condition(&volume, &path).await, Err(Code::NotFound), "no pod has it");
}

#[tokio::test]
async fn reported_capabilities_match_the_implementation() {
    let (plugin, _) = TestPlugin::start_in_memory().await;
    let mut node = plugin.node_client().await.0;
    let offered = node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.expect("capabilities");
    let kinds: Vec<_> = offered.into_inner().capabilities.into_iter().map(|it| it.r#type).collect();
    let rpc = |kind: rpc::Type| Some(Type::Rpc(node_service_capability::Rpc { r#type: kind.into() }));
    let expected = [rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition, rpc::Type::SingleNodeMultiWriter];
    assert_eq!(kinds, expected.map(rpc));
    let stage = node.node_stage_volume(NodeStageVolumeRequest::default()).await;
    let expand = node.node_expand_volume(NodeExpandVolumeRequest::default()).await;
    let codes = [stage.expect_err("not supported").code(), expand.expect_err("not supported").code()];
    assert_eq!(codes, [Code::Unimplemented; 2]);
}

/// A mounter that blocks until the test lets it proceed.
#[derive(Debug, Default)]
struct SlowMounter {
    memory: MemMounter,
    gate: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl SlowMounter {
    /// Waits until a mount has started.
    fn wait_started(&self) {
        let gate = self.gate.lock().expect("not poisoned");
        drop(self.changed.wait_while(gate, |(has_started, _)| !*has_started).expect("not poisoned"));
    }

    fn proceed(&self) {
        self.gate.lock().expect("not poisoned").1 = true;
        self.changed.notify_all();
    }
}

impl VolumeMounter for SlowMounter {
    fn find_mount(&self, target: &TargetPath) -> Result<Option<TargetMount>, TargetMountError> {
        self.memory.find_mount(target)
    }

    fn mount(
        &self,
        volume: &OpenVolume,
        target: &TargetPath,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError> {
        let mut gate = self.gate.lock().expect("not poisoned");
        gate.0 = true;
        self.changed.notify_all();
        drop(self.changed.wait_while(gate, |(_, may_proceed)| !*may_proceed).expect("not poisoned"));
        self.memory.mount(volume, target, flags)
    }

    fn unmount(&self, target: &TargetPath) -> Result<(), TargetMountError> {
        self.memory.unmount(target)
    }

    fn list_targets(&self, volume: &OpenVolume) -> Result<Vec<TargetPath>, TargetMountError> {
        self.memory.list_targets(volume)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_call_for_a_volume_is_aborted_while_the_first_is_in_flight() {
    let slow = Arc::new(SlowMounter::default());
    let shared: Arc<dyn VolumeMounter> = slow.clone();
    let plugin = TestPlugin::start(move |_: &Path| shared).await;
    let (one, two) = (plugin.create_volume(1).await, plugin.create_volume(2).await);
    let [a, b] = ["a", "b"].map(|pod| plugin.pod_path(pod));
    let (mut first, mut second) = (plugin.node_client().await, plugin.node_client().await);
    // The caller disconnects; its call continues.
    let call = tokio::spawn({
        let (one, a) = (one.clone(), a.clone());
        async move { first.publish(&one, &a).await }
    });
    let waiting = slow.clone();
    tokio::task::spawn_blocking(move || waiting.wait_started()).await.expect("started");
    call.abort();
    assert_eq!(second.publish(&one, &a).await, Err(Code::Aborted));
    assert_eq!(second.publish(&one, &b).await, Err(Code::Aborted));
    assert_eq!(second.unpublish(&one, &a).await, Err(Code::Aborted));
    assert_eq!(second.unpublish(&two, &b).await, Ok(()), "another volume is not blocked");
    slow.proceed();
    while second.publish(&one, &a).await == Err(Code::Aborted) {
        tokio::task::yield_now().await;
    }
    assert_eq!(slow.memory.stack_depth(&plugin.target_path("a")), 1);
    let of = FileId::from_fd(std::os::fd::AsFd::as_fd(
        &std::fs::File::open(plugin.volumes.path(&one)).expect("open"),
    ));
    assert_eq!(slow.memory.list_mounts()[&plugin.target_path("a")].volume, of.expect("stat"));
}
