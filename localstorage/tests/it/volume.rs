//! Volumes: creation, rejection, and resumption after a kill.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use nodekeel_localstorage::mount::{MountSpec, Mounter as _};
use nodekeel_localstorage::testing::{
    MountCall, RecordingMounter, SyscallAction, volume_conformance, with_failpoint_hook,
};
use nodekeel_localstorage::volume::{
    DataVolume, DirectoryVolume, DiskVolume, ErasePolicy, MountState, VolumeContents, VolumeError,
    inspect_disk, probe_disk,
};
use nodekeel_localstorage::{Dir, FileMode};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

mod claims;

const MIB: u64 = 1 << 20;

/// A sparse disk image, a directory as mount point, and a scripted mkfs.xfs.
struct VolumeFixture {
    temporary: TempDir,
    mounter: Arc<RecordingMounter>,
}

/// Writes the bytes of a real mkfs.xfs that a probe reads: each block has the UUID.
const MKFS_SCRIPT: &str = r#"#!/bin/sh
for disk; do case "$disk" in uuid=*) uuid=$(echo "${disk#uuid=}" | tr -d -) ;; esac; done
while [ -n "$uuid" ]; do
    bytes="$bytes$(printf '\\%03o' "0x${uuid%"${uuid#??}"}")"
    uuid=${uuid#??}
done
printf "XAGI$bytes" | dd of="$disk" bs=4k seek=5 conv=notrunc status=none
# Half of it is written.
printf 'XFSB' | dd of="$disk" conv=notrunc status=none
printf "$bytes" | dd of="$disk" bs=1 seek=32 conv=notrunc status=none
printf 'nodekeel' | dd of="$disk" bs=1 seek=108 conv=notrunc status=none
"#;

impl VolumeFixture {
    fn new() -> VolumeFixture {
        let temporary = tempfile::tempdir().unwrap();
        fs::create_dir(temporary.path().join("data")).unwrap();
        File::create(temporary.path().join("disk")).unwrap().set_len(4 * MIB).unwrap();
        let fixture = VolumeFixture { temporary, mounter: Arc::default() };
        fixture.write_mkfs(MKFS_SCRIPT);
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }

    fn write_mkfs(&self, script: &str) {
        testbed::write_program(&self.path("mkfs"), script).unwrap();
    }

    fn volume(&self) -> DiskVolume {
        DiskVolume::new(self.path("disk"), self.path("data"), self.mounter.clone())
            .with_mkfs(self.path("mkfs"))
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        File::options().write(true).open(self.path("disk")).unwrap().write_all_at(bytes, offset).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.path("disk")).unwrap()
    }

    fn contents(&self) -> VolumeContents {
        inspect_disk(&self.path("disk")).unwrap().contents
    }
}

fn parse_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn error_chain(error: &VolumeError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn a_directory_volume_keeps_the_contract() {
    let temporary = tempfile::tempdir().unwrap();
    volume_conformance(&DirectoryVolume::new(Dir::open(temporary.path()).unwrap()));
}

#[test]
fn a_disk_that_udev_probes_is_waited_for() {
    let fixture = VolumeFixture::new();
    let udev = File::open(fixture.path("disk")).unwrap();
    flock(&udev, FlockOperation::LockShared).unwrap();
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        scope.spawn(|| {
            let sender = sender;
            sender.send(fixture.volume().mount_new(ErasePolicy::Nothing).map(drop)).unwrap();
        });
        let early = receiver.recv_timeout(Duration::from_millis(200));
        assert!(early.is_err(), "the lock was ignored, or not waited for: {early:?}");
        flock(&udev, FlockOperation::Unlock).unwrap();
        receiver.recv().unwrap().unwrap();
    });
}

