use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::time::{Duration, UNIX_EPOCH};

use super::*;
use crate::FileMode;

/// A directory with an empty `source` and an empty `target`.
fn scratch() -> (tempfile::TempDir, [Dir; 2]) {
    let scratch = tempfile::tempdir().expect("a directory");
    let top = Dir::open(scratch.path()).expect("open");
    let dirs = ["source", "target"].map(|name| top.ensure_dir(name, FileMode::PRIVATE_DIR).expect("made"));
    (scratch, dirs)
}

/// Everything that a stream keeps of a tree, as lines.
fn describe(top: &Path) -> Vec<String> {
    let (mut lines, mut dirs) = (Vec::new(), vec![top.to_owned()]);
    while let Some(dir) = dirs.pop() {
        let entries = fs::read_dir(&dir).expect("a list").map(|entry| entry.expect("an entry").path());
        for path in entries.chain((dir == top).then(|| dir.clone())) {
            let stat = path.symlink_metadata().expect("stat");
            let content = match stat.file_type() {
                kind if kind.is_file() => format!("{:?}", fs::read(&path).expect("read")),
                kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path).expect("a link")),
                _ => String::new(),
            };
            if stat.is_dir() && path != top {
                dirs.push(path.clone());
            }
            let name = path.strip_prefix(top).expect("below");
            let links = if stat.is_dir() { 0 } else { stat.nlink() };
            lines.push(format!(
                "{name:?} {:o} {} {} {} {} {links} {content}",
                stat.mode(),
                stat.uid(),
                stat.gid(),
                stat.mtime(),
                stat.mtime_nsec(),
            ));
        }
    }
    lines.sort();
    lines
}

fn fill(top: &Path) {
    let at = |name: &str| top.join(name);
    fs::create_dir_all(at("below/deeper")).expect("directories");
    fs::create_dir(at("empty")).expect("a directory");
    fs::write(at("below/file"), "data").expect("written");
    fs::write(at(" \u{1}\n\u{fffd}"), "odd name").expect("written");
    fs::hard_link(at("below/file"), at("below/deeper/again")).expect("linked");
    fs::hard_link(at("below/file"), at("twice")).expect("linked");
    symlink("below/../../outside", at("link")).expect("linked");
    symlink("below", at("to-below")).expect("linked");
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, RawMode::RUSR, 0).expect("a FIFO");
    drop(UnixListener::bind(at("socket")).expect("a socket"));
    let sparse = File::create(at("sparse")).expect("created");
    sparse.write_all_at(b"middle", 3 << 20).expect("written");
    sparse.set_len(8 << 20).expect("a hole");
    sparse.set_modified(UNIX_EPOCH + Duration::new(1_000_000_007, 123_456_789)).expect("a time");
    fs::set_permissions(at("below/file"), std::fs::Permissions::from_mode(0o4751)).expect("a mode");
    fs::set_permissions(at("below/deeper"), std::fs::Permissions::from_mode(0o1500)).expect("a mode");
    rustix::fs::setxattr(at("twice"), "user.note", b"kept", rustix::fs::XattrFlags::empty()).expect("set");
}

fn stream_of(source: &Dir) -> Vec<u8> {
    let mut stream = Vec::new();
    source.send_tree(&mut stream).expect("sent");
    stream
}

#[test]
fn a_tree_arrives_with_all_that_a_clone_keeps() {
    let (scratch, [source, target]) = scratch();
    let at = |tree: &str| scratch.path().join(tree);
    fill(&at("source"));
    let stream = stream_of(&source);
    assert!(stream.len() < 1 << 20, "holes are not sent: {}", stream.len());
    let summary = target.receive_tree(&mut stream.as_slice()).expect("received");
    assert_eq!((summary.devices, summary.separate_files), (0, 0));
    assert_eq!(describe(&at("target")), describe(&at("source")));
    let blocks = |tree: &str| at(tree).join("sparse").metadata().expect("stat").blocks();
    assert!(blocks("target") <= blocks("source") + 64, "{}", blocks("target"));
    let mut value = [0; 16];
    let length = rustix::fs::getxattr(at("target").join("below/file"), "user.note", &mut value).expect("set");
    assert_eq!(&value[..length], b"kept");
}

#[test]
fn no_part_of_a_stream_and_no_changed_or_longer_one_is_received() {
    let (scratch, [source, _]) = scratch();
    fs::create_dir(scratch.path().join("source/below")).expect("a directory");
    fs::write(scratch.path().join("source/below/file"), "data").expect("written");
    fs::hard_link(scratch.path().join("source/below/file"), scratch.path().join("source/again"))
        .expect("linked");
    let stream = stream_of(&source);
    let receive = |number: usize, stream: &[u8]| {
        let top = Dir::open(scratch.path()).expect("open");
        let target = top.ensure_dir(format!("target-{number}"), FileMode::PRIVATE_DIR).expect("made");
        target.receive_tree(&mut &*stream).map(drop)
    };
    for length in 0..stream.len() {
        receive(length, &stream[..length]).expect_err("a part");
        let mut changed = stream.clone();
        changed[length] ^= 1;
        receive(stream.len() + length, &changed).expect_err("changed");
    }
    for more in [&b"\0"[..], &stream] {
        receive(2 * stream.len() + more.len(), &[&stream, more].concat()).expect_err("more");
    }
    receive(2 * stream.len(), &stream).expect("all of it");
}

