//! A custom consensus: it wraps another one, counts the calls of a node, and passes the conformance suite.
//!
//! `cargo run -p examples --example own_consensus`
//!
//! Its keys are those of the wrapped one. A real one would run another store as a child process. Each
//! consensus provides a runnable for the tree and reports its status, so the enrolment of the node works with
//! any of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use nodekeel_cluster::consensus::kv::{
    KeyRange, KvError, KvStore, RangeResponse, Revision, Txn, TxnResponse, WatchStream,
};
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::consensus::{
    ClusterAccess, Consensus, MemberService, MemberStatus, PreparedMember, StartOptions, StatusWatch,
};
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable as _, Supervisor};
use tokio::sync::watch;

/// Counts calls to a store.
#[derive(Debug)]
struct CountingStore {
    store: Arc<dyn KvStore>,
    calls: Arc<AtomicU64>,
}

#[async_trait]
impl KvStore for CountingStore {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.range(keys).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.watch(keys, from).await
    }
}

/// A consensus that counts calls to its store.
#[derive(Debug, Default)]
struct CountingConsensus {
    inner: MemoryConsensus,
    calls: Arc<AtomicU64>,
}

impl Consensus for CountingConsensus {
    fn prepare_member(&self, start: StartOptions) -> PreparedMember {
        let PreparedMember { service, status, recovery } = self.inner.prepare_member(start);
        let (sender, receiver) = watch::channel(status.current_status());
        let (sender, calls) = (Arc::new(sender), Arc::clone(&self.calls));
        let run = move |ctx: Context| {
            let (service, sender, calls) = (service.clone(), Arc::clone(&sender), Arc::clone(&calls));
            relay_status(service.run(ctx), status.clone(), sender, calls)
        };
        PreparedMember {
            service: MemberService::from_runnable(run),
            status: StatusWatch::from_receiver(receiver),
            recovery,
        }
    }
}

/// Runs the wrapped member and relays its status; relays its last status before it returns.
async fn relay_status(
    mut running: RunFuture,
    mut status: StatusWatch,
    sender: Arc<watch::Sender<MemberStatus>>,
    calls: Arc<AtomicU64>,
) -> Result<(), Failure> {
    loop {
        tokio::select! {
            biased;
            Some(now) = status.next_status() => drop(sender.send_replace(with_counting_store(now, &calls))),
            result = &mut running => {
                sender.send_replace(with_counting_store(status.current_status(), &calls));
                return result;
            }
        }
    }
}

fn with_counting_store(status: MemberStatus, calls: &Arc<AtomicU64>) -> MemberStatus {
    match status {
        MemberStatus::Running(running) => {
            let store = CountingStore { store: running.root_kv(), calls: Arc::clone(calls) };
            MemberStatus::Running(ClusterAccess::new(
                running.this_member().clone(),
                Arc::new(store),
                running.cluster_members(),
            ))
        }
        other => other,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let consensus = CountingConsensus::default();
    let started = consensus.prepare_member(StartOptions::new_cluster("own-1".parse()?, "192.0.2.7".parse()?));
    let (service, mut status) = (started.service, started.status);
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let service = service.clone();
        async move {
            ctx.run_child("consensus", service)?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    });
    let running = status.wait_running().await.ok_or_else(|| anyhow::anyhow!("the member did not start"))?;
    println!("member {}", running.this_member().name.as_deref().unwrap_or("nothing"));
    consensus_conformance(&running).await;
    kv_conformance(running.namespaced_kv("example", "conformance")?).await;
    println!("conformance suite passed, calls were counted: {}", consensus.calls.load(Ordering::Relaxed) > 0);
    supervisor.shutdown().await;
    Ok(())
}