#[test]
fn a_directory_with_foreign_files_is_neither_used_nor_changed() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = || Dir::open(temporary.path()).unwrap();
    dir().write("letter", b"dear", FileMode::PRIVATE_FILE).unwrap();
    let rejected = DirectoryVolume::new(dir()).mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(rejected, VolumeError::Occupied { found: VolumeContents::Files { entries: 1 }, .. }));
    let rejected = DirectoryVolume::new(dir()).mount_existing().unwrap_err();
    assert!(matches!(rejected, VolumeError::ForeignData { .. }), "{rejected:?}");
    // Consent to erase other contents does not apply.
    let other = ErasePolicy::Exactly(VolumeContents::Files { entries: 2 });
    assert!(DirectoryVolume::new(dir()).mount_new(other).is_err());
    assert_eq!(dir().read("letter").unwrap(), b"dear");
}

#[test]
#[ignore = "needs root"]
fn a_mount_point_in_a_directory_is_not_foreign_data() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = Dir::open(temporary.path()).unwrap();
    let mount = dir.ensure_dir("volumes", FileMode::PRIVATE_DIR).unwrap();
    let run = |program: &str, args: &[&str]| {
        let status = std::process::Command::new(program).args(args).arg(mount.path()).status().unwrap();
        assert!(status.success(), "{program}");
    };
    assert!(!dir.is_mount_point("volumes").unwrap() && !dir.is_mount_point("a/b").unwrap());
    let volume = DirectoryVolume::new(dir.try_clone().unwrap());
    assert!(matches!(volume.mount_existing(), Err(VolumeError::ForeignData { .. })));
    // The same file system: a bind mount.
    run("mount", &["--bind", temporary.path().to_str().unwrap()]);
    let is_mount_point = dir.is_mount_point("volumes");
    let created = volume.mount_new(ErasePolicy::Nothing).map(drop);
    run("umount", &[]);
    assert!(is_mount_point.unwrap());
    created.unwrap();
}

#[test]
fn erasing_a_directory_resumes_after_a_failure_at_any_call() {
    let erase = || ErasePolicy::Exactly(VolumeContents::Files { entries: 3 });
    for nth in 1.. {
        let temporary = tempfile::tempdir().unwrap();
        let volume = || DirectoryVolume::new(Dir::open(temporary.path()).unwrap());
        for name in ["a", "b", "c"] {
            fs::write(temporary.path().join(name), "dear").unwrap();
        }
        let mut count = 0;
        let fail_from_nth = move |_call: &'static str| {
            count += 1;
            if count < nth { SyscallAction::Proceed } else { SyscallAction::Fail(5) }
        };
        let created = {
            let volume = volume();
            with_failpoint_hook(fail_from_nth, || volume.mount_new(erase()).map(drop))
        };
        let again = match volume().mount_new(erase()) {
            // The erasure was complete, and only its report failed.
            Err(VolumeError::Occupied { .. }) => volume().mount_existing(),
            again => again,
        };
        let names = again.unwrap_or_else(|error| panic!("call {nth}: {error:?}")).list().unwrap();
        assert!(names.len() == 1 && names[0].name == ".data-volume", "call {nth}: {names:?}");
        if created.is_ok() {
            assert!(nth > 10, "the volume takes {nth} calls");
            return;
        }
    }
}

#[test]
fn a_half_erased_directory_is_not_a_volume() {
    let temporary = tempfile::tempdir().unwrap();
    let volume = || DirectoryVolume::new(Dir::open(temporary.path()).unwrap());
    let top = volume().mount_new(ErasePolicy::Nothing).unwrap();
    top.ensure_dir("etcd", FileMode::PRIVATE_DIR).unwrap();
    let erase = ErasePolicy::Exactly(VolumeContents::Files { entries: 2 });
    let volume_that_fails = volume();
    let fail = |call: &'static str| {
        if call == "unlinkat" { SyscallAction::Fail(5) } else { SyscallAction::Proceed }
    };
    with_failpoint_hook(fail, || volume_that_fails.mount_new(erase)).unwrap_err();
    let unfinished = volume().mount_existing().unwrap_err();
    assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
}

