//! Files of other programs and the kernel log.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use nodekeel_logtree::source::{FileError, FileSource, KmsgPosition, KmsgSource};
use nodekeel_logtree::{LogEntry, LogReader, LogStore, WriterOptions, parse};
use tokio::time::timeout;

use crate::support::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn open_for_writing(path: &Path) -> std::io::Result<File> {
    File::options().append(true).create(true).open(path)
}

async fn next_text(reader: &mut LogReader) -> String {
    entry_text(&timeout(TIMEOUT, reader.next()).await.expect("an entry arrives").unwrap())
}

/// Case 17. A second reader continues within a line and a block, and what was read takes no space.
#[tokio::test]
async fn appended_lines_arrive_once_also_after_a_time_without_a_reader() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let store = LogStore::default();
    let mut reader = store.open_reader(name_query("x").follow()).unwrap();
    let start = || {
        let mut file = FileSource::open(&path).unwrap();
        let mut to = store.line_writer(&dn("x"), WriterOptions::new("log").line_parser(parse::logfmt_line));
        tokio::spawn(async move { file.copy_lines(&mut to).await })
    };
    let long = "x".repeat(10_000);
    let mut writer = open_for_writing(&path).unwrap();
    for pass in 0..3 {
        // Without a reader, no writer waits.
        let mut other = open_for_writing(&path).unwrap();
        write!(other, "level=info msg={pass} x={long}\nlevel=info msg=second\n").unwrap();
        let pump = start();
        assert_eq!(next_text(&mut reader).await, pass.to_string());
        assert_eq!(next_text(&mut reader).await, "second");
        writeln!(other, "level=info msg=live").unwrap();
        assert_eq!(next_text(&mut reader).await, "live");
        pump.abort();
        assert!(pump.await.unwrap_err().is_cancelled());
        assert!(std::fs::metadata(&path).unwrap().blocks() <= 8, "at most one block is left");
    }
    // Another program truncates it, and appends.
    writer.set_len(0).unwrap();
    let _pump = start();
    writeln!(writer, "level=info msg=again").unwrap();
    assert_eq!(next_text(&mut reader).await, "again");
}

#[tokio::test]
async fn a_removed_or_replaced_file_is_read_to_its_end_and_detected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let store = LogStore::default();
    let mut reader = store.open_reader(name_query("x").follow()).unwrap();
    let changes: [fn(&Path); 2] = [
        |path| std::fs::remove_file(path).unwrap(),
        |path| {
            let other = path.with_extension("other");
            File::create(&other).unwrap();
            std::fs::rename(other, path).unwrap();
        },
    ];
    for change in changes {
        let mut file = FileSource::open(&path).unwrap();
        let mut writer = open_for_writing(&path).unwrap();
        let mut to = store.line_writer(&dn("x"), WriterOptions::new("log"));
        let pump = tokio::spawn(async move { file.copy_lines(&mut to).await });
        writeln!(writer, "live").unwrap();
        assert_eq!(next_text(&mut reader).await, "live");
        writeln!(writer, "last").unwrap();
        change(&path);
        timeout(TIMEOUT, pump).await.expect("it ends").unwrap().unwrap();
        assert_eq!(next_text(&mut reader).await, "last");
    }
}

#[tokio::test]
async fn nothing_but_a_regular_file_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
    symlink(at("file"), at("link")).unwrap();
    for name in ["fifo", "link", "."] {
        assert!(matches!(FileSource::open(&at(name)), Err(FileError::NotAFile { .. })), "{name}");
    }
    assert!(matches!(FileSource::open(&at("no/where")), Err(FileError::Open { .. })));
    drop(FileSource::open(&at("file")).unwrap());
    assert_eq!(std::fs::metadata(at("file")).unwrap().mode() & 0o777, 0o600);
}

fn write_kernel_record(text: &str) {
    let mut device = File::options().write(true).open("/dev/kmsg").unwrap();
    device.write_all(format!("<12>{text}\n").as_bytes()).unwrap();
}

/// Copies the kernel log from a position on until an entry with this text arrives.
async fn copy_until(store: &LogStore, position: &KmsgPosition, text: &str) -> LogEntry {
    let mut kmsg = KmsgSource::open(position).unwrap();
    let mut reader = store.open_reader(name_query("kernel").follow()).unwrap();
    let to = dn("kernel");
    let find = async {
        while let Some(entry) = reader.next().await {
            if entry_text(&entry) == text {
                return entry;
            }
        }
        unreachable!("a following reader does not end")
    };
    tokio::select! {
        found = timeout(TIMEOUT, find) => found.expect("the record arrives"),
        ended = kmsg.copy_records(store, &to) => panic!("{ended:?}"),
    }
}

/// Writes records to the kernel log and reads them back, by two sources in turn.
#[tokio::test]
#[ignore = "needs root: reads and writes /dev/kmsg"]
async fn a_kernel_record_arrives_once_with_its_level_and_facility() {
    let (store, position) = (LogStore::default(), KmsgPosition::default());
    let [first, second] = [1, 2].map(|n| format!("nodekeel-logtree test {} {n}", std::process::id()));
    KmsgSource::check().unwrap();
    write_kernel_record(&first);
    let found = copy_until(&store, &position, &first).await;
    assert_eq!(entry_level(&found), nodekeel_logtree::Level::Warn);
    assert!(found.time.elapsed().unwrap_or_default() < TIMEOUT);
    write_kernel_record(&second);
    copy_until(&store, &position, &second).await;
    let texts = read_texts(&store, name_query("kernel"));
    assert_eq!(texts.iter().filter(|text| [&first, &second].contains(text)).count(), 2);
}
