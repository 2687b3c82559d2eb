use std::cell::{Cell, RefCell};

use futures_util::stream;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use serde_json::json;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::{Instant, sleep};

use super::*;
use crate::testing::objects::sample_class;

const CALL_TIME: Duration = Duration::from_secs(1);

fn class(name: &str) -> StorageClass {
    sample_class(json!({ "metadata": { "name": name } }))
}

fn reference(name: &str) -> ObjectRef<StorageClass> {
    ObjectRef::new(name)
}

/// A cache with these objects.
fn filled_cache(names: &[&str]) -> (Store<StorageClass>, reflector::store::Writer<StorageClass>) {
    let (cache, mut writer) = reflector::store();
    writer.apply_watcher_event(&Event::Init);
    names.iter().for_each(|name| writer.apply_watcher_event(&Event::InitApply(class(name))));
    writer.apply_watcher_event(&Event::InitDone);
    (cache, writer)
}

fn changes() -> (UnboundedSender<ObjectRef<StorageClass>>, impl Stream<Item = ObjectRef<StorageClass>>) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    (sender, futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx)))
}

fn concurrency(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("not 0")
}

/// The calls of a run: the name, and when it started after the test's start.
#[derive(Default)]
struct CallLog {
    calls: RefCell<Vec<(String, Duration)>>,
    running: Cell<usize>,
    most: Cell<usize>,
}

impl CallLog {
    async fn call(&self, class: Arc<StorageClass>, start: Instant, next: NextRun) -> NextRun {
        let name = class.metadata.name.clone().unwrap_or_default();
        assert!(self.running.get() == 0 || self.calls.borrow().last().is_some_and(|(last, _)| *last != name));
        self.calls.borrow_mut().push((name, start.elapsed()));
        self.running.set(self.running.get() + 1);
        self.most.set(self.most.get().max(self.running.get()));
        sleep(CALL_TIME).await;
        self.running.set(self.running.get() - 1);
        next
    }

    /// The names, with the seconds of their starts.
    fn seconds(&self) -> Vec<(String, u64)> {
        self.calls.borrow().iter().map(|(name, time)| (name.clone(), time.as_secs())).collect()
    }
}

