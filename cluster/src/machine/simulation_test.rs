//! Random lives of a node: a world that plays driver, disk, cluster and operator, and holds the machine to its invariants.
//!
//! Answers are lost, repeated and reordered, actions fail before and after their effect, the node is killed at any
//! moment, tickets come, go and change, disks are swapped, and the clock by which the deadline is told jumps by up to ten
//! years both ways. `NODEKEEL_LIVES` sets how many rounds are played, `NODEKEEL_SEED` replays the one that failed.

mod effects;
mod invariants;
mod mischief;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use super::core::{Action, Input, Machine, Sequence};
use super::state::{Kind, State};
use super::step::{EnrolmentId, Flow, Progress};
use crate::consensus::{PEER_PORT, Peer, PeerUrl};
use crate::node::{ClusterId, GoldenTicket, NodeId, TicketParts};
use crate::pki::{Leaf, NewAuthority};

const OPS_PER_ROUND: u32 = 200;
const TEN_YEARS: i64 = 10 * 366 * 24 * 3600;
const DEADLINE: i64 = 120;

/// The cluster of all tickets.
const OTHERS: ClusterId = ClusterId::new([0xff; 16]);

/// Two tickets, for two nodes.
static TICKETS: LazyLock<[Arc<GoldenTicket>; 2]> = LazyLock::new(|| [ticket(), ticket()]);

fn ticket() -> Arc<GoldenTicket> {
    use nodekeel_localstorage::pki::{PrivateKey, Template};
    let mut authority = NewAuthority::generate().expect("an authority");
    let node_key = PrivateKey::generate().expect("a key");
    let node_certificate = Template::default().self_sign(&node_key).expect("a certificate");
    let node = NodeId::new("sim-", &node_key.public()).expect("a name");
    let name: crate::consensus::MemberName = node.as_str().parse().expect("a name");
    let address = "192.0.2.7".parse().expect("an address");
    let parts = TicketParts {
        node_key,
        node_certificate,
        member: authority.issue(&Leaf::member(name.clone(), address)).expect("issued"),
        revoked: authority.none_revoked().expect("a list"),
        peers: Vec::new(),
        this: Peer::new(name, PeerUrl::new(address, PEER_PORT)),
    };
    Arc::new(GoldenTicket::try_new(parts).expect("it holds together"))
}

/// What the data volume holds.
#[derive(Clone, Debug)]
struct Volume {
    mark: EnrolmentId,
    identity: Option<NodeId>,
    /// The cluster of the member whose data it has.
    member: Option<ClusterId>,
}

/// What the enrolment configuration is at the moment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Config {
    Absent,
    Ticket(usize),
    Unreadable,
}

