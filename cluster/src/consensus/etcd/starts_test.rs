//! The fence, over random schedules on a model of Raft: what its logs keep and who may lead, without time.
//!
//! The model is kinder than the world in one respect: a voter that has just started gets its start into the log before
//! any other write. And a copy is put back only as the fence permits to see: of a stopped voter, of one voter at a time,
//! and if each majority with it has another voter that has seen it start since.

use super::*;

#[test]
fn a_voter_starts_when_a_majority_with_it_has_seen_no_later_start() {
    let names = |count: usize| (0..count).map(|number| format!("n{number}")).collect::<Vec<_>>();
    let seen = |answers: &[(usize, u64)]| {
        answers.iter().map(|(voter, start)| (format!("n{voter}"), StartNumber(*start))).collect()
    };
    let decide = |own, others, answers: &[(usize, u64)]| {
        decide_start(StartNumber(own), &names(others), &seen(answers))
    };
    // (other voters, answers that suffice)
    for (others, needed) in [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (6, 3)] {
        let answers: Vec<_> = (0..needed).map(|voter| (voter, 3)).collect();
        assert_eq!(decide(3, others, &answers), StartDecision::Start, "{others}");
        if needed > 0 {
            assert_eq!(decide(3, others, &answers[1..]), StartDecision::Wait, "{others}");
        }
    }
    let older = StartDecision::OlderDisk { witness: "n1".into(), seen: StartNumber(4) };
    assert_eq!(decide(3, 4, &[(0, 3), (1, 4)]), older);
    // The answer of one that is no voter is no vote, and is evidence.
    assert_eq!(decide(3, 2, &[(9, 3)]), StartDecision::Wait);
    assert!(matches!(decide(3, 2, &[(9, 4)]), StartDecision::OlderDisk { .. }));
}

#[test]
fn the_url_for_clients_has_the_number_of_the_start() {
    let url = StartNumber(7).mark_url("https://10.0.0.8:2379");
    assert_eq!(url, "https://10.0.0.8:2379?start=7");
    assert_eq!(StartNumber::from_urls(&[url]), StartNumber(7));
    for unmarked in ["https://10.0.0.8:2379", "https://10.0.0.8:2379?start=", "https://x?start=-1"] {
        assert_eq!(StartNumber::from_urls(&[unmarked.into()]), StartNumber(0));
    }
}

#[test]
fn the_file_outside_counts_the_starts_of_its_member_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (path, [one, two]) =
        (directory.path().join("starts"), ["one", "two"].map(|name| name.parse().unwrap()));
    let record = |name| OutsideRecord { path: &path, name };
    assert_eq!(record(&one).load().unwrap(), StartNumber(0));
    record(&one).store(StartNumber(12)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"one 12\n");
    assert_eq!(record(&one).load().unwrap(), StartNumber(12));
    assert_eq!(record(&two).load().unwrap(), StartNumber(0), "it joined again, with another name");
}

const SEEDS: u64 = 12_000;
const OPERATIONS: usize = 120;

#[test]
fn no_schedule_of_restored_copies_loses_an_acknowledged_key() {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        if let Err(lost) = Model::new(seed, true).run(&mut counts) {
            panic!("seed {seed}: {lost}");
        }
    }
    println!("{SEEDS} seeds: {counts:?}");
    // The schedules are not idle.
    assert!(counts.acknowledged > 10 * SEEDS && counts.fenced > SEEDS / 50, "{counts:?}");
    assert!(counts.joined_again > SEEDS / 100, "{counts:?}");
}

#[test]
fn without_the_fence_the_same_schedules_lose_keys() {
    let lost =
        (0..SEEDS).filter(|seed| Model::new(*seed, false).run(&mut Counts::default()).is_err()).count();
    println!("{lost} of {SEEDS} seeds lose a key");
    assert!(lost > 0);
}

#[derive(Debug, Default)]
struct Counts {
    acknowledged: u64,
    restored: u64,
    fenced: u64,
    joined_again: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Content {
    Election,
    Write(u64),
    /// A start of the member with this name.
    Start(String, StartNumber),
}

/// What a copy of a voter has.
#[derive(Clone, Debug)]
struct Disk {
    name: String,
    log: Vec<(u64, Content)>,
    /// As far as this voter knows.
    committed: usize,
    term: u64,
    start: StartNumber,
}

impl Disk {
    fn seen(&self, name: &str) -> StartNumber {
        let starts = self.log[..self.committed].iter().filter_map(|(_, content)| match content {
            Content::Start(of, start) if of == name => Some(*start),
            _ => None,
        });
        starts.max().unwrap_or_default()
    }