#[test]
fn a_blank_disk_is_claimed_formatted_released_mounted_and_marked() {
    let fixture = VolumeFixture::new();
    // While mkfs runs, the claim is on the disk.
    fixture.write_mkfs(&format!("{MKFS_SCRIPT}cp \"$disk\" \"$0.seen\"\necho \"$@\" >\"$0.args\"\n"));
    let volume = fixture.volume();
    assert_eq!(volume.state(), MountState::Unmounted);
    let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
    assert_eq!(volume.state(), MountState::Mounted);
    assert_eq!(top.read(".data-volume").unwrap(), b"nodekeel data volume, format 1\n");
    let seen = probe_disk(&mut File::open(fixture.path("mkfs.seen")).unwrap()).unwrap();
    assert_eq!(seen, VolumeContents::Interrupted);
    assert!(matches!(fixture.contents(), VolumeContents::Xfs { label, .. } if label == "nodekeel"));
    let args = fs::read_to_string(fixture.path("mkfs.args")).unwrap();
    let (words, disk) = args.split_once(" -- ").unwrap();
    assert!(
        disk.trim_end().strip_prefix("/proc/self/fd/").is_some_and(|number| number.parse::<u32>().is_ok()),
        "{disk}"
    );
    let uuid = words.strip_prefix("-q -K -L nodekeel -m uuid=").unwrap();
    assert_eq!(fixture.bytes()[32..48], parse_hex(&uuid.replace('-', "")));
    let calls = [MountCall::Mount {
        spec: MountSpec::DATA,
        source: Some(fixture.path("disk")),
        target: fixture.path("data"),
    }];
    assert_eq!(fixture.mounter.recorded_calls(), calls);
}

#[test]
fn a_disk_with_data_is_rejected_and_not_a_byte_changes() {
    let signatures: [(&str, u64, &[u8]); 6] = [
        ("luks", 0, b"LUKS\xba\xbe"),
        ("ext", 1080, b"\x53\xef"),
        ("gpt", 4 * MIB - 512, b"EFI PART"),
        ("xfs", 0, b"XFSB"),
        ("LVM2_member", 512, b"LABELONE"),
        ("data", 40_000, b"diary"),
    ];
    for (name, offset, magic) in signatures {
        let fixture = VolumeFixture::new();
        fixture.write(offset, magic);
        let before = fixture.bytes();
        let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(rejected, VolumeError::Occupied { .. }), "{name}: {rejected:?}");
        assert!(rejected.to_string().contains(if name == "xfs" { "XFS" } else { name }), "{rejected}");
        let foreign = fixture.volume().mount_existing().unwrap_err();
        assert!(matches!(foreign, VolumeError::ForeignData { .. }), "{name}: {foreign:?}");
        let other = ErasePolicy::Exactly(VolumeContents::Files { entries: 1 });
        assert!(fixture.volume().mount_new(other).is_err(), "consent to erase other contents does not apply");
        assert_eq!(fixture.mounter.recorded_calls(), [], "foreign data is not even mounted");
        assert!(before == fixture.bytes(), "{name}: the disk has changed");

        let found = fixture.contents();
        fixture.write_mkfs(&format!("{MKFS_SCRIPT}echo \"$@\" >\"$0.args\"\n"));
        fixture.volume().mount_new(ErasePolicy::Exactly(found)).unwrap();
        assert!(fs::read_to_string(fixture.path("mkfs.args")).unwrap().contains(" -f "));
    }
}

#[test]
fn a_file_system_with_our_label_and_files_but_no_marker_is_foreign() {
    let fixture = VolumeFixture::new();
    fixture.volume().mount_new(ErasePolicy::Nothing).unwrap();
    fixture.mounter.unmount(&fixture.path("data")).unwrap();
    fs::write(fixture.path("data/letter"), "dear").unwrap();
    fs::remove_file(fixture.path("data/.data-volume")).unwrap();
    let volume = fixture.volume();
    assert!(matches!(volume.mount_existing(), Err(VolumeError::ForeignData { .. })));
    assert!(matches!(volume.mount_new(ErasePolicy::Nothing), Err(VolumeError::Occupied { .. })));
    assert_eq!(volume.state(), MountState::Unmounted);
    let mounted = fixture.mounter.mount_info(&fixture.path("data")).unwrap();
    assert_eq!(mounted, None, "a rejected volume is unmounted again");
    assert_eq!(fs::read(fixture.path("data/letter")).unwrap(), b"dear");
}

