//! A node on a host of a site: its disks, its runs, its operator.

use std::fs::{File, OpenOptions, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::consensus::{ClusterAccess, DEFAULT_CLIENT_PORT, DEFAULT_PEER_PORT, PeerUrl};
use nodekeel_cluster::enrolment::{
    ClusterNode, ConsensusFactory, EnrolmentSettings, FailureReason, NodeMembership,
};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::pki::{CertificateSpec, ClusterCa};
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_supervisor::{Failure, RunnableState, WaitReason};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Signal, kill_process};
use testbed::ScratchDir;
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use super::site::Site;
use crate::enrolment::{NodeRun, create_disks, error_chain, node_address, node_deps, ticket_file};
use crate::etcd::etcd_processes;

/// Longer than anything here takes, unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(90);

/// A node, with its disks, on a host of a site.
pub(crate) struct Voter {
    pub(crate) site: Arc<Site>,
    pub(crate) host: usize,
    binary: PathBuf,
    scratch: ScratchDir,
    running: Option<(NodeRun, Runtime)>,
}

impl Voter {
    pub(crate) fn new(site: &Arc<Site>, host: usize, binary: PathBuf) -> Voter {
        let scratch = ScratchDir::new().unwrap();
        create_disks(scratch.path());
        Voter { site: Arc::clone(site), host, binary, scratch, running: None }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.site.address(self.host)
    }

    pub(crate) fn peer_url(&self) -> PeerUrl {
        PeerUrl::new(self.address().into(), DEFAULT_PEER_PORT)
    }

    /// A path below the node's data volume.
    pub(crate) fn data(&self, path: &str) -> PathBuf {
        self.scratch.path().join("data").join(path)
    }

    fn ticket_file(&self) -> LayoutFile {
        ticket_file(self.scratch.path())
    }

    /// Starts the node; it is restarted when a run ends.
    pub(crate) fn start(&mut self) {
        self.start_with(|_| {});
    }

