//! The guest's kernel: its download, and the two images that are made of it once.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::root_tree::{RootTree, find_libraries};
use crate::{AptClient, cache, command_output, tools};

/// A directory with `boot/vmlinuz-RELEASE` and `lib/modules/RELEASE`, as `dpkg -x` of a kernel package
/// creates, or `/` for the machine's kernel.
const GIVEN: &str = "NODEKEEL_GUEST_KERNEL";
/// Debian's kernel for virtual machines: few drivers, and all that the tests need as modules.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// The modules that the root's image needs before it can be mounted; others are loaded from there on demand.
const EARLY: [&str; 5] = ["virtio_pci", "virtio_blk", "virtio_console", "squashfs", "overlay"];
const INIT: &str = include_str!("init.sh");

/// The files that QEMU boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GuestKernel {
    /// Its release, and a hash that changes with the images.
    pub(super) name: String,
    /// The compressed kernel.
    pub(super) image: PathBuf,
    /// The first file system: a shell and the modules that find the root.
    pub(super) initramfs: PathBuf,
    /// All modules, as a squashfs that is mounted at `/usr/lib/modules`.
    pub(super) modules: PathBuf,
}

impl GuestKernel {
    /// Finds or builds them.
    ///
    /// # Errors
    /// A kernel can't be downloaded, or a tool is missing or fails.
    pub(super) fn find_or_build() -> Result<Self> {
        let source = find_source()?;
        let (release, image) = find_release(&source)?;
        let busybox = tools::find_tool(tools::BUSYBOX)?;
        let name = images_name(&release, &image, &busybox)?;
        let directory = cache::make_entry(&format!("guest-{name}"), |directory| {
            let is_static = find_libraries(std::slice::from_ref(&busybox))?.is_empty();
            ensure!(is_static, "{} isn't static: install Debian's busybox-static", busybox.display());
            let modules = release_modules(&source, &release)?;
            let work = directory.join("work");
            let tree = index_modules(&modules, &work, &release)?;
            fs::copy(&image, directory.join("vmlinuz"))
                .with_context(|| format!("copy {}", image.display()))?;
            write_initramfs(&directory.join("initramfs"), &busybox, &work, &release)?;
            write_modules(tree, &directory.join("modules"), &release)?;
            fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))
        })?;
        let [image, initramfs, modules] =
            ["vmlinuz", "initramfs", "modules"].map(|name| directory.join(name));
        Ok(Self { name, image, initramfs, modules })
    }
}

/// A name that changes with the kernel, the shell and the script of the images.
fn images_name(release: &str, image: &Path, busybox: &Path) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    (INIT, EARLY).hash(&mut hasher);
    for file in [image, busybox] {
        // Reading them would take longer than all other preparations of a boot.
        let stat = file.metadata().with_context(|| format!("stat {}", file.display()))?;
        (stat.len(), stat.mtime(), stat.mtime_nsec()).hash(&mut hasher);
    }
    Ok(format!("{release}-{:016x}", hasher.finish()))
}

/// The kernel's directory: the caller's, or the one that was downloaded.
fn find_source() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os(GIVEN).filter(|given| !given.is_empty()) {
        return Ok(given.into());
    }
    ensure!(
        cfg!(target_arch = "x86_64"),
        "Debian's kernel is for x86_64 only: set {GIVEN} to a directory with boot/vmlinuz-* and lib/modules"
    );
    cache::make_entry(PACKAGE, |directory| {
        download_kernel(directory).with_context(|| {
            format!("download a kernel; without a network, set {GIVEN} to a directory with boot/vmlinuz-* and lib/modules")
        })
    })
}

/// Downloads the package that the kernel's metapackage depends on.
fn download_kernel(directory: &Path) -> Result<()> {
    let apt = AptClient::new(directory.join("apt"), "amd64")?;
    let text = apt.run_program("apt-cache", &["depends", PACKAGE])?;
    let package = text.lines().find_map(kernel_package);
    let package = package
        .with_context(|| format!("find the kernel that {PACKAGE} depends on in apt-cache's output"))?;
    apt.run_program("apt-get", &["download", package])?;
    apt.unpack_into(directory)
}

fn kernel_package(line: &str) -> Option<&str> {
    line.trim().strip_prefix("Depends: ").filter(|name| name.starts_with("linux-image-"))
}

/// The newest kernel of the directory, and its file.
fn find_release(source: &Path) -> Result<(String, PathBuf)> {
    let boot = source.join("boot");
    let entries = fs::read_dir(&boot).with_context(|| format!("list {}", boot.display()))?.flatten();
    let kernels = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((name.strip_prefix("vmlinuz-")?.to_owned(), entry.path()))
    });
    let newest = kernels.max_by_key(|(release, _)| parse_release(release));
    newest.with_context(|| format!("find vmlinuz-* in {}", boot.display()))
}

