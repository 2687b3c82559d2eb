//! Reads and writes over three voters, while nodes are stopped, killed, frozen and cut off, their disks lost, and older
//! copies of these put back.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::MemberId;
use nodekeel_cluster::consensus::kv::{KeyRange, Txn, TxnOp};
use nodekeel_cluster::enrolment::ClusterNode;
use rstest::rstest;
use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::checker::{Op, Outcome, Version, Violation, ask_porcupine, check_history, lost_writes};
use super::voter::{Voter, start_cluster, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::retried;

/// How many operations have to end with an answer.
const OPS_ENV: &str = "NODEKEEL_HISTORY_OPS";
const DEFAULT_OPS: usize = 2000;
/// There is at least one fault for so many operations.
const OPS_PER_FAULT: usize = 1000;
/// Replays the order of the faults; how they meet the operations is up to the machine.
pub(super) const SEED_ENV: &str = "NODEKEEL_SEED";
/// Writers, each with a key, and as many readers.
const KEYS: usize = 6;
/// The timeout of an operation: its outcome is unknown then.
const PATIENCE: Duration = Duration::from_secs(3);

/// What the clients share.
struct Clients {
    /// The nodes that run, by host.
    nodes: Mutex<Vec<Option<ClusterNode>>>,
    clock: AtomicU64,
    answered: AtomicUsize,
    is_over: AtomicBool,
    history: Mutex<Vec<Op>>,
}

impl Clients {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn node(&self, host: usize) -> Option<ClusterNode> {
        self.nodes.lock().unwrap()[host].clone()
    }

    fn record(&self, op: Op) {
        if !matches!(op.outcome, Outcome::Unknown(_)) {
            self.answered.fetch_add(1, Ordering::SeqCst);
        }
        self.history.lock().unwrap().push(op);
    }

    /// Writes 1, 2, 3, … at one voter after the other.
    async fn write(self: Arc<Self>, key: usize) {
        let name = format!("/history/{key}");
        let mut value = 0;
        while !self.is_over.load(Ordering::SeqCst) {
            let Some(node) = self.node((key + value as usize) % 3) else {
                continue_later().await;
                value += 1;
                continue;
            };
            value += 1;
            let begun = self.tick();
            let written = timeout(PATIENCE, async {
                let kv = node.root_kv().ok()?;
                let text = value.to_string();
                let both = Txn::new().then(TxnOp::put(name.as_str(), text.as_str()));
                kv.txn(both.then(TxnOp::put(format!("{name}/{text}"), ""))).await.ok()
            });
            let outcome = match written.await {
                Ok(Some(done)) => Outcome::Acknowledged(Version { value, revision: done.revision.0 }),
                _ => Outcome::Unknown(value),
            };
            self.record(Op { key, begun, ended: self.tick(), outcome });
            if let Outcome::Unknown(_) = outcome {
                continue_later().await;
            }
        }
    }

    async fn read(self: Arc<Self>, key: usize) {
        let name = format!("/history/{key}");
        for turn in 0.. {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let Some(node) = self.node((key + turn) % 3) else {
                continue_later().await;
                continue;
            };
            let begun = self.tick();
            let read = timeout(PATIENCE, async {
                let kv = node.root_kv().ok()?.get(name.as_bytes()).await.ok()?;
                Some(kv.map_or_else(Version::default, |kv| Version {
                    value: String::from_utf8_lossy(&kv.value).parse().unwrap_or_default(),
                    revision: kv.mod_revision.0,
                }))
            });
            match read.await {
                Ok(Some(version)) => {
                    self.record(Op { key, begun, ended: self.tick(), outcome: Outcome::Read(version) });
                }
                _ => continue_later().await,
            }
        }
    }
}

async fn continue_later() {
    sleep(Duration::from_millis(20)).await;
}

/// The numbers of a seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn from_seed(seed: u64) -> Random {
        Random(seed | 1)
    }

    pub(super) fn below(&mut self, end: u64) -> usize {
        // xorshift64*. *Source:* Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled", 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end) as usize
    }
}

/// The voters and what happens to them.
struct Nemesis {
    voters: Vec<Voter>,
    clients: Arc<Clients>,
    random: Random,
    faults: [u32; 7],
    refusals: u32,
}

impl Nemesis {
    fn start(&mut self, host: usize) {
        self.voters[host].start();
        self.clients.nodes.lock().unwrap()[host] = Some(self.voters[host].node());
    }

    async fn end(&mut self, host: usize) {
        self.clients.nodes.lock().unwrap()[host] = None;
        self.voters[host].kill().await;
    }

