//! A pod with a volume, which is mounted as by the kubelet.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use nodekeel_provisioner::csi::{BindMounter, MountRestrictions, TargetPath, VolumeMounter as _};
use nodekeel_provisioner::{ImageFormat, VolumeId, VolumeKind, VolumeOpener as _};
use testbed::wait_until;

use super::store::{FREE_WITHIN, MountedStore};

const DATA: &[u8] = b"data";

/// A pod with one volume, which is unmounted when this is dropped.
pub(super) struct TestPod {
    mounter: BindMounter,
    target: TargetPath,
    /// Where the volume is.
    path: PathBuf,
    kind: VolumeKind,
    _kubelet: tempfile::TempDir,
}

impl TestPod {
    pub(super) fn start(mounted: &MountedStore, volume: &VolumeId) -> Result<Self> {
        let kubelet = tempfile::tempdir()?;
        let path = kubelet.path().join("volume");
        let target = TargetPath::try_new(kubelet.path(), path.to_str().context("the path is UTF-8")?)?;
        let opened = mounted.store().open(volume)?;
        let mounter = BindMounter::new(kubelet.path());
        mounter.mount(&opened, &target, MountRestrictions::default())?;
        Ok(Self { mounter, target, path, kind: opened.kind(), _kubelet: kubelet })
    }

    fn is_device(&self) -> bool {
        self.kind == VolumeKind::Image(ImageFormat::Block)
    }

    fn file_path(&self) -> PathBuf {
        if self.is_device() { self.path.clone() } else { self.path.join("file") }
    }

    /// Writes data, durably.
    pub(super) fn write_data(&self) -> Result<()> {
        let create = !self.is_device();
        let mut file = File::options().write(true).create(create).truncate(false).open(self.file_path())?;
        file.write_all(DATA)?;
        file.sync_all()?;
        if create {
            File::open(&self.path)?.sync_all()?;
        }
        Ok(())
    }

    /// Checks that the data are there.
    pub(super) fn check_data(&self) -> Result<()> {
        let mut found = vec![0; DATA.len()];
        File::open(self.file_path())?.read_exact(&mut found)?;
        ensure!(found == DATA, "the volume has {found:?}");
        Ok(())
    }
}

impl Drop for TestPod {
    fn drop(&mut self) {
        let _ = wait_until(FREE_WITHIN, "an unmount", || Ok(self.mounter.unmount(&self.target)?));
    }
}
