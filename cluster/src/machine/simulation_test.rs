//! Random lives of a node: a world that plays driver, disk, cluster and operator, and holds the machine to its invariants.
//!
//! Answers are lost, repeated and reordered, actions fail before and after their effect, the node is killed at any
//! moment, tickets come, go and change, disks are swapped, and the clock by which the deadline is told jumps by up to ten
//! years both ways. `NODEKEEL_LIVES` sets how many rounds are played, `NODEKEEL_SEED` replays the one that failed.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use super::core::{Action, Input, Machine, Outcome, Rejected, Sequence};
use super::decide::Found;
use super::reason::StepError;
use super::state::{Kind, State};
use super::step::{EnrolmentId, Flow, Mode, Progress, Step};
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
    founded: Vec<ClusterId>,
    formats: u32,
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
            founded: Vec::new(),
            formats: 0,
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

    /// Gives the machine an input, and holds what it does to the invariants.
    fn apply(&mut self, input: Input) {
        let Some(machine) = &mut self.machine else { return };
        let (before, history) = (format!("{:?}", machine.state()), machine.history().to_vec());
        let kind = machine.state().kind();
        let awaited = self.pending.as_ref().map(sequence_of);
        match machine.apply(input.clone()) {
            Err(rejected) => {
                assert_eq!(
                    format!("{:?}", machine.state()),
                    before,
                    "{input:?} was rejected and changed the state"
                );
                assert_eq!(machine.history(), history, "{input:?} was rejected and changed the history");
                assert_eq!(kind.is_final(), matches!(rejected, Rejected::Final { .. }), "{rejected}");
                self.count("inputs rejected");
            }
            Ok(action) => {
                assert!(!kind.is_final(), "a final state took {input:?}");
                if let Some(given) = answered(&input) {
                    assert_eq!(awaited, Some(given), "an answer was taken that nobody waits for");
                }
                let to = machine.state().kind();
                if to != kind {
                    assert!(kind.leads_to(to), "{kind} → {to}");
                    self.entered(to);
                }
                if let Some(action) = &action {
                    self.check_action(action);
                }
                self.pending = action;
                self.count("inputs taken");
            }
        }
    }

    fn entered(&mut self, to: Kind) {
        match to {
            Kind::CreatingCluster => {
                assert_eq!(
                    self.examined,
                    Some(Config::Absent),
                    "a cluster is founded where there is, or may be, a ticket"
                );
                self.count("creating");
            }
            Kind::Joining => {
                assert_ne!(self.examined, Some(Config::Unreadable), "a node joins by what can't be read");
                let State::Joining { ticket, work } = self.machine().state() else { panic!("it is Joining") };
                let by = ticket.as_ref().map(|ticket| Flow::Join(ticket.digest()));
                let began = work.progress().flow();
                assert!(by.is_none_or(|by| by == began), "a node joins by another ticket than it began with");
                self.count("joining");
            }
            Kind::Restarting => self.count("restarting"),
            Kind::Running => self.check_running(),
            Kind::Failed => self.count("failed"),
            Kind::New => panic!("nothing leads back to New"),
        }
    }

    /// Running is what it says.
    fn check_running(&mut self) {
        self.count("running");
        let State::Running(membership) = self.machine().state().clone() else { panic!("it is Running") };
        let journal = self.journal.as_ref().expect("what runs was recorded");
        assert_eq!(journal.next, None, "a node runs whose way is not complete");
        assert_eq!(journal.node.as_ref(), Some(&membership.node), "the journal is of another node");
        assert_eq!(journal.cluster, Some(membership.cluster), "the journal is of another cluster");
        let volume = self.volume.as_ref().expect("what runs has a volume");
        assert_eq!(volume.mark, membership.enrolment, "it runs on another enrolment's volume");
        assert_eq!(volume.identity.as_ref(), Some(&membership.node), "it runs with another node's key");
        assert_eq!(volume.member, Some(membership.cluster), "its member is of another cluster");
        let here = (membership.cluster, membership.node.clone());
        assert!(self.records.contains(&here), "a node runs that the cluster does not know");
        let expected = match journal.flow {
            Flow::Create => ClusterId::new(membership.enrolment.0),
            Flow::Join(_) => OTHERS,
        };
        assert!(membership.cluster == expected || self.is_tampered, "it is in the wrong cluster");
    }

    /// What is asked for now fits what is recorded.
    fn check_action(&mut self, action: &Action) {
        let recorded = self.journal.clone();
        match action {
            Action::Examine(_) => {}
            Action::Perform(_, step, mode) => {
                let recorded = recorded.expect("nothing is done before the decision is recorded");
                assert_eq!(recorded.mode(*step), *mode, "{step} is done as {mode:?} against the journal");
                let volume = self.volume.as_ref();
                if *step > Step::Identity && recorded.node.is_some() {
                    let identity = volume.and_then(|volume| volume.identity.clone());
                    assert_eq!(identity, recorded.node, "{step} is done with another node's key");
                }
                if *step > Step::Consensus {
                    let member = volume.and_then(|volume| volume.member);
                    let is_right =
                        member == recorded.expected_cluster() || recorded.expected_cluster().is_none();
                    assert!(is_right, "{step} is done in another cluster");
                }
            }
            Action::Record(_, progress) => match recorded {
                None => assert_eq!(progress.next, Some(Step::RECORDED[0]), "the decision is recorded first"),
                Some(recorded) => {
                    let done = recorded.next.expect("nothing is recorded once all is");
                    assert_eq!(progress.next, recorded.after(done).next, "one step at a time is recorded");
                    let same = (progress.enrolment, progress.flow) == (recorded.enrolment, recorded.flow);
                    assert!(same, "a node that began one way went another");
                    self.check_done(done, progress);
                }
            },
        }
    }

    /// What is recorded as done is done.
    fn check_done(&self, step: Step, progress: &Progress) {
        if self.is_tampered {
            return;
        }
        let volume = self.volume.as_ref();
        match step {
            Step::Storage => assert!(volume.is_some_and(|volume| volume.mark == progress.enrolment)),
            Step::Identity => {
                assert_eq!(volume.and_then(|volume| volume.identity.clone()), progress.node);
            }
            Step::Consensus => assert_eq!(volume.and_then(|volume| volume.member), progress.cluster),
            Step::Record => {
                let here = progress.cluster.zip(progress.node.clone()).expect("both are known");
                assert!(self.records.contains(&here), "a record is recorded that is not there");
            }
            Step::Network | Step::Local => panic!("{step} is not recorded"),
        }
    }

    /// The driver does what is pending, and its answer is on its way: after its effect, or without.
    fn act(&mut self) {
        let Some(action) = self.pending.clone() else { return };
        let fault = if self.pick(100) < self.trouble { self.pick(20) } else { 2 };
        if fault == 0 {
            self.count("failures before the effect");
            return self.answer(Input::Failed(sequence_of(&action), Arc::new(StepError::NoNetwork)));
        }
        let Some(input) = self.perform(&action) else { return };
        if fault == 1 {
            self.count("failures after the effect");
            return self.answer(Input::Failed(sequence_of(&action), Arc::new(StepError::NoNetwork)));
        }
        self.count("actions");
        self.answer(input);
    }

    fn answer(&mut self, input: Input) {
        self.inputs.push(input);
        if self.pick(8) == 0 {
            self.count("answers repeated");
            let again = self.inputs[self.inputs.len() - 1].clone();
            self.inputs.push(again);
        }
    }

    fn perform(&mut self, action: &Action) -> Option<Input> {
        let sequence = sequence_of(action);
        let failed = || Some(Input::Failed(sequence, Arc::new(StepError::NoNetwork)));
        match action {
            // Once in a run; of its answer there may be more than one.
            Action::Examine(_) if self.examined.is_some() => None,
            Action::Examine(_) => match self.found() {
                Some(found) => Some(Input::Examined(sequence, found)),
                None => failed(),
            },
            Action::Record(_, progress) => {
                self.journal = Some(progress.clone());
                Some(Input::Recorded(sequence))
            }
            Action::Perform(_, Step::Network, _) if !self.has_address => None,
            Action::Perform(_, step, mode) => match self.do_step(*step, *mode) {
                Some(outcome) => Some(Input::Done(sequence, outcome)),
                None => failed(),
            },
        }
    }

    fn found(&mut self) -> Option<Found> {
        self.examined = Some(self.config);
        if let Some(progress) = self.journal.clone().filter(|progress| progress.next.is_none()) {
            return Some(Found::Complete { progress });
        }
        let ticket = match self.config {
            Config::Absent => None,
            Config::Ticket(which) => Some(Arc::clone(&TICKETS[which])),
            Config::Unreadable => return None,
        };
        Some(match self.journal.clone() {
            Some(progress) => Found::Begun { progress, ticket },
            None => Found::Fresh { ticket, enrolment: EnrolmentId(self.bytes()) },
        })
    }

    /// The effect of a step, as the shell has it; none where it refuses.
    fn do_step(&mut self, step: Step, mode: Mode) -> Option<Outcome> {
        let progress = self.machine().state().work().expect("steps are done on the way").progress().clone();
        match step {
            Step::Network => Some(Outcome::Network),
            Step::Local => Some(Outcome::Local),
            Step::Storage => {
                if self.volume.is_none() && mode == Mode::Make {
                    self.formats += 1;
                    assert!(self.formats <= 1 || self.is_tampered, "a data volume was made a second time");
                    self.volume = Some(Volume { mark: progress.enrolment, identity: None, member: None });
                }
                let volume = self.volume.as_ref()?;
                (volume.mark == progress.enrolment).then_some(Outcome::Storage)
            }
            Step::Identity => {
                let fresh =
                    format!("sim-{:032x}", u128::from_be_bytes(self.bytes())).parse().expect("a name");
                let new = match self.machine().state() {
                    State::Joining { ticket: Some(ticket), .. } => ticket.node().clone(),
                    _ => fresh,
                };
                let volume = self.volume.as_mut()?;
                if mode == Mode::Make {
                    volume.identity.get_or_insert(new);
                }
                volume.identity.clone().map(Outcome::Identity)
            }
            Step::Consensus => self.start_member(&progress, mode),
            Step::Record => {
                let volume = self.volume.clone()?;
                let here = (volume.member?, volume.identity?);
                if mode == Mode::Again && !self.records.contains(&here) {
                    return None;
                }
                if !self.records.contains(&here) {
                    self.records.push(here);
                }
                Some(Outcome::Record)
            }
        }
    }

    fn start_member(&mut self, progress: &Progress, mode: Mode) -> Option<Outcome> {
        let cluster = match progress.flow {
            Flow::Create => ClusterId::new(progress.enrolment.0),
            Flow::Join(_) => OTHERS,
        };
        let volume = self.volume.as_mut()?;
        if volume.member.is_none() && mode == Mode::Make {
            volume.member = Some(cluster);
            if progress.flow == Flow::Create {
                self.founded.push(cluster);
                assert_eq!(self.founded.len(), 1, "a second cluster was founded");
            }
        }
        volume.member.map(Outcome::Consensus)
    }

    fn deliver(&mut self) {
        if self.inputs.is_empty() {
            return;
        }
        let at = self.pick(self.inputs.len());
        // Some stay, and come again later.
        let input = match self.pick(10) {
            0 => self.inputs[at].clone(),
            _ => self.inputs.remove(at),
        };
        self.apply(input);
    }

    fn lose(&mut self) {
        if !self.inputs.is_empty() {
            let at = self.pick(self.inputs.len());
            self.inputs.remove(at);
            self.count("answers lost");
        }
    }

    /// Answers that nobody gave.
    fn nonsense(&mut self) {
        let awaited = self.pending.as_ref().map_or(0, |action| sequence_of(action).0);
        // The pending action's own sequence only with what can't be its answer.
        let wrong = Sequence([awaited + 1, awaited.wrapping_sub(1), 0, u64::MAX][self.pick(4)]);
        let input = match self.pick(6) {
            0 => Input::Begin,
            1 => Input::Recorded(wrong),
            2 => Input::Done(wrong, Outcome::Storage),
            3 => Input::Failed(wrong, Arc::new(StepError::NoNetwork)),
            4 => Input::Examined(wrong, Found::Fresh { ticket: None, enrolment: EnrolmentId([1; 16]) }),
            _ => match &self.pending {
                Some(Action::Examine(sequence)) => Input::Recorded(*sequence),
                Some(Action::Record(sequence, _)) => Input::Done(*sequence, Outcome::Record),
                Some(Action::Perform(sequence, Step::Network, _)) => Input::Done(*sequence, Outcome::Local),
                Some(Action::Perform(sequence, ..)) => Input::Done(*sequence, Outcome::Network),
                None => return,
            },
        };
        let before = self.machine().history().to_vec();
        let pending = self.pending.clone();
        self.apply(input);
        assert_eq!(self.machine().history(), before, "an answer that nobody gave was taken");
        assert_eq!(self.pending, pending, "an answer that nobody gave was taken");
    }

    /// The clock by which somebody tells the deadline is wrong, and is set right, and wrong again.
    fn let_time_pass(&mut self) {
        self.wall += match self.pick(3) {
            0 => i64::try_from(self.pick(60)).expect("it fits"),
            1 => self.jump() / 1000,
            _ => self.jump(),
        };
        if self.wall >= self.deadline {
            self.count("deadlines");
            self.apply(Input::Deadline(None));
            self.deadline = i64::MAX;
        }
    }

    fn operate(&mut self) {
        self.count("operations");
        match self.pick(6) {
            0 => self.has_address = !self.has_address,
            1 => self.config = Config::Unreadable,
            2 => self.config = Config::Ticket(1),
            3 => self.config = Config::Ticket(0),
            _ => self.config = Config::Absent,
        }
    }

    /// Somebody swaps disks, or restores another's: never while the node runs its steps on them.
    fn tamper(&mut self) {
        if self.pick(4) > 0 {
            return;
        }
        self.kill();
        let (other, name) = (EnrolmentId(self.bytes()), self.bytes());
        let Some(volume) = &mut self.volume else { return };
        let name = format!("sim-{:032x}", u128::from_be_bytes(name)).parse().expect("a name");
        self.is_tampered = true;
        match self.names % 3 {
            0 => volume.mark = other,
            1 if volume.identity.is_some() => volume.identity = Some(name),
            _ if volume.member.is_some() => volume.member = Some(ClusterId::new(other.0)),
            _ => volume.mark = other,
        }
        self.count("disks tampered with");
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
        assert!(!is_running || self.founded.len() <= 1);
        for input in [Input::Begin, Input::Deadline(None), Input::Stop, Input::Recorded(Sequence(1))] {
            self.apply(input);
            assert_eq!(self.pending, None, "a final state asks for nothing");
        }
    }
}

fn sequence_of(action: &Action) -> Sequence {
    match action {
        Action::Examine(sequence) | Action::Record(sequence, _) | Action::Perform(sequence, ..) => *sequence,
    }
}

fn answered(input: &Input) -> Option<Sequence> {
    match input {
        Input::Examined(sequence, _)
        | Input::Done(sequence, _)
        | Input::Recorded(sequence)
        | Input::Failed(sequence, _) => Some(*sequence),
        Input::Begin | Input::Deadline(_) | Input::Stop => None,
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
    for what in ["running", "failed", "restarting", "joining", "creating", "answers lost", "answers repeated"]
    {
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