    pub(crate) fn start_with(&mut self, change: impl FnOnce(&mut EnrolmentSettings)) {
        let mut settings = EnrolmentSettings::default();
        (settings.golden_tickets, settings.bootstrap, settings.deadline) = (true, self.host == 0, HANG);
        change(&mut settings);
        let network = Arc::new(StaticNetwork::new(node_address(&self.address().to_string())));
        let consensus = ConsensusFactory::etcd_on_volume(EtcdConfig::new(&self.binary));
        let deps = node_deps(self.scratch.path(), network, consensus);
        let (node, runtime) = (ClusterNode::new(deps, settings), self.site.runtime(self.host));
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

    pub(crate) fn is_started(&self) -> bool {
        self.running.is_some()
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
        let pids = etcd_processes(self.scratch.path());
        for pid in &pids {
            let _ = kill_process(*pid, Signal::KILL);
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
        self.ticket_file().write(&ticket.await.to_config()).unwrap();
    }

    /// The disk is replaced by an empty one; the ticket is still there.
    pub(crate) fn lose_disk(&self) {
        assert!(!self.is_started());
        let ticket = self.ticket_file().read().unwrap();
        for name in ["esp", "data"] {
            std::fs::remove_dir_all(self.scratch.path().join(name)).unwrap();
        }
        create_disks(self.scratch.path());
        self.ticket_file().write(&ticket).unwrap();
    }

    /// Exchanges the disks for empty ones with the same ticket, and back.
    pub(crate) fn swap_disks(&self) {
        assert!(!self.is_started());
        let (ticket, top) = (self.ticket_file().read().unwrap(), self.scratch.path());
        for name in ["esp", "data"] {
            let (disk, spare, moved) = (top.join(name), top.join(format!("{name}.spare")), top.join("moved"));
            std::fs::rename(&disk, &moved).unwrap();
            if spare.exists() {
                std::fs::rename(&spare, &disk).unwrap();
            }
            std::fs::rename(&moved, &spare).unwrap();
        }
        create_disks(self.scratch.path());
        self.ticket_file().write(&ticket).unwrap();
    }

    /// The files of the enrolment journal, with their names.
    pub(crate) fn copy_journal(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = std::fs::read_dir(self.scratch.path().join("esp")).unwrap();
        let files = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        files.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
    }

    /// Writes them again.
    pub(crate) fn restore_journal(&self, files: Vec<(PathBuf, Vec<u8>)>) {
        assert!(!self.is_started());
        for (path, content) in files {
            std::fs::write(path, content).unwrap();
        }
    }

    /// From now on its etcd starts only once the gate is opened.
    pub(crate) fn hold_etcd(&mut self) -> Gate {
        let (pipe, script) = (self.scratch.path().join("gate"), self.scratch.path().join("held-etcd"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (binary, gate) = (self.binary.display(), pipe.display());
        // Opening the pipe waits for the other end.
        let lines =
            format!("#!/bin/sh\n[ \"$1\" = --version ] || read -r _ < {gate}\nexec {binary} \"$@\"\n");
        std::fs::write(&script, lines).unwrap();
        std::fs::set_permissions(&script, Permissions::from_mode(0o700)).unwrap();
        Gate { pipe, etcd: std::mem::replace(&mut self.binary, script) }
    }

    /// Its etcd starts again without a gate.
    pub(crate) fn release_etcd(&mut self, gate: Gate) {
        self.binary = gate.etcd;
        std::fs::remove_file(gate.pipe).unwrap();
    }

    /// Waits until its etcd has a log.
    pub(crate) async fn wait_log(&self) {
        let is_log = |entry: std::fs::DirEntry| entry.file_name().as_encoded_bytes().ends_with(b".wal");
        let has_log = || {
            let entries = std::fs::read_dir(self.data("etcd/data/member/wal"));
            entries.is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(is_log)))
        };
        let writing = async {
            while !has_log() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(HANG, writing).await.expect("a log in time");
    }

    /// A client of its etcd, from the test's own network.
    pub(crate) async fn client(&self) -> Client {
        let cluster_ca = retried(async || ClusterCa::load_ca(self.access().await.root_kv()).await).await;
        let name = "operator".parse().unwrap();
        let with = cluster_ca.issue_credentials(&CertificateSpec::for_client(name)).await.unwrap();
        let tls = TlsOptions::new()
            .ca_certificate(Certificate::from_pem(with.ca.to_pem()))
            .identity(Identity::from_pem(with.certificate.to_pem(), with.key.to_pem().as_bytes()));
        let options = ConnectOptions::new().with_tls(tls).with_timeout(Duration::from_secs(5));
        let url = format!("https://{}:{DEFAULT_CLIENT_PORT}", self.address());
        Client::connect([url], Some(options)).await.unwrap()
    }
}

/// Keeps an etcd from starting.
pub(crate) struct Gate {
    pipe: PathBuf,
    etcd: PathBuf,
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

/// Calls a cluster until it answers: it may be electing a leader.
pub(crate) async fn retried<T, E: std::fmt::Debug>(call: impl AsyncFn() -> Result<T, E>) -> T {
    let mut last_error = None;
    let calling = async {
        loop {
            match call().await {
                Ok(answer) => return answer,
                Err(error) => last_error = Some(error),
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    let answered = timeout(HANG, calling).await;
    answered.unwrap_or_else(|_| panic!("no answer in time: {last_error:?}"))
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
pub(crate) async fn start_cluster(hosts: usize, binary: PathBuf) -> Vec<Voter> {
    cluster_and_spare(hosts, binary).await.0
}

/// The same, and another node on the same network, which is off. The network has room for more.
pub(crate) async fn cluster_and_spare(hosts: usize, binary: PathBuf) -> (Vec<Voter>, Voter) {
    let site = Arc::new(Site::new(hosts + 4));
    let mut voters: Vec<_> = (0..hosts).map(|host| Voter::new(&site, host, binary.clone())).collect();
    voters[0].start();
    voters[0].wait_running().await;
    for joiner in 1..hosts {
        voters[joiner].give_ticket(&voters[0]).await;
        voters[joiner].start();
        voters[joiner].wait_running().await;
    }
    (voters, Voter::new(&site, hosts, binary))
}
