//! Compares snapshots with what was recorded when they were unpacked, and with their layers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    PrepareSnapshotRequest, RemoveSnapshotRequest, UsageRequest, ViewSnapshotRequest,
};
use containerd_client::types::Mount;
use tokio::task::spawn_blocking;
use tonic::Status;
use tonic::transport::Channel;

use super::import::ImportLease;
use super::unpack::{apply_layer, chain_ids, check_disk_space, has_snapshot, unpack_error};
use crate::Digest;
use crate::digest::DigestHasher;
use crate::image::ImageLayer;
use crate::store::ImageStoreError;

/// See [`ImageStore::find_damaged_layer`](crate::ImageStore::find_damaged_layer).
pub(super) async fn find_damaged_layer(
    lease: &ImportLease,
    layers: &[ImageLayer],
    thorough: bool,
) -> Result<Option<usize>, ImageStoreError> {
    let mut below = None;
    for (number, (layer, name)) in layers.iter().zip(chain_ids(layers)).enumerate() {
        let proof = SnapshotProof { lease, layer, below, name };
        let is_intact = match has_snapshot(lease, name).await.map_err(|status| unpack_error(layer, status))? {
            false => return Ok(None),
            true if thorough => {
                check_disk_space(lease, layer, below).await?;
                proof.matches_layer().await
            }
            true => proof.matches_usage().await,
        };
        if !is_intact.map_err(|status| unpack_error(layer, status))? {
            return Ok(Some(number));
        }
        below = Some(name);
    }
    Ok(None)
}

struct SnapshotProof<'a> {
    lease: &'a ImportLease,
    layer: &'a ImageLayer,
    below: Option<Digest>,
    name: Digest,
}

impl SnapshotProof<'_> {
    fn client(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.lease.images.channel.clone())
    }

    fn snapshotter(&self) -> String {
        self.lease.images.snapshotter_name.clone()
    }

    /// Compares the number of files with the one that containerd has recorded: files that are gone.
    async fn matches_usage(&self) -> Result<bool, Status> {
        let request = UsageRequest { snapshotter: self.snapshotter(), key: self.name.to_string() };
        let usage = self.client().usage(self.lease.leased_request(request)).await?.into_inner();
        self.with_directory(async |directory| {
            let count = run_blocking(move || count_inodes(&directory)).await?;
            Ok(i64::try_from(count).is_ok_and(|count| count == usage.inodes))
        })
        .await
    }

    /// Unpacks the layer again next to its snapshot, and compares the files.
    async fn matches_layer(&self) -> Result<bool, Status> {
        let key = self.lease.unique_key("proof");
        let prepare = PrepareSnapshotRequest {
            snapshotter: self.snapshotter(),
            key: key.clone(),
            parent: self.below.map(|below| below.to_string()).unwrap_or_default(),
            labels: Default::default(),
        };
        let mounts = self.client().prepare(self.lease.leased_request(prepare)).await?.into_inner().mounts;
        let compare = async {
            let fresh = own_directory(&mounts);
            apply_layer(self.lease, self.layer, mounts).await?;
            self.with_directory(async |directory| match fresh {
                Some(fresh) => run_blocking(move || are_equal(&directory, &fresh)).await,
                None => Ok(true),
            })
            .await
        };
        let is_equal = compare.await;
        self.remove(key).await;
        is_equal
    }

    /// Calls a function with the directory that has the files of this snapshot alone. A snapshotter whose mounts show none
    /// is not looked at.
    async fn with_directory(
        &self,
        look: impl AsyncFnOnce(PathBuf) -> Result<bool, Status>,
    ) -> Result<bool, Status> {
        let key = self.lease.unique_key("view");
        let view = ViewSnapshotRequest {
            snapshotter: self.snapshotter(),
            key: key.clone(),
            parent: self.name.to_string(),
            labels: Default::default(),
        };
        let mounts = self.client().view(self.lease.leased_request(view)).await?.into_inner().mounts;
        let looked = match own_directory(&mounts) {
            Some(directory) => look(directory).await,
            None => Ok(true),
        };
        self.remove(key).await;
        looked
    }

    async fn remove(&self, key: String) {
        let remove = RemoveSnapshotRequest { snapshotter: self.snapshotter(), key };
        // Deleting the lease removes what remains if this fails.
        drop(self.client().remove(self.lease.leased_request(remove)).await);
    }
}

async fn run_blocking<T: Send + 'static>(
    look: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Status> {
    let looked = spawn_blocking(look).await;
    let looked = looked.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
    looked.map_err(|error| Status::internal(error.to_string()))
}

/// The directory of the snapshot without those below it: the source of a bind mount, or the uppermost one of an overlay.
fn own_directory(mounts: &[Mount]) -> Option<PathBuf> {
    let [mount] = mounts else { return None };
    match mount.r#type.as_str() {
        "bind" => Some(PathBuf::from(&mount.source)),
        "overlay" => {
            let option = |key: &str| mount.options.iter().find_map(|option| option.strip_prefix(key));
            let lower = || option("lowerdir=").and_then(|lower| lower.split(':').next());
            option("upperdir=").or_else(lower).map(PathBuf::from)
        }
        _ => None,
    }
}