    /// What was written and is there in the end, by key and value.
    async fn left_writes(&self) -> BTreeSet<(usize, u64)> {
        let root = self.voters[0].access().await.root_kv();
        // A busy machine may elect another leader at this moment.
        let read = retried(async || root.range(KeyRange::prefix("/history/")).await).await;
        let parse = |key: &[u8]| {
            let (key, value) = std::str::from_utf8(key).ok()?.strip_prefix("/history/")?.split_once('/')?;
            Some((key.parse().ok()?, value.parse().ok()?))
        };
        read.kvs.iter().filter_map(|kv| parse(&kv.key)).collect()
    }

    fn fault_count(&self) -> usize {
        self.faults.iter().sum::<u32>() as usize
    }

    async fn strike(&mut self) {
        let (fault, host) = (self.random.below(7), self.random.below(3));
        self.faults[fault] += 1;
        match fault {
            0 => {
                self.voters[host].kill_etcd();
            }
            1 => {
                self.end(host).await;
                sleep(Duration::from_millis(500)).await;
                self.start(host);
            }
            2 => {
                self.voters[host].site.set_connected(host, false).unwrap();
                sleep(Duration::from_secs(3)).await;
                self.voters[host].site.set_connected(host, true).unwrap();
            }
            3 => self.lose_disk(host).await,
            4 => {
                self.clients.nodes.lock().unwrap()[host] = None;
                self.voters[host].stop().await;
                self.start(host);
            }
            5 => {
                self.voters[host].signal_etcd(Signal::STOP);
                sleep(Duration::from_secs(3)).await;
                self.voters[host].signal_etcd(Signal::CONT);
            }
            _ => self.restore_copy(host).await,
        }
        self.wait_all_running().await;
    }

    /// Each fault strikes a whole cluster: with a member that has not joined again, another one's loss is that of a majority.
    async fn wait_all_running(&self) {
        for voter in &self.voters {
            voter.wait_running().await;
        }
    }

    /// One voter is away while the others write; then another loses its disk, whose ticket is kept, and the third
    /// goes. What those two have acknowledged is only on the third.
    async fn lose_disk(&mut self, host: usize) {
        // The first one has bootstrapped, and has no ticket.
        let (lost, away) = if host == 0 { (1, 2) } else { (host, 3 - host) };
        self.end(away).await;
        sleep(Duration::from_millis(1500)).await;
        self.end(lost).await;
        self.voters[lost].lose_disk();
        self.end(0).await;
        self.start(away);
        self.start(lost);
        let admitted = timeout(Duration::from_secs(6), async {
            loop {
                if self.voters[lost].node().wait_finished().await.is_ok() {
                    return;
                }
                continue_later().await;
            }
        });
        if admitted.await.is_err() {
            self.refusals += 1;
        } else {
            // Time to read what is left.
            sleep(Duration::from_secs(2)).await;
        }
        self.start(0);
        self.voters[0].wait_running().await;
        if self.voters[lost].node().cluster_identity().is_err() {
            self.rejoin(lost).await;
        }
    }

    /// An older copy of a disk is put back. It lacks what its member has acknowledged since, and would be a majority with
    /// another one that was away.
    async fn restore_copy(&mut self, host: usize) {
        // The first one has no ticket by which it could join again.
        let host = host.max(1);
        self.end(host).await;
        let copy = self.voters[host].copy_disks();
        self.start(host);
        self.voters[host].wait_running().await;
        sleep(Duration::from_millis(1500)).await;
        self.end(host).await;
        self.voters[host].restore_disks(&copy);
        self.start(host);
        self.voters[host].wait_condition("is an older copy").await;
        self.rejoin(host).await;
    }

    /// Removes the member whose data is gone, and joins its node again.
    async fn rejoin(&mut self, host: usize) {
        self.end(host).await;
        let (node, url) = (self.voters[0].node(), self.voters[host].peer_url());
        retried(async || remove_member(&node, url.as_str()).await.ok_or("not removed")).await;
        self.voters[host].lose_disk();
        self.voters[host].give_ticket(&self.voters[0]).await;
        self.start(host);
    }
}

/// Removes the member at this URL; `None` if that has to be repeated.
async fn remove_member(node: &ClusterNode, url: &str) -> Option<()> {
    let members = node.cluster_members().ok()?;
    let listed = members.list_members().await.ok()?;
    let at_url: Option<MemberId> =
        listed.iter().find(|member| member.peer_urls.iter().any(|one| one == url)).map(|member| member.id);
    match at_url {
        Some(id) => members.remove_member(id).await.ok(),
        None => Some(()),
    }
}

