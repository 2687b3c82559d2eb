//! What the kubelet may ask of a node.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use nodekeel_fsquota::{Bytes, Inodes, Usage};
use nodekeel_provisioner::csi::proto::csi::node_service_capability::{Type, rpc};
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::proto::csi::volume_usage::Unit;
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::csi::testing::MemMounts;
use nodekeel_provisioner::csi::{FileId, MountError, MountFlags, Mounted, Mounts, Target};
use tonic::Code;

use super::harness::{Running, capability, id, request};

#[tokio::test]
async fn a_second_publish_does_not_stack_mounts() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path) = (running.volume(1).await, running.path("a"));
    let mut node = running.node().await;
    for _ in 0..3 {
        assert_eq!(node.publish(&volume, &path).await, Ok(()));
        assert_eq!(mounts.depth(&running.target("a")), 1);
    }
    for _ in 0..2 {
        assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
        assert!(!mounts.has_directory(&running.target("a")), "the target goes, too");
    }
}

#[tokio::test]
async fn a_restarted_plugin_finds_what_is_mounted() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path) = (running.volume(1).await, running.path("a"));
    assert_eq!(running.node().await.publish(&volume, &path).await, Ok(()));
    running.supervisor.shutdown().await;
    let shared = mounts.clone();
    let again =
        Running::start_in(running.directory.clone(), running.store.clone(), move |_| Arc::new(shared)).await;
    let mut node = again.node().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.depth(&again.target("a")), 1);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.depth(&again.target("a")), 0);
}

#[tokio::test]
async fn what_differs_at_a_target_is_refused_and_stays() {
    let (running, mounts) = Running::with_memory().await;
    let (one, two, path) = (running.volume(1).await, running.volume(2).await, running.path("a"));
    let mut node = running.node().await;
    assert_eq!(node.publish(&one, &path).await, Ok(()));
    assert_eq!(node.publish(&two, &path).await, Err(Code::AlreadyExists));
    let mut read_only = request(&one, &path, Mode::SingleNodeMultiWriter);
    read_only.readonly = true;
    assert_eq!(node.send(read_only.clone()).await, Err(Code::AlreadyExists));
    let mut no_exec = request(&one, &path, Mode::SingleNodeMultiWriter);
    no_exec.volume_capability = Some(capability(Mode::SingleNodeMultiWriter, &["noexec"]));
    assert_eq!(node.send(no_exec).await, Err(Code::AlreadyExists));
    let mounted = mounts.mounted(&running.target("a")).expect("memory").expect("the first mount");
    assert!(
        !mounted.flags.read_only && mounted.flags.no_suid && mounted.flags.no_dev && !mounted.flags.no_exec
    );
    assert_eq!(node.unpublish(&one, &path).await, Ok(()));
    assert_eq!(node.send(read_only).await, Ok(()));
}

#[tokio::test]
async fn a_volume_for_one_pod_is_published_once() {
    let (running, mounts) = Running::with_memory().await;
    let volume = running.volume(1).await;
    let [a, b] = ["a", "b"].map(|pod| running.path(pod));
    let mut node = running.node().await;
    for mode in [Mode::SingleNodeSingleWriter, Mode::SingleNodeWriter, Mode::SingleNodeReaderOnly] {
        assert_eq!(node.send(request(&volume, &a, mode)).await, Ok(()));
        assert_eq!(node.send(request(&volume, &a, mode)).await, Ok(()), "again is success");
        assert_eq!(node.send(request(&volume, &b, mode)).await, Err(Code::FailedPrecondition));
        assert!(!mounts.has_directory(&running.target("b")));
        assert_eq!(node.unpublish(&volume, &a).await, Ok(()));
        assert_eq!(node.send(request(&volume, &b, mode)).await, Ok(()));
        assert_eq!(node.unpublish(&volume, &b).await, Ok(()));
    }
    for mode in [Mode::SingleNodeMultiWriter, Mode::MultiNodeReaderOnly] {
        assert_eq!(node.send(request(&volume, &a, mode)).await, Ok(()));
        assert_eq!(node.send(request(&volume, &b, mode)).await, Ok(()));
        let is_read_only = |pod| mounts.all()[&running.target(pod)].flags.read_only;
        assert_eq!([is_read_only("a"), is_read_only("b")], [mode == Mode::MultiNodeReaderOnly; 2]);
        assert_eq!(node.unpublish(&volume, &a).await, Ok(()));
        assert_eq!(node.unpublish(&volume, &b).await, Ok(()));
    }
}

