//! The cost of appending to the log store and of reading its newest entries. Our library and each peer take
//! turns within one run, and every figure is the median of the rounds.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::hint::black_box;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nodekeel_logtree::{Dn, LineWriter, LogLimits, LogMessage, LogQuery, LogStore, WriterOptions};
use testbed::bench::BenchRow;
use tracing::Dispatch;
use tracing::field::Field;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

const ROUNDS: usize = 15;
const APPENDS: u32 = 100_000;
/// A line of 134 characters and a newline, as long as what a node's services write on average.
const LINE: &str = "2026-11-21 11:26:08.712071 I | pkg/fileutil: started to purge file, dir: member/snap, suffix: snap.db, max: 5, interval: 30s, kept: 0..\n";
/// Version of tracing-subscriber.
const PEER_VERSION: &str = "0.3.23";

fn main() -> anyhow::Result<()> {
    let [event, append] = bench_leveled();
    let mut rows = vec![bench_raw_append()];
    rows.extend(bench_raw_append_parts());
    rows.extend([event, append, bench_tail_read()]);
    testbed::bench::write_rows("journal", &rows)?;
    Ok(())
}

/// Nanoseconds per call over `n` calls.
fn nanos_per_call(n: u32, mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..n {
        work();
    }
    start.elapsed().as_nanos() as f64 / f64::from(n)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Runs both in turns and returns the medians.
fn interleaved_medians(mut ours: impl FnMut() -> f64, mut peer: impl FnMut() -> f64) -> (f64, f64) {
    let (ours, peer) = (0..ROUNDS).map(|_| (ours(), peer())).unzip();
    (median(ours), median(peer))
}

/// The simplest alternative to a log store: the newest lines with their times, behind a lock.
#[derive(Default)]
struct PlainRing(Mutex<(VecDeque<(SystemTime, String)>, usize)>);

impl PlainRing {
    fn push(&self, line: &str) {
        let now = SystemTime::now();
        let mut ring = self.0.lock().expect("not poisoned");
        ring.1 += line.len();
        ring.0.push_back((now, line.trim_end().to_owned()));
        while ring.1 > 1 << 20 {
            let (_, oldest) = ring.0.pop_front().expect("the ring has an entry");
            ring.1 -= oldest.len() + 1;
        }
    }
}

fn open_writer(store: &LogStore, dn: &str) -> LineWriter {
    let dn: Dn = dn.parse().expect("a valid name");
    store.line_writer(&dn, WriterOptions::new("stdout").generation(1))
}

fn bench_raw_append() -> BenchRow {
    let store = LogStore::default();
    let mut writer = open_writer(&store, "bench.raw");
    let ring = PlainRing::default();
    let (ours, peer) = interleaved_medians(
        || nanos_per_call(APPENDS, || writer.write_all(LINE.as_bytes()).expect("a write never fails")),
        || nanos_per_call(APPENDS, || ring.push(LINE)),
    );
    let work = format!("append a raw line of {} bytes to a full ring, one write each", LINE.len());
    BenchRow::new("raw_append", work, "ns", ours)
        .peer("Mutex<VecDeque<String>> with times", "std", peer)
        .limit(raw_append_limit())
        .goal_at_most(60.0)
}

/// The parts that no append can do without, each by itself: the time of the entry, its number over all names, and
/// its copy below a lock.
fn bench_raw_append_parts() -> [BenchRow; 3] {
    let number = AtomicU64::new(0);
    let ring = Mutex::new(vec![0; LINE.len()]);
    type Part<'a> = (&'a str, &'a str, Box<dyn FnMut() + 'a>);
    let mut parts: [Part<'_>; 3] = [
        ("raw_append_clock", "read the clock", Box::new(|| _ = black_box(SystemTime::now()))),
        (
            "raw_append_number",
            "increment an atomic number",
            Box::new(|| _ = black_box(number.fetch_add(1, Ordering::AcqRel))),
        ),
        (
            "raw_append_copy",
            "copy the line below an uncontended lock",
            Box::new(|| ring.lock().expect("not poisoned").copy_from_slice(black_box(LINE.as_bytes()))),
        ),
    ];
    let mut rounds = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (figures, (_, _, part)) in rounds.iter_mut().zip(&mut parts) {
            figures.push(nanos_per_call(APPENDS, part));
        }
    }
    let mut rounds = rounds.into_iter();
    parts.map(|(id, work, _)| {
        let work = format!("of raw_append: {work}");
        BenchRow::new(id, work, "ns", median(rounds.next().expect("one for each part")))
    })
}

