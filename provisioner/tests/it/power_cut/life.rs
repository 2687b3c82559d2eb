//! Volumes of each kind, from their creation to their removal: after a cut, each volume and each snapshot is complete or
//! absent, and no directory, project or loop device is left of what is absent.

use std::path::Path;

use anyhow::{Result, ensure};
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::{
    DirStore, ImageFormat, SnapshotStore as _, StoreIdentity, StoredId, VolumeId, VolumeKind,
    VolumeOpener as _, VolumeStore as _,
};
use testbed::guest::disk::FileSystem;
use testbed::power_cut::{CutPlan, PowerCut, RecordedDisk};
use testbed::wait_until;

use super::pod::TestPod;
use super::store::{FREE_WITHIN, MIB, MountedStore};
use crate::csi::real_images::devices_below;
use crate::csi::real_mounts::run_in_mount_namespace;
use crate::fixture::{PLACES, id, names, snapshot_id};

/// The names of the volume, its snapshot and the copy of that, in marks: `NAME-created` and `NAME-removed` when the call
/// has returned, `NAME-removing` before it.
const VOLUME: &str = "volume";
const SNAPSHOT: &str = "snapshot";
const COPY: &str = "copy";

/// The life of a volume of this kind on a file system.
#[derive(Clone, Copy)]
struct VolumeLife {
    file_system: FileSystem,
    kind: VolumeKind,
}

impl VolumeLife {
    /// The limits of a new volume, and of one that was expanded.
    fn limits(self) -> [QuotaLimits; 2] {
        let sizes = match self.kind {
            VolumeKind::Image(ImageFormat::Xfs) => [300, 320],
            _ => [8, 12],
        };
        let inodes = (self.kind == VolumeKind::Directory).then_some(Inodes(1024));
        sizes.map(|size| QuotaLimits { bytes: Some(Bytes(size * MIB)), inodes })
    }

    fn is_copied(self) -> bool {
        self.file_system == FileSystem::Xfs
    }

    async fn create(self, store: &DirStore, id: &VolumeId) -> Result<()> {
        let [limits, _] = self.limits();
        match (self.kind, limits.bytes) {
            (VolumeKind::Image(format), Some(size)) => store.create_image(id, format, size).await?,
            _ => store.create(id, limits).await?,
        }
        Ok(())
    }

    /// Copies a volume that was expanded, or its snapshot.
    async fn copy(self, store: &DirStore, from: StoredId, to: &VolumeId) -> Result<()> {
        let [_, limits] = self.limits();
        match (self.kind, limits.bytes) {
            (VolumeKind::Image(format), Some(size)) => {
                store.create_image_from(to, &from, format, size).await?;
            }
            _ => store.create_volume_from(to, &from, limits).await?,
        }
        Ok(store.mark_published(to).await?)
    }

    /// Records a life.
    fn record(self, disk: &RecordedDisk) -> Result<()> {
        let mounted = MountedStore::mount(self.file_system, disk.part(0))?;
        let (store, [_, expanded]) = (mounted.store(), self.limits());
        mounted.wait_for(store.create_identity())?;
        disk.mark("prepared")?;
        mounted.wait_for(self.create(store, &id(1)))?;
        disk.mark(&format!("{VOLUME}-created"))?;
        let pod = TestPod::start(&mounted, &id(1))?;
        pod.write_data()?;
        disk.mark("written")?;
        mounted.wait_for(store.resize(&id(1), expanded))?;
        disk.mark("expanded")?;
        if self.is_copied() {
            self.record_copies(&mounted, disk)?;
        }
        drop(pod);
        record_removal(disk, VOLUME, || Ok(mounted.wait_for(store.remove(&id(1)))?))?;
        mounted.wait_for(store.wait_until_erased());
        disk.mark("erased")
    }

    /// Records the life of a snapshot and of its copy.
    fn record_copies(self, mounted: &MountedStore, disk: &RecordedDisk) -> Result<()> {
        let store = mounted.store();
        mounted.wait_for(store.create_snapshot(&snapshot_id(1), &id(1)))?;
        disk.mark(&format!("{SNAPSHOT}-created"))?;
        mounted.wait_for(self.copy(store, snapshot_id(1).into(), &id(2)))?;
        disk.mark(&format!("{COPY}-created"))?;
        record_removal(disk, SNAPSHOT, || Ok(mounted.wait_for(store.remove_snapshot(&snapshot_id(1)))?))?;
        record_removal(disk, COPY, || Ok(mounted.wait_for(store.remove(&id(2)))?))
    }

    /// Checks what a cut has left, and removes it.
    fn check(self, device: &Path, cut: &PowerCut) -> Result<()> {
        let mounted = MountedStore::mount(self.file_system, device)?;
        let store = mounted.store();
        mounted.wait_for(async {
            store.start_serving().await?;
            store.wait_until_erased().await;
            let identity = store.identity().await?;
            ensure!(matches!(identity, StoreIdentity::Present(_)), "the store has lost its identity");
            self.check_stored(store, mounted.path(), cut).await
        })?;
        self.check_content(&mounted, cut)?;
        mounted.wait_for(async {
            for number in 1..=3 {
                store.remove(&id(number)).await?;
            }
            store.remove_snapshot(&snapshot_id(1)).await?;
            store.wait_until_erased().await;
            anyhow::Ok(())
        })?;
        check_nothing_left(&mounted)
    }