#[tokio::test]
async fn unknown_volumes_and_bad_requests_change_nothing() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path) = (running.volume(1).await, running.path("a"));
    let mut node = running.node().await;
    assert_eq!(node.publish(&id(9), &path).await, Err(Code::NotFound));
    assert_eq!(node.stats(&id(9), &path).await, Err(Code::NotFound));
    assert_eq!(node.stats(&volume, &path).await, Err(Code::NotFound), "it isn't there");
    for hostile in [".", "..", "../x", "/", "a\0b", &"x".repeat(4096)] {
        let mut asked = request(&volume, &path, Mode::SingleNodeWriter);
        asked.volume_id = hostile.into();
        assert_eq!(node.send(asked).await, Err(Code::NotFound), "{hostile:?}");
    }
    for outside in
        ["/etc/x", "relative", &format!("{path}/../../../../etc"), &running.kubelet().display().to_string()]
    {
        assert_eq!(node.publish(&volume, outside).await, Err(Code::InvalidArgument), "{outside:?}");
        assert_eq!(node.unpublish(&volume, outside).await, Err(Code::InvalidArgument), "{outside:?}");
        assert_eq!(node.stats(&volume, outside).await, Err(Code::NotFound), "{outside:?}");
    }
    assert_eq!(node.send(NodePublishVolumeRequest::default()).await, Err(Code::InvalidArgument));
    let empty = node.0.node_unpublish_volume(NodeUnpublishVolumeRequest::default()).await;
    assert_eq!(empty.expect_err("empty").code(), Code::InvalidArgument);
    let empty = node.0.node_get_volume_stats(NodeGetVolumeStatsRequest::default()).await;
    assert_eq!(empty.expect_err("empty").code(), Code::InvalidArgument);
    assert!(mounts.all().is_empty());
}

#[tokio::test]
async fn a_removed_volume_can_still_be_unpublished() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path) = (running.volume(1).await, running.path("a"));
    let mut node = running.node().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    std::fs::remove_dir(running.volumes.path(&volume)).expect("remove");
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert!(mounts.all().is_empty());
}

#[tokio::test]
async fn stacked_mounts_of_an_older_driver_are_all_taken_away() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path, target) = (running.volume(1).await, running.path("a"), running.target("a"));
    let mut node = running.node().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    let there = mounts.mounted(&target).expect("memory").expect("a mount");
    mounts.stack(&target, there);
    assert_eq!(mounts.depth(&target), 2);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
    assert_eq!(mounts.depth(&target), 0);
}

#[tokio::test]
async fn a_mount_that_fails_or_is_in_use_is_told_and_can_be_tried_again() {
    let (running, mounts) = Running::with_memory().await;
    let (volume, path, target) = (running.volume(1).await, running.path("a"), running.target("a"));
    let mut node = running.node().await;
    mounts.fail_next(io::ErrorKind::OutOfMemory);
    assert_eq!(node.publish(&volume, &path).await, Err(Code::Internal));
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    mounts.use_target(&target, true);
    assert_eq!(node.unpublish(&volume, &path).await, Err(Code::Unavailable));
    mounts.use_target(&target, false);
    assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
}

#[tokio::test]
async fn stats_are_the_quotas() {
    let (running, _) = Running::with_memory().await;
    let (volume, path) = (running.volume(1).await, running.path("a"));
    let mut node = running.node().await;
    assert_eq!(node.publish(&volume, &path).await, Ok(()));
    running.store.fill(&volume, Usage { bytes: Bytes(3 << 20), inodes: Inodes(96) });
    let rows = node.stats(&volume, &path).await.expect("stats");
    let row = |unit: Unit| {
        let row = rows.iter().find(|row| row.unit() == unit).expect("a row");
        (row.total, row.used, row.available)
    };
    assert_eq!(row(Unit::Bytes), (8 << 20, 3 << 20, 5 << 20));
    assert_eq!(row(Unit::Inodes), (4096, 96, 4000));
    running.store.fill(&volume, Usage { bytes: Bytes(9 << 20), inodes: Inodes(5000) });
    let rows = node.stats(&volume, &path).await.expect("stats");
    assert!(rows.iter().all(|row| row.available == 0), "{rows:?}");
}