/// The history with one more read, which returns the first value of a key after a later one was acknowledged.
fn with_stale_read(mut history: Vec<Op>) -> Vec<Op> {
    let acknowledged = |op: &&Op| matches!(op.outcome, Outcome::Acknowledged(_));
    let last = *history.iter().filter(acknowledged).max_by_key(|op| op.ended).expect("an acknowledged write");
    let end = history.iter().map(|op| op.ended).max().unwrap_or_default();
    let outcome = Outcome::Read(Version::default());
    history.push(Op { key: last.key, begun: end + 1, ended: end + 2, outcome });
    history
}

pub(super) fn number_from(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn no_acknowledged_write_is_lost_whatever_happens_to_three_voters(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let wanted = number_from(OPS_ENV).map_or(DEFAULT_OPS, |ops| usize::try_from(ops).unwrap());
    let seed = number_from(SEED_ENV).unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("{SEED_ENV}={seed} {OPS_ENV}={wanted}");
    // Until 3.4.42, 3.5.28 and 3.6.9 a member that had waited too long for its read index asked again under the same
    // id, so that a delayed answer could be taken for that of a later read: such a read may be stale. It loses nothing.
    // *Source:* etcd#20418, fixed by etcd#21399.
    let may_be_stale = version == Debian;
    let voters = start_cluster(3, version).await;
    let nodes = voters.iter().map(|voter| Some(voter.node())).collect();
    let clients = Arc::new(Clients {
        nodes: Mutex::new(nodes),
        clock: AtomicU64::new(1),
        answered: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
        history: Mutex::default(),
    });
    let mut running = JoinSet::new();
    for key in 0..KEYS {
        running.spawn(Arc::clone(&clients).write(key));
        running.spawn(Arc::clone(&clients).read(key));
    }
    let started_at = Instant::now();
    let mut nemesis = Nemesis {
        voters,
        clients: Arc::clone(&clients),
        random: Random::from_seed(seed),
        faults: [0; 7],
        refusals: 0,
    };
    // The worst one happens in every history.
    nemesis.lose_disk(2).await;
    nemesis.faults[3] += 1;
    nemesis.wait_all_running().await;
    while clients.answered.load(Ordering::SeqCst) < wanted || nemesis.fault_count() < wanted / OPS_PER_FAULT {
        sleep(Duration::from_millis(300)).await;
        nemesis.strike().await;
    }
    // Everything has healed, and every key is read once more.
    sleep(Duration::from_secs(1)).await;
    clients.is_over.store(true, Ordering::SeqCst);
    while running.join_next().await.is_some() {}
    let history = std::mem::take(&mut *clients.history.lock().unwrap());
    let lost = lost_writes(&history, &nemesis.left_writes().await);
    let (stale, wrong): (Vec<_>, Vec<_>) =
        check_history(&history).into_iter().partition(Violation::is_stale_read);
    let [etcds, nodes, partitions, disks, stops, freezes, copies] = nemesis.faults;
    println!(
        "{} operations in {:.0?}, {} of them answered; {etcds} times etcd killed, {nodes} times a node, {stops} times one \
         stopped, {freezes} times etcd frozen, {partitions} times a node cut off, {disks} disks lost with their tickets \
         kept, {} of them refused, {copies} older copies of a disk refused; {} acknowledged writes lost, {} stale reads",
        history.len(),
        started_at.elapsed(),
        clients.answered.load(Ordering::SeqCst),
        nemesis.refusals,
        lost.len(),
        stale.len()
    );
    stale.iter().chain(&wrong).take(5).for_each(|violation| println!("{violation}"));
    assert_eq!(lost, [], "acknowledged writes are lost, by key and value");
    assert!(wrong.is_empty(), "the order of the store's revisions is not that of the operations");
    assert!(stale.is_empty() || may_be_stale, "older values were read than what was known");
    let (is_linearizable, verdict) = ask_porcupine(&history);
    println!("porcupine: {verdict}");
    assert!(is_linearizable || !stale.is_empty(), "the history is not linearizable");
    // The checker is asked whether it finds what is planted: the last value that was read is not there yet for a later reader.
    let planted = ask_porcupine(&with_stale_read(history));
    assert!(!planted.0, "a planted stale read is not found: {}", planted.1);
    assert_eq!(nemesis.refusals, disks, "a used ticket was accepted");
    stop_all(&mut nemesis.voters).await;
}
