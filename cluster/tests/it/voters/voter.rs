//! A node on a host of a site: its disks, its runs, its operator.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::Client;
use nix::sched::{CloneFlags, setns};
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::consensus::{ClusterAccess, DEFAULT_PEER_PORT, PeerUrl};
use nodekeel_cluster::enrolment::{
    ClusterNode, ConsensusFactory, EnrolmentSettings, FailureReason, NodeMembership,
};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::node::GoldenTicket;
use nodekeel_supervisor::{Failure, RunnableState, WaitReason};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Signal, kill_process};
use testbed::{PrivateNetwork, ScratchDir, write_program};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

use crate::enrolment::{NodeFixture, NodeRun, create_disks, error_chain, node_address};
use crate::etcd::{EtcdVersion, etcd_client, etcd_processes, retried};
use crate::member_run::HANG;

/// The node's disks.
const DISKS: [&str; 2] = ["esp", "data"];

/// A node, with its disks, on a host of a site.
pub(crate) struct Voter {
    pub(crate) site: Arc<PrivateNetwork>,
    pub(crate) host: usize,
    binary: PathBuf,
    fixture: NodeFixture,
    running: Option<(NodeRun, Runtime)>,
}

impl Voter {
    pub(crate) fn new(site: &Arc<PrivateNetwork>, host: usize, version: EtcdVersion) -> Voter {
        let (binary, url) = (version.binary(), PeerUrl::new(site.address(host).into(), DEFAULT_PEER_PORT));
        let mut fixture = NodeFixture::with_consensus(etcd_of(&binary), url);
        let settings = &mut fixture.settings;
        (settings.golden_tickets, settings.bootstrap, settings.deadline) = (true, host == 0, HANG);
        Voter { site: Arc::clone(site), host, binary, fixture, running: None }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.site.address(self.host)
    }

    pub(crate) fn peer_url(&self) -> PeerUrl {
        self.fixture.url.clone()
    }

    /// Moves a node that is off to another host, with its disks.
    pub(crate) fn move_to(&mut self, host: usize) {
        assert!(self.running.is_none());
        self.host = host;
        self.fixture.url = PeerUrl::new(self.address().into(), DEFAULT_PEER_PORT);
        let address = node_address(&self.address().to_string());
        self.fixture.network = Arc::new(StaticNetwork::new(address));
    }