#[tokio::test]
async fn what_is_offered_is_what_is_done() {
    let (running, _) = Running::with_memory().await;
    let mut node = running.node().await.0;
    let offered = node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.expect("capabilities");
    let kinds: Vec<_> = offered.into_inner().capabilities.into_iter().map(|it| it.r#type).collect();
    let rpc = |kind: rpc::Type| Some(Type::Rpc(node_service_capability::Rpc { r#type: kind.into() }));
    assert_eq!(kinds, [rpc(rpc::Type::GetVolumeStats), rpc(rpc::Type::SingleNodeMultiWriter)]);
    let stage = node.node_stage_volume(NodeStageVolumeRequest::default()).await;
    let expand = node.node_expand_volume(NodeExpandVolumeRequest::default()).await;
    let codes = [stage.expect_err("not offered").code(), expand.expect_err("not offered").code()];
    assert_eq!(codes, [Code::Unimplemented; 2]);
}

/// Mounts that take as long as the test likes.
#[derive(Debug, Default)]
struct Slow {
    memory: MemMounts,
    gate: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Slow {
    /// Waits until a mount has begun.
    fn begun(&self) {
        let gate = self.gate.lock().expect("unpoisoned");
        drop(self.changed.wait_while(gate, |(begun, _)| !*begun).expect("unpoisoned"));
    }

    fn go_on(&self) {
        self.gate.lock().expect("unpoisoned").1 = true;
        self.changed.notify_all();
    }
}

impl Mounts for Slow {
    fn mounted(&self, target: &Target) -> Result<Option<Mounted>, MountError> {
        self.memory.mounted(target)
    }

    fn mount(&self, volume: BorrowedFd<'_>, target: &Target, flags: MountFlags) -> Result<(), MountError> {
        let mut gate = self.gate.lock().expect("unpoisoned");
        gate.0 = true;
        self.changed.notify_all();
        drop(self.changed.wait_while(gate, |(_, may_go_on)| !*may_go_on).expect("unpoisoned"));
        self.memory.mount(volume, target, flags)
    }

    fn unmount(&self, target: &Target) -> Result<(), MountError> {
        self.memory.unmount(target)
    }

    fn targets(&self, volume: BorrowedFd<'_>) -> Result<Vec<Target>, MountError> {
        self.memory.targets(volume)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_call_for_a_volume_is_aborted_while_the_first_is_under_way() {
    let slow = Arc::new(Slow::default());
    let shared: Arc<dyn Mounts> = slow.clone();
    let running = Running::start(move |_: &Path| shared).await;
    let (one, two) = (running.volume(1).await, running.volume(2).await);
    let [a, b] = ["a", "b"].map(|pod| running.path(pod));
    let (mut first, mut second) = (running.node().await, running.node().await);
    // The caller gives up; what it has begun goes on.
    let call = tokio::spawn({
        let (one, a) = (one.clone(), a.clone());
        async move { first.publish(&one, &a).await }
    });
    let waiting = slow.clone();
    tokio::task::spawn_blocking(move || waiting.begun()).await.expect("begun");
    call.abort();
    assert_eq!(second.publish(&one, &a).await, Err(Code::Aborted));
    assert_eq!(second.publish(&one, &b).await, Err(Code::Aborted));
    assert_eq!(second.unpublish(&one, &a).await, Err(Code::Aborted));
    assert_eq!(second.unpublish(&two, &b).await, Ok(()), "another volume isn't kept waiting");
    slow.go_on();
    while second.publish(&one, &a).await == Err(Code::Aborted) {
        tokio::task::yield_now().await;
    }
    assert_eq!(slow.memory.depth(&running.target("a")), 1);
    let of =
        FileId::of(std::os::fd::AsFd::as_fd(&std::fs::File::open(running.volumes.path(&one)).expect("open")));
    assert_eq!(slow.memory.all()[&running.target("a")].of, of.expect("stat"));
}
