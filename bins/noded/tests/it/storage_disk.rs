//! The data volume on real disks, in a guest: created, opened again after stops and kills, refused, and grown.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nodekeel_localstorage::mount::mount_table;
use nodekeel_node::v1::{
    AcknowledgeStorageRequest, AddRecoveryPassphraseRequest, CancelStorageScrubRequest, EraseStorageRequest,
    EventsRequest, HealthRequest, ReencryptStorageRequest, RestartRequest, RotateStorageKeysRequest,
    ScrubStorageRequest, StorageRequest, StorageResponse, StorageScrub, UnlockStorageRequest,
};
use testbed::guest::disk::FileSystem;
use testbed::{ScratchDir, command_output};
use tokio::time::timeout;

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, node_command, nodectl_path, wait};
use crate::storage_device::{DeviceFixture, DeviceNode, TOLD_WITHIN, mebibytes_of_file_system, wipe_device};

const NOT_ENCRYPTED: &str = "encryption = \"none\"\n";
const LOCAL: &str = "encryption = \"encrypted\"\nkeys = \"local\"\n";

/// Creates the volume with a file, and stops the node.
async fn create_volume(fixture: &DeviceFixture, keys: &str) {
    let node = fixture.start(keys).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    node.stop().await;
    assert!(!fixture.is_open(), "a stop unmounts the volume, and closes its mapping");
}

