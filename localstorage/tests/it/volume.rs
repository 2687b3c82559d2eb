//! Volumes: what is made, what is refused, what goes on after a kill.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::mount::{MountSpec, Mounter as _};
use nodekeel_localstorage::testing::{MountCall, RecordingMounter, Verdict, volume_conformance, with_hook};
use nodekeel_localstorage::volume::{
    Contents, DataVolume, Directory, Erase, Plain, State, VolumeError, probe,
};
use nodekeel_localstorage::{Dir, Mode};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A sparse image for a disk, a directory for what is mounted, and a mkfs.xfs that does as much as the test wants.
struct Bench {
    temporary: TempDir,
    mounter: Arc<RecordingMounter>,
}

/// What the real one leaves behind, as far as a probe sees it.
const MKFS: &str = r#"#!/bin/sh
for disk; do case "$disk" in uuid=*) uuid=$(echo "${disk#uuid=}" | tr -d -) ;; esac; done
while [ -n "$uuid" ]; do
    bytes="$bytes$(printf '\\%03o' "0x${uuid%"${uuid#??}"}")"
    uuid=${uuid#??}
done
printf 'XFSB' | dd of="$disk" conv=notrunc status=none
printf "$bytes" | dd of="$disk" bs=1 seek=32 conv=notrunc status=none
printf 'nodekeel' | dd of="$disk" bs=1 seek=108 conv=notrunc status=none
"#;

impl Bench {
    fn new() -> Bench {
        let temporary = tempfile::tempdir().unwrap();
        fs::create_dir(temporary.path().join("data")).unwrap();
        File::create(temporary.path().join("disk")).unwrap().set_len(4 * MIB).unwrap();
        let bench = Bench { temporary, mounter: Arc::default() };
        bench.mkfs(MKFS);
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temporary.path().join(name)
    }

    fn mkfs(&self, script: &str) {
        testbed::write_program(&self.path("mkfs"), script).unwrap();
    }

    fn volume(&self) -> Plain {
        Plain::new(self.path("disk"), self.path("data"), self.mounter.clone()).with_mkfs(self.path("mkfs"))
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        File::options().write(true).open(self.path("disk")).unwrap().write_all_at(bytes, offset).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.path("disk")).unwrap()
    }

    fn contents(&self) -> Contents {
        probe(&mut File::open(self.path("disk")).unwrap()).unwrap()
    }
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn text(error: &VolumeError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn a_directory_keeps_the_contract() {
    let temporary = tempfile::tempdir().unwrap();
    volume_conformance(&Directory::new(Dir::open(temporary.path()).unwrap()));
}

#[test]
fn a_directory_with_files_of_somebody_is_neither_used_nor_touched() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = || Dir::open(temporary.path()).unwrap();
    dir().write("letter", b"dear", Mode::PRIVATE_FILE).unwrap();
    let refused = Directory::new(dir()).mount_new(Erase::Nothing).unwrap_err();
    assert!(matches!(refused, VolumeError::Occupied { found: Contents::Files { entries: 1 }, .. }));
    let refused = Directory::new(dir()).mount_existing().unwrap_err();
    assert!(matches!(refused, VolumeError::NotOurs { .. }), "{refused:?}");
    // Consent to something else than what is there is none.
    let other = Erase::Exactly(Contents::Files { entries: 2 });
    assert!(Directory::new(dir()).mount_new(other).is_err());
    assert_eq!(dir().read("letter").unwrap(), b"dear");
}

#[test]
fn erasing_a_directory_that_fails_at_any_call_goes_on_by_the_same_consent() {
    let erase = || Erase::Exactly(Contents::Files { entries: 3 });
    for nth in 1.. {
        let temporary = tempfile::tempdir().unwrap();
        let volume = || Directory::new(Dir::open(temporary.path()).unwrap());
        for name in ["a", "b", "c"] {
            fs::write(temporary.path().join(name), "dear").unwrap();
        }
        let mut count = 0;
        let fail_from_nth = move |_call: &'static str| {
            count += 1;
            if count < nth { Verdict::Go } else { Verdict::Fail(5) }
        };
        let made = {
            let volume = volume();
            with_hook(fail_from_nth, || volume.mount_new(erase()).map(drop))
        };
        let again = match volume().mount_new(erase()) {
            // Only its report has failed.
            Err(VolumeError::Occupied { .. }) => volume().mount_existing(),
            again => again,
        };
        let names = again.unwrap_or_else(|error| panic!("call {nth}: {error:?}")).list().unwrap();
        assert!(names.len() == 1 && names[0].name == ".data-volume", "call {nth}: {names:?}");
        if made.is_ok() {
            assert!(nth > 10, "it makes {nth} calls");
            return;
        }
    }
}