#[test]
fn the_first_meaningful_line_of_mkfs_output_is_in_the_error() {
    let fixture = VolumeFixture::new();
    let usage = "Usage: mkfs.xfs\\n/* blocksize */\\t[-b size=num]";
    fixture.write_mkfs(&format!(
        "#!/bin/sh\nprintf '\\n agsize (1 block) too small\\n{usage}\\n' >&2\nexit 3\n"
    ));
    let error = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
    let text = error_chain(&error);
    assert!(text.contains("(agsize (1 block) too small)") && text.contains("exit status: 3"), "{text}");
    assert!(!text.contains("Usage") && !text.contains("blocksize"), "{text}");
    let missing =
        fixture.volume().with_mkfs("/nowhere/mkfs.xfs").mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(
        matches!(&missing, VolumeError::Format { source, .. } if source.kind() == io::ErrorKind::NotFound)
    );
    let text = error_chain(&missing);
    assert!(text.contains("can't run /nowhere/mkfs.xfs") && text.contains("install xfsprogs"), "{text}");
}

#[test]
fn a_failed_mount_is_undone_and_can_be_retried() {
    let fixture = VolumeFixture::new();
    let volume = fixture.volume();
    fixture.mounter.fail_next_mount(io::ErrorKind::PermissionDenied);
    assert!(matches!(volume.mount_new(ErasePolicy::Nothing), Err(VolumeError::Mount(_))));
    assert_eq!(volume.state(), MountState::Unmounted);
    volume.mount_new(ErasePolicy::Nothing).unwrap();
    volume.unmount().unwrap();
    assert_eq!(volume.state(), MountState::Unmounted);
    volume.unmount().unwrap();
    assert_eq!(fixture.mounter.recorded_calls().len(), 2);
}

#[test]
fn an_invalid_or_unopenable_device_is_reported() {
    let fixture = VolumeFixture::new();
    let of = |device: &Path| {
        let volume = DiskVolume::new(device, fixture.path("data"), fixture.mounter.clone());
        let (new, existing) = (volume.mount_new(ErasePolicy::Nothing), volume.mount_existing());
        assert!(matches!(existing, Err(VolumeError::Device { .. })), "{existing:?}");
        error_chain(&new.unwrap_err())
    };
    assert!(of(Path::new("/dev/null")).ends_with("/dev/null: not a block device"));
    assert!(of(&fixture.path("absent")).contains("No such file"));
    File::create(fixture.path("small")).unwrap().set_len(MIB).unwrap();
    assert!(of(&fixture.path("small")).contains("too small"));
    // Another process uses the disk.
    let lock = File::open(fixture.path("disk")).unwrap();
    lock.lock().unwrap();
    let locked = error_chain(&fixture.volume().mount_existing().unwrap_err());
    assert!(locked.starts_with("can't lock ") && locked.contains("lslocks"), "{locked}");
}

#[test]
fn a_directory_with_recovered_files_in_lost_and_found_is_not_empty() {
    let temporary = tempfile::tempdir().unwrap();
    let volume = || DirectoryVolume::new(Dir::open(temporary.path()).unwrap());
    fs::create_dir(temporary.path().join("lost+found")).unwrap();
    fs::write(temporary.path().join("lost+found/131"), "recovered by xfs_repair").unwrap();
    let rejected = volume().mount_new(ErasePolicy::Nothing);
    assert!(matches!(rejected, Err(VolumeError::Occupied { .. })), "{rejected:?}");
    assert!(matches!(volume().mount_existing(), Err(VolumeError::ForeignData { .. })));
    // mkfs.ext4 creates an empty one.
    fs::remove_file(temporary.path().join("lost+found/131")).unwrap();
    volume().mount_new(ErasePolicy::Nothing).unwrap();
}
