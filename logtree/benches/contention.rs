//! The cost of writers, readers and names to each other: every figure is a ratio of two measurements that take
//! turns in one run, except the time of 100,000 names.

use std::hint::black_box;
use std::io::Write;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use futures_core::Stream;
use nodekeel_logtree::{
    Dn, Level, LineWriter, LogLimits, LogMessage, LogQuery, LogReader, LogStore, WriterOptions,
};
use testbed::bench::{BenchRow, median, percentile};

const ROUNDS: usize = 15;
const APPENDS: u32 = 200_000;
/// As long as what a node's services write on average.
const LINE: &[u8; 135] = &{
    let mut line = [b'x'; 135];
    line[134] = b'\n';
    line
};

fn main() -> anyhow::Result<()> {
    let [two_stores, two_writers] = bench_two_writers();
    let rows = [
        two_stores,
        two_writers,
        bench_beside_reads(
            "beside_tails",
            "reads the newest 1,000 entries of 64 full names, again and again",
            |store| {
                let query = LogQuery::of_dn(dn("full")).include_descendants().last_entries(1000);
                black_box(store.open_reader(query).expect("a valid query").read_backlog());
            },
        ),
        bench_beside_reads(
            "beside_search",
            "searches 64 full names for a rare level, again and again",
            |store| {
                let query = LogQuery::of_dn(dn("full")).include_descendants().min_level(Level::Error);
                black_box(store.open_reader(query).expect("a valid query").read_backlog());
            },
        ),
        bench_beside_live_tail(),
        bench_idle_followers(),
        bench_live_tail(),
        bench_names(),
    ];
    testbed::bench::write_rows("contention", &rows)?;
    Ok(())
}

fn dn(name: &str) -> Dn {
    name.parse().expect("a valid name")
}

fn open_writer(store: &LogStore, name: &str) -> LineWriter {
    store.line_writer(&dn(name), WriterOptions::new("stdout").generation(1))
}

fn write_line(writer: &mut LineWriter) {
    writer.write_all(LINE).expect("a write never fails");
}

fn nanos_per_append(writer: &mut LineWriter) -> f64 {
    let start = Instant::now();
    (0..APPENDS).for_each(|_| write_line(writer));
    start.elapsed().as_nanos() as f64 / f64::from(APPENDS)
}

/// Appends in a nanosecond, of all writers at once, each of which also does something else.
fn rate(writers: &mut [LineWriter], also: impl Fn() + Sync) -> f64 {
    let (together, also) = (Barrier::new(writers.len()), &also);
    thread::scope(|scope| {
        let run = |writer: &mut LineWriter| {
            together.wait();
            let start = Instant::now();
            (0..APPENDS).for_each(|_| {
                write_line(writer);
                also();
            });
            f64::from(APPENDS) / start.elapsed().as_nanos() as f64
        };
        let running: Vec<_> = writers.iter_mut().map(|writer| scope.spawn(move || run(writer))).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// The limit is that of two stores whose writers share nothing but a number that both increment: that much costs the order
/// over all names, because the number's cache line moves from processor to processor. The row of two stores is what the
/// processors allow without it: 2.0 without other work, and not far above 1 with it.
fn bench_two_writers() -> [BenchRow; 2] {
    let (store, other) = (LogStore::default(), LogStore::default());
    let mut shared = [open_writer(&store, "a"), open_writer(&store, "b")];
    let mut separate = [open_writer(&store, "c"), open_writer(&other, "c")];
    let number = CacheLine(AtomicU64::new(0));
    let (mut ratios, mut limits, mut machine) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let one = rate(&mut shared[..1], || ());
        ratios.push(rate(&mut shared, || ()) / one);
        limits.push(rate(&mut separate, || _ = number.0.fetch_add(1, Ordering::AcqRel)) / one);
        machine.push(rate(&mut separate, || ()) / one);
    }
    let work = "append raw lines on two threads, each to a private store, beside one thread: what the machine allows";
    let two_stores = BenchRow::new("two_stores", work, "x", median(&machine));
    let work = "append raw lines on two threads, each to a private name, beside one thread; the limit: two stores and a shared counter";
    [
        two_stores,
        BenchRow::new("two_writers", work, "x", median(&ratios)).limit(median(&limits)).goal_at_least(1.8),
    ]
}

/// A value that shares its cache line with no other.
#[repr(align(128))]
struct CacheLine<T>(T);

fn full_store() -> LogStore {
    let store = LogStore::new(LogLimits { total_bytes: 128 << 20, ..LogLimits::default() });
    for name in 0..64 {
        let mut writer = open_writer(&store, &format!("full.{name}"));
        (0..8000).for_each(|_| write_line(&mut writer));
        store.append_message(&dn(&format!("full.{name}")), LogMessage::new(Level::Error, "rare"));
    }
    store
}

/// The 99th percentile of single appends, in nanoseconds.
fn append_p99(writer: &mut LineWriter) -> f64 {
    let times = (0..APPENDS / 4).map(|_| {
        let start = Instant::now();
        write_line(writer);
        start.elapsed().as_nanos() as f64
    });
    percentile(&times.collect::<Vec<_>>(), 99.0)
}

/// The 99th percentile of appends while another thread works.
fn p99_beside(writer: &mut LineWriter, work: &(dyn Fn() + Sync)) -> f64 {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let working = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                work();
            }
        });
        let p99 = append_p99(writer);
        stop.store(true, Ordering::Relaxed);
        working.thread().unpark();
        p99
    })
}

