//! FIFOs and the kernel log.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use nodekeel_logtree::source::{FifoError, FifoSource, KmsgPosition, KmsgSource};
use nodekeel_logtree::{LogEntry, LogReader, LogStore, WriterOptions, parse};
use tokio::time::timeout;

use crate::support::*;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Opens a FIFO for writing without waiting; fails if no process reads it.
fn open_for_writing(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK).open(path)
}

async fn next_text(reader: &mut LogReader) -> String {
    entry_text(&timeout(TIMEOUT, reader.next()).await.expect("an entry arrives").unwrap())
}

/// Case 17.
#[tokio::test]
async fn fifo_lines_arrive_as_messages_also_after_a_reader_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let store = LogStore::default();
    let mut reader = store.open_reader(name_query("x").follow()).unwrap();
    let start = || {
        let mut fifo = FifoSource::open(&path).unwrap();
        let mut to = store.line_writer(&dn("x"), WriterOptions::new("log").line_parser(parse::logfmt_line));
        tokio::spawn(async move { fifo.copy_lines(&mut to).await })
    };

    let pump = start();
    let mut writer = open_for_writing(&path).unwrap();
    writer.write_all(b"level=info msg=one\nlevel=info msg=two\n").unwrap();
    assert_eq!(next_text(&mut reader).await, "one");
    assert_eq!(next_text(&mut reader).await, "two");
    drop(writer);
    pump.abort();
    assert!(pump.await.unwrap_err().is_cancelled());
    assert_eq!(
        open_for_writing(&path).unwrap_err().raw_os_error(),
        Some(nix::libc::ENXIO),
        "no process reads any more"
    );

    let _pump = start();
    open_for_writing(&path).unwrap().write_all(b"level=info msg=three\n").unwrap();
    assert_eq!(next_text(&mut reader).await, "three");
}

#[tokio::test]
async fn a_fifo_outlives_its_writers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let store = LogStore::default();
    let mut reader = store.open_reader(name_query("x").follow()).unwrap();
    let mut fifo = FifoSource::open(&path).unwrap();
    let mut to = store.line_writer(&dn("x"), WriterOptions::new("log"));
    let _pump = tokio::spawn(async move { fifo.copy_lines(&mut to).await });
    for number in 0..100 {
        open_for_writing(&path).unwrap().write_all(format!("{number}\n").as_bytes()).unwrap();
        assert_eq!(next_text(&mut reader).await, number.to_string());
    }
}

#[tokio::test]
async fn a_removed_or_replaced_fifo_is_detected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let other = directory.path().join("other");
    let lose: [&dyn Fn(); 3] =
        [&|| std::fs::remove_file(&path).unwrap(), &|| std::fs::rename(&path, &other).unwrap(), &|| {
            std::fs::rename(&other, &path).unwrap()
        }];
    for (way, lose) in lose.into_iter().enumerate() {
        let fifo = FifoSource::open(&path).unwrap();
        let mut removed = std::pin::pin!(fifo.watch_removal().unwrap());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o620);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(timeout(Duration::from_millis(20), &mut removed).await.is_err(), "it is still there: {way}");
        lose();
        timeout(TIMEOUT, removed).await.expect("the change is detected").unwrap();
        timeout(TIMEOUT, fifo.watch_removal().unwrap())
            .await
            .expect("an earlier change is detected, too")
            .unwrap();
    }
}

#[tokio::test]
async fn lines_of_an_unlinked_fifo_arrive_until_its_last_writer_closes_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let store = LogStore::default();
    let mut reader = store.open_reader(name_query("x").follow()).unwrap();
    let mut to = store.line_writer(&dn("x"), WriterOptions::new("log"));
    let fifo = FifoSource::open(&path).unwrap();
    let mut writer = open_for_writing(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let drained = tokio::spawn(async move { fifo.copy_to_end(&mut to).await });
    for line in ["one", "two"] {
        writer.write_all(format!("{line}\n").as_bytes()).unwrap();
        assert_eq!(next_text(&mut reader).await, line);
    }
    assert!(!drained.is_finished());
    drop(writer);
    timeout(TIMEOUT, drained).await.expect("copying ends").unwrap().unwrap();
}

#[tokio::test]
async fn nothing_but_a_fifo_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("file"), "").unwrap();
    drop(FifoSource::open(&at("fifo")).unwrap());
    symlink(at("fifo"), at("link")).unwrap();
    for name in ["file", "link", "."] {
        assert!(matches!(FifoSource::open(&at(name)), Err(FifoError::NotFifo { .. })), "{name}");
    }
    assert!(matches!(FifoSource::open(&at("no/where")), Err(FifoError::Create { .. })));
    let metadata = std::fs::metadata(at("fifo")).unwrap();
    assert!(metadata.file_type().is_fifo());
    assert!(FifoSource::open(&at("fifo")).is_ok(), "an existing FIFO is used");
}

fn write_kernel_record(text: &str) {
    let mut device = OpenOptions::new().write(true).open("/dev/kmsg").unwrap();
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
