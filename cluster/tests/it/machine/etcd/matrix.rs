//! A node and its etcd, killed at each moment of each flow.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use super::super::bed::{Life, said};
use super::life::{Ran, Told, Victim, WITHIN, live_if_told};
use super::{Machine, enrolment};

/// How many of the moments a test of them kills at: each so many-th one, or `all`.
const KILLS: &str = "NODEKEEL_CLUSTER_KILLS";
/// That many moments apart, unless it is told otherwise: 36 kills.
const EVERY: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flow {
    Create,
    Join,
    Restart,
}

const FLOWS: [Flow; 3] = [Flow::Create, Flow::Join, Flow::Restart];

/// A machine that is about to go one way, and who else it takes.
struct Scene<'a> {
    flow: Flow,
    test: &'a str,
    machine: Machine,
    founder: Option<(Machine, Life)>,
    /// What it was in an earlier life.
    before: Option<Ran>,
}

impl<'a> Scene<'a> {
    async fn set(flow: Flow, test: &'a str, binary: &Path) -> Self {
        let mut scene = Self { flow, test, machine: Machine::new(binary), founder: None, before: None };
        match flow {
            Flow::Create => {}
            Flow::Restart => scene.before = Some(scene.live().ran()),
            Flow::Join => {
                let founder = Machine::new(binary);
                let life = founder.start();
                life.cluster.wait_finished().await.unwrap_or_else(|reason| panic!("{}", said(reason)));
                let kv = life.cluster.kv("test", "kills").expect("it runs");
                kv.put(b"/kept", b"by the founder").await.expect("it is put");
                let tickets = life.cluster.golden_tickets().expect("they are enabled");
                let ticket = tickets.issue(&scene.machine.url()).await.expect("it is made");
                let disks = scene.machine.scratch.path();
                enrolment(disks).enrolment.write(&ticket.to_config()).expect("it is written");
                scene.founder = Some((founder, life));
            }
        }
        scene
    }

    /// A life in which nothing is killed.
    fn live(&self) -> Told {
        Told::by(&self.machine.live(self.test, Victim::Nobody, 0))
    }

    async fn end(self) {
        if let Some((_founder, life)) = self.founder {
            life.end().await;
        }
    }

    /// A node that is in the one cluster, as the one node, with every key.
    fn check(&self, ran: &Ran, disk: &Disk, is_key_put: bool, what: &str) {
        let members = if self.flow == Flow::Join { 2 } else { 1 };
        assert_eq!((ran.members, ran.has_ghosts, ran.learners), (members, false, 0), "{what}: ghosts");
        assert!(ran.has_kept || !is_key_put, "{what}: a key is lost");
        let founded = match (&self.founder, &disk.mark) {
            (Some((_, life)), _) => Some(life.cluster.node().expect("it runs").cluster.to_string()),
            // Whoever founds a cluster names it as the attempt that began with the volume.
            (None, Some(mark)) => Some(String::from_utf8_lossy(mark).trim().to_owned()),
            (None, None) => None,
        };
        assert!(founded.is_none_or(|founded| ran.cluster == founded), "{what}: a second cluster");
        if let Some(before) = &self.before {
            assert_eq!((&ran.node, &ran.cluster), (&before.node, &before.cluster), "{what}");
        }
    }
}

/// What on the disk says whose it is, as far as it was made.
struct Disk {
    mark: Option<Vec<u8>>,
    authority: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
}

impl Disk {
    fn of(machine: &Machine) -> Self {
        let data = machine.scratch.path().join("data");
        let read = |path: &str| fs::read(data.join(path)).ok();
        let authority = read("etcd/peer_pki/ca.pem").or_else(|| read("etcd/new_authority/ca.pem"));
        Self { mark: read(".enrolment"), authority, key: read("node/credentials/cert-key.pem") }
    }

    /// That what there was is there still.
    fn goes_on_in(&self, later: &Self, what: &str) {
        let is_kept = |was: &Option<Vec<u8>>, is: &Option<Vec<u8>>| was.is_none() || was == is;
        assert!(is_kept(&self.mark, &later.mark), "{what}: another volume");
        assert!(is_kept(&self.authority, &later.authority), "{what}: another authority");
        assert!(is_kept(&self.key, &later.key), "{what}: another node");
    }

    fn is_whole(&self) -> bool {
        self.mark.is_some() && self.authority.is_some() && self.key.is_some()
    }
}

/// How long it took until all was well, in milliseconds.
#[derive(Clone, Copy, Default)]
struct Took {
    /// Until the life whose etcd was killed was Running or Failed, and served if it was Running.
    to_go_on: u64,
    /// Until the next life was Running.
    to_run: u64,
}