/// Appends beside a thread that reads what they append to. The thread without it is as busy, so that the machine is as fast.
/// The limit is that of a thread that does the same with another store, with which the writer shares no lock: what is above
/// the limit is the store's, and the rest is that of caches, memory and the scheduler.
fn bench_beside(
    id: &str,
    work: &str,
    mut writer: LineWriter,
    read: &(dyn Fn() + Sync),
    read_other: &(dyn Fn() + Sync),
) -> BenchRow {
    let compute = || (0..1000).for_each(|number| drop(black_box(number.to_string())));
    let (mut ratios, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let alone = p99_beside(&mut writer, &compute);
        limits.push(p99_beside(&mut writer, read_other) / alone);
        ratios.push(p99_beside(&mut writer, read) / alone);
    }
    let work = format!(
        "99th percentile of appends while another thread {work}, beside one that only computes; the limit: the thread does it with another store"
    );
    BenchRow::new(id, work, "x", median(&ratios)).limit(median(&limits)).goal_at_most(1.2)
}

fn bench_beside_reads(id: &str, work: &str, read: impl Fn(&LogStore) + Sync) -> BenchRow {
    let (store, other) = (full_store(), full_store());
    bench_beside(id, work, open_writer(&store, "full.7"), &|| read(&store), &|| read(&other))
}

/// Wakes a thread that waits for an entry.
struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A store with 1,000 names, and a follower that has read all of them.
fn followed_store() -> (LogStore, Mutex<LogReader>) {
    let store = LogStore::default();
    (0..1000).for_each(|name| write_line(&mut open_writer(&store, &format!("live.{name}"))));
    let query = LogQuery::of_dn(dn("live")).include_descendants().follow();
    let mut reader = store.open_reader(query).expect("a valid query");
    poll_to_end(&mut reader);
    (store, Mutex::new(reader))
}

/// Reads an entry, or waits for the next.
fn follow_entry(reader: &Mutex<LogReader>) {
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut reader = reader.lock().expect("not poisoned");
    if Pin::new(&mut *reader).poll_next(&mut Context::from_waker(&waker)).is_pending() {
        thread::park();
    }
}

/// The thread without the store's lock follows another store, to which it appends itself.
fn bench_beside_live_tail() -> BenchRow {
    let ((store, reader), (other, other_reader)) = (followed_store(), followed_store());
    let other_writer = Mutex::new(open_writer(&other, "live.7"));
    let read_other = || {
        write_line(&mut other_writer.lock().expect("not poisoned"));
        follow_entry(&other_reader);
    };
    let writer = open_writer(&store, "live.7");
    let work = "follows 1,000 names, of which this is one";
    bench_beside("beside_live_tail", work, writer, &|| follow_entry(&reader), &read_other)
}

fn poll_to_end(reader: &mut LogReader) {
    let mut context = Context::from_waker(Waker::noop());
    while Pin::new(&mut *reader).poll_next(&mut context).is_ready() {}
}

fn bench_idle_followers() -> BenchRow {
    let store = LogStore::default();
    let mut writer = open_writer(&store, "a.b");
    write_line(&mut writer);
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let alone = nanos_per_append(&mut writer);
        // Half of them wait for another level, half for another name.
        let mut followers: Vec<_> = (0..1000)
            .map(|number| match number % 2 {
                0 => LogQuery::of_dn(dn("a")).include_descendants().min_level(Level::Error),
                _ => LogQuery::of_dn(dn("other")).include_descendants(),
            })
            .map(|query| store.open_reader(query.follow()).expect("a valid query"))
            .collect();
        followers.iter_mut().for_each(poll_to_end);
        ratios.push(nanos_per_append(&mut writer) / alone);
    }
    let work = "append raw lines beside 1,000 followers that wait for other entries, and without";
    BenchRow::new("idle_followers", work, "x", median(&ratios)).goal_at_most(1.2)
}

/// A follower of 1,000 names that reads each entry, which one of them gets.
fn bench_live_tail() -> BenchRow {
    let follow = |names: usize| {
        let store = LogStore::default();
        let mut writers: Vec<_> =
            (0..names).map(|name| open_writer(&store, &format!("live.{name}"))).collect();
        writers.iter_mut().for_each(write_line);
        let mut reader = store
            .open_reader(LogQuery::of_dn(dn("live")).include_descendants().follow())
            .expect("a valid query");
        poll_to_end(&mut reader);
        move || {
            let start = Instant::now();
            for round in 0..10_000 {
                write_line(&mut writers[round * 7 % names]);
                poll_to_end(&mut reader);
            }
            start.elapsed().as_nanos() as f64 / 10_000.0
        }
    };
    let (mut few, mut many) = (follow(10), follow(1000));
    let ratios: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let few = few();
            many() / few
        })
        .collect();
    let work = "append an entry and read it by a follower of 1,000 names, and of 10";
    BenchRow::new("live_tail", work, "x", median(&ratios)).goal_at_most(2.0)
}

fn bench_names() -> BenchRow {
    let names: Vec<Dn> = (0..100_000).map(|name| dn(&format!("names.n{name}"))).collect();
    let times = (0..5).map(|_| {
        let store = LogStore::default();
        let start = Instant::now();
        for name in &names {
            store.append_message(name, LogMessage::new(Level::Info, "the only line"));
        }
        start.elapsed().as_secs_f64()
    });
    let work = "append one message to each of 100,000 new names, with the default limits";
    BenchRow::new("names_100k", work, "s", median(&times.collect::<Vec<_>>())).goal_at_most(1.0)
}
