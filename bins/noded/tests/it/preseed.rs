//! Preseeded images under noded: who waits for them, what is left out, and what a full disk does to etcd.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use testbed::{ContainerImage, ScratchDir, command_output, tools};

use crate::harness::{EtcdPorts, NodedProcess, service_config, sleep_config};
use crate::health::{wait_healthy, wait_problem};

const PRESEED: &str = "root.containerd.preseed";

/// A directory of bundles.
fn new_bundle_dir() -> ScratchDir {
    let images = ScratchDir::new().unwrap();
    fs::create_dir(images.path().join("k8s.io")).unwrap();
    images
}

/// Writes `localhost/NAME:1` with a layer of this many bytes as `NAME.tar`.
fn put_image(images: &ScratchDir, name: &str, bytes: u64) {
    let content = images.path().join(format!("{name}.content"));
    File::create(&content).unwrap().set_len(bytes).unwrap();
    let archive = images.path().join(format!("k8s.io/{name}.tar"));
    ContainerImage::new(format!("localhost/{name}:1"))
        .add_file(format!("{name}-content"), &content)
        .write_archive(&archive)
        .unwrap();
    fs::remove_file(content).unwrap();
}

/// The configuration of a containerd that preseeds these bundles, with more sections.
fn preseed_config(bundles: &Path, sections: &str) -> String {
    format!("services.etcd.enable = false\n[services.containerd]\npreseed = {bundles:?}\n{sections}")
}

/// A service that needs the images.
fn kubelet_config() -> String {
    sleep_config("kubelet", "depends_on = [\"containerd.preseed\"]")
}