#[test]
fn a_directory_half_erased_is_no_volume() {
    let temporary = tempfile::tempdir().unwrap();
    let volume = || Directory::new(Dir::open(temporary.path()).unwrap());
    let top = volume().mount_new(Erase::Nothing).unwrap();
    top.ensure_dir("etcd", Mode::PRIVATE_DIR).unwrap();
    let erase = Erase::Exactly(Contents::Files { entries: 2 });
    let volume_that_fails = volume();
    let fail = |call: &'static str| if call == "unlinkat" { Verdict::Fail(5) } else { Verdict::Go };
    with_hook(fail, || volume_that_fails.mount_new(erase)).unwrap_err();
    let unfinished = volume().mount_existing().unwrap_err();
    assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
}

#[test]
fn what_comes_to_a_disk_after_an_interrupted_format_is_its_owners() {
    for (name, offset, magic) in
        [("ext", 1080, &b"\x53\xef"[..]), ("gpt", 512, b"EFI PART"), ("XFS", 0, b"XFSB")]
    {
        let bench = Bench::new();
        bench.mkfs("#!/bin/sh\nkill -9 $$\n");
        assert!(matches!(bench.volume().mount_new(Erase::Nothing), Err(VolumeError::Format { .. })));
        assert_eq!(bench.contents(), Contents::Interrupted);
        // Somebody takes the disk for something else. Nothing wipes a claim but the format that it is about.
        bench.write(offset, magic);
        bench.mkfs(MKFS);
        let before = bench.bytes();
        let refused = bench.volume().mount_new(Erase::Nothing).unwrap_err();
        assert!(matches!(refused, VolumeError::Occupied { .. }), "{name}: {refused:?}");
        assert!(refused.to_string().contains(name), "{refused}");
        assert!(before == bench.bytes(), "{name}: the disk has changed");
        bench.volume().mount_new(Erase::Exactly(bench.contents())).unwrap();
    }
}

#[test]
fn consent_to_one_disk_is_none_to_another_of_the_same_kind() {
    // Of each kind, what differs between two of them; the names of devices change places from one boot to the next.
    for (offset, magic, at) in
        [(1080, &b"\x53\xef"[..], 1128), (4 * MIB - 512, b"EFI PART", 4 * MIB - 456), (0, b"XFSB", 32)]
    {
        let disk = |uuid: &[u8]| {
            let bench = Bench::new();
            bench.write(offset, magic);
            bench.write(at, uuid);
            bench.write(108, b"nodekeel");
            bench
        };
        let (given_up, other) = (disk(b"the one"), disk(b"another"));
        let erase = Erase::Exactly(given_up.contents());
        let before = other.bytes();
        // With a file on it, it is nobody's to finish either.
        fs::write(other.path("data/letter"), "dear").unwrap();
        let refused = other.volume().mount_new(erase.clone()).unwrap_err();
        assert!(matches!(refused, VolumeError::Occupied { .. }), "{refused:?}");
        assert!(before == other.bytes(), "the disk has changed");
        given_up.volume().mount_new(erase.clone()).unwrap();

        // And where a format was interrupted, it is none to what somebody has put there since.
        let (given_up, other) = (disk(b"the one"), disk(b"another"));
        given_up.mkfs("#!/bin/sh\nkill -9 $$\n");
        given_up.volume().mount_new(erase.clone()).unwrap_err();
        assert_eq!(given_up.contents(), Contents::Interrupted);
        given_up.write(at, &other.bytes()[at as usize..at as usize + 7]);
        given_up.mkfs(MKFS);
        fs::write(given_up.path("data/letter"), "dear").unwrap();
        let before = given_up.bytes();
        let refused = given_up.volume().mount_new(erase).unwrap_err();
        assert!(matches!(refused, VolumeError::Occupied { .. }), "{refused:?}");
        assert!(before == given_up.bytes(), "the disk has changed");
    }
}