    /// Checks which volumes and snapshots there are, with their limits and marks.
    async fn check_stored(self, store: &DirStore, base: &Path, cut: &PowerCut) -> Result<()> {
        let (volumes, snapshots) = (store.list().await?, store.list_snapshots().await?);
        let found = [
            (VOLUME, volumes.contains(&id(1))),
            (SNAPSHOT, snapshots.contains(&snapshot_id(1))),
            (COPY, volumes.contains(&id(2))),
        ];
        for (name, exists) in found {
            ensure!(must_exist(cut, name).is_none_or(|must| must == exists), "{name} exists: {exists}");
        }
        let mut stored: Vec<String> = volumes.iter().map(ToString::to_string).collect();
        stored.extend(snapshots.iter().map(ToString::to_string));
        let known = found.iter().filter(|(_, exists)| *exists).count();
        ensure!(stored.len() == known, "{stored:?} are stored");
        let mut marked = if self.kind == VolumeKind::Directory { Vec::new() } else { stored };
        marked.sort();
        let kinds = names(&base.join("kinds"));
        ensure!(kinds == marked, "{kinds:?} have marks, instead of {marked:?}");
        for place in [".new", ".trash"] {
            let left = names(&base.join(place));
            ensure!(left.is_empty(), "{left:?} are left in {place}");
        }
        for volume in &volumes {
            let (limits, [new, expanded]) = (store.usage(volume).await?.limits, self.limits());
            let may_be_new = *volume == id(1) && !cut.has_mark("expanded");
            ensure!(limits == expanded || may_be_new && limits == new, "{volume} has {limits:?}");
            let kind = store.inspect(volume)?.kind();
            ensure!(kind == self.kind, "{volume} is of the kind {kind}");
        }
        Ok(())
    }

    /// Checks that volumes can be mounted and expanded, the snapshot copied, and that all have their data.
    fn check_content(self, mounted: &MountedStore, cut: &PowerCut) -> Result<()> {
        let (store, [_, expanded]) = (mounted.store(), self.limits());
        let (volumes, snapshots) =
            mounted.wait_for(async { anyhow::Ok((store.list().await?, store.list_snapshots().await?)) })?;
        if !snapshots.is_empty() {
            mounted.wait_for(self.copy(store, snapshot_id(1).into(), &id(3)))?;
            TestPod::start(mounted, &id(3))?.check_data()?;
        }
        for volume in volumes {
            let pod = TestPod::start(mounted, &volume)?;
            if volume != id(1) || cut.has_mark("written") {
                pod.check_data()?;
            }
            mounted.wait_for(store.resize(&volume, expanded))?;
            pod.write_data()?;
        }
        Ok(())
    }

    fn cut_power(self, sample_count: usize) -> Result<()> {
        let disk = RecordedDisk::acquire(&[640 * MIB])?;
        self.file_system.format_device(disk.part(0))?;
        self.record(&disk)?;
        let recording = disk.finish()?;
        let operation = format!("the life of a volume of the kind {} on {:?}", self.kind, self.file_system);
        let plan = CutPlan::new(&operation, [sample_count, 30]);
        recording.check_cuts(&plan, |cut| self.check(recording.part(0), cut))
    }
}

fn record_removal(disk: &RecordedDisk, name: &str, remove: impl FnOnce() -> Result<()>) -> Result<()> {
    disk.mark(&format!("{name}-removing"))?;
    remove()?;
    disk.mark(&format!("{name}-removed"))
}

/// True if the object of this name in marks must be there; `None` while it is being created or removed.
fn must_exist(cut: &PowerCut, name: &str) -> Option<bool> {
    let has_mark = |moment| cut.has_mark(&format!("{name}-{moment}"));
    match ["created", "removing", "removed"].map(has_mark) {
        [_, _, true] => Some(false),
        [true, false, _] => Some(true),
        _ => None,
    }
}

/// Other tests look at all loop devices, and the kernel counts the files of a project a moment longer.
fn check_nothing_left(mounted: &MountedStore) -> Result<()> {
    let base = mounted.path();
    for place in PLACES {
        let left = names(&base.join(place));
        ensure!(left.is_empty(), "{left:?} are left in {place}");
    }
    let quota = mounted.quota();
    wait_until(FREE_WITHIN, "projects and loop devices to go", || {
        let (projects, devices) = (quota.list_projects()?, devices_below(base));
        ensure!(projects.is_empty() && devices.is_empty(), "{projects:?} and {devices:?} are left");
        Ok(())
    })
}

fn cut_power_on(file_system: FileSystem, sample_count: usize) {
    run_in_mount_namespace(move || {
        for kind in VolumeKind::ALL {
            VolumeLife { file_system, kind }
                .cut_power(sample_count)
                .unwrap_or_else(|error| panic!("{error:#}"));
        }
    });
}

#[test]
#[ignore = "sampled: needs kernel with 2 disks of 1 GiB"]
fn a_volume_on_xfs_is_complete_or_absent_after_power_cuts_and_so_are_its_snapshot_and_copy() {
    cut_power_on(FileSystem::Xfs, 2);
}

#[test]
#[ignore = "sampled: needs kernel with 2 disks of 1 GiB"]
fn a_volume_on_ext4_is_complete_or_absent_after_power_cuts() {
    cut_power_on(FileSystem::Ext4, 2);
}