/// The problem of the import in health, once it has one with this text.
fn wait_condition(noded: &NodedProcess, text: &str) -> String {
    wait_problem(noded, "images", text)["problem"].as_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs containerd and root"]
fn a_service_that_depends_on_preseed_starts_when_the_images_are_there() {
    let images = new_bundle_dir();
    for number in 0..8 {
        put_image(&images, &format!("image-{number}"), 4_000_000);
    }
    let scratch = ScratchDir::new().unwrap();
    let seen = scratch.path().join("seen");
    let socket = scratch.path().join("data/run/containerd/containerd.sock");
    let ctr = tools::find_tool(tools::CTR).unwrap();
    let script =
        format!("{} -a {} -n k8s.io images ls -q >{}", ctr.display(), socket.display(), seen.display());
    let keys = "readiness = \"exit\"\ndepends_on = [\"containerd.preseed\"]";
    let config = preseed_config(images.path(), &service_config("kubelet", &script, keys));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    noded.wait_for_event("root.service.kubelet", 1, "ready");
    assert_eq!(fs::read_to_string(seen).unwrap().lines().count(), 8, "all of them");
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_containerd_whose_cri_does_not_load_is_not_ready_and_status_says_why() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("containerd.toml");
    let text = format!(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"nowhere\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{}/opt\"\n",
        scratch.path().display()
    );
    fs::write(&file, text).unwrap();
    let config =
        format!("services.etcd.enable = false\nservices.containerd.config = \"{}\"\n", file.display());
    let noded = NodedProcess::start(&config);
    // After its start timeout of a minute.
    let status = noded.wait_status("root.containerd", |status| {
        assert!(status["state"] != "ready", "{status}");
        !status["exits"].as_array().unwrap().is_empty()
    });
    let reason = status["exits"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("CRI") && reason.contains("disabled_plugins"), "{reason}");
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_bundle_that_failed_is_named_in_health_and_neither_holds_nor_restarts_the_services() {
    let images = new_bundle_dir();
    fs::write(images.path().join("k8s.io/bad.tar"), "scribble").unwrap();
    let noded = NodedProcess::start(&preseed_config(images.path(), &kubelet_config()));
    let reason = wait_condition(&noded, "k8s.io/bad.tar");
    assert!(reason.contains("truncated"), "{reason}");
    // The other services have what there is.
    noded.wait_for_event(PRESEED, 1, "ready");
    noded.wait_for_event("root.service.kubelet", 1, "ready");
    // Also when they restart while it lasts.
    noded.ask(&["restart", "--wait", "root.service.kubelet"]);
    let states = noded.ask_json(&["images"]);
    assert_eq!(
        (&states[0]["bundle"], &states[0]["state"]),
        (&"bad.tar".into(), &"wanted".into()),
        "{states}"
    );
    assert!(states[0]["problem"].as_str().unwrap().contains("truncated"), "{states}");
    // A repaired bundle is imported at the next attempt.
    fs::remove_file(images.path().join("k8s.io/bad.tar")).unwrap();
    put_image(&images, "good", 1000);
    noded.ask(&["restart", PRESEED]);
    wait_healthy(&noded);
    let states = noded.ask_json(&["images"]);
    assert_eq!(states.as_array().unwrap().len(), 1, "{states}");
    let of = |key: &str| states[0][key].as_str().unwrap().to_owned();
    assert_eq!(
        [of("name"), of("state"), of("bundle")],
        ["localhost/good:1", "listed", "good.tar"],
        "{states}"
    );
    assert!(states[0]["size_bytes"].as_u64().unwrap() > 1000 && states[0]["pinned"] == true, "{states}");
    // A file that loses a bit is found on request, and written again. What else is wrong hides that from nobody.
    let bad = images.path().join("k8s.io/bad.tar");
    fs::write(&bad, "scribble").unwrap();
    wait_condition(&noded, "k8s.io/bad.tar");
    let (layer, content) = flip_layer(&noded);
    noded
        .nodectl(&["images", "verify", "localhost/absent:1"])
        .assert_fails(4, "there is no image localhost/absent:1");
    noded.nodectl(&["images", "verify"]).assert_fails(6, "");
    assert!(noded.ask_json(&["images"]).as_array().unwrap().iter().any(|image| image["state"] == "damaged"));
    let damage = wait_problem(&noded, "image content", "localhost/good:1 is damaged");
    assert!(damage["hint"].as_str().unwrap().contains("nodectl images repair"), "{damage}");
    wait_condition(&noded, "k8s.io/bad.tar");
    let repaired = noded.ask_json(&["images", "repair", "localhost/good:1"]);
    assert_eq!(repaired["damaged"][0]["repaired"], true, "{repaired}");
    assert!(fs::read(&layer).unwrap() == content);
    assert_eq!(noded.ask_json(&["images", "verify"])["damaged"], serde_json::json!([]));
    fs::remove_file(bad).unwrap();
    wait_healthy(&noded);
    let status = noded.status("root.service.kubelet");
    assert_eq!((&status["generation"], &status["state"]), (&2.into(), &"ready".into()), "{status}");
    noded.stop();
}

/// Flips a bit of the largest file of containerd's content; returns its path, and what it had.
fn flip_layer(noded: &NodedProcess) -> (PathBuf, Vec<u8>) {
    let blobs =
        noded.data().join("data/containerd/root").join("io.containerd.content.v1.content/blobs/sha256");
    let blobs = fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().path());
    let layer = blobs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let content = fs::read(&layer).unwrap();
    let mut flipped = content.clone();
    flipped[600] ^= 1;
    fs::remove_file(&layer).unwrap();
    fs::write(&layer, flipped).unwrap();
    (layer, content)
}

#[test]
#[ignore = "needs containerd and root"]
fn a_repair_without_bundles_ends_and_says_what_to_do() {
    let images = new_bundle_dir();
    put_image(&images, "a", 1000);
    let archive = images.path().join("k8s.io/a.tar").display().to_string();
    let noded = NodedProcess::start("services.etcd.enable = false\n");
    noded.wait_ready("root.containerd");
    // Nothing has created the namespace yet, and nothing will create the other one.
    assert_eq!(noded.ask_json(&["images", "verify"])["images"], 0);
    let misspelt = noded.nodectl(&["images", "repair", "--namespace", "k8s"]);
    misspelt.assert_fails_in_a_line(4, "there is no namespace k8s in containerd; known: ");
    misspelt.assert_fails(4, "k8s.io");
    noded.ask(&["images", "--import", &archive]);
    let (layer, content) = flip_layer(&noded);
    for _ in 0..2 {
        let repair = noded.nodectl(&["-o", "json", "images", "repair"]);
        assert_eq!(repair.code, Some(6), "{repair:?}");
        let damaged = repair.json()["damaged"][0].clone();
        assert_eq!((&damaged["name"], &damaged["repaired"]), (&"localhost/a:1".into(), &false.into()));
        let reason = damaged["reason"].as_str().unwrap();
        assert!(reason.contains("no bundle brings the image: import its archive"), "{reason}");
        assert_eq!(noded.ask_json(&["images"])[0]["state"], "damaged", "until it is repaired");
    }
    noded.ask(&["images", "--import", &archive]);
    assert_eq!(noded.ask_json(&["images"])[0]["state"], "listed");
    assert!(fs::read(&layer).unwrap() == content, "written again");
    assert_eq!(noded.ask_json(&["images", "repair"])["damaged"], serde_json::json!([]));
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn damage_of_an_image_whose_directory_is_not_there_is_known_to_the_next_noded_and_its_health() {
    let disk = new_bundle_dir();
    put_image(&disk, "a", 1000);
    let config = preseed_config(disk.path(), "");
    let noded = NodedProcess::start(&config);
    noded.wait_ready(PRESEED);
    let away = disk.path().with_extension("away");
    fs::rename(disk.path(), &away).unwrap();
    let (layer, content) = flip_layer(&noded);
    noded.nodectl(&["images", "verify"]).assert_fails(6, "");
    assert_eq!(noded.ask_json(&["images"])[0]["state"], "damaged");
    let noded = NodedProcess::start_in(noded.stop_and_keep(), &config, &[]);
    noded.wait_ready("root.containerd");
    let images = noded.ask_json(&["images"]);
    assert_eq!(images[0]["state"], "damaged", "{images}");
    let damage = wait_problem(&noded, "image content", "localhost/a:1 in k8s.io is damaged, and no bundle");
    assert!(damage["hint"].as_str().unwrap().contains("nodectl images --import FILE"), "{damage}");
    fs::rename(&away, disk.path()).unwrap();
    wait_healthy(&noded);
    let images = noded.ask_json(&["images"]);
    assert_eq!((&images[0]["state"], &images[0]["problem"]), (&"listed".into(), &serde_json::Value::Null));
    assert!(fs::read(&layer).unwrap() == content, "written again");
    noded.stop();
}

/// The directory of a disk that is not mounted.
#[test]
#[ignore = "needs containerd and root"]
fn a_missing_preseed_directory_is_seen_in_status_and_json_and_holds_the_services() {
    let disk = ScratchDir::new().unwrap();
    let missing = disk.path().join("not-mounted");
    let noded = NodedProcess::start(&preseed_config(&missing, &kubelet_config()));
    let found = wait_problem(&noded, PRESEED, "not-mounted");
    assert!(found["problem"].as_str().unwrap().contains("No such file"), "{found}");
    let status = noded.ask(&["status"]);
    assert!(status.contains(PRESEED) && status.contains("not-mounted"), "{status}");
    assert_ne!(noded.status("root.service.kubelet")["state"], "ready");
    fs::create_dir_all(missing.join("k8s.io")).unwrap();
    noded.wait_for_event("root.service.kubelet", 1, "ready");
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_watch_follows_the_states_and_the_bytes_of_an_import() {
    let images = new_bundle_dir();
    let noded = NodedProcess::start(&preseed_config(images.path(), ""));
    noded.wait_ready(PRESEED);
    let watch = noded.follow(&["images", "--watch"]);
    watch.find_value(|list| list.as_array().unwrap().is_empty());
    put_image(&images, "a", 300_000_000);
    let size = fs::metadata(images.path().join("k8s.io/a.tar")).unwrap().len();
    let mut before = 0;
    let states = watch.find_value(|list| {
        let Some(image) = list.get(0) else { return false };
        let done = image["import_done_bytes"].as_u64();
        assert!(done.is_none_or(|done| done >= before && image["import_total_bytes"] == size), "{list}");
        before = done.unwrap_or(before);
        before > 0
    });
    assert_eq!(states[0]["state"], "wanted", "{states}");
    let text = noded.ask(&["status", PRESEED]);
    assert!(!text.contains("imports") || text.contains("k8s.io/a.tar: "), "{text}");
    watch.find_value(|list| list[0]["state"] == "listed" && list[0]["import_total_bytes"].is_null());
    fs::remove_file(images.path().join("k8s.io/a.tar")).unwrap();
    watch.find_value(|list| list[0]["bundle"].is_null());
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn directories_are_added_and_removed_by_a_reload_and_containerd_runs_on() {
    let [first, second] = [new_bundle_dir(), new_bundle_dir()];
    put_image(&first, "a", 1000);
    put_image(&second, "b", 1000);
    let config = |directories: &[&Path]| {
        format!(
            "services.etcd.enable = false\n[services.containerd]\npreseed = {directories:?}\n{}",
            kubelet_config()
        )
    };
    let noded = NodedProcess::start(&config(&[first.path()]));
    noded.wait_for_event("root.service.kubelet", 1, "ready");
    let pid = || {
        let status = noded.status("root.containerd");
        (status["pid"].clone(), status["generation"].clone())
    };
    let running = pid();
    let (both, reversed) = ([first.path(), second.path()], [second.path(), first.path()]);
    for (directories, bundles) in
        [(&both[..], "a.tar b.tar"), (&reversed[..], "a.tar b.tar"), (&reversed[..1], "b.tar")]
    {
        noded.write_config(&config(directories));
        let checked = noded.ask(&["reload"]);
        assert!(checked.contains("apply services.containerd.preseed"), "{checked}");
        testbed::wait_until(std::time::Duration::from_secs(20), "the images", || {
            let images = noded.ask_json(&["images"]);
            let of = |image: &serde_json::Value| {
                let directory = image["directory"].as_str()?;
                let name = image["bundle"].as_str()?;
                let is_pinned =
                    image["pinned"] == true && directories.iter().any(|path| path.ends_with(directory));
                is_pinned.then(|| name.to_owned())
            };
            let found: Vec<_> = images.as_array().unwrap().iter().filter_map(of).collect();
            anyhow::ensure!(found.join(" ") == bundles, "{images}");
            Ok(())
        })
        .unwrap();
        wait_healthy(&noded);
    }
    assert_eq!(pid(), running, "it runs on");
    assert_eq!(noded.status(PRESEED)["generation"], 1);
    assert_eq!(noded.status("root.service.kubelet")["generation"], 1);
    // A crash of containerd has the directories of the reload, too.
    noded.ask(&["restart", "--wait", "root.containerd"]);
    noded.wait_for_event(PRESEED, 2, "ready");
    let images = noded.ask_json(&["images"]);
    let b = images.as_array().unwrap().iter().find(|image| image["name"] == "localhost/b:1").unwrap();
    assert_eq!(b["directory"], second.path().display().to_string(), "{images}");
    noded.stop();
}

/// A new ext4 of this size at a path.
fn mount_ext4(directory: &Path, mebibytes: u64) {
    let image = directory.with_extension("ext4");
    File::create(&image).unwrap().set_len(mebibytes << 20).unwrap();
    let mut format = Command::new(tools::find_tool(tools::MKFS_EXT4).unwrap());
    command_output(format.arg("-q").arg(&image)).unwrap();
    fs::create_dir(directory).unwrap();
    let mut mount = Command::new(tools::find_tool(tools::MOUNT).unwrap());
    command_output(mount.args(["-o", "loop"]).arg(&image).arg(directory)).unwrap();
}

fn free_bytes(directory: &Path) -> u64 {
    let disk = nix::sys::statvfs::statvfs(directory).unwrap();
    disk.blocks_free() * disk.fragment_size()
}

#[test]
#[ignore = "needs etcd, containerd, mkfs.ext4 and root"]
fn etcd_never_stops_while_a_small_disk_is_filled_with_images() {
    // Unpacked, each takes its size twice.
    const MEGABYTES: [u64; 20] =
        [500, 120, 110, 100, 90, 80, 70, 60, 50, 40, 30, 25, 20, 15, 10, 5, 4, 3, 2, 1];
    let images = new_bundle_dir();
    for (order, megabytes) in MEGABYTES.iter().enumerate() {
        put_image(&images, &format!("image-{order:02}-{megabytes}"), megabytes * 1_000_000);
    }
    let scratch = ScratchDir::new().unwrap();
    let data = scratch.path().join("data");
    mount_ext4(&data, 700);
    let ports = EtcdPorts::reserve();
    let containerd = format!("[services.containerd]\npreseed = {:?}\nunpack = true\n", images.path());
    let config = format!("{}{containerd}", ports.section(""));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let reason = wait_condition(&noded, "are not imported");
    println!("{reason}");
    // etcd goes on: 20 MB of values, while preseed tries again.
    let value = "x".repeat(100_000);
    for key in 0..200 {
        ports.etcdctl(&["put", &key.to_string(), &value]);
    }
    let etcd = noded.wait_status("root.etcd", |status| status["state"] == "ready");
    assert_eq!((etcd["generation"].as_u64(), etcd["restarts"].as_u64()), (Some(1), Some(0)), "{etcd}");
    let listed = noded.ctr(&["images", "ls", "-q"]).unwrap();
    let imported: u64 =
        listed.lines().map(|name| name.rsplit(['-', ':']).nth(1).unwrap().parse::<u64>().unwrap()).sum();
    println!("{imported} MB imported, {} MB free: {listed}", free_bytes(&data) / 1_000_000);
    assert!(imported >= 150, "{imported} MB: {listed}");
    assert!(reason.contains("k8s.io/image-00-500.tar"), "what is left out is named: {reason}");
    let states = noded.ask_json(&["images"]);
    let left_out = states.as_array().unwrap().iter().filter(|image| image["state"] == "wanted");
    let left_out = left_out.inspect(|image| {
        assert!(image["problem"].as_str().unwrap().contains("no space left"), "{image}");
    });
    assert_eq!(left_out.count() + listed.lines().count(), MEGABYTES.len(), "{states}");
    let disk = nix::sys::statvfs::statvfs(&data).unwrap();
    assert!(disk.files_free() * 5 >= disk.files(), "{disk:?}");
    assert!(free_bytes(&data) > 100_000_000, "{}", free_bytes(&data));
    // What does not fit costs nothing again.
    noded.ask(&["restart", "--wait", PRESEED]);
    wait_condition(&noded, "are not imported");
    assert!(free_bytes(&data) > 100_000_000, "{}", free_bytes(&data));
    noded.ask(&["stop", "--wait", "root.containerd"]);
    noded.stop();
}
