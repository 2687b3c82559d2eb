//! Power cuts and kills in the life of a data volume, in a guest: the next start ends open, or in one condition whose
//! command, typed as it stands there, ends open. No data is formatted, and no state is left that nobody gets out of.
//!
//! ```text
//!  creation ──▶ first use ──▶ rotation ──▶ growth ──▶ header lost ──▶ header restore ──▶ re-encryption   recorded once
//!      ✂            ✂            ✂           ✂                             ✂                  ✂
//!      └────────────┴────────────┴─────┬─────┴─────────────────────────────┴──────────────────┘
//!                              start, settle ──▶ open
//!                                         └────▶ condition ──▶ its command ──▶ open ──▶ start ──▶ open
//! ```
//!
//! `NODEKEEL_STORAGE_CORNERS` is the number of cuts and kills of all tests together, and `NODEKEEL_SEED` selects others.

mod life;
mod machine;
mod remedy;

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use nodekeel_node::v1::StorageRequest;
use testbed::command_output;
use testbed::guest::disk::GuestDisk;
use testbed::power_cut::{CutPlan, PowerCut, selected_seed};
use tokio::runtime::Handle;
use tokio::task::block_in_place;

use self::life::{Knowledge, Life, record_life};
use self::machine::{Machine, SMALL_MEBIBYTES};
use self::remedy::{Settled, choose_command, settle};
use crate::storage_device::{DeviceNode, only_node, wipe_device};

/// The share of a test in `NODEKEEL_STORAGE_CORNERS`, in percent, or its sample.
fn count_corners(percent: usize, sample: usize) -> usize {
    let whole = std::env::var("NODEKEEL_STORAGE_CORNERS").ok();
    whole.map_or(sample, |count| count.parse::<usize>().unwrap() * percent / 100)
}

/// How often each scenario had each outcome.
#[derive(Default)]
struct Tally(BTreeMap<(String, String), usize>);

impl Tally {
    fn add(&mut self, scenario: &str, outcome: String) {
        *self.0.entry((scenario.to_owned(), outcome)).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|((scenario, outcome), count)| writeln!(f, "{count:4} {scenario}: {outcome}"))
    }
}

/// Starts a node on what is left, and brings its volume back as an operator would. Returns the outcome, for the tally.
async fn recover(machine: &Machine, known: &Knowledge) -> Result<String> {
    let mut node = machine.start_node().await?;
    let settled = settle(&mut node).await?;
    let outcome = match &settled {
        Settled::Open => "open at once".to_owned(),
        Settled::Condition { name, texts } => {
            let command = choose_command(texts, known.witness.is_some())
                .with_context(|| format!("a corner, no command leads out of it: {texts:#?}"))?;
            let ended = known.type_command(machine, &command)?;
            ensure!(ended.code == Some(0), "a corner, {command:?} fails: {ended:#?}; {texts:#?}");
            let after = settle(&mut node).await?;
            ensure!(matches!(after, Settled::Open), "a corner behind {command:?}: {after:#?}; {texts:#?}");
            let placed = command.split_whitespace().take(4).collect::<Vec<_>>().join(" ");
            format!("{name}, and open by `{}`", placed.split("-sampled").next().unwrap_or_default())
        }
    };
    check_open(machine, &mut node, known).await.with_context(|| outcome.clone())?;
    stop(machine, node).await?;
    if !matches!(settled, Settled::Open) {
        let mut node = machine.start_node().await?;
        let again = settle(&mut node).await?;
        ensure!(matches!(again, Settled::Open), "{outcome}, and at the next start: {again:#?}");
        check_open(machine, &mut node, known).await?;
        stop(machine, node).await?;
    }
    Ok(outcome)
}

/// The open volume is the node's, with its data.
async fn check_open(machine: &Machine, node: &mut DeviceNode, known: &Knowledge) -> Result<()> {
    let status = node.client.storage(StorageRequest {}).await?.into_inner();
    let volume = status.encryption.as_ref().map(|encryption| encryption.volume.as_str());
    if let Some(id) = &known.volume {
        ensure!(volume == Some(&*id.header), "it is another volume: {status:?}");
        ensure!(machine.file_system_id()? == id.file_system, "its file system was formatted: {status:?}");
        ensure!(machine.count_formats() == known.formats, "mkfs.xfs was run over a volume");
    }
    machine.check_size()?;
    match &known.witness {
        Some(text) => {
            let found = std::fs::read_to_string(machine.witness());
            ensure!(found.as_ref().ok() == Some(text), "the witness: {found:?}");
        }
        // A cut before the report of its write may leave it, whole or not.
        None if known.volume.is_none() => {
            ensure!(!machine.witness().exists(), "a new volume has files of another one");
        }
        None => {}
    }
    machine.write_file("later", "data")
}

