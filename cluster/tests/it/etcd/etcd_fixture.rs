//! Members on this host, each with a private directory and dedicated ports.

use std::fs::OpenOptions;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use etcd_client::Client;
use nodekeel_cluster::consensus::etcd::{EtcdConfig, EtcdConsensus};
use nodekeel_cluster::consensus::{ClusterAccess, MemberName, Peer, PeerUrl, StartOptions};
use nodekeel_cluster::pki::CertificateSpec;
use nodekeel_localstorage::pki::{Certificate, Credentials};
use nodekeel_localstorage::tree::{EtcdDir, IdentityDir, LayoutTarget};
use nodekeel_localstorage::{Dir, OsFileStore};
use nodekeel_supervisor::{Backoff, ChildPolicy, OutputOrigin, Supervisor};
use rustix::process::Pid;
use testbed::{ReservedPort, ScratchDir, gotool, leftovers, reserve_port, tools, wait_until};
use tokio::task::block_in_place;
use tokio::time::{sleep, timeout};

use super::peer_question::ask_peer;
use crate::member_run::{HANG, MemberRun};

/// The initial address of all members.
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EtcdVersion {
    Debian,
    /// 3.5 and 3.6, which only upgrades run.
    Former(usize),
    Newest,
}

impl EtcdVersion {
    pub(crate) fn binary(self) -> PathBuf {
        match self {
            EtcdVersion::Debian => tools::find_tool(tools::ETCD).unwrap(),
            EtcdVersion::Former(index) => gotool::FORMER_ETCDS[index].program_path("etcd").unwrap(),
            EtcdVersion::Newest => gotool::ETCD.program_path("etcd").unwrap(),
        }
    }
}

nodekeel_localstorage::layout! {
    /// The volume of a node with a member.
    pub(crate) struct MemberVolume {
        /// The member's files.
        pub(crate) etcd: EtcdDir = "etcd", 0o700;
        /// The node's identity.
        pub(crate) node: IdentityDir = "node", 0o700;
    }
}

/// Places a member's directories.
pub(crate) fn place_data(directory: &Path) -> MemberVolume {
    let placement = OsFileStore::new(Dir::open(directory).unwrap());
    LayoutTarget::new(Arc::new(placement), directory).create_layout().unwrap()
}

/// A member with this data.
pub(crate) fn etcd_member(
    binary: PathBuf,
    peer_port: u16,
    extra_args: &[&str],
    data: &MemberVolume,
) -> EtcdConsensus {
    let mut config = EtcdConfig::new(binary);
    config.peer_port = peer_port;
    config.extra_args = extra_args.iter().map(|arg| (*arg).to_owned()).collect();
    EtcdConsensus::new(config, data.etcd.clone())
}

/// A client at the socket of the etcd with its files in this directory.
pub(crate) async fn etcd_client(files: &Path) -> Client {
    let socket = format!("unix://{}", files.join("client/etcd:0").display());
    let channel = tonic::transport::Endpoint::from_shared(socket).unwrap().connect_lazy();
    Client::from_channel(etcd_client::Channel::Tonic(channel), None).await.unwrap()
}

/// The running etcds with data in this directory.
pub(crate) fn etcd_processes(directory: &Path) -> Vec<Pid> {
    let processes = leftovers::find_processes(directory).unwrap();
    let etcds = processes.iter().filter(|process| process.command.contains("--data-dir"));
    etcds.filter_map(|process| Pid::from_raw(process.pid)).collect()
}

/// Calls a cluster until it answers: it may be electing a leader, and etcd rejects changes while it has not heard from
/// all members for five seconds.
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

/// A member that runs alone in its cluster.
pub(crate) async fn started_member(version: EtcdVersion) -> (EtcdFixture, MemberRun, ClusterAccess) {
    let fixture = EtcdFixture::new(version, "one");
    let mut node = fixture.run(fixture.bootstrap_options());
    let running = node.wait_running().await;
    (fixture, node, running)
}

/// A member's directory, ports and name.
pub(crate) struct EtcdFixture {
    version: EtcdVersion,
    pub(crate) name: MemberName,
    address: IpAddr,
    peer: ReservedPort,
    pub(crate) data: MemberVolume,
    /// Dropped last: removes what is left.
    pub(crate) scratch: ScratchDir,
}

