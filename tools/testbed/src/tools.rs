//! The path of a program, and the Debian package that has it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// A program that tests and tasks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tool {
    /// The name of its file.
    pub name: &'static str,
    /// The Debian package that has it.
    pub package: &'static str,
}

/// The etcd server.
pub const ETCD: Tool = Tool { name: "etcd", package: "etcd-server" };
/// Etcd's client.
pub const ETCDCTL: Tool = Tool { name: "etcdctl", package: "etcd-client" };
/// The containerd daemon.
pub const CONTAINERD: Tool = Tool { name: "containerd", package: "containerd" };
/// Containerd's client.
pub const CTR: Tool = Tool { name: "ctr", package: "containerd" };
/// The runtime that containerd's shim calls.
pub const RUNC: Tool = Tool { name: "runc", package: "runc" };
/// Copies images between archives and layouts.
pub const SKOPEO: Tool = Tool { name: "skopeo", package: "skopeo" };
/// Makes and changes images in layouts.
pub const UMOCI: Tool = Tool { name: "umoci", package: "umoci" };
/// The compiler of protobuf files, called by the builds of etcd's and containerd's clients.
pub const PROTOC: Tool = Tool { name: "protoc", package: "protobuf-compiler" };
/// Go's compiler, which builds what Debian lacks; an old one fetches a newer one first.
pub const GO: Tool = Tool { name: "go", package: "golang-go" };
/// Runit's supervisor of one process, a peer in benches.
pub const RUNSV: Tool = Tool { name: "runsv", package: "runit" };
/// S6's supervisor of one process, a peer in benches.
pub const S6_SUPERVISE: Tool = Tool { name: "s6-supervise", package: "s6" };
/// Runs a program as another user.
pub const SETPRIV: Tool = Tool { name: "setpriv", package: "util-linux" };
/// Runs a program in new namespaces.
pub const UNSHARE: Tool = Tool { name: "unshare", package: "util-linux" };
/// The machine in which guests run.
pub const QEMU: Tool = Tool { name: "qemu-system-x86_64", package: "qemu-system-x86" };
/// A TPM 2.0 in software, for guests and for tests on this machine.
pub const SWTPM: Tool = Tool { name: "swtpm", package: "swtpm" };
/// A guest's small programs; static, since its shell comes before every library.
pub const BUSYBOX: Tool = Tool { name: "busybox", package: "busybox-static" };
/// A guest's shell once its root is there.
pub const SH: Tool = Tool { name: "sh", package: "dash" };
/// Makes a guest's root from a tar stream.
pub const SQFSTAR: Tool = Tool { name: "sqfstar", package: "squashfs-tools" };
/// Lists the libraries that a guest's programs need.
pub const LDD: Tool = Tool { name: "ldd", package: "libc-bin" };
/// Writes the index of a guest's kernel modules.
pub const DEPMOD: Tool = Tool { name: "depmod", package: "kmod" };
/// Lists the modules in the order in which they load.
pub const MODPROBE: Tool = Tool { name: "modprobe", package: "kmod" };
/// Formats XFS.
pub const MKFS_XFS: Tool = Tool { name: "mkfs.xfs", package: "xfsprogs" };
/// XFS' program for quotas, a peer in benches.
pub const XFS_QUOTA: Tool = Tool { name: "xfs_quota", package: "xfsprogs" };
/// Grows XFS.
pub const XFS_GROWFS: Tool = Tool { name: "xfs_growfs", package: "xfsprogs" };
/// Formats ext4.
pub const MKFS_EXT4: Tool = Tool { name: "mkfs.ext4", package: "e2fsprogs" };
/// Changes an ext4's features.
pub const TUNE2FS: Tool = Tool { name: "tune2fs", package: "e2fsprogs" };
/// Formats FAT.
pub const MKFS_VFAT: Tool = Tool { name: "mkfs.vfat", package: "dosfstools" };
/// Formats btrfs.
pub const MKFS_BTRFS: Tool = Tool { name: "mkfs.btrfs", package: "btrfs-progs" };
/// Creates and checks partition tables.
pub const SGDISK: Tool = Tool { name: "sgdisk", package: "gdisk" };
/// Copies files into FAT.
pub const MCOPY: Tool = Tool { name: "mcopy", package: "mtools" };
/// Formats NTFS.
pub const MKNTFS: Tool = Tool { name: "mkntfs", package: "ntfs-3g" };
/// Formats exFAT.
pub const MKFS_EXFAT: Tool = Tool { name: "mkfs.exfat", package: "exfatprogs" };
/// Formats F2FS.
pub const MKFS_F2FS: Tool = Tool { name: "mkfs.f2fs", package: "f2fs-tools" };
/// Formats NILFS2.
pub const MKFS_NILFS2: Tool = Tool { name: "mkfs.nilfs2", package: "nilfs-tools" };
/// Formats ReiserFS.
pub const MKREISERFS: Tool = Tool { name: "mkreiserfs", package: "reiserfsprogs" };
/// Formats Reiser4.
pub const MKFS_REISER4: Tool = Tool { name: "mkfs.reiser4", package: "reiser4progs" };
/// Formats JFS.
pub const MKFS_JFS: Tool = Tool { name: "mkfs.jfs", package: "jfsutils" };
/// Formats APFS.
pub const MKAPFS: Tool = Tool { name: "mkapfs", package: "apfsprogs" };
/// Formats UDF.
pub const MKUDFFS: Tool = Tool { name: "mkudffs", package: "udftools" };
/// Formats OCFS2.
pub const MKFS_OCFS2: Tool = Tool { name: "mkfs.ocfs2", package: "ocfs2-tools" };
/// Formats GFS2.
pub const MKFS_GFS2: Tool = Tool { name: "mkfs.gfs2", package: "gfs2-utils" };
/// Makes an UFS of files.
pub const MAKEFS: Tool = Tool { name: "makefs", package: "makefs" };
/// Makes an EROFS of files.
pub const MKFS_EROFS: Tool = Tool { name: "mkfs.erofs", package: "erofs-utils" };
/// Makes a romfs of files.
pub const GENROMFS: Tool = Tool { name: "genromfs", package: "genromfs" };
/// Makes an ISO 9660 of files.
pub const GENISOIMAGE: Tool = Tool { name: "genisoimage", package: "genisoimage" };
/// Writes DRBD's metadata.
pub const DRBDMETA: Tool = Tool { name: "drbdmeta", package: "drbd-utils" };
/// Formats bcache.
pub const MAKE_BCACHE: Tool = Tool { name: "make-bcache", package: "bcache-tools" };
/// Manages logical volumes.
pub const LVM: Tool = Tool { name: "lvm", package: "lvm2" };
/// Manages software RAIDs.
pub const MDADM: Tool = Tool { name: "mdadm", package: "mdadm" };
/// Formats dm-integrity.
pub const INTEGRITYSETUP: Tool = Tool { name: "integritysetup", package: "cryptsetup-bin" };
/// Formats LUKS.
pub const CRYPTSETUP: Tool = Tool { name: "cryptsetup", package: "cryptsetup-bin" };
/// Makes a disk whose writes are logged, for power cuts.
pub const DMSETUP: Tool = Tool { name: "dmsetup", package: "dmsetup" };
/// Lists the system calls of a process.
pub const STRACE: Tool = Tool { name: "strace", package: "strace" };
/// Identifies the content of a disk.
pub const BLKID: Tool = Tool { name: "blkid", package: "util-linux" };
/// Runs a program with a file locked.
pub const FLOCK: Tool = Tool { name: "flock", package: "util-linux" };
/// Mounts with every option, which busybox doesn't.
pub const MOUNT: Tool = Tool { name: "mount", package: "mount" };
/// Its counterpart.
pub const UMOUNT: Tool = Tool { name: "umount", package: "mount" };
/// Creates network namespaces, and links between them.
pub const IP: Tool = Tool { name: "ip", package: "iproute2" };
/// Checks systemd's units.
pub const SYSTEMD_ANALYZE: Tool = Tool { name: "systemd-analyze", package: "systemd" };
/// Starts and stops systemd's units.
pub const SYSTEMCTL: Tool = Tool { name: "systemctl", package: "systemd" };

