//! The reserve of the data volume, in a guest whose kernel enforces limits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::v1::{HealthRequest, HealthResponse, Node, State, StatusRequest};
use testbed::guest::disk::{FileSystem, GuestDisk};
use testbed::{ContainerImage, ScratchDir, command_output, tools};

use crate::harness::{NodedProcess, check, wait};

/// The share of images, with the 128 MiB that are left for etcd: a dozen images fill it on a disk of any size.
const SHARE: u64 = 290_000_000;

fn disk_bytes(path: &Path) -> (u64, u64) {
    let disk = nix::sys::statvfs::statvfs(path).unwrap();
    (disk.blocks() * disk.fragment_size(), disk.blocks_free() * disk.fragment_size())
}

/// An archive of `localhost/NAME:1`, with a layer of this many bytes.
fn write_image(directory: &Path, name: &str, bytes: u64) -> PathBuf {
    let (content, archive) =
        (directory.join(format!("{name}.content")), directory.join(format!("{name}.tar")));
    fs::File::create(&content).unwrap().set_len(bytes).unwrap();
    let image = ContainerImage::new(format!("localhost/{name}:1"));
    image.add_file(format!("{name}-content"), &content).write_archive(&archive).unwrap();
    fs::remove_file(content).unwrap();
    archive
}

/// The status of a runnable. It asks the node itself, as the guest has no nodectl.
fn status(noded: &NodedProcess, dn: &str) -> Node {
    let request = StatusRequest { dn: dn.into(), ..StatusRequest::default() };
    call(noded, async |mut client: NodeClient| client.status(request).await).node.unwrap()
}

fn health(noded: &NodedProcess) -> HealthResponse {
    call(noded, async |mut client: NodeClient| client.health(HealthRequest::default()).await)
}

fn call<T>(
    noded: &NodedProcess,
    request: impl AsyncFnOnce(NodeClient) -> Result<tonic::Response<T>, tonic::Status>,
) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = client::connect(&noded.socket()).await.unwrap();
        request(client).await.unwrap().into_inner()
    })
}

/// Imports an archive as a kubelet's pull, without the check of noded's imports. The error is containerd's.
fn pull(noded: &NodedProcess, archive: &Path) -> anyhow::Result<String> {
    noded.ctr(&["images", "import", "--no-unpack", archive.to_str().unwrap()])
}

/// Puts that many values of a megabyte.
fn put_values(count: usize) {
    let scratch = ScratchDir::new().unwrap();
    fs::write(scratch.path().join("value"), "x".repeat(1_000_000)).unwrap();
    let etcdctl = tools::find_tool(tools::ETCDCTL).unwrap();
    for key in 0..count {
        // Beside other work, an emulated etcd takes longer than the client's five seconds.
        let options = "--endpoints 127.0.0.1:2379 --command-timeout 120s";
        let script = format!("{} {options} put {key} <value", etcdctl.display());
        let mut put = Command::new("sh");
        command_output(put.args(["-c", &script]).env("ETCDCTL_API", "3").current_dir(scratch.path()))
            .unwrap();
    }
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 700 MiB, etcd, containerd and 2 GiB of memory"]
fn pulls_that_fill_an_xfs_leave_etcd_its_reserve_and_health_says_what_is_full() {
    let mounted = GuestDisk::acquire().unwrap().format_and_mount(FileSystem::Xfs, "prjquota").unwrap();
    let (scratch, images) = (ScratchDir::new().unwrap(), ScratchDir::new().unwrap());
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    mount(Some(mounted.mount_point()), &data, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    let reserve = disk_bytes(&data).0 - SHARE;
    let config = format!(
        "[services.etcd]\nclient_port = 2379\npeer_port = 2380\n[services.containerd]\nreserve = {reserve}\n"
    );
    let checked = check(scratch.path(), &config, &[]).output();
    assert!(checked.contains("a project limit keeps the reserve of the disk free"), "{checked}");

    let node = NodedProcess::start_in(scratch, &config, &[]);
    for dn in ["root.etcd", "root.containerd"] {
        wait(dn, || {
            let status = status(&node, dn);
            anyhow::ensure!(status.state() == State::Ready, "{status:?}");
            Ok(())
        });
    }
    put_values(1);
    let root = node.data().join("data/containerd/root").display().to_string();
    let is_full = |health: &HealthResponse| {
        health.conditions.iter().find(|found| found.object == root).map(|found| found.problem.clone())
    };
    assert_eq!(is_full(&health(&node)), None);
    let mut pulled = Vec::new();
    let refused = loop {
        let name = format!("image-{}", pulled.len());
        let archive = write_image(images.path(), &name, 12_000_000 + pulled.len() as u64);
        let imported = pull(&node, &archive);
        fs::remove_file(archive).unwrap();
        match imported {
            Ok(_) => pulled.push(name),
            Err(error) => break format!("{error:#}"),
        }
        assert!(pulled.len() < 20, "{pulled:?} are in a share of {SHARE} bytes");
    };
    println!("{} images of 12 MB; then: {refused}", pulled.len());
    assert!(refused.contains("no space left on device") && pulled.len() >= 4, "{pulled:?}: {refused}");
    put_values(4);
    let free = disk_bytes(&data).1;
    println!("{} MB are free of a reserve of {}", free / 1_000_000, reserve / 1_000_000);
    assert!(free > reserve / 2, "{free} bytes are free");
    for dn in ["root.etcd", "root.containerd"] {
        let status = status(&node, dn);
        assert_eq!((status.generation, status.restarts), (1, 0), "{status:?}");
    }
    let problem = is_full(&health(&node)).unwrap_or_else(|| panic!("{:?}", health(&node)));
    println!("{root}: {problem}");
    assert!(problem.contains("have almost used their share of the disk"), "{problem}");
    // Deleting images makes room, although nothing more can be written.
    for name in &pulled[..3] {
        node.ctr(&["images", "rm", "--sync", &format!("localhost/{name}:1")]).unwrap();
    }
    pull(&node, &write_image(images.path(), "later", 6_000_000)).unwrap();
    assert_eq!(is_full(&health(&node)), None);
    node.stop();
}
