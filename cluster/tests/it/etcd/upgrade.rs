//! Members upgraded one after the other, from each minor release of etcd to the next, while a client writes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::ClusterAccess;
use nodekeel_cluster::consensus::kv::KeyRange;
use tokio::time::{sleep, timeout};

use super::EtcdVersion::{Debian, Former, Newest};
use super::cluster::three_members;
use super::etcd_fixture::{EtcdFixture, retried};
use crate::member_run::HANG;

/// The time after which a write counts as unanswered.
const PATIENCE: Duration = Duration::from_secs(3);
/// The writes that are acknowledged between two upgrades of a member.
const WRITES: usize = 200;

/// A client that writes one key after the other, each at the next member that runs.
#[derive(Default)]
struct Writer {
    members: Mutex<[Option<ClusterAccess>; 3]>,
    acknowledged: Mutex<BTreeSet<String>>,
    longest_gap: Mutex<Duration>,
    is_over: AtomicBool,
}

impl Writer {
    fn set_member(&self, index: usize, access: Option<ClusterAccess>) {
        self.members.lock().unwrap()[index] = access;
    }

    fn count(&self) -> usize {
        self.acknowledged.lock().unwrap().len()
    }

    async fn write(self: Arc<Self>) {
        let mut last = Instant::now();
        for number in 0.. {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let member = self.members.lock().unwrap()[number % 3].clone();
            let Some(member) = member else { continue };
            let key = format!("/load/{number}");
            match timeout(PATIENCE, member.root_kv().put(key.as_bytes(), b"")).await {
                Ok(Ok(_)) => {
                    self.acknowledged.lock().unwrap().insert(key);
                    let mut longest = self.longest_gap.lock().unwrap();
                    *longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
                // Not acknowledged.
                Ok(Err(_)) => sleep(Duration::from_millis(20)).await,
                Err(_) => {}
            }
        }
    }

    /// Waits until it has written more.
    async fn wait_writes(&self) {
        let before = self.count();
        let writing = async {
            while self.count() < before + WRITES {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(HANG, writing).await.expect("writes are acknowledged");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "soak: two more releases of etcd, which are built once"]
async fn members_upgraded_one_by_one_from_3_4_to_the_newest_lose_no_acknowledged_write() {
    let mut fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(Debian, name));
    let mut runs = Vec::new();
    let writer = Arc::new(Writer::default());
    for (index, (run, access)) in three_members(&fixtures).await.into_iter().enumerate() {
        writer.set_member(index, Some(access));
        runs.push(Some(run));
    }
    let writing = tokio::spawn(Arc::clone(&writer).write());
    writer.wait_writes().await;
    for version in [Former(0), Former(1), Newest] {
        for index in 0..3 {
            let started_at = Instant::now();
            writer.set_member(index, None);
            runs[index].take().expect("it runs").stop().await;
            fixtures[index].install(version);
            let mut run = fixtures[index].run(fixtures[index].restart_options());
            let access = run.wait_running().await;
            println!("{version:?}: member {index} is back after {:?}", started_at.elapsed());
            writer.set_member(index, Some(access));
            runs[index] = Some(run);
            writer.wait_writes().await;
        }
    }
    writer.is_over.store(true, Ordering::SeqCst);
    writing.await.unwrap();
    let members = writer.members.lock().unwrap().clone();
    let acknowledged = writer.acknowledged.lock().unwrap().clone();
    for access in members.into_iter().flatten() {
        let left = retried(async || access.root_kv().range(KeyRange::prefix("/load/")).await).await;
        let left: BTreeSet<_> = left.kvs.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()).collect();
        assert!(acknowledged.is_subset(&left), "{:?}", acknowledged.difference(&left));
    }
    println!("{} writes, {:?} at most between two", acknowledged.len(), writer.longest_gap.lock().unwrap());
    for run in runs.into_iter().flatten() {
        run.stop().await;
    }
}