/// The linker of Rust's programs, and the compiler of the C in some crates.
pub const CC: Tool = Tool { name: "cc", package: "gcc" };
/// Compresses archives of images, and unpacks modules of some kernels.
pub const ZSTD: Tool = Tool { name: "zstd", package: "zstd" };
/// Names the commit of a bench, and the files that a change touches.
pub const GIT: Tool = Tool { name: "git", package: "git" };

/// Every program that the workspace's builds, tests, benches and demo run.
pub const ALL: [Tool; 63] = [
    CC,
    GIT,
    IP,
    SYSTEMD_ANALYZE,
    SYSTEMCTL,
    ZSTD,
    ETCD,
    ETCDCTL,
    CONTAINERD,
    CTR,
    RUNC,
    SKOPEO,
    UMOCI,
    PROTOC,
    GO,
    RUNSV,
    S6_SUPERVISE,
    SETPRIV,
    UNSHARE,
    QEMU,
    SWTPM,
    BUSYBOX,
    SH,
    SQFSTAR,
    LDD,
    DEPMOD,
    MODPROBE,
    MKFS_XFS,
    XFS_QUOTA,
    XFS_GROWFS,
    MKFS_EXT4,
    TUNE2FS,
    MKFS_VFAT,
    MKFS_BTRFS,
    SGDISK,
    LVM,
    MDADM,
    INTEGRITYSETUP,
    MCOPY,
    MKNTFS,
    MKFS_EXFAT,
    MKFS_F2FS,
    MKFS_NILFS2,
    MKREISERFS,
    MKFS_REISER4,
    MKFS_JFS,
    MKAPFS,
    MKUDFFS,
    MKFS_OCFS2,
    MKFS_GFS2,
    MAKEFS,
    MKFS_EROFS,
    GENROMFS,
    GENISOIMAGE,
    DRBDMETA,
    MAKE_BCACHE,
    CRYPTSETUP,
    DMSETUP,
    STRACE,
    BLKID,
    FLOCK,
    MOUNT,
    UMOUNT,
];

