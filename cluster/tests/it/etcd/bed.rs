//! Members on this machine, each with a directory and ports of its own.

use std::fs::OpenOptions;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::etcd::{EtcdConfig, EtcdConsensus};
use nodekeel_cluster::consensus::{MemberName, Peer, PeerUrl, Running, Start};
use nodekeel_cluster::pki::{Authority, Leaf};
use nodekeel_localstorage::pki::Certificate;
use nodekeel_localstorage::tree::{Data, Site};
use nodekeel_localstorage::{Dir, OsPlacement};
use nodekeel_supervisor::{Backoff, Origin, Policy, Supervisor};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::process::Pid;
use testbed::{Port, Scratch, free_port, gotool, leftovers, tools};
use tokio::task::block_in_place;

use crate::node::Node;

/// Where all members are at first.
pub(crate) const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Version {
    Debian,
    Newest,
}

impl Version {
    pub(crate) fn binary(self) -> PathBuf {
        match self {
            Version::Debian => tools::find(tools::ETCD).unwrap(),
            Version::Newest => gotool::ETCD.program("etcd").unwrap(),
        }
    }
}

/// Places a member's directories.
pub(crate) fn place(directory: &Path) -> Data {
    let placement = OsPlacement::new(Dir::open(directory).unwrap());
    Site::new(Arc::new(placement), directory).place().unwrap()
}

/// A member with its data there.
pub(crate) fn member(binary: PathBuf, ports: [u16; 2], extra_args: &[&str], data: &Data) -> EtcdConsensus {
    let mut config = EtcdConfig::new(binary);
    [config.peer_port, config.client_port] = ports;
    config.extra_args = extra_args.iter().map(|arg| (*arg).to_owned()).collect();
    EtcdConsensus::new(config, data.etcd.clone())
}

/// What a member has: its directory, its ports, its name.
pub(crate) struct Bed {
    version: Version,
    pub(crate) name: MemberName,
    address: IpAddr,
    peer: Port,
    client: Port,
    pub(crate) data: Data,
    /// Dropped last: it removes what is left.
    pub(crate) scratch: Scratch,
}

impl Bed {
    pub(crate) fn new(version: Version, name: &str) -> Bed {
        Bed::at(version, name, ADDRESS)
    }

    pub(crate) fn at(version: Version, name: &str, address: IpAddr) -> Bed {
        let scratch = Scratch::new().unwrap();
        let data = place(scratch.path());
        let (peer, client) = (free_port().unwrap(), free_port().unwrap());
        Bed { version, name: name.parse().unwrap(), address, peer, client, data, scratch }
    }

    /// The ports of members and of clients.
    pub(crate) fn ports(&self) -> [u16; 2] {
        [self.peer.number(), self.client.number()]
    }

    pub(crate) fn consensus(&self, extra_args: &[&str]) -> EtcdConsensus {
        member(self.version.binary(), self.ports(), extra_args, &self.data)
    }

    pub(crate) fn create(&self) -> Start {
        Start::new_cluster(self.name.clone(), self.address)
    }

    pub(crate) fn restart(&self) -> Start {
        Start::restart(self.name.clone(), self.address)
    }

    /// It is at another address from now on.
    pub(crate) fn move_to(&mut self, address: IpAddr) {
        self.address = address;
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    pub(crate) fn url(&self) -> PeerUrl {
        PeerUrl::new(self.address, self.peer.number())
    }

    pub(crate) fn client_url(&self) -> String {
        format!("https://{}", SocketAddr::new(self.address, self.client.number()))
    }

    /// What a member that runs gives to this one, with those that are there already.
    pub(crate) async fn join(&self, there: &[&Bed], running: &Running) -> Start {
        let authority = Authority::load(running.root()).await.unwrap();
        let credentials = authority.issue(&Leaf::member(self.name.clone(), self.address)).await.unwrap();
        let revoked = authority.revoked().await.unwrap();
        let peers = there.iter().map(|bed| Peer::new(bed.name.clone(), bed.url())).collect();
        Start::join(self.name.clone(), self.address, peers, Arc::new(credentials), revoked)
    }

    /// Waits until its list on the disk has all of these, which is within five seconds.
    pub(crate) fn revokes(&self, ca: &Certificate, revoked: &[Certificate]) {
        let (files, until) = (&self.data.etcd, Instant::now() + Duration::from_secs(5));
        let changes = inotify::init(CreateFlags::empty()).unwrap();
        // A list takes the place of the one before.
        inotify::add_watch(&changes, files.path(), WatchFlags::MOVED_TO).unwrap();
        let list = || files.load_revoked(ca).unwrap().unwrap();
        block_in_place(|| {
            while !revoked.iter().all(|certificate| list().revokes(certificate)) {
                let left = until.checked_duration_since(Instant::now());
                let left = left.expect("the list is on the disk within five seconds").try_into().unwrap();
                if poll(&mut [PollFd::new(&changes, PollFlags::IN)], Some(&left)).unwrap() > 0 {
                    rustix::io::read(&changes, &mut [0; 4096]).unwrap();
                }
            }
        });
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
        let file = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let output = move |_: Origin<'_>| file.try_clone().unwrap();
        let backoff = Backoff { initial: Duration::from_millis(50), ..Backoff::default() };
        let builder = Supervisor::builder().output(output).policy(Policy { backoff, ..Policy::default() });
        let node = Node::start_with(&self.consensus(extra_args), start, builder);
        Node { log: Some(log), ..node }
    }
}