async fn stop(machine: &Machine, node: DeviceNode) -> Result<()> {
    let stragglers = node.node.shutdown().await.stragglers;
    ensure!(stragglers.is_empty(), "{stragglers:?}");
    ensure!(!machine.is_open(), "a stop leaves the volume open");
    Ok(())
}

/// Records a life, and cuts the power in it so often.
async fn check_cuts(life: &Life, count: usize) {
    let _turn = only_node().await;
    let (recording, story) = record_life(life).await.unwrap();
    let mut tally = Tally::default();
    let handle = Handle::current();
    let mut check = |cut: &PowerCut| {
        let scenario = life::scenario_of(cut);
        if scenario == life::DAMAGE {
            // Nothing that noded does.
            return Ok(());
        }
        let disks = [recording.part(0), recording.part(1)];
        let machine = Machine::start(life.encryption, disks, story.size_at(cut))?;
        let known = story.knowledge_at(cut, &machine)?;
        let outcome = handle.block_on(recover(&machine, &known));
        let outcome = outcome.with_context(|| scenario.to_owned())?;
        tally.add(scenario, outcome);
        Ok(())
    };
    // The creation has most of all writes: each operation gets its share from its begin on.
    let share = count.div_ceil(life.starts.len());
    let checked: Vec<_> = block_in_place(|| {
        let plans = life.starts.iter().map(|from| CutPlan { from, ..CutPlan::new(life.name, [share; 2]) });
        plans.map(|plan| recording.check_cuts(&plan, &mut check)).collect()
    });
    println!("storage corners of {}, NODEKEEL_SEED={}:\n{tally}", life.name, selected_seed().unwrap());
    let wrong: Vec<_> = checked.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with 2 disks of 1 GiB and 2 GiB of memory"]
async fn a_power_cut_in_the_life_of_a_volume_leaves_no_corner() {
    check_cuts(&Life::ENCRYPTED, count_corners(45, 4)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with 2 disks of 1 GiB and 2 GiB of memory"]
async fn a_power_cut_in_the_life_of_an_authenticated_volume_leaves_no_corner() {
    check_cuts(&Life::AUTHENTICATED, count_corners(20, 3)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with 2 disks of 1 GiB and 2 GiB of memory"]
async fn a_power_cut_in_the_reencryption_of_a_volume_leaves_no_corner() {
    check_cuts(&Life::REENCRYPTED, count_corners(15, 3)).await;
}

/// Numbers of a sequence.
struct Dice(u64);

impl Dice {
    /// Of `[0, below)`. *Source:* Knuth's MMIX.
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below.max(1)
    }
}

/// What noded does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Killed {
    Wipe,
    Creation,
    Rotation,
    HeaderRestore,
    Growth,
    Reencryption,
}

/// In their order: the last ones need the volume that the creation has left.
const KILLED: [Killed; 6] = [
    Killed::Wipe,
    Killed::Creation,
    Killed::Rotation,
    Killed::HeaderRestore,
    Killed::Growth,
    Killed::Reencryption,
];

/// A machine whose noded is killed, and the operator's knowledge of it.
struct KilledMachine {
    // Closed before its disks are free.
    machine: Option<Machine>,
    disks: Vec<GuestDisk>,
    known: Knowledge,
    dice: Dice,
    /// How long each operation took when it was last seen to end.
    times: BTreeMap<Killed, Duration>,
}

impl KilledMachine {
    fn new() -> Result<Self> {
        let disks = GuestDisk::acquire_many(2)?;
        let dice = Dice(selected_seed()?);
        Ok(Self { machine: None, disks, known: Knowledge::default(), dice, times: BTreeMap::new() })
    }

    /// Kills noded once during an operation, and brings the volume back.
    async fn kill_once(&mut self, killed: Killed) -> Result<String> {
        if matches!(killed, Killed::Wipe | Killed::Creation) {
            let life = if killed == Killed::Wipe { Life::AUTHENTICATED } else { Life::ENCRYPTED };
            // The last one has the mappings until it is dropped.
            self.machine = None;
            self.machine = Some(blank_machine(&self.disks, life.encryption)?);
            self.known = Knowledge::default();
        }
        let machine = self.machine.as_ref().context("its volume was created before")?;
        if killed == Killed::HeaderRestore {
            machine.damage_header(&[0xa5; 1 << 20])?;
        }
        let longest = self.times.get(&killed).copied().unwrap_or(Duration::from_secs(5));
        let delay = Duration::from_millis(self.dice.roll(u64::try_from(longest.as_millis())? * 6 / 5));
        let took = block_in_place(|| kill_noded(machine, &self.known, killed, delay))?;
        self.times.extend(took.map(|took| (killed, took)));
        let outcome = recover(machine, &self.known).await;
        let outcome = outcome.with_context(|| format!("{killed:?}, killed after {delay:?}"))?;
        if matches!(killed, Killed::Wipe | Killed::Creation) {
            let mut node = machine.start_node().await?;
            node.wait_open().await;
            self.known = life::first_use(machine, &mut node).await?;
            stop(machine, node).await?;
        } else if matches!(killed, Killed::Rotation | Killed::Reencryption) {
            // What the operator does after each of them.
            let node = machine.start_node().await?;
            node.wait_open().await;
            if killed == Killed::Reencryption {
                life::reencrypt(machine, &self.known)?;
            }
            self.known.header = Some(machine.back_up_header()?);
            stop(machine, node).await?;
        }
        Ok(outcome)
    }
}

/// A machine with a blank disk and an empty ESP.
fn blank_machine(disks: &[GuestDisk], encryption: &'static str) -> Result<Machine> {
    let [esp, data] = [disks[0].device_path(), disks[1].device_path()];
    wipe_device(esp);
    wipe_device(data);
    // In blocks of 1024 bytes.
    command_output(std::process::Command::new("mkfs.vfat").args(["-F", "16"]).arg(esp).arg("16384"))?;
    Machine::start(encryption, [esp, data], SMALL_MEBIBYTES)
}

/// Starts noded and an operation, and kills noded at a moment. Returns how long the operation took, if it had ended before.
fn kill_noded(
    machine: &Machine,
    known: &Knowledge,
    killed: Killed,
    delay: Duration,
) -> Result<Option<Duration>> {
    let mut began = Instant::now();
    let mut noded = machine.spawn_noded();
    let mut typed = None;
    if !matches!(killed, Killed::Wipe | Killed::Creation) {
        noded.wait_for_line("control socket at");
    }
    match killed {
        Killed::Wipe | Killed::Creation => {}
        Killed::Rotation => {
            machine.wait_ready()?;
            began = Instant::now();
            typed = Some(machine.spawn_nodectl(&["storage", "rotate"])?);
        }
        Killed::HeaderRestore => {
            began = Instant::now();
            let header = known.header.as_ref().context("the operator has a backup")?;
            let header = header.to_str().context("a path")?;
            typed = Some(machine.spawn_nodectl(&["storage", "header", "restore", header])?);
        }
        Killed::Reencryption => {
            machine.wait_ready()?;
            let file = machine.path("passphrase");
            std::fs::write(&file, &known.passphrase)?;
            let file = file.to_str().context("a path")?;
            began = Instant::now();
            typed = Some(machine.spawn_nodectl(&[
                "storage",
                "reencrypt",
                "--wait",
                "--passphrase-file",
                file,
            ])?);
        }
        Killed::Growth => {
            machine.wait_ready()?;
            began = Instant::now();
            machine.grow_a_little()?;
        }
    }
    #[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
    std::thread::sleep(delay.saturating_sub(began.elapsed()));
    let has_ended = match &mut typed {
        Some(typed) => typed.try_wait()?.is_some(),
        None => {
            matches!(killed, Killed::Wipe | Killed::Creation)
                && machine.witness().parent().is_some_and(is_mounted)
        }
    };
    let took = has_ended.then(|| began.elapsed());
    noded.signal(Signal::SIGKILL);
    noded.wait_end();
    if let Some(mut typed) = typed {
        typed.wait()?;
    }
    Ok(took)
}

fn is_mounted(path: &std::path::Path) -> bool {
    nodekeel_localstorage::mount::mount_table()
        .is_ok_and(|table| table.iter().any(|entry| entry.target == path))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with 2 disks of 1 GiB and 2 GiB of memory"]
async fn a_noded_that_is_killed_in_the_life_of_a_volume_leaves_no_corner() {
    let _turn = only_node().await;
    let mut machine = KilledMachine::new().unwrap();
    let (mut tally, mut failures) = (Tally::default(), Vec::new());
    let count = count_corners(20, KILLED.len());
    for number in 0..count {
        let killed = KILLED[number % KILLED.len()];
        match machine.kill_once(killed).await {
            Ok(outcome) => tally.add(&format!("{killed:?}"), outcome),
            Err(error) => failures.push(format!("kill {number}: {error:#}")),
        }
    }
    println!("storage corners of kills, NODEKEEL_SEED={}:\n{tally}", selected_seed().unwrap());
    assert!(failures.is_empty(), "{} of {count} kills:\n{}", failures.len(), failures.join("\n"));
}
