//! Random runs of a node: a simulated world plays driver, disk, cluster and operator, and checks the state
//! machine's invariants.
//!
//! Results are lost, repeated and reordered, actions fail before and after their effect, the node is killed
//! at any moment, tickets appear, disappear and change, disks are swapped, and the clock that measures the
//! deadline jumps by up to ten years both ways. `NODEKEEL_LIVES` sets the number of rounds, `NODEKEEL_SEED`
//! replays the one that failed.

mod effects;
mod faults;
mod invariants;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use super::fsm::{ActionId, EnrolmentAction, EnrolmentFsm, EnrolmentInput};
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};
use super::state::{EnrolmentPhase, EnrolmentState};
use crate::consensus::{DEFAULT_PEER_PORT, Peer, PeerUrl};
use crate::node::{ClusterId, GoldenTicket, NodeId, TicketParts};
use crate::pki::{CertificateSpec, PendingCa};

const OPS_PER_ROUND: u32 = 200;
const TEN_YEARS: i64 = 10 * 366 * 24 * 3600;
const DEADLINE: i64 = 120;

/// The cluster of all tickets.
const OTHERS: ClusterId = ClusterId::from_bytes([0xff; 16]);

/// Two tickets, for two nodes.
static TICKETS: LazyLock<[Arc<GoldenTicket>; 2]> = LazyLock::new(|| [ticket(), ticket()]);

fn ticket() -> Arc<GoldenTicket> {
    use nodekeel_localstorage::pki::{CertificateTemplate, PrivateKey};
    let mut pending_ca = PendingCa::generate().expect("a CA");
    let node_key = PrivateKey::generate().expect("a key");
    let node_certificate = CertificateTemplate::default().self_sign(&node_key).expect("a certificate");
    let node = NodeId::from_key("sim-", &node_key.public_key()).expect("a valid name");
    let name: crate::consensus::MemberName = node.as_str().parse().expect("a valid name");
    let address = "192.0.2.7".parse().expect("an address");
    let parts = TicketParts {
        node_key,
        node_certificate,
        member_credentials: pending_ca
            .issue_credentials(&CertificateSpec::for_member(name.clone(), address))
            .expect("issued"),
        revocation_list: pending_ca.empty_revocation_list().expect("a list"),
        peers: Vec::new(),
        new_member: Peer::new(name, PeerUrl::new(address, DEFAULT_PEER_PORT)),
    };
    Arc::new(GoldenTicket::from_parts(parts).expect("a consistent ticket"))
}

/// The content of the data volume.
#[derive(Clone, Debug)]
struct SimVolume {
    mark: EnrolmentId,
    identity: Option<NodeId>,
    /// The cluster of the member whose data the volume holds.
    member: Option<ClusterId>,
}

/// The enrolment configuration at the moment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SimConfig {
    Absent,
    Ticket(usize),
    Unreadable,
}

struct SimWorld {
    random: u64,
    // Durable state.
    journal: Option<EnrolmentProgress>,
    volume: Option<SimVolume>,
    config: SimConfig,
    /// The configuration when this run inspected it.
    examined: Option<SimConfig>,
    records: Vec<(ClusterId, NodeId)>,
    /// True if an operator asked the node to bootstrap.
    is_told: bool,
    /// The record that it was enrolled, which outlives journal and volume.
    bootstrap_record: Option<EnrolmentId>,
    /// The clusters that it has bootstrapped.
    bootstrapped: BTreeSet<[u8; 16]>,
    /// A fault has changed data that no correct component changes.
    is_tampered: bool,
    has_address: bool,
    wall: i64,
    // The process.
    fsm: Option<EnrolmentFsm>,
    /// The pending action, which has had no effect yet.
    pending: Option<EnrolmentAction>,
    /// Queued inputs.
    inputs: Vec<EnrolmentInput>,
    deadline: i64,
    names: u64,
    /// The share of operations that may be faults, in percent.
    fault_percent: usize,
    counts: BTreeMap<&'static str, u64>,
}

