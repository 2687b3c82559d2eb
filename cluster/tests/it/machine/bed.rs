//! A machine that can be started again and again: its disks, its address, and what others there are.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::Consensus;
use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryNet};
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Membership, Reason, Settings};
use nodekeel_cluster::network::{Address, StaticNetwork};
use nodekeel_cluster::node::{Enrolment, EnrolmentSource, EspEnrolment, LocalNames};
use nodekeel_localstorage::tree::Site;
use nodekeel_localstorage::volume::Directory;
use nodekeel_localstorage::{Dir, Mode, OsPlacement};
use nodekeel_supervisor::{Backoff, Child, Context, Failure, Policy, Restart, Supervisor};
use tempfile::TempDir;

/// Longest time that a test waits for what it expects at once.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A machine with its disks.
pub(crate) struct Bed {
    pub(crate) disks: TempDir,
    pub(crate) network: Arc<StaticNetwork>,
    pub(crate) consensus: Arc<dyn Consensus>,
    pub(crate) settings: Settings,
}

impl Bed {
    /// Alone on its net.
    pub(crate) fn alone() -> Self {
        Self::on(&MemoryNet::new(), "192.0.2.1")
    }

    /// At this address of a net.
    pub(crate) fn on(net: &MemoryNet, address: &str) -> Self {
        Self::with(Arc::new(MemoryConsensus::on(net)), address)
    }

    /// With this consensus.
    pub(crate) fn with(consensus: Arc<dyn Consensus>, address: &str) -> Self {
        let disks = disks();
        let top = Dir::open(disks.path()).expect("it opens");
        for name in ["esp", "data", "run"] {
            top.ensure_dir(name, Mode::PRIVATE_DIR).expect("it is made");
        }
        let network = Arc::new(StaticNetwork::new(at(address)));
        Self { disks, network, consensus, settings: Settings::default() }
    }

    pub(crate) fn dir(&self, name: &str) -> Dir {
        Dir::open(self.disks.path().join(name)).expect("it opens")
    }

    pub(crate) fn enrolment(&self) -> EspEnrolment {
        let esp = self.dir("esp");
        let path = esp.path().to_owned();
        Site::new(Arc::new(OsPlacement::new(esp)), path).place().expect("it is placed")
    }

    /// What the machine has when it is switched on.
    pub(crate) fn deps(&self) -> Deps {
        Deps {
            state: self.dir("esp"),
            enrolment: Enrolment::new([EnrolmentSource::Kept(self.enrolment().enrolment.clone())]),
            network: self.network.clone(),
            volume: Arc::new(Directory::new(self.dir("data"))),
            consensus: ConsensusSource::anywhere(Arc::clone(&self.consensus)),
            local: LocalNames::default(),
        }
    }

    /// The machine, switched on.
    pub(crate) fn start(&self) -> Life {
        Life::of(Cluster::new(self.deps(), self.settings.clone()))
    }

    /// One life that has to succeed.
    pub(crate) async fn runs(&self) -> (Life, Membership) {
        let life = self.start();
        let membership = life.finished().await.expect("it is in its cluster");
        (life, membership)
    }

    /// One life that has to fail.
    pub(crate) async fn fails(&self) -> Reason {
        let life = self.start();
        let reason = life.finished().await.expect_err("it is in no cluster");
        life.end().await;
        reason
    }
}

/// A machine while it is on.
pub(crate) struct Life {
    pub(crate) cluster: Cluster,
    supervisor: Supervisor,
}

impl Life {
    /// One whose run is not followed by another.
    pub(crate) fn of(cluster: Cluster) -> Self {
        Self::with(cluster, Policy { restart: Restart::Never, ..Policy::default() })
    }

    /// One whose runs follow each other.
    pub(crate) fn restarted(cluster: Cluster) -> Self {
        let backoff = Backoff { initial: Duration::from_millis(1), ..Backoff::default() };
        Self::with(cluster, Policy { backoff, ..Policy::default() })
    }

    fn with(cluster: Cluster, policy: Policy) -> Self {
        let child = cluster.clone();
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let child = child.clone();
            async move {
                ctx.run_group([Child::new("cluster", child).policy(policy)])?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        Self { cluster, supervisor }
    }

    /// How it ended, which has to be soon.
    pub(crate) async fn finished(&self) -> Result<Membership, Reason> {
        // The run begins once the tree has started it: a handle that nobody runs would wait for ever.
        tokio::time::timeout(SOON, self.cluster.wait_finished()).await.expect("it finishes soon")
    }

    /// Switched off.
    pub(crate) async fn end(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{:?}", report.stragglers);
    }
}

/// In memory, where the machine has such a place: what these tests kill is the process, and each step syncs.
fn disks() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

pub(crate) fn at(address: &str) -> Address {
    Address::try_new(ip(address)).expect("of one host")
}

pub(crate) fn ip(address: &str) -> IpAddr {
    address.parse().expect("an address")
}

/// The whole chain of an error.
pub(crate) fn said(error: impl Into<Failure>) -> String {
    error.into().to_string()
}

/// A cluster of one that makes tickets.
pub(crate) async fn founder(net: &MemoryNet) -> (Bed, Life) {
    let mut bed = Bed::on(net, "192.0.2.1");
    bed.settings.golden_tickets = true;
    let (life, _) = bed.runs().await;
    (bed, life)
}
