//! gVisor's log, without gVisor: what comes through the FIFO.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_containerd_svc::runsc_log;
use nodekeel_logtree::{Body, Journal, Limits, Query, Reader};
use nodekeel_supervisor::{State, Supervisor};
use tempfile::TempDir;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

/// The pump under a supervisor, and what it has read.
struct Pump {
    directory: TempDir,
    supervisor: Supervisor,
    lines: Reader,
}

impl Pump {
    async fn start() -> Self {
        // Room for all that any of these tests writes, however late it is read.
        Self::into(Journal::new(Limits { bytes_per_dn: 16 << 20, ..Limits::default() })).await
    }

    async fn into(journal: Journal) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let lines = journal.read(Query::new("root".parse().unwrap()).follow()).unwrap();
        let fifo = directory.path().join("log.fifo");
        let supervisor = Supervisor::builder().start(runsc_log(journal, fifo));
        let mut changes = supervisor.watch();
        while supervisor.snapshot()[0].state != State::Ready {
            changes.changed().await.unwrap();
        }
        Self { directory, supervisor, lines }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("log.fifo")
    }

    async fn next(&mut self) -> String {
        match timeout(SOON, self.lines.next()).await.expect("a line comes").unwrap().body {
            Body::Leveled(entry) => entry.message,
            Body::Raw(entry) => entry.text,
            other => panic!("{other:?}"),
        }
    }

    async fn stop(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
    }
}

fn writer(path: &Path) -> File {
    File::options().append(true).open(path).unwrap()
}

/// Reference 10: several writers, one that goes, a burst of a MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_writers_are_read_to_their_last_line() {
    const LINES: usize = 8192;
    let mut pump = Pump::start().await;
    let path = pump.path();
    let writers = ["a", "b"].map(|name| {
        let mut fifo = writer(&path);
        // As gVisor does, a line a call; 64 bytes of it.
        std::thread::spawn(move || {
            for number in 0..LINES {
                fifo.write_all(format!("{name}{number:062}\n").as_bytes()).unwrap();
            }
        })
    });
    let mut next = [0; 2];
    while next != [LINES; 2] {
        let line = pump.next().await;
        let (name, number) = line.split_at(1);
        let at = &mut next[usize::from(name == "b")];
        assert_eq!(number.parse::<usize>().unwrap(), *at, "in order, and none is missing");
        *at += 1;
    }
    for writer in writers {
        writer.join().unwrap();
    }
    writeln!(writer(&path), "a later one").unwrap();
    assert_eq!(pump.next().await, "a later one");
    pump.stop().await;
}

/// Reference 13, `runsc pump: sink slow`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_that_nobody_reads_stalls_no_writer_and_what_it_costs_is_counted() {
    const LINES: u64 = 8192;
    let mut pump = Pump::into(Journal::new(Limits { bytes_per_dn: 64 << 10, ..Limits::default() })).await;
    let mut fifo = writer(&pump.path());
    let written = tokio::task::spawn_blocking(move || {
        (0..LINES).for_each(|number| fifo.write_all(format!("{number:063}\n").as_bytes()).unwrap());
    });
    timeout(SOON, written).await.expect("it is not stalled").unwrap();
    let (mut read, mut dropped, mut last) = (0, 0, 0);
    while last != LINES - 1 {
        match timeout(SOON, pump.lines.next()).await.expect("the last line comes").unwrap().body {
            Body::Raw(line) => (read, last) = (read + 1, line.text.parse().unwrap()),
            Body::Dropped(gap) => dropped += gap.count,
            other => panic!("{other:?}"),
        }
    }
    assert!(dropped > 0);
    assert_eq!(read + dropped, LINES);
    pump.stop().await;
}

/// Reference 13, `runsc pump: file deleted under it`.
#[tokio::test]
async fn one_that_is_removed_is_made_again_and_who_has_it_open_is_read_on() {
    let mut pump = Pump::start().await;
    let path = pump.path();
    let mut olds = Vec::new();
    for round in 0..3 {
        olds.push(writer(&path));
        fs::remove_file(&path).unwrap();
        // Nothing tells of it outside of the pump.
        let mut new = tokio::task::spawn_blocking({
            let path = path.clone();
            move || testbed::wait_until(SOON, "a new one", || Ok(File::options().append(true).open(&path)?))
        })
        .await
        .unwrap()
        .unwrap();
        writeln!(new, "new {round}").unwrap();
        assert_eq!(pump.next().await, format!("new {round}"));
        for (number, old) in olds.iter_mut().enumerate() {
            writeln!(old, "old {number}").unwrap();
            assert_eq!(pump.next().await, format!("old {number}"));
        }
    }
    pump.stop().await;
}
