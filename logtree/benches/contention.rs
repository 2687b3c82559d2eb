//! What writers, readers and names cost each other: every figure is a ratio of two measurements that take
//! turns in one run, except the time of 100,000 names.

use std::hint::black_box;
use std::io::Write;
use std::pin::Pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::thread;
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
    let rows = [
        bench_two_writers(),
        bench_beside(
            "beside_tails",
            "reads the newest 1,000 entries of 64 full names, again and again",
            |store| {
                let query = LogQuery::of_dn(dn("full")).include_descendants().last_entries(1000);
                black_box(store.open_reader(query).expect("a valid query").read_backlog());
            },
        ),
        bench_beside("beside_search", "searches 64 full names for a rare level, again and again", |store| {
            let query = LogQuery::of_dn(dn("full")).include_descendants().min_level(Level::Error);
            black_box(store.open_reader(query).expect("a valid query").read_backlog());
        }),
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
/// over all names, because the number's cache line moves from processor to processor. Two stores without it reach 2.0 on
/// processors without other work, and the store reaches its limit; with other work, neither is far above 1.
fn bench_two_writers() -> BenchRow {
    let (store, other) = (LogStore::default(), LogStore::default());
    let mut shared = [open_writer(&store, "a"), open_writer(&store, "b")];
    let mut separate = [open_writer(&store, "c"), open_writer(&other, "c")];
    let number = CacheLine(AtomicU64::new(0));
    let (mut ratios, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let one = rate(&mut shared[..1], || ());
        ratios.push(rate(&mut shared, || ()) / one);
        limits.push(rate(&mut separate, || _ = number.0.fetch_add(1, Ordering::AcqRel)) / one);
    }
    BenchRow::new(
        "two_writers",
        "append raw lines on two threads, each to a name of its own, beside one thread; the limit: two stores and a shared counter",
        "x",
        median(&ratios),
    )
    .limit(median(&limits))
    .goal_at_least(1.8)
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

/// The 99th percentile of appends beside a thread that reads what they append to, and without.
fn bench_beside(id: &str, work: &str, read: impl Fn(&LogStore) + Sync) -> BenchRow {
    let store = full_store();
    let mut writer = open_writer(&store, "full.7");
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        // Another thread is as busy, so that the machine is as fast.
        let mut beside = |read: &(dyn Fn() + Sync)| {
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        read();
                    }
                });
                let p99 = append_p99(&mut writer);
                stop.store(true, Ordering::Relaxed);
                p99
            })
        };
        let alone = beside(&|| (0..1000).for_each(|number| drop(black_box(number.to_string()))));
        ratios.push(beside(&|| read(&store)) / alone);
    }
    let work =
        format!("99th percentile of appends while another thread {work}, beside one that only computes");
    BenchRow::new(id, work, "x", median(&ratios)).goal_at_most(1.2)
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
