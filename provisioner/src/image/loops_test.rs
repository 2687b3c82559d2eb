use std::fs::File;

use proptest::prelude::*;

use super::*;

#[test]
fn only_loop_devices_have_numbers() {
    let number = |name: &str| loop_number(OsStr::new(name));
    assert_eq!([number("loop0"), number("loop17")], [Some(0), Some(17)]);
    for other in ["loop", "loop1p1", "loop-control", "loop+1", "sda", "loop99999999999"] {
        assert_eq!(number(other), None, "{other}");
    }
}

#[test]
fn a_device_is_named_after_the_directory_of_its_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let volume = directory.path().join("pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f");
    fs::create_dir(&volume).expect("create");
    let file = File::create(volume.join("image")).expect("create");
    let name = file_name(file.as_fd());
    assert_eq!(name[..40], *b"pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f");
    assert!(name[40..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_file_of_a_device_is_compared_by_its_inode() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = File::create(directory.path().join("image")).expect("create");
    let of_file = BackingFile::from_fd(file.as_fd()).expect("stat");
    assert!(!has_other_file(u32::MAX, of_file), "what is not shown may be the file");
}

proptest! {
    #[test]
    fn the_kernels_encoding_of_a_device_number_is_that_of_stat(major in 0..0x1000_u32, minor in 0..0x10_0000_u32) {
        let (low, high) = (u64::from(minor & 0xff), u64::from(minor & !0xff) << 12);
        let encoded = low | u64::from(major) << 8 | high;
        prop_assert_eq!(decode_device(encoded), rustix::fs::makedev(major, minor));
    }
}

fn sparse_file(directory: &Path, bytes: u64) -> File {
    let path = directory.join("image");
    let file = File::options().read(true).write(true).create_new(true).open(path).expect("create");
    file.set_len(bytes).expect("set the size");
    file
}

/// Other tests look at all devices, and may hold one during this test.
fn wait_detached(file: &File) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !find(file.as_fd()).expect("find").is_empty() {
        assert!(Instant::now() < deadline, "the device is left");
        thread::yield_now();
    }
}

const OPTIONS: LoopOptions = LoopOptions { read_only: false, autoclear: false, block_size: None };

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_device_is_found_by_its_file_grows_with_it_and_is_detached() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = sparse_file(directory.path(), 1 << 20);
    let find_all = || find(file.as_fd()).expect("find");
    assert!(find_all().is_empty());
    let device = attach(file.as_fd(), OPTIONS).expect("attach");
    assert_eq!(device.size().expect("a size"), 1 << 20);
    assert!(device.is_complete() && !device.is_autoclear() && !device.is_read_only());
    drop(device);
    let found = find_all();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].backing_file(), BackingFile::from_fd(file.as_fd()).expect("stat"));
    let same = LoopDevice::open_numbers(found[0].numbers).expect("open").expect("a file");
    assert_eq!(same.path(), found[0].path());
    file.set_len(3 << 20).expect("set the size");
    grow_attached(file.as_fd()).expect("grow");
    assert_eq!(same.size().expect("a size"), 3 << 20);
    sync_mounted(file.as_fd()).expect("sync");
    drop((found, same));
    detach_all(file.as_fd()).expect("detach");
    wait_detached(&file);
    detach_all(file.as_fd()).expect("nothing is attached");
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_device_that_clears_itself_goes_with_its_last_user_unless_it_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = sparse_file(directory.path(), 1 << 20);
    let options = LoopOptions { autoclear: true, ..OPTIONS };
    let device = attach(file.as_fd(), options).expect("attach");
    assert!(device.is_autoclear());
    drop(device);
    wait_detached(&file);
    let mut device = attach(file.as_fd(), options).expect("attach");
    device.keep_attached().expect("keep");
    drop(device);
    let found = find(file.as_fd()).expect("find");
    assert!(found.len() == 1 && !found[0].is_autoclear());
    drop(found);
    detach_all(file.as_fd()).expect("detach");
    wait_detached(&file);
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_read_only_device_can_not_be_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = sparse_file(directory.path(), 1 << 20);
    let device =
        attach(file.as_fd(), LoopOptions { read_only: true, autoclear: true, ..OPTIONS }).expect("attach");
    assert!(device.is_read_only());
    let write = File::options()
        .write(true)
        .open(device.path())
        .and_then(|mut file| io::Write::write_all(&mut file, b"x"));
    assert!(write.is_err());
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn files_attached_at_once_get_separate_devices() {
    let attach_one = |_| {
        let directory = tempfile::tempdir().expect("a directory");
        let file = sparse_file(directory.path(), 1 << 20);
        let device = attach(file.as_fd(), LoopOptions { autoclear: true, ..OPTIONS }).expect("attach");
        assert_eq!(device.backing_file(), BackingFile::from_fd(file.as_fd()).expect("stat"));
        device
    };
    let devices: Vec<LoopDevice> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|number| scope.spawn(move || attach_one(number))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut paths: Vec<_> = devices.iter().map(LoopDevice::path).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), 8);
}