/// A file that a program reads, and the Debian package that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedFile {
    /// Where the package puts it.
    pub path: &'static str,
    /// The Debian package that has it.
    pub package: &'static str,
}

/// Files that those programs need and their packages don't bring: protoc's standard types, the network of
/// pods, C's headers, and the certificates of the registries from which Go and cargo download.
pub const FILES: [SharedFile; 4] = [
    SharedFile { path: "/usr/include/google/protobuf/descriptor.proto", package: "libprotobuf-dev" },
    SharedFile { path: "/usr/lib/cni/bridge", package: "containernetworking-plugins" },
    SharedFile { path: "/usr/include/stdlib.h", package: "libc6-dev" },
    SharedFile { path: "/etc/ssl/certs/ca-certificates.crt", package: "ca-certificates" },
];

/// A program that was not found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingTool {
    /// The program.
    pub tool: Tool,
    /// The directories that were searched.
    pub searched: Vec<PathBuf>,
}

impl fmt::Display for MissingTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tool { name, package } = self.tool;
        let places: Vec<_> = self.searched.iter().map(|place| place.display().to_string()).collect();
        let places = places.join(", ");
        write!(f, "find {name} in {places}: install Debian's {package} (`apt-get install {package}`)")
    }
}

impl std::error::Error for MissingTool {}

/// Finds a program: in the directories of `NODEKEEL_BIN`, then of `PATH`, then in the usual ones (a plain
/// user's `PATH` leaves out `/usr/sbin`, where daemons are).
///
/// # Errors
/// [`MissingTool`] names the package to install.
pub fn find_tool(tool: Tool) -> Result<PathBuf, MissingTool> {
    find_in(tool, std::env::var_os("NODEKEEL_BIN"), std::env::var_os("PATH"))
}

const USUAL: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn find_in(tool: Tool, preferred: Option<OsString>, path: Option<OsString>) -> Result<PathBuf, MissingTool> {
    let mut searched = Vec::new();
    let lists = [preferred.as_deref(), path.as_deref(), Some(OsStr::new(USUAL))];
    for directory in lists.into_iter().flatten().flat_map(std::env::split_paths) {
        // An empty entry would mean the working directory.
        if directory.as_os_str().is_empty() || searched.contains(&directory) {
            continue;
        }
        let candidate = directory.join(tool.name);
        if is_program(&candidate) {
            return Ok(candidate);
        }
        searched.push(directory);
    }
    Err(MissingTool { tool, searched })
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn place(directory: &Path, mode: u32) -> PathBuf {
        let path = directory.join("etcd");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn nodekeel_bin_comes_before_path() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (preferred, _other) = (place(first.path(), 0o755), place(second.path(), 0o755));
        let found = find_in(ETCD, Some(first.path().into()), Some(second.path().into()));
        assert_eq!(found, Ok(preferred));
    }

    #[test]
    fn a_file_that_cannot_be_executed_is_skipped() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        place(first.path(), 0o644);
        let program = place(second.path(), 0o755);
        assert_eq!(find_in(ETCD, Some(first.path().into()), Some(second.path().into())), Ok(program));
    }

    #[test]
    fn the_error_names_the_package() {
        let absent = Tool { name: "no-such-program", package: "no-such-package" };
        let missing = find_in(absent, None, Some("/nowhere::".into())).unwrap_err();
        assert!(missing.to_string().contains("apt-get install no-such-package"), "{missing}");
        assert!(missing.searched.iter().all(|place| !place.as_os_str().is_empty()));
    }
}
