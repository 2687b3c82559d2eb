//! gVisor's log, without gVisor: lines appended to its file.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_containerd_svc::runsc_log_reader;
use nodekeel_logtree::{EntryBody, LogLimits, LogQuery, LogReader, LogStore};
use nodekeel_supervisor::{RunnableState, Supervisor};
use tempfile::TempDir;
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(20);

/// The log reader under a supervisor, and the lines it has read.
struct FileReader {
    directory: TempDir,
    supervisor: Supervisor,
    lines: LogReader,
}

impl FileReader {
    async fn start() -> Self {
        // Enough space for all lines of any of these tests, read at any time.
        Self::start_with(LogStore::new(LogLimits { bytes_per_dn: 16 << 20, ..LogLimits::default() })).await
    }

    async fn start_with(journal: LogStore) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let lines = journal.open_reader(LogQuery::of_dn("root".parse().unwrap()).follow()).unwrap();
        let log = directory.path().join("log");
        let supervisor = Supervisor::builder().start(runsc_log_reader(journal, log));
        let mut changes = supervisor.watch_changes();
        while supervisor.snapshot()[0].state != RunnableState::Ready {
            changes.changed().await.unwrap();
        }
        Self { directory, supervisor, lines }
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    async fn next_line(&mut self) -> String {
        match timeout(TIMEOUT, self.lines.next()).await.expect("a line arrives").unwrap().body {
            EntryBody::Leveled(entry) => entry.message,
            EntryBody::Raw(entry) => entry.text,
            other => panic!("{other:?}"),
        }
    }

    async fn stop(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
    }
}

fn open_writer(path: &Path) -> File {
    File::options().append(true).open(path).unwrap()
}

/// Reference 10: several writers, one that exits, a burst of a MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_writers_are_read_to_their_last_line() {
    const LINES: usize = 8192;
    let mut reader = FileReader::start().await;
    let path = reader.log_path();
    let writers = ["a", "b"].map(|name| {
        let mut log = open_writer(&path);
        // As gVisor does, one line per call; 64 bytes each.
        std::thread::spawn(move || {
            for number in 0..LINES {
                log.write_all(format!("{name}{number:062}\n").as_bytes()).unwrap();
            }
        })
    });
    let mut next = [0; 2];
    while next != [LINES; 2] {
        let line = reader.next_line().await;
        let (name, number) = line.split_at(1);
        let at = &mut next[usize::from(name == "b")];
        assert_eq!(number.parse::<usize>().unwrap(), *at, "in order, and none is missing");
        *at += 1;
    }
    for writer in writers {
        writer.join().unwrap();
    }
    writeln!(open_writer(&path), "a later one").unwrap();
    assert_eq!(reader.next_line().await, "a later one");
    reader.stop().await;
}

/// Reference 13, `runsc pump: sink slow`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_stalls_no_writer_and_dropped_lines_are_counted() {
    const LINES: u64 = 8192;
    let mut reader =
        FileReader::start_with(LogStore::new(LogLimits { bytes_per_dn: 64 << 10, ..LogLimits::default() }))
            .await;
    let mut log = open_writer(&reader.log_path());
    let written = tokio::task::spawn_blocking(move || {
        (0..LINES).for_each(|number| log.write_all(format!("{number:063}\n").as_bytes()).unwrap());
    });
    timeout(TIMEOUT, written).await.expect("the writer is not stalled").unwrap();
    let (mut read, mut dropped, mut last) = (0, 0, 0);
    while last != LINES - 1 {
        match timeout(TIMEOUT, reader.lines.next()).await.expect("the last line arrives").unwrap().body {
            EntryBody::Raw(line) => (read, last) = (read + 1, line.text.parse().unwrap()),
            EntryBody::Dropped(gap) => dropped += gap.count,
            other => panic!("{other:?}"),
        }
    }
    assert!(dropped > 0);
    assert_eq!(read + dropped, LINES);
    reader.stop().await;
}

/// Reference 13, `runsc pump: file deleted under it`.
#[tokio::test]
async fn a_removed_file_is_created_again() {
    let mut reader = FileReader::start().await;
    let path = reader.log_path();
    for pass in 0..3 {
        fs::remove_file(&path).unwrap();
        // Outside of the reader, only polling shows the new file.
        let mut new = tokio::task::spawn_blocking({
            let path = path.clone();
            move || {
                testbed::wait_until(TIMEOUT, "a new one", || Ok(File::options().append(true).open(&path)?))
            }
        })
        .await
        .unwrap()
        .unwrap();
        writeln!(new, "new {pass}").unwrap();
        assert_eq!(reader.next_line().await, format!("new {pass}"));
    }
    reader.stop().await;
}