impl EtcdFixture {
    pub(crate) fn new(version: EtcdVersion, name: &str) -> EtcdFixture {
        EtcdFixture::new_at(version, name, ADDRESS)
    }

    pub(crate) fn new_at(version: EtcdVersion, name: &str, address: IpAddr) -> EtcdFixture {
        let scratch = ScratchDir::new().unwrap();
        let data = place_data(scratch.path());
        let peer = reserve_port().unwrap();
        EtcdFixture { version, name: name.parse().unwrap(), address, peer, data, scratch }
    }

    /// Its etcd.
    pub(crate) fn binary(&self) -> PathBuf {
        self.version.binary()
    }

    /// The port for members.
    pub(crate) fn peer_port(&self) -> u16 {
        self.peer.number()
    }

    pub(crate) fn consensus(&self, extra_args: &[&str]) -> EtcdConsensus {
        etcd_member(self.binary(), self.peer_port(), extra_args, &self.data)
    }

    pub(crate) fn bootstrap_options(&self) -> StartOptions {
        StartOptions::new_cluster(self.name.clone(), self.address)
    }

    pub(crate) fn restart_options(&self) -> StartOptions {
        StartOptions::restart_member(self.name.clone(), self.address)
    }

    /// Replaces the etcd that runs next.
    pub(crate) fn install(&mut self, version: EtcdVersion) {
        self.version = version;
    }

    /// Changes the member's address.
    pub(crate) fn move_to(&mut self, address: IpAddr) {
        self.address = address;
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    pub(crate) fn peer_url(&self) -> PeerUrl {
        PeerUrl::new(self.address, self.peer.number())
    }

    /// A client of its etcd.
    pub(crate) async fn client(&self) -> Client {
        etcd_client(self.data.etcd.path()).await
    }

    /// The version of its etcd, as it answers the holder of these credentials.
    pub(crate) async fn ask(&self, with: &Credentials) -> std::io::Result<String> {
        ask_peer(SocketAddr::new(self.address, self.peer_port()), &with.ca, Some(with), "/version").await
    }

    /// What a running member gives to this one, with the members that are present already.
    pub(crate) async fn join_options(
        &self,
        existing: &[&EtcdFixture],
        running: &ClusterAccess,
    ) -> StartOptions {
        let cluster_ca = running.load_ca().await.unwrap();
        let credentials = cluster_ca
            .issue_credentials(&CertificateSpec::for_member(self.name.clone(), self.address))
            .await
            .unwrap();
        let revoked = cluster_ca.revocation_list().await.unwrap();
        let peers =
            existing.iter().map(|fixture| Peer::new(fixture.name.clone(), fixture.peer_url())).collect();
        StartOptions::join_cluster(self.name.clone(), self.address, peers, Arc::new(credentials), revoked)
    }

    /// Waits until its list on the disk has all of these certificates, for at most five seconds.
    pub(crate) fn wait_revoked(&self, ca: &Certificate, revoked: &[Certificate]) {
        let are_listed = || {
            let list = self.data.etcd.load_revocation_list(ca)?.context("no list")?;
            ensure!(revoked.iter().all(|certificate| list.is_revoked(certificate)), "not revoked yet");
            Ok(())
        };
        let limit = Duration::from_secs(5);
        block_in_place(|| wait_until(limit, "the list on the disk", are_listed)).unwrap();
    }

    /// The running process.
    pub(crate) fn pid(&self) -> Pid {
        etcd_processes(self.scratch.path())[0]
    }

    /// Runs the member. Its output is in the file `output.log`.
    pub(crate) fn run(&self, start: StartOptions) -> MemberRun {
        self.run_with(start, &[])
    }

    pub(crate) fn run_with(&self, start: StartOptions, extra_args: &[&str]) -> MemberRun {
        let log = self.scratch.path().join("output.log");
        let file = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let output = move |_: OutputOrigin<'_>| file.try_clone().unwrap();
        let backoff = Backoff { initial: Duration::from_millis(50), ..Backoff::default() };
        let builder = Supervisor::builder()
            .output_sink(output)
            .default_policy(ChildPolicy { backoff, ..ChildPolicy::default() });
        let mut member = MemberRun::start_with(&self.consensus(extra_args), start, builder);
        member.log = Some(log);
        member
    }
}