/// The clock, an uncontended lock and two copies of the line: the minimum cost of any implementation.
fn raw_append_limit() -> f64 {
    let lock = Mutex::new(vec![0; LINE.len()]);
    let mut line = vec![0; LINE.len()];
    let mut round = || {
        nanos_per_call(APPENDS, || {
            black_box(SystemTime::now());
            line.copy_from_slice(black_box(LINE.as_bytes()));
            lock.lock().expect("not poisoned").copy_from_slice(&line);
        })
    };
    median((0..ROUNDS).map(|_| round()).collect())
}

/// A layer that only formats the values of events, which any layer has to do before it can store them.
#[derive(Default)]
struct FormatLayer(Mutex<String>);

impl<S: tracing::Subscriber> Layer<S> for FormatLayer {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = self.0.lock().expect("not poisoned");
        text.clear();
        event.record(&mut |field: &Field, value: &dyn fmt::Debug| {
            let _ = write!(text, "{field}={value:?} ");
        });
    }
}

fn bench_leveled() -> [BenchRow; 2] {
    let store = LogStore::default();
    let ours = Dispatch::new(tracing_subscriber::registry().with(store.layer()));
    let format = Dispatch::new(tracing_subscriber::registry().with(FormatLayer::default()));
    let fmt = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(io::sink);
    let peer = Dispatch::new(tracing_subscriber::registry().with(fmt));
    let ring = PlainRing::default();
    let events = |dispatch: &Dispatch| {
        tracing::dispatcher::with_default(dispatch, || {
            let _span = tracing::info_span!("service", dn = "bench.leveled").entered();
            nanos_per_call(APPENDS, || {
                tracing::info!(attempt = 3, member = "etcd-0", "started to purge the file of a member")
            })
        })
    };
    let plain = || {
        nanos_per_call(APPENDS, || {
            ring.push("started to purge the file of a member attempt=3 member=etcd-0\n")
        })
    };
    let mut rounds = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (figures, figure) in
            rounds.iter_mut().zip([events(&ours), events(&format), events(&peer), plain()])
        {
            figures.push(figure);
        }
    }
    let [ours, format, peer, plain] = rounds.map(median);
    let work = "store a tracing event with two fields, in a span that names it";
    [
        BenchRow::new("leveled_event", work, "ns", ours)
            .peer("tracing-subscriber fmt to a sink", PEER_VERSION, peer)
            .limit(format),
        BenchRow::new(
            "leveled_append",
            "the same, minus the cost of a layer that only formats the values",
            "ns",
            ours - format,
        )
        .peer("Mutex<VecDeque<String>> of ready lines", "std", plain)
        .goal_at_most(250.0),
    ]
}

fn bench_tail_read() -> BenchRow {
    let store = LogStore::new(LogLimits { total_bytes: 128 << 20, ..LogLimits::default() });
    for round in 0..8192 {
        for dn in 0..64 {
            let dn: Dn = format!("bench.tail.dn{dn}").parse().expect("a valid name");
            store.append_message(
                &dn,
                LogMessage::new(nodekeel_logtree::Level::Info, format!("{round} {}", LINE.trim_end())),
            );
        }
    }
    let query = || {
        LogQuery::of_dn("bench.tail".parse().expect("a valid name")).include_descendants().last_entries(1000)
    };
    let read = || {
        let start = Instant::now();
        let entries = store.open_reader(query()).expect("a valid query").read_backlog();
        assert_eq!(entries.len(), 1000);
        start.elapsed()
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let ours = median((0..ROUNDS * 10).map(|_| ms(read())).collect());
    BenchRow::new("tail_1000", "read the newest 1,000 entries of a full subtree of 64 names", "ms", ours)
        .goal_at_most(1.0)
}