/// Two releases of etcd, shifted by 0 and 1, have each moment once between them where every fourth is taken.
pub(super) async fn killed_at_each_moment(test: &str, binary: &Path, shift: usize) {
    if live_if_told().await {
        return;
    }
    let every = match std::env::var(KILLS).ok().as_deref() {
        Some("all") => 1,
        Some(every) => every.parse().expect("a number, or all"),
        None => EVERY,
    };
    let (mut nodes, mut etcds, mut failed, mut slowest) = (0, 0, 0, Took::default());
    for (number, flow) in FLOWS.into_iter().enumerate() {
        let scene = Scene::set(flow, test, binary).await;
        let moments = scene.live().moments();
        scene.end().await;
        for (victim, further) in [(Victim::Node, 0), (Victim::Etcd, every / 2)] {
            let first = (number + shift + further) % every;
            let some = moments.iter().enumerate().skip(first).step_by(every);
            for (nth, moment) in some {
                let what = format!("{flow:?}, {victim:?} killed at {nth}, {moment}");
                let scene = Scene::set(flow, test, binary).await;
                let (took, has_failed) = match victim {
                    Victim::Etcd => etcd_killed(&scene, nth, &what),
                    _ => (node_killed(&scene, nth, &what), false),
                };
                scene.end().await;
                let Took { to_go_on, to_run } = took;
                assert!(
                    u128::from(to_go_on.max(to_run)) < WITHIN.as_millis(),
                    "{what}: {to_go_on} ms, {to_run} ms"
                );
                *(if victim == Victim::Etcd { &mut etcds } else { &mut nodes }) += 1;
                failed += u32::from(has_failed);
                slowest.to_go_on = slowest.to_go_on.max(to_go_on);
                slowest.to_run = slowest.to_run.max(to_run);
            }
        }
    }
    println!(
        "{} kills, {nodes} of the node and {etcds} of etcd: Running {} ms after the next start at worst; where etcd was \
         killed, the node served {} ms later at worst ({failed} times it Failed before that); 0 second clusters, 0 ghosts, \
         0 lost keys",
        nodes + etcds,
        slowest.to_run,
        slowest.to_go_on
    );
}

fn node_killed(scene: &Scene<'_>, nth: usize, what: &str) -> Took {
    let before = Disk::of(&scene.machine);
    let killed = scene.machine.live(scene.test, Victim::Node, nth);
    assert_eq!(killed.status.signal(), Some(9), "{what}: {:?}", killed.status);
    let to_run = next_life(scene, &before, scene.flow != Flow::Create, what).took;
    println!("{what}: Running {to_run} ms after its next start");
    Took { to_go_on: 0, to_run }
}

/// How long it took, and whether the life that was hit has failed.
fn etcd_killed(scene: &Scene<'_>, nth: usize, what: &str) -> (Took, bool) {
    let before = Disk::of(&scene.machine);
    let killed = Told::by(&scene.machine.live(scene.test, Victim::Etcd, nth));
    assert_eq!(killed.killed(), 1, "{what}: one etcd was killed");
    let (ended, failed) = (killed.ended(), killed.failed());
    let hit = failed.is_none().then(|| killed.ran());
    let serves = hit.as_ref().map_or(0, |_| killed.serves());
    let is_key_put = scene.flow != Flow::Create;
    if let Some(hit) = &hit {
        scene.check(hit, &Disk::of(&scene.machine), is_key_put, what);
    }
    let after = next_life(scene, &before, is_key_put || hit.is_some(), what);
    if let Some(hit) = &hit {
        assert_eq!((&after.node, &after.cluster), (&hit.node, &hit.cluster), "{what}");
    }
    let how = failed.map_or_else(|| format!("serves {serves} ms later"), |why| format!("Failed, {why}"));
    println!("{what}: ended {ended} ms later, {how}, and Running {} ms after its next start", after.took);
    (Took { to_go_on: ended.max(serves), to_run: after.took }, failed.is_some())
}

/// The life after a kill, which is in the one cluster, as who it was.
fn next_life(scene: &Scene<'_>, before: &Disk, is_key_put: bool, what: &str) -> Ran {
    let found = Disk::of(&scene.machine);
    before.goes_on_in(&found, what);
    let ran = scene.live().ran();
    let left = Disk::of(&scene.machine);
    found.goes_on_in(&left, what);
    assert!(left.is_whole(), "{what}: what says whose the disk is is where it is looked for");
    scene.check(&ran, &left, is_key_put, what);
    ran
}
