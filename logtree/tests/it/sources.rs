//! FIFOs and the kernel's log.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use nodekeel_logtree::source::{Fifo, FifoError, Kmsg};
use nodekeel_logtree::{Journal, Query, Reader, WriterOptions, parse};
use tokio::time::timeout;

use crate::support::*;

const SOON: Duration = Duration::from_secs(20);

/// Opens a FIFO for writing without waiting; fails when nobody reads.
fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK).open(path)
}

async fn next(reader: &mut Reader) -> String {
    text(&timeout(SOON, reader.next()).await.expect("it comes").unwrap())
}

/// Case 17.
#[tokio::test]
async fn lines_of_a_fifo_arrive_as_messages_also_after_its_reader_was_restarted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let journal = Journal::default();
    let mut reader = journal.read(Query::new(dn("x")).follow()).unwrap();
    let start = || {
        let mut fifo = Fifo::open(&path).unwrap();
        let mut to = journal.writer(&dn("x"), WriterOptions::new("log").parser(parse::logfmt));
        tokio::spawn(async move { fifo.pump(&mut to).await })
    };

    let pump = start();
    let mut writer = open(&path).unwrap();
    writer.write_all(b"level=info msg=one\nlevel=info msg=two\n").unwrap();
    assert_eq!(next(&mut reader).await, "one");
    assert_eq!(next(&mut reader).await, "two");
    drop(writer);
    pump.abort();
    assert!(pump.await.unwrap_err().is_cancelled());
    assert_eq!(open(&path).unwrap_err().raw_os_error(), Some(nix::libc::ENXIO), "nobody reads any more");

    let _pump = start();
    open(&path).unwrap().write_all(b"level=info msg=three\n").unwrap();
    assert_eq!(next(&mut reader).await, "three");
}

#[tokio::test]
async fn a_fifo_outlives_its_writers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let journal = Journal::default();
    let mut reader = journal.read(Query::new(dn("x")).follow()).unwrap();
    let mut fifo = Fifo::open(&path).unwrap();
    let mut to = journal.writer(&dn("x"), WriterOptions::new("log"));
    let _pump = tokio::spawn(async move { fifo.pump(&mut to).await });
    for number in 0..100 {
        open(&path).unwrap().write_all(format!("{number}\n").as_bytes()).unwrap();
        assert_eq!(next(&mut reader).await, number.to_string());
    }
}

#[tokio::test]
async fn a_name_that_no_longer_leads_to_the_fifo_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let other = directory.path().join("other");
    let lose: [&dyn Fn(); 3] =
        [&|| std::fs::remove_file(&path).unwrap(), &|| std::fs::rename(&path, &other).unwrap(), &|| {
            std::fs::rename(&other, &path).unwrap()
        }];
    for (way, lose) in lose.into_iter().enumerate() {
        let fifo = Fifo::open(&path).unwrap();
        let mut removed = std::pin::pin!(fifo.removed().unwrap());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o620);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(timeout(Duration::from_millis(20), &mut removed).await.is_err(), "it is still there: {way}");
        lose();
        timeout(SOON, removed).await.expect("it is noticed").unwrap();
        timeout(SOON, fifo.removed().unwrap()).await.expect("also when it was before").unwrap();
    }
}

#[tokio::test]
async fn what_is_written_into_a_fifo_without_a_name_arrives_until_its_last_writer_goes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let journal = Journal::default();
    let mut reader = journal.read(Query::new(dn("x")).follow()).unwrap();
    let mut to = journal.writer(&dn("x"), WriterOptions::new("log"));
    let fifo = Fifo::open(&path).unwrap();
    let mut writer = open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let drained = tokio::spawn(async move { fifo.drain(&mut to).await });
    for line in ["one", "two"] {
        writer.write_all(format!("{line}\n").as_bytes()).unwrap();
        assert_eq!(next(&mut reader).await, line);
    }
    assert!(!drained.is_finished());
    drop(writer);
    timeout(SOON, drained).await.expect("it ends").unwrap().unwrap();
}

#[tokio::test]
async fn nothing_but_a_fifo_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("file"), "").unwrap();
    drop(Fifo::open(&at("fifo")).unwrap());
    symlink(at("fifo"), at("link")).unwrap();
    for name in ["file", "link", "."] {
        assert!(matches!(Fifo::open(&at(name)), Err(FifoError::NotFifo { .. })), "{name}");
    }
    assert!(matches!(Fifo::open(&at("no/where")), Err(FifoError::Make { .. })));
    let metadata = std::fs::metadata(at("fifo")).unwrap();
    assert!(metadata.file_type().is_fifo());
    assert!(Fifo::open(&at("fifo")).is_ok(), "one that is there is used");
}

/// Writes a record to the kernel's log and reads it back.
#[tokio::test]
#[ignore = "needs root: reads and writes /dev/kmsg"]
async fn a_record_of_the_kernel_arrives_with_its_level_and_facility() {
    let journal = Journal::default();
    let mut kmsg = Kmsg::open().unwrap();
    let mark = format!("nodekeel-logtree test {}", std::process::id());
    OpenOptions::new()
        .write(true)
        .open("/dev/kmsg")
        .unwrap()
        .write_all(format!("<12>{mark}\n").as_bytes())
        .unwrap();
    let mut reader = journal.read(Query::new(dn("kernel")).follow()).unwrap();
    let to = dn("kernel");
    let find = async {
        while let Some(entry) = reader.next().await {
            if text(&entry) == mark {
                return entry;
            }
        }
        unreachable!("a following reader does not end")
    };
    tokio::select! {
        found = timeout(SOON, find) => {
            let found = found.expect("it comes");
            assert_eq!(level(&found), nodekeel_logtree::Level::Warn);
            assert!(found.time.elapsed().unwrap_or_default() < SOON);
        }
        ended = kmsg.pump(&journal, &to) => panic!("{ended:?}"),
    }
}