    /// A path below the node's disks, which are `data` and `esp`.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.fixture.disks.path().join(path)
    }

    /// Starts the node; it is restarted when a run ends.
    pub(crate) fn start(&mut self) {
        self.start_with(|_| {});
    }

    pub(crate) fn start_with(&mut self, change: impl FnOnce(&mut EnrolmentSettings)) {
        let mut settings = self.fixture.settings.clone();
        change(&mut settings);
        let (node, runtime) =
            (ClusterNode::new(self.fixture.deps(), settings), host_runtime(&self.site, self.host));
        let run = {
            let _guard = runtime.enter();
            NodeRun::start_with_restarts(node)
        };
        self.running = Some((run, runtime));
    }

    /// The node's handle while it runs.
    pub(crate) fn node(&self) -> ClusterNode {
        self.running.as_ref().expect("it runs").0.node.clone()
    }

    /// The node's state in the tree, and what it waits for.
    pub(crate) fn status_in_tree(&self) -> Option<(RunnableState, WaitReason)> {
        self.running.as_ref().expect("it runs").0.status_in_tree()
    }

    /// Runs this on the node's host.
    pub(crate) async fn on_host<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        self.running.as_ref().expect("it runs").1.spawn(work).await.unwrap()
    }

    /// Access to its cluster, once it has it: after a start, the others may be in the cluster before this node is.
    pub(crate) async fn access(&self) -> ClusterAccess {
        retried(async || self.node().cluster_access()).await
    }

    /// Waits until the node is in its cluster.
    pub(crate) async fn wait_running(&self) -> NodeMembership {
        self.wait_result(Result::ok).await
    }

    /// Waits until a run has failed.
    pub(crate) async fn wait_failed(&self) -> FailureReason {
        self.wait_result(Result::err).await
    }

    /// Waits until a run has a result of this kind.
    async fn wait_result<T>(&self, select: impl Fn(Result<NodeMembership, FailureReason>) -> Option<T>) -> T {
        let node = self.node();
        let selected = async {
            loop {
                match select(node.wait_finished().await) {
                    Some(result) => return result,
                    None => sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let node = self.node();
        let late = |_| panic!("{:?}: {:?}", node.condition(), node.current_state());
        timeout(HANG, selected).await.unwrap_or_else(late)
    }

    /// Waits until the node says this of itself.
    pub(crate) async fn wait_condition(&self, expected: &str) {
        let node = self.node();
        let said = async {
            while !node.condition().is_some_and(|condition| condition.contains(expected)) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let late = |_| panic!("{expected}: {:?}: {:?}", node.condition(), node.current_state());
        timeout(HANG, said).await.unwrap_or_else(late);
    }

    pub(crate) async fn wait_failure_text(&self) -> String {
        error_chain(self.wait_failed().await)
    }

    /// Stops the node as a shutdown does.
    pub(crate) async fn stop(&mut self) {
        if let Some((run, runtime)) = self.running.take() {
            runtime.spawn(run.stop()).await.unwrap();
            runtime.shutdown_background();
        }
    }

    /// Ends the node as a power cut does.
    pub(crate) async fn kill(&mut self) {
        let Some((run, runtime)) = self.running.take() else { return };
        // Without its runtime, nothing restarts etcd.
        std::mem::forget(run);
        runtime.shutdown_background();
        self.kill_etcd();
        let gone = Instant::now() + HANG;
        while self.kill_etcd() {
            assert!(Instant::now() < gone, "etcd does not end");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Kills its etcd; returns whether it ran.
    pub(crate) fn kill_etcd(&self) -> bool {
        self.signal_etcd(Signal::KILL)
    }

    /// Signals its etcd; returns whether it ran.
    pub(crate) fn signal_etcd(&self, signal: Signal) -> bool {
        let pids = etcd_processes(self.fixture.disks.path());
        for pid in &pids {
            let _ = kill_process(*pid, signal);
        }
        !pids.is_empty()
    }

    /// Puts the ticket where the node looks for it.
    pub(crate) async fn give_ticket(&self, from: &Voter) {
        let ticket = retried(async || {
            let (node, url) = (from.node(), self.peer_url());
            let issuing =
                async move { node.ticket_issuer()?.issue_ticket(&url).await.map_err(Failure::from) };
            from.on_host(issuing).await
        });
        self.take_ticket(&ticket.await);
    }

    /// Puts this ticket where the node looks for it.
    pub(crate) fn take_ticket(&self, ticket: &GoldenTicket) {
        self.fixture.give_ticket(ticket);
    }

    /// Its disks are empty, and the ticket is gone, too.
    pub(crate) fn reset(&self) {
        assert!(self.running.is_none());
        ["esp", "data"].iter().for_each(|name| std::fs::remove_dir_all(self.path(name)).unwrap());
        create_disks(self.fixture.disks.path());
    }

    /// The disk is replaced by an empty one; the ticket is still there.
    pub(crate) fn lose_disk(&self) {
        self.change_disks(|disk| std::fs::remove_dir_all(disk).unwrap());
    }

    /// Exchanges the disks for empty ones with the same ticket, and back.
    pub(crate) fn swap_disks(&self) {
        self.change_disks(|disk| {
            let (spare, moved) = (disk.with_extension("spare"), disk.with_extension("moved"));
            std::fs::rename(disk, &moved).unwrap();
            if spare.exists() {
                std::fs::rename(&spare, disk).unwrap();
            }
            std::fs::rename(&moved, &spare).unwrap();
        });
    }

    /// A copy of the disks of a node that does not run.
    pub(crate) fn copy_disks(&self) -> ScratchDir {
        assert!(self.running.is_none());
        let copy = ScratchDir::new().unwrap();
        DISKS.iter().for_each(|name| copy_tree(&self.path(name), copy.path()));
        copy
    }

    /// Puts a copy of the disks back in place of them.
    pub(crate) fn restore_disks(&self, copy: &ScratchDir) {
        assert!(self.running.is_none());
        for name in DISKS {
            std::fs::remove_dir_all(self.path(name)).unwrap();
            copy_tree(&copy.path().join(name), self.fixture.disks.path());
        }
    }

    /// Takes each disk out; where no other is put in, there is an empty one. The ticket is on it again.
    fn change_disks(&self, take_out: impl Fn(&Path)) {
        assert!(self.running.is_none());
        let ticket = self.fixture.ticket_file().read().unwrap();
        DISKS.iter().for_each(|name| take_out(&self.path(name)));
        create_disks(self.fixture.disks.path());
        self.fixture.ticket_file().write(&ticket).unwrap();
    }

    /// From now on its etcd starts only once the gate is opened.
    pub(crate) fn hold_etcd(&mut self) -> Gate {
        let scratch = ScratchDir::new().unwrap();
        let (pipe, script) = (scratch.path().join("gate"), scratch.path().join("held-etcd"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (binary, gate) = (self.binary.display(), pipe.display());
        // Opening the pipe waits for the other end.
        let lines =
            format!("#!/bin/sh\n[ \"$1\" = --version ] || read -r _ < {gate}\nexec {binary} \"$@\"\n");
        write_program(&script, &lines).unwrap();
        self.fixture.consensus = etcd_of(&script);
        Gate { pipe, _scratch: scratch }
    }

    /// Its etcd is of this release from its next start on.
    pub(crate) fn set_etcd(&mut self, version: EtcdVersion) {
        self.binary = version.binary();
        self.fixture.consensus = etcd_of(&self.binary);
    }

    /// Its etcd gets these arguments, too.
    pub(crate) fn add_etcd_args(&mut self, args: &[&str]) {
        let mut config = EtcdConfig::new(&self.binary);
        config.extra_args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.fixture.consensus = ConsensusFactory::etcd_on_volume(config);
    }

    /// Its etcd starts again without a gate.
    pub(crate) fn release_etcd(&mut self, _gate: Gate) {
        self.fixture.consensus = etcd_of(&self.binary);
    }

    /// Waits until its etcd has a log.
    pub(crate) async fn wait_log(&self) {
        let is_log = |entry: std::fs::DirEntry| entry.file_name().as_encoded_bytes().ends_with(b".wal");
        let has_log = || {
            let entries = std::fs::read_dir(self.path("data/etcd/data/member/wal"));
            entries.is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(is_log)))
        };
        let writing = async {
            while !has_log() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(HANG, writing).await.expect("a log in time");
    }

    /// A client of its etcd, at its socket.
    pub(crate) async fn client(&self) -> Client {
        // Once it serves.
        self.access().await;
        etcd_client(&self.path("data/etcd")).await
    }

    /// The TCP ports at which its host listens.
    pub(crate) async fn listening_ports(&self) -> BTreeSet<u16> {
        // Lines of `sl local_address rem_address st …`. *Source:* proc_net_tcp in the kernel's documentation.
        let read = |table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap();
        let tables = self.on_host(async move { ["tcp", "tcp6"].map(read).concat() }).await;
        let fields = tables.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let listening = fields.filter(|fields| fields[3] == "0A");
        listening
            .map(|fields| u16::from_str_radix(fields[1].split_once(':').unwrap().1, 16).unwrap())
            .collect()
    }
}

impl Drop for Voter {
    /// A failed test leaves its etcd behind.
    fn drop(&mut self) {
        self.kill_etcd();
    }
}

fn copy_tree(from: &Path, into: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, into]).status().unwrap();
    assert!(copied.success());
}

/// A runtime whose threads, and the processes that they start, are on this host.
fn host_runtime(site: &PrivateNetwork, host: usize) -> Runtime {
    let namespace = Arc::new(File::open(site.namespace_path(host)).unwrap());
    let enter = move || setns(&*namespace, CloneFlags::CLONE_NEWNET).unwrap();
    Builder::new_multi_thread().worker_threads(1).on_thread_start(enter).enable_all().build().unwrap()
}

/// The members of nodes that run this program.
fn etcd_of(binary: &Path) -> ConsensusFactory {
    ConsensusFactory::etcd_on_volume(EtcdConfig::new(binary))
}

/// Keeps an etcd from starting.
pub(crate) struct Gate {
    pipe: PathBuf,
    /// Removed with it.
    _scratch: ScratchDir,
}

impl Gate {
    /// Waits until etcd is at the gate.
    pub(crate) async fn wait_reached(&self) -> File {
        let reaching = async {
            loop {
                // Without a reader there is no other end.
                let opened = OpenOptions::new()
                    .write(true)
                    .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
                    .open(&self.pipe);
                match opened {
                    Ok(gate) => return gate,
                    Err(_) => sleep(Duration::from_millis(5)).await,
                }
            }
        };
        timeout(HANG, reaching).await.expect("etcd is started in time")
    }
}

/// Writes once there is a leader.
pub(crate) async fn put(voter: &Voter, key: &str, value: &str) {
    let put =
        async || voter.node().root_kv()?.put(key.as_bytes(), value.as_bytes()).await.map_err(Failure::from);
    retried(put).await;
}

/// Reads once there is a leader.
pub(crate) async fn get(voter: &Voter, key: &str) -> Option<String> {
    let get = async || voter.node().root_kv()?.get(key.as_bytes()).await.map_err(Failure::from);
    retried(get).await.map(|kv| String::from_utf8(kv.value).unwrap())
}

pub(crate) async fn stop_all(voters: &mut [Voter]) {
    for voter in voters {
        voter.stop().await;
    }
}

/// A cluster of voters that have joined one after the other.
pub(crate) async fn start_cluster(hosts: usize, version: EtcdVersion) -> Vec<Voter> {
    cluster_and_spare(hosts, version).await.0
}

/// The same, and another node on the same network, which is off. The network has room for more.
pub(crate) async fn cluster_and_spare(hosts: usize, version: EtcdVersion) -> (Vec<Voter>, Voter) {
    let site = Arc::new(PrivateNetwork::new(hosts + 4).unwrap());
    let mut voters: Vec<_> = (0..hosts).map(|host| Voter::new(&site, host, version)).collect();
    start_all(&mut voters).await;
    (voters, Voter::new(&site, hosts, version))
}

/// Starts the first one, which bootstraps the cluster, and joins the others one after the other.
pub(crate) async fn start_all(voters: &mut [Voter]) {
    voters[0].start();
    voters[0].wait_running().await;
    for joiner in 1..voters.len() {
        voters[joiner].give_ticket(&voters[0]).await;
        voters[joiner].start();
        voters[joiner].wait_running().await;
    }
}