struct World {
    random: u64,
    // What lasts.
    journal: Option<Progress>,
    volume: Option<Volume>,
    config: Config,
    /// What it was when this run looked.
    examined: Option<Config>,
    records: Vec<(ClusterId, NodeId)>,
    /// Somebody has changed what nobody should have.
    is_tampered: bool,
    has_address: bool,
    wall: i64,
    // The process.
    machine: Option<Machine>,
    /// What is under way and has had no effect yet.
    pending: Option<Action>,
    /// Inputs on their way.
    inputs: Vec<Input>,
    deadline: i64,
    names: u64,
    /// How much goes wrong: of a hundred operations, so many may.
    trouble: usize,
    counts: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: seed,
            journal: None,
            volume: None,
            config: Config::Absent,
            examined: None,
            records: Vec::new(),
            is_tampered: false,
            has_address: true,
            wall: 0,
            machine: None,
            pending: None,
            inputs: Vec::new(),
            deadline: 0,
            names: 0,
            trouble: 0,
            counts: BTreeMap::new(),
        };
        world.config = [Config::Absent, Config::Absent, Config::Ticket(0), Config::Unreadable][world.pick(4)];
        world.wall = world.jump();
        world.trouble = [100, 100, 20, 4][world.pick(4)];
        world
    }

    fn pick(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    fn jump(&mut self) -> i64 {
        let span = usize::try_from(2 * TEN_YEARS).expect("it fits");
        i64::try_from(self.pick(span)).expect("it fits") - TEN_YEARS
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A name that nobody had before.
    fn bytes(&mut self) -> [u8; 16] {
        self.names += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.names.to_le_bytes());
        bytes
    }

    fn step(&mut self) {
        if self.machine.is_none() {
            return self.boot();
        }
        let happens = self.pick(100);
        if happens >= 75 && self.pick(100) >= self.trouble {
            return if self.machine().state().kind().is_final() { self.kill() } else { self.deliver() };
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
            _ => self.apply(Input::Stop),
        }
    }

    fn boot(&mut self) {
        self.count("starts");
        self.machine = Some(Machine::new());
        self.deadline = self.wall + DEADLINE;
        self.examined = None;
        self.apply(Input::Begin);
        assert!(
            matches!(self.pending, Some(Action::Examine(_))),
            "a run begins with a look at what is there"
        );
    }

    fn kill(&mut self) {
        self.count("kills");
        (self.machine, self.pending) = (None, None);
        self.inputs.clear();
    }

    fn machine(&self) -> &Machine {
        self.machine.as_ref().expect("it runs")
    }

    /// One life in which nothing goes wrong.
    fn live(&mut self) {
        self.boot();
        for _ in 0..40 {
            let Some(action) = self.pending.clone() else { break };
            let input = self.perform(&action).expect("there is an address");
            self.apply(input);
        }
    }

    /// Everything works from now on: the next run ends, and well if it may.
    fn heal(&mut self) {
        self.has_address = true;
        if self.machine.is_some() {
            self.apply(Input::Deadline(None));
            assert!(self.machine().state().kind().is_final(), "a deadline ends every run");
        }
        self.kill();
        let begun = self.journal.as_ref().map(|progress| progress.flow);
        self.config = match begun {
            Some(Flow::Join(digest)) => Config::Ticket(
                TICKETS.iter().position(|ticket| ticket.digest() == digest).expect("one of them"),
            ),
            Some(Flow::Create) | None => Config::Absent,
        };
        self.live();
        if let State::Running(first) = self.machine().state().clone() {
            // And the same for ever after.
            self.kill();
            self.live();
            let State::Running(again) = self.machine().state() else { panic!("it does not start again") };
            assert_eq!(again, &first, "it is not the same after another start");
            assert_eq!(self.machine().history(), [Kind::New, Kind::Restarting, Kind::Running]);
        }
        let state = self.machine().state();
        assert!(state.kind().is_final(), "with nothing in its way it is {}", state.kind());
        let is_running = state.kind() == Kind::Running;
        assert!(is_running || self.is_tampered, "with nothing in its way it is {state:?}");
        for input in [Input::Begin, Input::Deadline(None), Input::Stop, Input::Recorded(Sequence(1))] {
            self.apply(input);
            assert_eq!(self.pending, None, "a final state asks for nothing");
        }
    }
}

fn round(seed: u64) -> BTreeMap<&'static str, u64> {
    let mut world = World::new(seed);
    for _ in 0..OPS_PER_ROUND {
        world.step();
    }
    world.heal();
    world.counts
}

#[test]
fn random_lives_keep_the_invariants() {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    if let Some(seed) = number("NODEKEEL_SEED") {
        round(seed);
        return;
    }
    let rounds = number("NODEKEEL_LIVES").unwrap_or(3_000);
    let mut totals: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..rounds {
        let counts = std::panic::catch_unwind(|| round(seed))
            .unwrap_or_else(|_| panic!("replay this round with NODEKEEL_SEED={seed}"));
        for (what, count) in counts {
            *totals.entry(what).or_default() += count;
        }
    }
    // What never happens is not tested.
    let needed =
        ["running", "failed", "restarting", "joining", "creating", "answers lost", "answers repeated"];
    for what in needed.into_iter().chain(["disks lost", "members' data lost"]) {
        assert!(totals.get(what).is_some_and(|count| *count > 0), "no round had {what}");
    }
    println!("{rounds} rounds: {totals:?}");
}

#[test]
fn the_machine_has_no_tasks_no_clock_and_no_io() {
    for source in [
        include_str!("core.rs"),
        include_str!("state.rs"),
        include_str!("decide.rs"),
        include_str!("step.rs"),
    ] {
        for word in ["tokio", "async ", "std::time", "std::fs", "SystemTime", "Instant", "std::thread"] {
            assert!(!source.contains(word), "{word}");
        }
    }
}
