//! Members on this machine, each with a directory and ports of its own.

use std::fs::OpenOptions;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_cluster::consensus::etcd::{EtcdConfig, EtcdConsensus};
use nodekeel_cluster::consensus::{MemberName, Peer, PeerUrl, Running, Start};
use nodekeel_cluster::pki::{Authority, Leaf};
use nodekeel_localstorage::tree::{Data, Site};
use nodekeel_localstorage::{Dir, OsPlacement};
use nodekeel_supervisor::{Backoff, Origin, Policy, Supervisor};
use rustix::process::Pid;
use testbed::{Port, Scratch, free_port, gotool, leftovers, tools};

use crate::node::Node;

/// Where all members are.
pub(crate) const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Version {
    Debian,
    Newest,
}

impl Version {
    fn binary(self) -> PathBuf {
        match self {
            Version::Debian => tools::find(tools::ETCD).unwrap(),
            Version::Newest => gotool::ETCD.program("etcd").unwrap(),
        }
    }
}

/// What a member has: its directory, its ports, its name.
pub(crate) struct Bed {
    version: Version,
    pub(crate) name: MemberName,
    peer: Port,
    client: Port,
    pub(crate) data: Data,
    /// Dropped last: it removes what is left.
    pub(crate) scratch: Scratch,
}

impl Bed {
    pub(crate) fn new(version: Version, name: &str) -> Bed {
        let scratch = Scratch::new().unwrap();
        let placement = OsPlacement::new(Dir::open(scratch.path()).unwrap());
        let data = Site::new(Arc::new(placement), scratch.path()).place().unwrap();
        let (peer, client) = (free_port().unwrap(), free_port().unwrap());
        Bed { version, name: name.parse().unwrap(), peer, client, data, scratch }
    }

    pub(crate) fn consensus(&self, extra_args: &[&str]) -> EtcdConsensus {
        let mut config = EtcdConfig::new(self.version.binary());
        config.peer_port = self.peer.number();
        config.client_port = self.client.number();
        config.extra_args = extra_args.iter().map(|arg| (*arg).to_owned()).collect();
        EtcdConsensus::new(config, self.data.etcd.clone())
    }

    pub(crate) fn create(&self) -> Start {
        Start::new_cluster(self.name.clone(), ADDRESS)
    }

    pub(crate) fn restart(&self) -> Start {
        Start::restart(self.name.clone(), ADDRESS)
    }

    pub(crate) fn url(&self) -> PeerUrl {
        PeerUrl::new(ADDRESS, self.peer.number())
    }

    pub(crate) fn client_url(&self) -> String {
        format!("https://{}", self.client.address())
    }

    /// What a member that runs gives to this one, with those that are there already.
    pub(crate) async fn join(&self, there: &[&Bed], running: &Running) -> Start {
        let authority = Authority::load(running.root()).await.unwrap();
        let credentials = authority.issue(&Leaf::member(self.name.clone(), ADDRESS)).await.unwrap();
        let revoked = authority.revoked().await.unwrap();
        let peers = there.iter().map(|bed| Peer::new(bed.name.clone(), bed.url())).collect();
        Start::join(self.name.clone(), ADDRESS, peers, Arc::new(credentials), revoked)
    }

    /// The process that runs now.
    pub(crate) fn pid(&self) -> Pid {
        let processes = leftovers::processes(self.scratch.path()).unwrap();
        let etcd = processes.iter().find(|process| process.command.contains("--data-dir")).unwrap();
        Pid::from_raw(etcd.pid).unwrap()
    }

    /// Runs it. Its output is in the file `output.log`.
    pub(crate) fn run(&self, start: Start) -> Node {
        self.run_with(start, &[])
    }

    pub(crate) fn run_with(&self, start: Start, extra_args: &[&str]) -> Node {
        let log = self.scratch.path().join("output.log");
        let file = OpenOptions::new().create(true).append(true).open(log).unwrap();
        let output = move |_: Origin<'_>| file.try_clone().unwrap();
        let backoff = Backoff { initial: std::time::Duration::from_millis(50), ..Backoff::default() };
        let builder = Supervisor::builder().output(output).policy(Policy { backoff, ..Policy::default() });
        Node::start_with(&self.consensus(extra_args), start, builder)
    }
}