/// A name, a link or an attribute leads out of the tree in no stream, also if its hash is right.
#[test]
fn a_stream_writes_nothing_outside_of_its_tree() {
    let (scratch, [_, target]) = scratch();
    fs::write(scratch.path().join("secret"), "data").expect("written");
    let record = |tag: u8, fields: &[&[u8]]| {
        let mut to = Hashing { inner: Vec::new(), hash: Sha256::new() };
        to.put(MAGIC).expect("written");
        to.put(&[tag]).expect("written");
        fields.iter().for_each(|field| to.put_bytes(field).expect("written"));
        to.inner
    };
    for stream in [
        record(ENTER, &[b".."]),
        record(ENTER, &[b"../other"]),
        record(FILE, &[b"a/b"]),
        record(FILE, &[b""]),
        record(LINK, &[b"stolen", b"../secret"]),
        record(LINK, &[b"stolen", b"/etc/passwd"]),
        record(SYMLINK, &[b"..", b"x"]),
    ] {
        target.receive_tree(&mut stream.as_slice()).expect_err("refused");
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("a list").count(), 3);
    assert_eq!(fs::read_dir(scratch.path().join("target")).expect("a list").count(), 0);
}

#[test]
fn records_of_any_bytes_are_received_within_the_tree_or_refused() {
    let (scratch, [source, _]) = scratch();
    fill(&scratch.path().join("source"));
    let stream = stream_of(&source);
    let records = &stream[MAGIC.len()..stream.len() - 32];
    let top = Dir::open(scratch.path()).expect("open");
    let top = top.ensure_dir("fuzz", FileMode::PRIVATE_DIR).expect("made");
    fuzz_tree_stream(&top, records);
    for at in (0..records.len()).step_by(23) {
        for byte in [0, b'.', b'/', records[at].wrapping_add(1), 0xff] {
            let mut changed = records.to_vec();
            changed[at] = byte;
            fuzz_tree_stream(&top, &changed);
        }
        fuzz_tree_stream(&top, &[&records[..at], &records[at + 1..]].concat());
    }
}

/// Makes nested directories of this name, and returns the lowest.
fn nest(top: &Dir, name: &str, depth: usize) -> OwnedFd {
    let mut dir = top.as_fd().try_clone_to_owned().expect("duplicated");
    for _ in 0..depth {
        rustix::fs::mkdirat(&dir, name, RawMode::RWXU).expect("made");
        dir = syscalls::open_on_same_mount(&dir, OsStr::new(name), OPEN_DIR_FLAGS).expect("open");
    }
    dir
}

#[test]
fn a_tree_deeper_than_the_limit_of_open_files_arrives() {
    let (scratch, [source, target]) = scratch();
    drop(nest(&source, "d", 1500));
    let stream = stream_of(&source);
    let opened = std::cell::Cell::new(0);
    let mut watched = Watched(&stream, || opened.set(opened.get().max(open_below(scratch.path()))));
    let received = target.receive_tree(&mut watched).expect("received");
    assert_eq!(received.entries, 1501);
    assert!(opened.get() < 8, "{} descriptors", opened.get());
}

#[test]
fn names_of_a_file_whose_path_is_too_long_arrive_as_separate_files() {
    let (_scratch, [source, target]) = scratch();
    let dir = nest(&source, &"d".repeat(200), 30);
    drop(syscalls::create_new_file(&dir, OsStr::new("a")).expect("a file"));
    rustix::fs::linkat(&dir, "a", &dir, "b", rustix::fs::AtFlags::empty()).expect("linked");
    let received = target.receive_tree(&mut stream_of(&source).as_slice()).expect("received");
    assert_eq!((received.entries, received.separate_files), (33, 2));
}

/// The descriptors of this process that are in a tree; tests that run at the same time have others.
fn open_below(top: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").expect("a list").map(|entry| entry.expect("an entry").path());
    // A path that is too long can't be read; only this test has such a one.
    let is_below = |path: &Path| match fs::read_link(path) {
        Ok(target) => target.starts_with(top),
        Err(error) => error.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()),
    };
    all.filter(|path| is_below(path)).count()
}

/// A reader that calls back before each part.
struct Watched<'a, F>(&'a [u8], F);

impl<F: Fn()> Read for Watched<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1();
        let length = buffer.len().min(512);
        self.0.read(&mut buffer[..length])
    }
}
