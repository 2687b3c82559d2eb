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

/// Declares a constant for each program that this workspace's code finds, and [`ALL`] of them.
macro_rules! tools {
    (
        named { $($(#[$doc:meta])* $constant:ident = $name:literal of $package:literal;)* }
        others { $($other:literal of $other_package:literal;)* }
    ) => {
        $($(#[$doc])* pub const $constant: Tool = Tool { name: $name, package: $package };)*
        /// Every program that the workspace's builds, tests, benches and demo run.
        pub const ALL: &[Tool] =
            &[$($constant,)* $(Tool { name: $other, package: $other_package },)*];
    };
}

tools! {
    named {
        /// The etcd server.
        ETCD = "etcd" of "etcd-server";
        /// Etcd's client.
        ETCDCTL = "etcdctl" of "etcd-client";
        /// The containerd daemon.
        CONTAINERD = "containerd" of "containerd";
        /// Containerd's client.
        CTR = "ctr" of "containerd";
        /// The runtime that containerd's shim calls.
        RUNC = "runc" of "runc";
        /// Decrypts the backups of a cluster.
        AGE = "age" of "age";
        /// Makes the keys for them.
        AGE_KEYGEN = "age-keygen" of "age";
        /// Copies images between archives and layouts.
        SKOPEO = "skopeo" of "skopeo";
        /// Builds images, and pushes them into archives.
        BUILDAH = "buildah" of "buildah";
        /// Makes and changes images in layouts.
        UMOCI = "umoci" of "umoci";
        /// Go's compiler, which builds what Debian lacks; an old one fetches a newer one first.
        GO = "go" of "golang-go";
        /// Runs a program as another user.
        SETPRIV = "setpriv" of "util-linux";
        /// Runs a program in new namespaces.
        UNSHARE = "unshare" of "util-linux";
        /// The machine in which guests run.
        QEMU = "qemu-system-x86_64" of "qemu-system-x86";
        /// A TPM 2.0 in software, for guests and for tests on this machine.
        SWTPM = "swtpm" of "swtpm";
        /// A Tang server, which answers one connection at its standard input and output.
        TANGD = "tangd" of "tang";
        /// A guest's small programs; static, since its shell comes before every library.
        BUSYBOX = "busybox" of "busybox-static";
        /// A guest's shell once its root is there.
        SH = "sh" of "dash";
        /// Makes a guest's root from a tar stream.
        SQFSTAR = "sqfstar" of "squashfs-tools";
        /// Lists the libraries that a guest's programs need.
        LDD = "ldd" of "libc-bin";
        /// Writes the index of a guest's kernel modules.
        DEPMOD = "depmod" of "kmod";
        /// Lists the modules in the order in which they load.
        MODPROBE = "modprobe" of "kmod";
        /// Formats XFS.
        MKFS_XFS = "mkfs.xfs" of "xfsprogs";
        /// XFS' program for quotas, a peer in benches.
        XFS_QUOTA = "xfs_quota" of "xfsprogs";
        /// Grows XFS.
        XFS_GROWFS = "xfs_growfs" of "xfsprogs";
        /// Tells where the blocks of a file are.
        XFS_IO = "xfs_io" of "xfsprogs";
        /// Formats ext4.
        MKFS_EXT4 = "mkfs.ext4" of "e2fsprogs";
        /// Changes an ext4's features.
        TUNE2FS = "tune2fs" of "e2fsprogs";
        /// Formats FAT.
        MKFS_VFAT = "mkfs.vfat" of "dosfstools";
        /// Formats btrfs.
        MKFS_BTRFS = "mkfs.btrfs" of "btrfs-progs";
        /// Creates and checks partition tables.
        SGDISK = "sgdisk" of "gdisk";
        /// Manages logical volumes.
        LVM = "lvm" of "lvm2";
        /// Manages software RAIDs.
        MDADM = "mdadm" of "mdadm";
        /// Formats dm-integrity.
        INTEGRITYSETUP = "integritysetup" of "cryptsetup-bin";
        /// Formats LUKS.
        CRYPTSETUP = "cryptsetup" of "cryptsetup-bin";
        /// Makes a disk whose writes are logged, for power cuts.
        DMSETUP = "dmsetup" of "dmsetup";
        /// Identifies the content of a disk.
        BLKID = "blkid" of "util-linux";
        /// Runs a program with a file locked.
        FLOCK = "flock" of "util-linux";
        /// Mounts with every option, which busybox doesn't.
        MOUNT = "mount" of "mount";
        /// Its counterpart.
        UMOUNT = "umount" of "mount";
        /// Creates network namespaces, and links between them.
        IP = "ip" of "iproute2";
        /// Limits what a link sends.
        TC = "tc" of "iproute2";
        /// Drops packets of one connection.
        IPTABLES = "iptables" of "iptables";
        /// Runs a program in another process's namespaces, or in named ones.
        NSENTER = "nsenter" of "util-linux";
        /// Suspends a file system's writes.
        FSFREEZE = "fsfreeze" of "util-linux";
        /// Makes a disk of a file.
        LOSETUP = "losetup" of "mount";
        /// Starts and stops systemd's units.
        SYSTEMCTL = "systemctl" of "systemd";
        /// The linker of Rust's programs, and the compiler of the C in some crates.
        CC = "cc" of "gcc";
        /// Compresses archives of images, and unpacks modules of some kernels.
        ZSTD = "zstd" of "zstd";
    }
    // What tests and builds call by its name.
    others {
        "protoc" of "protobuf-compiler";
        "runsv" of "runit";
        "s6-supervise" of "s6";
        "mcopy" of "mtools";
        "mkntfs" of "ntfs-3g";
        "mkfs.exfat" of "exfatprogs";
        "mkfs.f2fs" of "f2fs-tools";
        "mkfs.nilfs2" of "nilfs-tools";
        "mkreiserfs" of "reiserfsprogs";
        "mkfs.reiser4" of "reiser4progs";
        "mkfs.jfs" of "jfsutils";
        "mkapfs" of "apfsprogs";
        "mkudffs" of "udftools";
        "mkfs.ocfs2" of "ocfs2-tools";
        "mkfs.gfs2" of "gfs2-utils";
        "makefs" of "makefs";
        "mkfs.erofs" of "erofs-utils";
        "genromfs" of "genromfs";
        "genisoimage" of "genisoimage";
        "drbdmeta" of "drbd-utils";
        "make-bcache" of "bcache-tools";
        "clevis" of "clevis";
        "jose" of "jose";
        "strace" of "strace";
        "debootstrap" of "debootstrap";
        "strip" of "binutils";
        "systemd-analyze" of "systemd";
        "git" of "git";
    }
}

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

const USUAL: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/libexec";

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
    fn the_error_names_the_package() {
        let absent = Tool { name: "no-such-program", package: "no-such-package" };
        let missing = find_in(absent, None, Some("/nowhere::".into())).unwrap_err();
        assert!(missing.to_string().contains("apt-get install no-such-package"), "{missing}");
        assert!(missing.searched.iter().all(|place| !place.as_os_str().is_empty()));
    }
}