    /// By which Raft compares logs.
    fn rank(&self) -> (u64, usize) {
        (self.log.last().map_or(0, |(term, _)| *term), self.log.len())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Run {
    Stopped,
    Waiting,
    Running,
    Fenced,
}

struct Voter {
    disk: Disk,
    copy: Option<Disk>,
    run: Run,
    is_frozen: bool,
    side: bool,
    /// Its last start is not in the log yet.
    is_unpublished: bool,
}

struct Model {
    random: u64,
    has_fence: bool,
    voters: Vec<Voter>,
    leader: Option<usize>,
    acknowledged: Vec<u64>,
    next_key: u64,
}

impl Model {
    fn new(seed: u64, has_fence: bool) -> Model {
        let count = if seed.is_multiple_of(2) { 3 } else { 5 };
        let voter = |number| Voter {
            disk: Disk {
                name: format!("n{number}"),
                log: Vec::new(),
                committed: 0,
                term: 0,
                start: StartNumber(1),
            },
            copy: None,
            run: Run::Running,
            is_frozen: false,
            side: false,
            is_unpublished: true,
        };
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let voters = (0..count).map(voter).collect();
        Model { random, has_fence, voters, leader: None, acknowledged: Vec::new(), next_key: 0 }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).unwrap() % limit
    }

    fn majority(&self) -> usize {
        self.voters.len() / 2 + 1
    }

    fn run(mut self, counts: &mut Counts) -> Result<(), String> {
        for _ in 0..OPERATIONS {
            let voter = self.below(self.voters.len());
            match self.below(16) {
                0..6 => self.write(counts)?,
                // Stopped or killed: its log is on the disk before it acknowledges.
                6 | 7 => self.voters[voter].run = Run::Stopped,
                8 | 9 => self.start(voter),
                10 => self.back_up(voter),
                11 => self.restore(voter, counts),
                12 => self.voters[voter].is_frozen ^= true,
                13 => self.voters[voter].side ^= true,
                14 => self.heal(),
                _ => self.join_again(voter, counts)?,
            }
            self.start_waiting(counts);
            // A start is published before anything else.
            self.publish()?;
        }
        Ok(())
    }

    fn heal(&mut self) {
        for number in 0..self.voters.len() {
            (self.voters[number].side, self.voters[number].is_frozen) = (false, false);
            self.start(number);
        }
    }

    fn start(&mut self, voter: usize) {
        if self.voters[voter].run == Run::Stopped {
            self.voters[voter].run = Run::Waiting;
        }
    }

    /// All that wait decide by the same answers: they answer each other.
    fn start_waiting(&mut self, counts: &mut Counts) {
        let mut decisions = Vec::new();
        for (number, voter) in self.voters.iter().enumerate() {
            if voter.run != Run::Waiting || voter.is_frozen {
                continue;
            }
            let others: Vec<_> =
                self.voters.iter().filter(|other| other.disk.name != voter.disk.name).collect();
            let names: Vec<_> = others.iter().map(|other| other.disk.name.clone()).collect();
            let answers = others.iter().filter(|other| {
                matches!(other.run, Run::Running | Run::Waiting)
                    && !other.is_frozen
                    && other.side == voter.side
            });
            let seen =
                answers.map(|other| (other.disk.name.clone(), other.disk.seen(&voter.disk.name))).collect();
            let decision = if self.has_fence {
                decide_start(voter.disk.start, &names, &seen)
            } else {
                StartDecision::Start
            };
            decisions.push((number, decision));
        }
        for (number, decision) in decisions {
            let voter = &mut self.voters[number];
            match decision {
                StartDecision::Start => {
                    voter.disk.start.0 += 1;
                    (voter.run, voter.is_unpublished) = (Run::Running, true);
                }
                StartDecision::Wait => {}
                StartDecision::OlderDisk { .. } => {
                    voter.run = Run::Fenced;
                    counts.fenced += 1;
                }
            }
        }
    }

    fn back_up(&mut self, voter: usize) {
        let voter = &mut self.voters[voter];
        if voter.run == Run::Stopped {
            voter.copy = Some(voter.disk.clone());
        }
    }

    /// Puts a copy back, within the promise of the fence.
    fn restore(&mut self, voter: usize, counts: &mut Counts) {
        let Some(copy) = self.voters[voter].copy.clone() else { return };
        let is_older = |voter: &Voter| voter.disk.start < self.last_start(&voter.disk.name);
        if self.voters[voter].run != Run::Stopped || self.voters.iter().any(is_older) {
            return;
        }
        let others = self.voters.iter().filter(|other| other.disk.name != copy.name);
        let unseen = others.filter(|other| other.disk.seen(&copy.name) <= copy.start).count();
        if unseen + 1 < self.majority() {
            self.voters[voter].disk = copy;
            counts.restored += 1;
        }
    }

    /// The last start that any log has.
    fn last_start(&self, name: &str) -> StartNumber {
        self.voters.iter().map(|voter| voter.disk.seen(name)).max().unwrap_or_default()
    }

    /// A side that has a majority of running voters.
    fn quorum(&self) -> Option<Vec<usize>> {
        [false, true].into_iter().find_map(|side| {
            let is_in = |voter: &Voter| voter.run == Run::Running && !voter.is_frozen && voter.side == side;
            let reachable: Vec<_> = self
                .voters
                .iter()
                .enumerate()
                .filter(|(_, voter)| is_in(voter))
                .map(|(number, _)| number)
                .collect();
            (reachable.len() >= self.majority()).then_some(reachable)
        })
    }

    /// A leader of this quorum. Whoever can win may win.
    fn elect(&mut self, quorum: &[usize]) -> Result<usize, String> {
        if let Some(leader) = self.leader.filter(|leader| quorum.contains(leader)) {
            let terms = quorum.iter().map(|number| self.voters[*number].disk.term).max();
            if terms == Some(self.voters[leader].disk.term) {
                return Ok(leader);
            }
        }
        let votes = |candidate: usize| {
            let rank = self.voters[candidate].disk.rank();
            quorum.iter().filter(|number| self.voters[**number].disk.rank() <= rank).count()
        };
        let able: Vec<_> =
            quorum.iter().copied().filter(|number| votes(*number) >= self.majority()).collect();
        let leader = able[self.below(able.len())];
        let term = 1 + quorum.iter().map(|number| self.voters[*number].disk.term).max().unwrap_or_default();
        for number in quorum {
            self.voters[*number].disk.term = term;
        }
        self.leader = Some(leader);
        // Raft's promise: a leader has all that was acknowledged.
        let log = &self.voters[leader].disk.log;
        let has = |key: u64| log.iter().any(|(_, content)| *content == Content::Write(key));
        if let Some(lost) = self.acknowledged.iter().find(|key| !has(**key)) {
            return Err(format!("key {lost} was acknowledged, and the new leader {leader} lacks it"));
        }
        self.append(leader, quorum, Content::Election);
        Ok(leader)
    }

    /// Writes to the log of the leader and of a random majority, whose members may not know yet that it is committed.
    fn append(&mut self, leader: usize, quorum: &[usize], content: Content) {
        let term = self.voters[leader].disk.term;
        self.voters[leader].disk.log.push((term, content));
        let log = self.voters[leader].disk.log.clone();
        self.voters[leader].disk.committed = log.len();
        let (mut others, majority) = (quorum.to_vec(), self.majority());
        others.retain(|number| *number != leader);
        let left_out = self.below(others.len() + 2 - majority);
        for _ in 0..left_out {
            let number = self.below(others.len());
            others.swap_remove(number);
        }
        for number in others {
            let knows = self.below(4) > 0;
            let disk = &mut self.voters[number].disk;
            disk.log.clone_from(&log);
            disk.committed = if knows { log.len() } else { disk.committed.min(log.len()) };
        }
    }

    fn publish(&mut self) -> Result<(), String> {
        let Some(quorum) = self.quorum() else { return Ok(()) };
        let leader = self.elect(&quorum)?;
        for number in &quorum {
            if std::mem::take(&mut self.voters[*number].is_unpublished) {
                let Disk { name, start, .. } = self.voters[*number].disk.clone();
                self.append(leader, &quorum, Content::Start(name, start));
            }
        }
        Ok(())
    }

    fn write(&mut self, counts: &mut Counts) -> Result<(), String> {
        let Some(quorum) = self.quorum() else { return Ok(()) };
        let leader = self.elect(&quorum)?;
        self.next_key += 1;
        self.append(leader, &quorum, Content::Write(self.next_key));
        self.acknowledged.push(self.next_key);
        counts.acknowledged += 1;
        Ok(())
    }

    /// A fenced voter is replaced by a new member with the cluster's data.
    fn join_again(&mut self, voter: usize, counts: &mut Counts) -> Result<(), String> {
        let Some(quorum) = self.quorum() else { return Ok(()) };
        if self.voters[voter].run != Run::Fenced {
            return Ok(());
        }
        let leader = self.elect(&quorum)?;
        let name = format!("{}x", self.voters[voter].disk.name);
        let disk = Disk { name, start: StartNumber(1), ..self.voters[leader].disk.clone() };
        self.voters[voter] = Voter {
            disk,
            copy: None,
            run: Run::Running,
            is_frozen: false,
            side: self.voters[leader].side,
            is_unpublished: true,
        };
        counts.joined_again += 1;
        Ok(())
    }
}