#[test]
fn a_format_that_may_erase_is_killed_before_it_does_and_goes_on() {
    for (offset, magic, label) in
        [(1080, &b"\x53\xef"[..], ""), (4 * MIB - 512, b"EFI PART", ""), (0, b"XFSB", "old")]
    {
        let bench = Bench::new();
        bench.write(offset, magic);
        bench.write(108, label.as_bytes());
        let erase = Erase::Exactly(bench.contents());
        bench.mkfs("#!/bin/sh\nkill -9 $$\n");
        for _ in 0..2 {
            let killed = bench.volume().mount_new(erase.clone()).unwrap_err();
            assert!(matches!(killed, VolumeError::Format { .. }), "{killed:?}");
            assert_eq!(bench.contents(), Contents::Interrupted);
        }
        bench.mkfs(MKFS);
        bench.volume().mount_new(erase).unwrap();
        assert!(matches!(bench.contents(), Contents::Xfs { label, .. } if label == "nodekeel"));
    }
}

#[test]
fn a_blank_disk_is_claimed_formatted_released_mounted_and_marked() {
    let bench = Bench::new();
    // At the time that mkfs runs, the claim is on the disk.
    bench.mkfs(&format!("{MKFS}cp \"$disk\" \"$disk.seen\"\necho \"$@\" >\"$disk.args\"\n"));
    let volume = bench.volume();
    assert_eq!(volume.state(), State::Unmounted);
    let top = volume.mount_new(Erase::Nothing).unwrap();
    assert_eq!(volume.state(), State::Mounted);
    assert_eq!(top.read(".data-volume").unwrap(), b"nodekeel data volume, format 1\n");
    let seen = probe(&mut File::open(bench.path("disk.seen")).unwrap()).unwrap();
    assert_eq!(seen, Contents::Interrupted);
    assert!(matches!(bench.contents(), Contents::Xfs { label, .. } if label == "nodekeel"));
    let args = fs::read_to_string(bench.path("disk.args")).unwrap();
    let (words, disk) = args.split_once(" -- ").unwrap();
    assert_eq!(disk.trim_end(), bench.path("disk").display().to_string());
    let uuid = words.strip_prefix("-q -K -L nodekeel -m uuid=").unwrap();
    assert_eq!(bench.bytes()[32..48], hex(&uuid.replace('-', "")));
    let calls = [MountCall::Mount {
        spec: MountSpec::DATA,
        source: Some(bench.path("disk")),
        target: bench.path("data"),
    }];
    assert_eq!(bench.mounter.calls(), calls);
}

#[test]
fn what_a_disk_holds_is_refused_and_not_a_byte_of_it_changes() {
    let signatures: [(&str, u64, &[u8]); 6] = [
        ("luks", 0, b"LUKS\xba\xbe"),
        ("ext", 1080, b"\x53\xef"),
        ("gpt", 4 * MIB - 512, b"EFI PART"),
        ("xfs", 0, b"XFSB"),
        ("LVM2_member", 512, b"LABELONE"),
        ("data", 40_000, b"diary"),
    ];
    for (name, offset, magic) in signatures {
        let bench = Bench::new();
        bench.write(offset, magic);
        let before = bench.bytes();
        let refused = bench.volume().mount_new(Erase::Nothing).unwrap_err();
        assert!(matches!(refused, VolumeError::Occupied { .. }), "{name}: {refused:?}");
        assert!(refused.to_string().contains(if name == "xfs" { "XFS" } else { name }), "{refused}");
        let foreign = bench.volume().mount_existing().unwrap_err();
        assert!(matches!(foreign, VolumeError::NotOurs { .. }), "{name}: {foreign:?}");
        let other = Erase::Exactly(Contents::Occupied { found: vec![] });
        assert!(bench.volume().mount_new(other).is_err(), "consent to something else is none");
        assert_eq!(bench.mounter.calls(), [], "what is not ours is not even mounted");
        assert!(before == bench.bytes(), "{name}: the disk has changed");

        let found = bench.contents();
        bench.mkfs(&format!("{MKFS}echo \"$@\" >\"$disk.args\"\n"));
        bench.volume().mount_new(Erase::Exactly(found)).unwrap();
        assert!(fs::read_to_string(bench.path("disk.args")).unwrap().contains(" -f "));
    }
}