fn expected(calls: &[(&str, u64)]) -> Vec<(String, u64)> {
    calls.iter().map(|(name, second)| ((*name).to_owned(), *second)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_changed_object_is_reconciled_at_once_and_the_calls_in_progress_end() {
    let ((cache, _writer), (sender, changes)) = (filled_cache(&["a"]), changes());
    let (start, log) = (Instant::now(), CallLog::default());
    for name in ["a", "missing"] {
        sender.send(reference(name)).expect("it is received");
    }
    let end = async {
        sleep(CALL_TIME / 2).await;
        drop(sender);
    };
    let run = reconcile_changes(changes, stream::pending(), cache, concurrency(2), |it| {
        log.call(it, start, NextRun::OnChange)
    });
    tokio::join!(run, end);
    assert_eq!(*log.calls.borrow(), [("a".to_owned(), Duration::ZERO)], "no timer was waited for");
    assert_eq!(start.elapsed(), CALL_TIME);
}

#[tokio::test(start_paused = true)]
async fn an_object_is_reconciled_by_one_call_at_a_time_and_again_after_a_change() {
    let ((cache, _writer), (sender, changes)) = (filled_cache(&["a"]), changes());
    let (start, log) = (Instant::now(), CallLog::default());
    let change = async {
        for _ in 0..3 {
            sender.send(reference("a")).expect("it is received");
            sleep(CALL_TIME / 4).await;
        }
        sleep(3 * CALL_TIME).await;
        drop(sender);
    };
    let run = reconcile_changes(changes, stream::pending(), cache, concurrency(9), |it| {
        log.call(it, start, NextRun::OnChange)
    });
    tokio::join!(run, change);
    assert_eq!(log.seconds(), expected(&[("a", 0), ("a", 1)]));
    assert_eq!(log.most.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn as_many_objects_as_allowed_are_reconciled_together_in_their_order() {
    let ((cache, _writer), (sender, changes)) = (filled_cache(&["a", "b", "c", "d"]), changes());
    let (start, log) = (Instant::now(), CallLog::default());
    let change = async {
        for name in ["d", "c", "b", "a", "c"] {
            sender.send(reference(name)).expect("it is received");
        }
        sleep(9 * CALL_TIME).await;
        drop(sender);
    };
    let run = reconcile_changes(changes, stream::pending(), cache, concurrency(2), |it| {
        log.call(it, start, NextRun::OnChange)
    });
    tokio::join!(run, change);
    let calls = log.seconds();
    assert_eq!(calls[..2], expected(&[("d", 0), ("c", 0)]));
    assert!(calls.contains(&("b".to_owned(), 1)) && calls.contains(&("a".to_owned(), 1)), "{calls:?}");
    assert_eq!(log.most.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_object_is_repeated_after_its_delay_and_a_change_ends_the_delay() {
    let ((cache, _writer), (sender, changes)) = (filled_cache(&["a"]), changes());
    let (start, log) = (Instant::now(), CallLog::default());
    let delay = NextRun::After(Duration::from_secs(10));
    let change = async {
        sender.send(reference("a")).expect("it is received");
        sleep(Duration::from_secs(14)).await;
        sender.send(reference("a")).expect("it is received");
        sleep(Duration::from_secs(12)).await;
        drop(sender);
    };
    let run =
        reconcile_changes(changes, stream::pending(), cache, concurrency(2), |it| log.call(it, start, delay));
    tokio::join!(run, change);
    // The delay begins when a call has ended, and the third one is the change's.
    assert_eq!(log.seconds(), expected(&[("a", 0), ("a", 11), ("a", 14), ("a", 25)]));
}

#[tokio::test(start_paused = true)]
async fn a_wake_ends_the_delays_of_all_objects_and_queues_no_other() {
    let ((cache, _writer), (sender, changes)) = (filled_cache(&["a", "b", "c"]), changes());
    let (start, log) = (Instant::now(), CallLog::default());
    let (wake, wakes) = mpsc::unbounded_channel();
    let wakes = stream::unfold(wakes, |mut wakes| async move { Some((wakes.recv().await?, wakes)) });
    let change = async {
        for name in ["b", "a"] {
            sender.send(reference(name)).expect("it is received");
        }
        sleep(Duration::from_secs(20)).await;
        wake.send(()).expect("it is received");
        sleep(CALL_TIME / 2).await;
        // What is running is not queued again.
        wake.send(()).expect("it is received");
        sleep(CALL_TIME).await;
        drop(sender);
    };
    let delay = NextRun::After(Duration::from_secs(300));
    let run = reconcile_changes(changes, wakes, cache, concurrency(9), |it| log.call(it, start, delay));
    tokio::join!(run, change);
    assert_eq!(log.seconds(), expected(&[("b", 0), ("a", 0), ("a", 20), ("b", 20)]));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_reconciled_before_the_cache_is_filled() {
    let (cache, mut writer) = reflector::store();
    let (sender, changes) = changes();
    let (start, log) = (Instant::now(), CallLog::default());
    sender.send(reference("a")).expect("it is received");
    let fill = async {
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(class("a")));
        sleep(Duration::from_secs(5)).await;
        writer.apply_watcher_event(&Event::InitDone);
        sleep(CALL_TIME / 2).await;
        drop(sender);
    };
    let run = reconcile_changes(changes, stream::pending(), cache, concurrency(2), |it| {
        log.call(it, start, NextRun::OnChange)
    });
    tokio::join!(run, fill);
    assert_eq!(log.seconds(), expected(&[("a", 5)]));
}

#[tokio::test(start_paused = true)]
async fn an_object_whose_delay_is_too_long_for_a_timer_waits_for_its_change() {
    let mut queue = WorkQueue::new();
    queue.add_change(reference("a"));
    let object = queue.start_next().expect("it is due");
    queue.finish(object, NextRun::After(Duration::MAX));
    assert!(queue.start_next().is_none(), "it is delayed");
    queue.add_change(reference("a"));
    assert!(queue.start_next().is_some_and(|object| object == reference("a")));
}