/// The numbers of a release, by which `6.10` comes after `6.9`.
fn parse_release(release: &str) -> Vec<u64> {
    release.split(['.', '-']).filter_map(|number| number.parse().ok()).collect()
}

fn release_modules(source: &Path, release: &str) -> Result<PathBuf> {
    let places = ["lib/modules", "usr/lib/modules"].map(|place| source.join(place).join(release));
    match places.iter().find(|place| place.is_dir()) {
        Some(place) => Ok(place.clone()),
        None => bail!("the modules of {release} are missing in {}", source.display()),
    }
}

/// Writes the modules' indexes, which the package's installation would write; the modules stay in place.
fn index_modules(modules: &Path, work: &Path, release: &str) -> Result<PathBuf> {
    let own = work.join("lib/modules").join(release);
    fs::create_dir_all(&own).with_context(|| format!("create {}", own.display()))?;
    for name in ["kernel", "modules.order", "modules.builtin", "modules.builtin.modinfo"] {
        let from = modules.canonicalize().with_context(|| format!("find {}", modules.display()))?.join(name);
        if from.exists() {
            symlink(&from, own.join(name)).with_context(|| format!("link to {name}"))?;
        }
    }
    let depmod = tools::find_tool(tools::DEPMOD)?;
    command_output(Command::new(depmod).arg("-b").arg(work).arg(release))?;
    Ok(own)
}

/// The kernel's built-in initramfs has `/dev/console`, which only root could make here.
fn write_initramfs(to: &Path, busybox: &Path, work: &Path, release: &str) -> Result<()> {
    let root = work.join("initramfs");
    let place = |path: &str, content: &[u8]| {
        let path = root.join(path);
        fs::write(&path, content).and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
    };
    let placed = (|| {
        for directory in ["bin", "dev", "proc", "sys", "modules", "state", "image", "root"] {
            fs::create_dir_all(root.join(directory))?;
        }
        place("bin/busybox", &fs::read(busybox)?)?;
        symlink("busybox", root.join("bin/sh"))?;
        place("init", INIT.as_bytes())
    })();
    placed.with_context(|| format!("write {}", root.display()))?;
    for (number, module) in early_modules(work, release)?.iter().enumerate() {
        place(&format!("modules/{number:02}.ko"), module).context("write a kernel module")?;
    }
    let archive = r#""$0" find . | "$0" cpio -o -H newc -R 0:0 -F "$1""#;
    let mut shell = Command::new(busybox);
    shell.args(["sh", "-c", archive]).arg(busybox).arg(to).current_dir(root);
    command_output(&mut shell).map(drop)
}

/// The modules of [`EARLY`] and their dependencies, in the order in which they load.
fn early_modules(work: &Path, release: &str) -> Result<Vec<Vec<u8>>> {
    let modprobe = tools::find_tool(tools::MODPROBE)?;
    let mut paths: Vec<PathBuf> = Vec::new();
    for module in EARLY {
        let mut command = Command::new(&modprobe);
        command.arg("-d").arg(work).args(["-S", release, "--show-depends", module]);
        for line in command_output(&mut command)?.lines() {
            // `builtin NAME` is part of the kernel.
            let path = line.strip_prefix("insmod ").map(|path| PathBuf::from(path.trim_end()));
            paths.extend(path.filter(|path| !paths.contains(path)));
        }
    }
    paths.iter().map(|path| read_module(path)).collect()
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => tools::Tool { name: "xz", package: "xz-utils" },
        Some("zst") => tools::ZSTD,
        _ => return fs::read(path).with_context(|| format!("read {}", path.display())),
    };
    let done = Command::new(tools::find_tool(program)?).arg("-dc").arg(path).output();
    let done = done.with_context(|| format!("unpack {}", path.display()))?;
    ensure!(done.status.success(), "{} can't unpack {}", program.name, path.display());
    Ok(done.stdout)
}

fn write_modules(indexed: PathBuf, to: &Path, release: &str) -> Result<()> {
    let mut tree = RootTree::default();
    let at = Path::new("/").join(release);
    tree.copy_directory(&at, &indexed, &|_| true)?;
    let kernel = indexed.join("kernel").canonicalize().context("find the modules")?;
    tree.copy_directory(&at.join("kernel"), &kernel, &|_| true)?;
    tree.write_image(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_release_is_known_by_its_numbers() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("boot")).unwrap();
        for release in ["6.9.12-amd64", "6.10.3-amd64", "6.10.3-2-amd64"] {
            fs::write(directory.path().join("boot").join(format!("vmlinuz-{release}")), "").unwrap();
        }
        assert_eq!(find_release(directory.path()).unwrap().0, "6.10.3-2-amd64");
        assert!(release_modules(directory.path(), "6.9.12-amd64").is_err());
    }

    #[test]
    fn the_kernel_behind_the_metapackage_is_found() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n  Suggests: x\n";
        assert_eq!(text.lines().find_map(kernel_package), Some("linux-image-6.1.0-56-cloud-amd64"));
    }
}