#[test]
fn a_volume_killed_at_any_point_of_its_making_is_made_again() {
    // Before the claim there is nothing; these are the points after it.
    let half = "#!/bin/sh\nfor disk; do :; done\n\
        printf 'half a file system' | dd of=\"$disk\" bs=1k seek=1 conv=notrunc status=none\nkill -9 $$\n";
    let bench = Bench::new();
    for script in ["#!/bin/sh\nkill -9 $$\n", half, &format!("{MKFS}kill -9 $$\n")] {
        bench.mkfs(script);
        let killed = bench.volume().mount_new(Erase::Nothing).unwrap_err();
        assert!(matches!(killed, VolumeError::Format { .. }), "{killed:?}");
        assert_eq!(bench.contents(), Contents::Interrupted);
        let unfinished = bench.volume().mount_existing().unwrap_err();
        assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
        assert_eq!(bench.mounter.calls(), []);
    }
    // Formatted and released, and not yet mounted: it is finished, and not formatted again.
    bench.mkfs(MKFS);
    bench.mounter.fail_next(io::ErrorKind::Interrupted);
    let killed = bench.volume().mount_new(Erase::Nothing).unwrap_err();
    assert!(matches!(killed, VolumeError::Mount(_)), "{killed:?}");
    assert!(matches!(bench.contents(), Contents::Xfs { .. }));
    bench.mkfs("#!/bin/sh\nexit 1\n");
    // Mounted and not yet marked: the mount of a process that is gone stays.
    let (disk, data) = (bench.path("disk"), bench.path("data"));
    bench.mounter.mount(&MountSpec::DATA, Some(&disk), &data).unwrap();
    let volume = bench.volume();
    let unfinished = volume.mount_existing().unwrap_err();
    assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
    volume.mount_new(Erase::Nothing).unwrap();
    assert_eq!(bench.mounter.calls().len(), 1, "it is mounted once");
    volume.unmount().unwrap();
    volume.mount_existing().unwrap();
}

#[test]
fn a_file_system_of_our_label_with_files_and_no_mark_is_not_ours() {
    let bench = Bench::new();
    bench.volume().mount_new(Erase::Nothing).unwrap();
    bench.mounter.unmount(&bench.path("data")).unwrap();
    fs::write(bench.path("data/letter"), "dear").unwrap();
    fs::remove_file(bench.path("data/.data-volume")).unwrap();
    let volume = bench.volume();
    assert!(matches!(volume.mount_existing(), Err(VolumeError::NotOurs { .. })));
    assert!(matches!(volume.mount_new(Erase::Nothing), Err(VolumeError::Occupied { .. })));
    assert_eq!(volume.state(), State::Unmounted);
    let mounted = bench.mounter.mounted(&bench.path("data")).unwrap();
    assert_eq!(mounted, None, "a refused volume is unmounted again");
    assert_eq!(fs::read(bench.path("data/letter")).unwrap(), b"dear");
}

#[test]
fn what_mkfs_says_is_in_the_error() {
    let bench = Bench::new();
    bench.mkfs("#!/bin/sh\necho 'agsize (1 block) too small' >&2\necho 'try more' >&2\nexit 3\n");
    let error = bench.volume().mount_new(Erase::Nothing).unwrap_err();
    let text = text(&error);
    assert!(
        text.contains("(agsize (1 block) too small try more)") && text.contains("exit status: 3"),
        "{text}"
    );
    let missing = bench.volume().with_mkfs("/nowhere/mkfs.xfs").mount_new(Erase::Nothing).unwrap_err();
    assert!(
        matches!(&missing, VolumeError::Format { source, .. } if source.kind() == io::ErrorKind::NotFound)
    );
}

#[test]
fn a_failed_mount_is_undone_and_can_be_tried_again() {
    let bench = Bench::new();
    let volume = bench.volume();
    bench.mounter.fail_next(io::ErrorKind::PermissionDenied);
    assert!(matches!(volume.mount_new(Erase::Nothing), Err(VolumeError::Mount(_))));
    assert_eq!(volume.state(), State::Unmounted);
    volume.mount_new(Erase::Nothing).unwrap();
    volume.unmount().unwrap();
    assert_eq!(volume.state(), State::Unmounted);
    volume.unmount().unwrap();
    assert_eq!(bench.mounter.calls().len(), 2);
}

#[test]
fn what_is_no_disk_or_cannot_be_opened_is_said() {
    let bench = Bench::new();
    let of = |device: &Path| {
        let volume = Plain::new(device, bench.path("data"), bench.mounter.clone());
        let (new, existing) = (volume.mount_new(Erase::Nothing), volume.mount_existing());
        assert!(matches!(existing, Err(VolumeError::Device { .. })), "{existing:?}");
        text(&new.unwrap_err())
    };
    assert!(of(Path::new("/dev/null")).ends_with("/dev/null: it is no block device"));
    assert!(of(&bench.path("absent")).contains("No such file"));
    File::create(bench.path("small")).unwrap().set_len(MIB).unwrap();
    assert!(of(&bench.path("small")).contains("too small"));
    // Somebody else is at work on it.
    let lock = File::open(bench.path("disk")).unwrap();
    lock.lock().unwrap();
    assert!(of(&bench.path("disk")).starts_with("open "));
}
