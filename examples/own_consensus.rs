//! A consensus of your own: another one wrapped, which counts what a node asks of it, and the suite that it passes.
//!
//! `cargo run -p examples --example own_consensus`
//!
//! It keeps its keys where the wrapped one does. A real one would run another store as a child process; whatever it is,
//! it gives a runnable for the tree and tells how it is with it, and the node's way into its cluster knows no difference.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_cluster::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, Range, Ranged, Revision, Txn, TxnResult,
};
use nodekeel_cluster::consensus::kv::{Watch, WatchFrom};
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::consensus::{Consensus, Running, Service, Start, Started, Status, StatusWatch};
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable as _, Supervisor};
use tokio::sync::watch;

/// Counts calls to a store.
#[derive(Debug)]
struct Counting {
    store: Arc<dyn KvStore>,
    calls: Arc<AtomicU64>,
}

#[async_trait]
impl KvStore for Counting {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.range(range).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.store.watch(keys, from).await
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.store.lease(ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.store.compact(before).await
    }
}

/// A consensus whose keys are counted.
#[derive(Debug, Default)]
struct Counted {
    inner: MemoryConsensus,
    calls: Arc<AtomicU64>,
}

impl Consensus for Counted {
    fn start(&self, start: Start) -> Started {
        let Started { service, status } = self.inner.start(start);
        let (sender, receiver) = watch::channel(status.now());
        let (sender, calls) = (Arc::new(sender), Arc::clone(&self.calls));
        let run = move |ctx: Context| {
            let (service, sender, calls) = (service.clone(), Arc::clone(&sender), Arc::clone(&calls));
            follow(service.run(ctx), status.clone(), sender, calls)
        };
        Started { service: Service::new(run), status: StatusWatch::new(receiver) }
    }
}

/// Runs the wrapped member, and tells what it tells: the end too, before its own.
async fn follow(
    mut running: RunFuture,
    mut status: StatusWatch,
    sender: Arc<watch::Sender<Status>>,
    calls: Arc<AtomicU64>,
) -> Result<(), Failure> {
    loop {
        tokio::select! {
            biased;
            Some(now) = status.changed() => drop(sender.send_replace(counted(now, &calls))),
            ended = &mut running => {
                sender.send_replace(counted(status.now(), &calls));
                return ended;
            }
        }
    }
}

fn counted(status: Status, calls: &Arc<AtomicU64>) -> Status {
    match status {
        Status::Running(running) => {
            let store = Counting { store: running.root(), calls: Arc::clone(calls) };
            Status::Running(Running::new(running.this().clone(), Arc::new(store), running.members()))
        }
        other => other,
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let consensus = Counted::default();
    let started = consensus.start(Start::new_cluster("own-1".parse()?, "192.0.2.7".parse()?));
    let (service, mut status) = (started.service, started.status);
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let service = service.clone();
        async move {
            ctx.run("consensus", service)?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    });
    let running = status.running().await.ok_or_else(|| anyhow::anyhow!("it did not start"))?;
    println!("a member called {}", running.this().name.as_deref().unwrap_or("nothing"));
    consensus_conformance(&running).await;
    kv_conformance(running.kv("example", "conformance")?).await;
    println!("it conforms, and its calls were counted: {}", consensus.calls.load(Ordering::Relaxed) > 0);
    supervisor.shutdown().await;
    Ok(())
}