impl SimWorld {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: seed,
            journal: None,
            volume: None,
            config: SimConfig::Absent,
            examined: None,
            records: Vec::new(),
            is_told: true,
            bootstrap_record: None,
            bootstrapped: BTreeSet::new(),
            is_tampered: false,
            has_address: true,
            wall: 0,
            fsm: None,
            pending: None,
            inputs: Vec::new(),
            deadline: 0,
            names: 0,
            fault_percent: 0,
            counts: BTreeMap::new(),
        };
        world.config = [SimConfig::Absent, SimConfig::Absent, SimConfig::Ticket(0), SimConfig::Unreadable]
            [world.pick(4)];
        world.wall = world.jump();
        world.fault_percent = [100, 100, 20, 4][world.pick(4)];
        world
    }

    fn pick(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    fn jump(&mut self) -> i64 {
        let span = usize::try_from(2 * TEN_YEARS).expect("within range");
        i64::try_from(self.pick(span)).expect("within range") - TEN_YEARS
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Bytes that were not used before.
    fn bytes(&mut self) -> [u8; 16] {
        self.names += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.names.to_le_bytes());
        bytes
    }

    fn step(&mut self) {
        if self.fsm.is_none() {
            return self.boot();
        }
        let happens = self.pick(100);
        if happens >= 75 && self.pick(100) >= self.fault_percent {
            return if self.fsm().current_state().phase().is_final() { self.kill() } else { self.deliver() };
        }
        match happens {
            0..=39 => self.act(),
            40..=74 => self.deliver(),
            75..=78 => self.lose(),
            79..=83 => self.nonsense(),
            84..=88 => self.let_time_pass(),
            89..=92 => self.operate(),
            93 => self.tamper(),
            94..=98 => self.kill(),
            _ => self.apply(EnrolmentInput::Stop),
        }
    }

    fn boot(&mut self) {
        self.count("starts");
        self.fsm = Some(EnrolmentFsm::new());
        self.deadline = self.wall + DEADLINE;
        self.examined = None;
        self.apply(EnrolmentInput::Start);
        assert!(
            matches!(self.pending, Some(EnrolmentAction::Inspect(_))),
            "a run starts with an inspection of the disk"
        );
    }

    fn kill(&mut self) {
        self.count("kills");
        (self.fsm, self.pending) = (None, None);
        self.inputs.clear();
    }

    fn fsm(&self) -> &EnrolmentFsm {
        self.fsm.as_ref().expect("a running node")
    }

    /// One run without faults.
    fn run_without_faults(&mut self) {
        self.boot();
        for _ in 0..40 {
            let Some(action) = self.pending.clone() else { break };
            let Some(input) = self.perform(&action) else { break };
            self.apply(input);
        }
    }

    /// Stops all faults: the next run ends, and succeeds if it can.
    fn check_recovery(&mut self) {
        self.has_address = true;
        if self.fsm.is_some() {
            self.apply(EnrolmentInput::DeadlineExceeded(None));
            assert!(self.fsm().current_state().phase().is_final(), "a deadline ends every run");
        }
        self.kill();
        let in_progress = self.journal.as_ref().map(|progress| progress.enrolment_kind);
        self.config = match in_progress {
            Some(EnrolmentKind::Join(digest)) => SimConfig::Ticket(
                TICKETS.iter().position(|ticket| ticket.digest() == digest).expect("one of the tickets"),
            ),
            Some(EnrolmentKind::Bootstrap | EnrolmentKind::Restore) | None => SimConfig::Absent,
        };
        self.is_told = true;
        self.run_without_faults();
        if self.fsm().current_state().phase() == EnrolmentPhase::Waiting {
            assert!(self.bootstrap_record.is_some(), "a node that was told to bootstrap waits");
            return self.count("waiting for a ticket after a loss");
        }
        if let EnrolmentState::Running(first) = self.fsm().current_state().clone() {
            // A further restart changes nothing.
            self.kill();
            self.run_without_faults();
            let EnrolmentState::Running(again) = self.fsm().current_state() else {
                panic!("the restart failed")
            };
            assert_eq!(again, &first, "the membership changed with another restart");
            assert_eq!(
                self.fsm().phase_history(),
                [EnrolmentPhase::New, EnrolmentPhase::Restarting, EnrolmentPhase::Running]
            );
        }
        let state = self.fsm().current_state();
        assert!(state.phase().is_final(), "without faults the run ended in {}", state.phase());
        let is_running = state.phase() == EnrolmentPhase::Running;
        assert!(is_running || self.is_tampered, "without faults the run ended in {state:?}");
        for input in [
            EnrolmentInput::Start,
            EnrolmentInput::DeadlineExceeded(None),
            EnrolmentInput::Stop,
            EnrolmentInput::Recorded(ActionId(1)),
        ] {
            self.apply(input);
            assert_eq!(self.pending, None, "a final state returned an action");
        }
    }
}

fn simulate_round(seed: u64) -> BTreeMap<&'static str, u64> {
    let mut world = SimWorld::new(seed);
    for _ in 0..OPS_PER_ROUND {
        world.step();
    }
    world.check_recovery();
    world.counts
}

#[test]
fn random_runs_keep_the_invariants() {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    if let Some(seed) = number("NODEKEEL_SEED") {
        simulate_round(seed);
        return;
    }
    let rounds = number("NODEKEEL_LIVES").unwrap_or(3_000);
    let mut totals: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..rounds {
        let counts = std::panic::catch_unwind(|| simulate_round(seed))
            .unwrap_or_else(|_| panic!("replay this round with NODEKEEL_SEED={seed}"));
        for (what, count) in counts {
            *totals.entry(what).or_default() += count;
        }
    }
    // An event that never occurs is not tested.
    let needed =
        ["running", "failed", "restarting", "joining", "creating", "answers lost", "answers repeated"];
    let lost = ["disks lost", "members' data lost", "everything lost", "waiting for a ticket after a loss"];
    for what in needed.into_iter().chain(lost) {
        assert!(totals.get(what).is_some_and(|count| *count > 0), "no round had {what}");
    }
    println!("{rounds} rounds: {totals:?}");
}

#[test]
fn the_state_machine_has_no_tasks_no_clock_and_no_io() {
    for source in [
        include_str!("fsm.rs"),
        include_str!("state.rs"),
        include_str!("plan.rs"),
        include_str!("progress.rs"),
    ] {
        for word in ["tokio", "async ", "std::time", "std::fs", "SystemTime", "Instant", "std::thread"] {
            assert!(!source.contains(word), "{word}");
        }
    }
}