/// *Source:* continuity's `fs.DiskUsage`, from which containerd records the number: each inode once, the directory itself
/// included.
fn count_inodes(directory: &Path) -> io::Result<usize> {
    let mut inodes = BTreeSet::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(path) = pending.pop() {
        let metadata = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        inodes.insert((metadata.dev(), metadata.ino()));
        if metadata.is_dir() {
            for entry in fs::read_dir(&path)? {
                pending.push(entry?.path());
            }
        }
    }
    Ok(inodes.len())
}

/// Returns whether two directories have the same files: types, modes, owners, links, devices and bytes. Times and extended
/// attributes are not compared.
fn are_equal(a: &Path, b: &Path) -> io::Result<bool> {
    let (mut pending, mut seen) = (vec![PathBuf::new()], BTreeMap::new());
    while let Some(path) = pending.pop() {
        let (a, b) = (a.join(&path), b.join(&path));
        let (Ok(of_a), Ok(of_b)) = (fs::symlink_metadata(&a), fs::symlink_metadata(&b)) else {
            return Ok(false);
        };
        let identity = |found: &Metadata| (found.mode(), found.uid(), found.gid());
        if identity(&of_a) != identity(&of_b) {
            return Ok(false);
        }
        let kind = of_a.file_type();
        let is_equal = if kind.is_dir() {
            let (in_a, in_b) = (list_names(&a)?, list_names(&b)?);
            pending.extend(in_a.iter().map(|name| path.join(name)));
            in_a == in_b
        } else if kind.is_symlink() {
            fs::read_link(&a)? == fs::read_link(&b)?
        } else if kind.is_file() {
            // Each inode once, however many names it has.
            let known = seen.insert(of_a.ino(), of_b.ino());
            known == Some(of_b.ino()) || (of_a.len() == of_b.len() && hash_file(&a)? == hash_file(&b)?)
        } else {
            kind.is_fifo() || kind.is_socket() || of_a.rdev() == of_b.rdev()
        };
        if !is_equal {
            return Ok(false);
        }
    }
    Ok(true)
}

fn list_names(directory: &Path) -> io::Result<BTreeSet<std::ffi::OsString>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
}

fn hash_file(path: &Path) -> io::Result<Digest> {
    let (mut file, mut hasher) = (File::open(path)?, DigestHasher::default());
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            read => hasher.update(&buffer[..read]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn directories_are_equal_with_the_same_files_and_bytes() {
        let scratch = tempfile::tempdir().expect("a directory");
        let create = |name: &str| {
            let top = scratch.path().join(name);
            fs::create_dir_all(top.join("bin")).expect("created");
            fs::write(top.join("bin/tool"), "bytes").expect("written");
            fs::hard_link(top.join("bin/tool"), top.join("bin/link")).expect("linked");
            symlink("tool", top.join("bin/symlink")).expect("linked");
            top
        };
        let (a, b) = (create("a"), create("b"));
        assert!(are_equal(&a, &b).expect("compared"));
        assert_eq!(count_inodes(&a).expect("counted"), 4, "two directories, a file and a link");
        fs::write(b.join("bin/tool"), [0; 5]).expect("written");
        assert!(!are_equal(&a, &b).expect("compared"), "zeroed");
        fs::write(b.join("bin/tool"), "bytes").expect("written");
        assert!(are_equal(&a, &b).expect("compared"));
        fs::remove_file(a.join("bin/symlink")).expect("removed");
        assert!(!are_equal(&a, &b).expect("compared"), "a file less");
        assert_eq!(count_inodes(&a).expect("counted"), 3);
        fs::remove_dir_all(&a).expect("removed");
        assert!(!are_equal(&a, &b).expect("compared"), "nothing");
        assert_eq!(count_inodes(&a).expect("counted"), 0);
    }

    #[test]
    fn a_snapshot_has_the_uppermost_directory_of_its_mounts() {
        let mount = |r#type: &str, options: &[&str]| Mount {
            r#type: r#type.into(),
            source: "/source".into(),
            target: String::new(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
        };
        let of = |r#type: &str, options: &[&str]| own_directory(&[mount(r#type, options)]);
        assert_eq!(of("bind", &["ro", "rbind"]), Some("/source".into()));
        assert_eq!(of("overlay", &["index=off", "lowerdir=/2/fs:/1/fs"]), Some("/2/fs".into()));
        let active = ["workdir=/3/work", "upperdir=/3/fs", "lowerdir=/2/fs"];
        assert_eq!(of("overlay", &active), Some("/3/fs".into()));
        assert_eq!((of("btrfs", &[]), own_directory(&[])), (None, None));
    }
}