fn assert_witness(fixture: &DeviceFixture) {
    assert_eq!(fs::read_to_string(fixture.volume().join("witness")).unwrap(), "data");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_node_keeps_its_data_on_a_disk_through_stops_and_kills() {
    for (keys, found) in [
        (NOT_ENCRYPTED, "has a data volume that is not encrypted"),
        (LOCAL, "has a data volume that is encrypted, with local keys, of node node"),
    ] {
        let fixture = DeviceFixture::new(384).await;
        let text = fixture.check(keys);
        assert!(text.contains("and noded reads all of it, and creates the volume if it is blank"), "{text}");
        assert!(!fixture.data().exists(), "a check creates nothing");
        create_volume(&fixture, keys).await;
        let before = fixture.checksum();
        let text = fixture.check(keys);
        assert!(text.contains(found), "{text}");
        assert!(before == fixture.checksum(), "a check writes nothing");

        // A noded that is killed leaves the volume open; the next one uses it so.
        let command = node_command("run", fixture.scratch.path(), &fixture.config(keys));
        let mut noded = NodedProcess::start_command(ScratchDir::new().unwrap(), command);
        let witness = fixture.volume().join("witness");
        wait("the volume", || Ok(fs::metadata(&witness).map(drop)?));
        noded.signal(Signal::SIGKILL);
        noded.wait_end();
        assert!(fixture.is_open());
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        let health = node.client.health(HealthRequest::default()).await.unwrap().into_inner();
        let warns =
            health.conditions.iter().any(|found| found.problem.contains("has no recovery passphrase"));
        assert_eq!(warns, keys == LOCAL, "{health:?}");
        let copies = fixture.data().canonicalize().unwrap().join("run/storage");
        let mounts = mount_table().unwrap();
        let in_memory = mounts.iter().any(|entry| entry.target == copies && entry.info.fstype == "tmpfs");
        assert_eq!(in_memory, keys == LOCAL, "copies of headers are in memory: {mounts:?}");
        let options = command_output(Command::new("cat").arg("/proc/self/mounts")).unwrap();
        let target = format!(" {} xfs ", fixture.volume().display());
        let mounted = options.lines().find(|line| line.contains(&target)).unwrap();
        for (option, is_set) in [("nosuid", true), ("prjquota", true), ("noexec", false)] {
            assert_eq!(mounted.contains(option), is_set, "{mounted}");
        }
        node.stop().await;
        assert!(!fixture.is_open());
    }
}

/// Restarts root.storage while a pod has its volume mounted, and then lets the disk grow.
async fn check_volume_in_use(keys: &str) {
    let fixture = DeviceFixture::new(384).await;
    create_volume(&fixture, keys).await;
    let mut node = fixture.start(keys).await;
    node.wait_open().await;
    // The kubelet mounts the volume of a pod below its own directory.
    let pod = fixture.scratch.path().join("pod");
    fs::create_dir(&pod).unwrap();
    command_output(Command::new("mount").arg("--bind").args([&fixture.volume(), &pod])).unwrap();
    node.reopen().await;
    // It grows by itself.
    fixture.grow(768);
    let volume = fixture.volume();
    wait("the growth", || {
        anyhow::ensure!(mebibytes_of_file_system(&volume) > 600);
        Ok(())
    });
    let is_mounted = fs::read_to_string(fixture.volume().join("witness"));
    // What a pod executes is on its volume.
    fs::copy("/bin/true", fixture.volume().join("true")).unwrap();
    let executed = Command::new(pod.join("true")).status();
    let health = node.storage_health().await;
    command_output(Command::new("umount").arg(&pod)).unwrap();
    assert_eq!(is_mounted.unwrap(), "data", "{keys}");
    assert!(executed.unwrap().success(), "{keys}");
    assert_eq!(health, Default::default(), "{keys}");
    node.stop().await;
    assert!(!fixture.is_open(), "{keys}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_volume_that_a_pod_keeps_in_use_is_opened_again_and_not_the_directory_below_it() {
    check_volume_in_use(LOCAL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_without_encryption_that_a_pod_keeps_in_use_is_opened_again() {
    check_volume_in_use(NOT_ENCRYPTED).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_foreign_disk_is_left_as_it_is_until_its_token_is_given() {
    let fixture = DeviceFixture::new(384).await;
    FileSystem::PlainExt4.format_device(&fixture.part).unwrap();
    let before = fixture.checksum();
    let text = fixture.check(LOCAL);
    assert!(text.contains("which has ext at byte 1080, and noded creates no volume there"), "{text}");
    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| !status.erase_token.is_empty()).await;
    assert!(
        status.detail.contains("the disk has ext at byte 1080, and noded wrote nothing to it"),
        "{status:?}"
    );
    let (problem, hint) = node.storage_health().await;
    assert!(problem.contains("ext at byte 1080"), "{problem}");
    assert!(hint.contains(&format!("nodectl storage erase {}", status.erase_token)), "{hint}");
    let refused = node.client.erase_storage(EraseStorageRequest { token: "ext-0".into() }).await;
    assert!(refused.unwrap_err().message().contains("token"), "another token erases nothing");
    node.client.restart(RestartRequest { dn: "root.storage".into() }).await.unwrap();
    node.wait_status(|status| !status.erase_token.is_empty()).await;
    assert!(before == fixture.checksum(), "the disk has changed");

    node.client.erase_storage(EraseStorageRequest { token: status.erase_token }).await.unwrap();
    node.wait_open().await;
    node.stop().await;
    assert!(fixture.check(LOCAL).contains("has a data volume that is encrypted"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_disk_with_one_sector_of_data_is_read_and_left_as_it_is_until_its_token_is_given() {
    let fixture = DeviceFixture::new(384).await;
    let part = File::options().write(true).open(&fixture.part).unwrap();
    part.write_all_at(&[7; 512], (77 << 20) + (68 << 10)).unwrap();
    part.sync_all().unwrap();
    let before = fixture.checksum();
    let text = fixture.check(LOCAL);
    assert!(text.contains("and noded reads all of it, and creates the volume if it is blank"), "{text}");
    let mut node = fixture.start(LOCAL).await;
    let is_read = |status: &StorageResponse| status.erase_token.starts_with("data-read-");
    let status = node.wait_status(is_read).await;
    assert!(status.detail.contains("the disk has data at byte 80809984"), "{status:?}");
    assert!(status.detail.contains("a token of every byte of this disk"), "{status:?}");
    assert!(before == fixture.checksum(), "the disk has changed");
    node.client.erase_storage(EraseStorageRequest { token: status.erase_token }).await.unwrap();
    node.wait_open().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_node_that_has_had_a_volume_takes_no_other_disk_for_it() {
    let fixture = DeviceFixture::new(384).await;
    create_volume(&fixture, NOT_ENCRYPTED).await;
    // The volume of another node, then a blank disk, then a volume with another encryption.
    for (other, says) in [
        (Some(NOT_ENCRYPTED), "has had a volume"),
        (None, "the disk has no data where it was sampled, but this node has had a volume"),
        (Some(LOCAL), "but storage.encryption is \"none\""),
    ] {
        wipe_device(&fixture.part);
        let own = fixture.scratch.path().join("own");
        fs::rename(fixture.data(), &own).unwrap();
        if let Some(keys) = other {
            create_volume(&fixture, keys).await;
            // The directory for copies of headers stays mounted.
            let _ = Command::new("umount").arg(fixture.data().join("run/storage")).output();
            fs::remove_dir_all(fixture.data()).unwrap();
        }
        fs::rename(&own, fixture.data()).unwrap();
        let before = fixture.checksum();
        let mut node = fixture.start(NOT_ENCRYPTED).await;
        let status = node.wait_status(|status| !status.detail.is_empty()).await;
        assert!(status.detail.contains(says), "{status:?}");
        node.stop().await;
        assert!(before == fixture.checksum(), "the disk has changed");
    }
    // A directory in its place would be an empty node.
    let mut node = DeviceNode::start(NO_DAEMONS, &fixture.data()).await;
    let status = node.wait_status(|status| !status.detail.is_empty()).await;
    assert!(status.detail.contains("it is on a disk, and storage.kind"), "{status:?}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_grows_with_its_disk_and_an_authenticated_one_says_that_it_can_not() {
    for keys in [NOT_ENCRYPTED, LOCAL] {
        let fixture = DeviceFixture::new(384).await;
        create_volume(&fixture, keys).await;
        fixture.grow(768);
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        assert!(mebibytes_of_file_system(&fixture.volume()) > 600, "{keys}");
        assert_eq!(node.storage_health().await, Default::default());
        node.stop().await;
    }
    let fixture = DeviceFixture::new(384).await;
    let keys = "encryption = \"encrypted-and-authenticated\"\nkeys = \"local\"\nwipe = false\n";
    create_volume(&fixture, keys).await;
    fixture.grow(768);
    // Every start reports it.
    for _ in 0..2 {
        let mut node = fixture.start(keys).await;
        node.wait_open().await;
        assert_witness(&fixture);
        assert!(mebibytes_of_file_system(&fixture.volume()) < 384);
        let (problem, _) = node.storage_health().await;
        assert!(problem.contains("can't grow a volume that is encrypted and authenticated"), "{problem}");
        // A scrub would find each block that was never written.
        let refused = node.client.scrub_storage(ScrubStorageRequest::default()).await.unwrap_err();
        assert!(refused.message().contains("storage.wipe = false"), "{refused:?}");
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
async fn a_volume_whose_key_is_gone_waits_for_the_recovery_passphrase() {
    let fixture = DeviceFixture::new(384).await;
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let added = node.client.add_recovery_passphrase(AddRecoveryPassphraseRequest::default()).await.unwrap();
    let passphrase = added.into_inner().passphrase;
    node.stop().await;
    let entries = fs::read_dir(fixture.data().join("esp")).unwrap().map(|entry| entry.unwrap().path());
    let keys: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == "key")).collect();
    assert_eq!(keys.len(), 1, "{keys:?}");
    fs::rename(&keys[0], fixture.scratch.path().join("key")).unwrap();
    let before = fixture.checksum();

    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| status.state == "locked").await;
    assert!(status.detail.contains("the node unlock key of volume"), "{status:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(problem.starts_with("is locked: ") && hint == "`nodectl storage unlock`", "{problem}; {hint}");
    let mut wrong = passphrase.clone().unwrap();
    wrong.text = "00000-00000-00000-00000-00000-00000-00GKG".into();
    let request = UnlockStorageRequest { passphrase: Some(wrong) };
    let rejected = node.client.unlock_storage(request).await.unwrap_err();
    assert!(rejected.message().contains("does not open"), "{rejected:?}");
    assert!(before == fixture.checksum(), "a wrong passphrase changes nothing");
    node.client.unlock_storage(UnlockStorageRequest { passphrase }).await.unwrap();
    node.wait_open().await;
    assert_witness(&fixture);
    // Until noded exits, it needs no operator again.
    node.reopen().await;
    // The volume stays open while something uses it: nor does the next start of this node need one.
    let busy = File::open(fixture.volume().join("witness")).unwrap();
    node.stop().await;
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    node.stop().await;
    drop(busy);
    // Without the record, it is another program's.
    fs::remove_file(fixture.data().join("run/storage/opened-volume")).unwrap();
    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| status.state == "locked").await;
    assert!(status.detail.contains("mapping nodekeel-data, and this node has not opened it"), "{status:?}");
    node.stop().await;

    fs::rename(fixture.scratch.path().join("key"), &keys[0]).unwrap();
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_wipe_goes_on_where_a_stop_or_a_kill_has_ended_it() {
    let fixture = DeviceFixture::new(384).await;
    let keys = "encryption = \"encrypted-and-authenticated\"\nkeys = \"local\"\n";
    let is_wiping = |status: &StorageResponse| status.wiped_bytes.is_some_and(|bytes| bytes > 0);
    let mut node = fixture.start(keys).await;
    let stopped = node.wait_status(is_wiping).await.wiped_bytes;
    node.stop().await;
    assert!(!fixture.is_open(), "a stop ends the wipe, and closes its mapping");

    let command = node_command("run", fixture.scratch.path(), &fixture.config(keys));
    let mut noded = NodedProcess::start_command(ScratchDir::new().unwrap(), command);
    wait("the wipe", || {
        anyhow::ensure!(fixture.is_open(), "no mapping");
        Ok(())
    });
    noded.signal(Signal::SIGKILL);
    noded.wait_end();
    assert!(fixture.is_open());
    // As a cryptsetup that was killed in its format leaves one.
    let left = "temporary-cryptsetup-1";
    fixture.map(left, &format!("CRYPT-INTEGRITY-{left}"));
    let mut node = fixture.start(keys).await;
    let resumed = node.wait_status(is_wiping).await.wiped_bytes;
    assert!(resumed >= stopped, "it resumes at {resumed:?}, and was stopped at {stopped:?}");
    node.wait_open().await;
    assert!(!fixture.has_mapping(left));
    // Its volume key can't be changed in place.
    let refused = node.client.reencrypt_storage(ReencryptStorageRequest::default()).await.unwrap_err();
    assert!(refused.message().contains("docs/noded.md, \"Move to another disk\""), "{refused:?}");
    node.stop().await;
    assert!(!fixture.is_open());
}

/// The condition of the volume's disk, once it is there or gone.
async fn wait_faults(node: &mut DeviceNode, is_there: bool) -> (String, Duration) {
    let began = Instant::now();
    loop {
        let health = node.client.health(HealthRequest::default()).await.unwrap().into_inner();
        let found =
            health.conditions.into_iter().find(|condition| condition.object == "disk of the data volume");
        if found.is_some() == is_there {
            return (found.map(|found| found.problem).unwrap_or_default(), began.elapsed());
        }
        assert!(began.elapsed() < TEST_TIMEOUT, "{found:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Writes a file, and changes its first block below the authenticated mapping of this name, where nobody has read it yet.
fn change_below(mapping: &str, file: &Path) {
    let witness = File::create(file).unwrap();
    witness.write_all_at(&[0x5a; 1 << 20], 0).unwrap();
    witness.sync_all().unwrap();
    // Both XFS and ext4 know where it lies.
    let extents = command_output(Command::new("xfs_io").args(["-r", "-c", "fiemap"]).arg(file)).unwrap();
    let first = extents.lines().nth(1).and_then(|line| line.split_whitespace().nth(2)).expect(&extents);
    let sector: u64 = first.split("..").next().unwrap().parse().expect(&extents);
    // The device that keeps the sectors with their tags.
    let below = format!("{mapping}_dif");
    let mut names = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
    let is_below =
        |path: &PathBuf| fs::read_to_string(path.join("dm/name")).is_ok_and(|name| name.trim() == below);
    let path = Path::new("/dev").join(names.find(is_below).expect("it is open").file_name().unwrap());
    let device = File::options().write(true).open(path).unwrap();
    device.write_all_at(&[0xff; 4096], sector * 512).unwrap();
    device.sync_all().unwrap();
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// Reads a file that was changed, and returns the node's problem, which is there in time.
async fn wait_told(node: &mut DeviceNode, file: &Path) {
    let read = fs::read(file).unwrap_err();
    assert_eq!(read.raw_os_error(), Some(nix::libc::EIO), "{read}");
    let (problem, elapsed) = wait_faults(node, true).await;
    assert!(elapsed < TOLD_WITHIN, "{elapsed:?}");
    assert!(problem.contains("reads of data that nobody with its key has written: dm-"), "{problem}");
    assert!(problem.contains("sector"), "{problem}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn bytes_that_were_changed_below_an_open_volume_are_a_problem_until_they_are_acknowledged() {
    let fixture = DeviceFixture::new(384).await;
    let keys = "encryption = \"encrypted-and-authenticated\"\nkeys = \"local\"\n";
    let config = fixture.config(keys).replace("kernel.log = false\n", "");
    let mut node = DeviceNode::start(&config, &fixture.data()).await;
    node.wait_open().await;
    let witness = fixture.volume().join("witness");
    wait_faults(&mut node, false).await;
    change_below("nodekeel-data", &witness);
    let found = scrub(&mut node, Some(u64::MAX)).await;
    assert_eq!((found.state.as_str(), found.unreadable_bytes), ("complete", 4096), "{found:?}");
    wait_told(&mut node, &witness).await;
    // It is there before anybody could have asked.
    let follow = EventsRequest { dn: "root.storage".into(), follow: true, ..EventsRequest::default() };
    let mut events = node.client.events(follow).await.unwrap().into_inner();
    let is_told = async {
        while let Some(answer) = events.message().await.unwrap() {
            if format!("{answer:?}").contains("nobody with its key") {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, is_told).await.expect("an event");
    assert_eq!(node.storage_health().await, Default::default(), "root.storage goes on");
    let status = node.client.storage(StorageRequest {}).await.unwrap().into_inner();
    assert_eq!((status.state.as_str(), status.faults.len()), ("open", 1), "{status:?}");
    node.stop().await;

    // A restart mends nothing.
    let mut node = DeviceNode::start(&config, &fixture.data()).await;
    node.wait_open().await;
    wait_faults(&mut node, true).await;
    let forgotten = node.client.acknowledge_storage(AcknowledgeStorageRequest {}).await.unwrap();
    assert_eq!(forgotten.into_inner().faults.len(), 1);
    wait_faults(&mut node, false).await;
    node.stop().await;
    let mut node = DeviceNode::start(&config, &fixture.data()).await;
    node.wait_open().await;
    wait_faults(&mut node, false).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn bytes_that_were_changed_below_an_ext4_that_an_operator_has_mounted_are_a_problem_too() {
    let fixture = DeviceFixture::new(64).await;
    let key = fixture.scratch.path().join("key");
    fs::write(&key, "passphrase").unwrap();
    let run = |program: &str, arguments: &[&str], path: &Path| {
        let mut command = Command::new(program);
        command_output(command.env("DM_DISABLE_UDEV", "1").args(arguments).arg(path)).unwrap();
    };
    let key = ["--batch-mode", "--key-file", key.to_str().unwrap()];
    let quick = ["--integrity", "hmac-sha256", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    run("cryptsetup", &[&key[..], &quick, &["luksFormat"]].concat(), &fixture.part);
    let mut open = Command::new("cryptsetup");
    open.env("DM_DISABLE_UDEV", "1").args(key).arg("open").arg(&fixture.part).arg("nodekeel-data");
    command_output(&mut open).unwrap();
    run("mkfs.ext4", &["-q"], Path::new("/dev/mapper/nodekeel-data"));
    fs::create_dir_all(fixture.data().join("data")).unwrap();
    run("mount", &["/dev/mapper/nodekeel-data"], &fixture.data().join("data"));

    let config = NO_DAEMONS.replace("kernel.log = false\n", "");
    let mut node = DeviceNode::start(&config, &fixture.data()).await;
    node.wait_open().await;
    let witness = fixture.volume().join("witness");
    wait_faults(&mut node, false).await;
    change_below("nodekeel-data", &witness);
    wait_told(&mut node, &witness).await;
    node.stop().await;
}

/// The exit code and the text of nodectl.
pub(crate) fn run_nodectl(fixture: &DeviceFixture, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(nodectl_path());
    command.arg("--socket").arg(fixture.data().join("run/control.sock")).args(arguments);
    let ended = tokio::task::block_in_place(|| command.stdin(Stdio::null()).output()).unwrap();
    (ended.status.code(), String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_header_that_was_put_back_or_lost_is_named_and_restored() {
    let fixture = DeviceFixture::new(384).await;
    let [old, new] = ["old", "new"].map(|name| fixture.scratch.path().join(name).display().to_string());
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let (code, text) = run_nodectl(&fixture, &["storage", "header", "backup", &old]);
    assert_eq!((code, fs::metadata(&old).unwrap().mode() & 0o777), (Some(0), 0o600), "{text}");
    node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap();
    let (code, text) = run_nodectl(&fixture, &["storage", "header", "backup", &new]);
    assert_eq!(code, Some(0), "{text}");
    let before = fixture.checksum();
    let (code, text) = run_nodectl(&fixture, &["storage", "header", "restore", &old]);
    assert!(code == Some(1) && text.contains("--recovery"), "{code:?}: {text}");
    assert!(before == fixture.checksum(), "an open volume keeps its header");
    node.stop().await;

    let put_back = fs::read(&old).unwrap();
    let noise = vec![0xa5; 1 << 20];
    for (header, says) in [
        (&put_back, "restore its newer header (nodectl storage header restore FILE)"),
        (&noise, "restore the header, type: nodectl storage header restore FILE"),
    ] {
        File::options().write(true).open(&fixture.part).unwrap().write_all_at(header, 0).unwrap();
        let mut node = fixture.start(LOCAL).await;
        let status = node.wait_status(|status| status.detail.contains(says)).await;
        assert_ne!(status.state, "open");
        let (code, text) = run_nodectl(&fixture, &["storage", "header", "restore", &new]);
        assert_eq!(code, Some(0), "{text}");
        node.wait_open().await;
        assert_witness(&fixture);
        node.stop().await;
    }
}

/// The last report of a scrub that runs to its end.
async fn scrub(node: &mut DeviceNode, bytes_per_second: Option<u64>) -> StorageScrub {
    let request = ScrubStorageRequest { bytes_per_second };
    let mut reports = node.client.scrub_storage(request).await.unwrap().into_inner();
    let mut last = None;
    while let Some(report) = timeout(5 * TEST_TIMEOUT, reports.message()).await.expect("a report").unwrap() {
        last = Some(report);
    }
    last.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_scrub_finds_blocks_that_nobody_reads_and_keeps_no_volume_open() {
    let fixture = DeviceFixture::new(384).await;
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    let whole = scrub(&mut node, Some(u64::MAX)).await;
    assert_eq!((whole.state.as_str(), whole.unreadable_ranges), ("complete", 0), "{whole:?}");
    assert!(whole.done_bytes == whole.device_bytes && whole.device_bytes > 300 << 20, "{whole:?}");

    // Far behind the data of a new file system: two blocks, and one.
    fixture.break_sectors(&[700_000..700_016, 720_000..720_008]);
    let found = scrub(&mut node, Some(u64::MAX)).await;
    assert_eq!((found.state.as_str(), found.unreadable_ranges), ("complete", 2), "{found:?}");
    assert_eq!(found.unreadable_bytes, 3 * 4096, "{found:?}");
    let ranges: Vec<_> = found.first_unreadable.iter().map(|range| range.end - range.start).collect();
    assert_eq!(ranges, [8192, 4096], "{found:?}");
    let (problem, _) = wait_faults(&mut node, true).await;
    assert!(problem.contains("failed reads or writes: dm-") && problem.contains("sectors"), "{problem}");

    // A stop does not wait for a slow one, and one at a time is running.
    let slow = ScrubStorageRequest { bytes_per_second: Some(1) };
    let mut reports = node.client.scrub_storage(slow).await.unwrap().into_inner();
    let second = node.client.scrub_storage(slow).await.unwrap_err();
    assert!(second.message().contains("a scrub is running"), "{second:?}");
    node.client.cancel_storage_scrub(CancelStorageScrubRequest {}).await.unwrap();
    while let Some(report) = reports.message().await.unwrap() {
        assert!(["running", "canceled"].contains(&report.state.as_str()), "{report:?}");
    }
    node.client.cancel_storage_scrub(CancelStorageScrubRequest {}).await.unwrap_err();
    node.client.scrub_storage(slow).await.unwrap();
    node.stop().await;
    assert!(!fixture.is_open(), "a scrub keeps the mapping open");

    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    let status = node.client.storage(StorageRequest {}).await.unwrap().into_inner();
    let last = status.last_scrub.as_ref().map(|last| last.state.as_str());
    assert!(last == Some("closed") && status.scrub.is_none() && status.faults.len() == 1, "{status:?}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_pulled_disk_closes_the_volume_everywhere_at_once() {
    let fixture = DeviceFixture::new(384).await;
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    let follow = EventsRequest { dn: "root.storage".into(), follow: true, ..EventsRequest::default() };
    let mut events = node.client.events(follow).await.unwrap().into_inner();
    let began = Instant::now();
    fixture.pull_disk();
    let status = node.wait_status(|status| status.state != "open").await;
    assert!(began.elapsed() < TOLD_WITHIN, "{status:?}");
    let is_told = async {
        while let Some(answer) = events.message().await.unwrap() {
            if format!("{answer:?}").contains("the kernel has removed the disk") {
                return;
            }
        }
    };
    timeout(TEST_TIMEOUT, is_told).await.expect("an event");
    assert!(began.elapsed() < TOLD_WITHIN, "{status:?}");
    let storage = node.node.snapshot().into_iter().find(|status| &*status.dn == "root.storage").unwrap();
    assert_ne!(storage.state, nodekeel_supervisor::RunnableState::Ready, "{storage:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(
        !problem.is_empty() && !format!("{problem}{hint}").contains("nodectl reset"),
        "{problem}: {hint}"
    );
    // Nothing uses it: it is unmounted, and its mapping closed.
    wait("the end of the volume", || {
        anyhow::ensure!(!fixture.is_open(), "it is open");
        Ok(())
    });
    fixture.attach_disk();
    node.wait_open().await;
    node.stop().await;
}
