//! A whole member, killed with SIGKILL while it makes its cluster or joins one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::{Mode, NewMember, Peer, Start};
use nodekeel_cluster::pki::{Authority, SubjectNames};

use super::bed::{Bed, Version, member, place};
use super::moved::{identity, is_at_home};
use crate::node::Node;

/// What the member that is to be killed is: lines of its directory, name, address, ports and program, and of whom it joins.
const VICTIM: &str = "NODEKEEL_TEST_VICTIM";

/// The moments of a kill: longer than a new cluster takes, in steps much shorter than any of its own.
const STEP: Duration = Duration::from_millis(45);
const STEPS: u32 = 16;
/// Whoever was killed runs so soon after its last start.
const WITHIN: Duration = Duration::from_secs(10);

/// Runs a member until it is killed. It is no test by itself: others start it.
#[tokio::test]
#[ignore = "needs etcd"]
async fn victim() {
    let Ok(text) = std::env::var(VICTIM) else { return };
    let [directory, name, address, peer, client, binary, first] =
        text.lines().collect::<Vec<_>>().try_into().unwrap();
    let address = address.parse().unwrap();
    let data = place(Path::new(directory));
    let ports = [peer.parse().unwrap(), client.parse().unwrap()];
    let consensus = member(PathBuf::from(binary), ports, &[], &data);
    let start = if first.is_empty() {
        Start::new_cluster(name.parse().unwrap(), address)
    } else {
        // The test has left there what the ticket says.
        let credentials = data.node.credentials.load().unwrap().unwrap();
        let revoked = data.etcd.load_revoked(&credentials.ca).unwrap().unwrap();
        let peers = vec![Peer::new("one".parse().unwrap(), first.parse().unwrap())];
        Start::join(name.parse().unwrap(), address, peers, Arc::new(credentials), revoked)
    };
    let node = Node::start(&consensus, start);
    std::future::pending::<()>().await;
    node.stop().await;
}

/// Starts the member, and kills it after a time; its etcd dies with it.
async fn kill_after(moment: u32, bed: &Bed, version: Version, first: &str) {
    let [peer, client] = bed.ports();
    let (directory, binary) = (bed.scratch.path().display(), version.binary());
    let (name, address, binary) = (&bed.name, bed.address(), binary.display());
    let text = format!("{directory}\n{name}\n{address}\n{peer}\n{client}\n{binary}\n{first}");
    // An empty line at the end is one.
    let text = if first.is_empty() { text + "\n" } else { text };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "etcd::kills::victim", "--include-ignored"]).env(VICTIM, text);
    let mut victim: Child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    tokio::time::sleep(STEP * moment).await;
    victim.kill().unwrap();
    victim.wait().unwrap();
}

pub(super) async fn a_member_killed_at_any_time_makes_one_cluster(version: Version) {
    let (mut kills, mut worst) = (0, Duration::ZERO);
    for step in 0..STEPS {
        let bed = Bed::new(version, "one");
        let mut authorities = Vec::new();
        // A second time in the midst of what the first has left.
        for moment in [step, (step * 7 + 3) % STEPS] {
            kill_after(moment, &bed, version, "").await;
            kills += 1;
            authorities.extend(bed.data.etcd.peer_pki.load().unwrap().map(|credentials| credentials.ca));
        }
        let began = Instant::now();
        let mut node = bed.run(bed.create());
        let running = node.running().await;
        worst = worst.max(began.elapsed());
        let authority = Authority::load(running.root()).await.unwrap();
        for before in authorities {
            assert_eq!(&before, authority.certificate(), "whoever was once certified stays so");
        }
        let issued = authority.issued().await.unwrap();
        let of_members = issued.iter().filter(|issued| !SubjectNames::of(issued).addresses.is_empty());
        assert_eq!(of_members.count(), 1, "one certificate of a member, which is recorded");
        assert_eq!(running.members().list().await.unwrap(), [running.this().clone()]);
        node.stop().await;
    }
    assert!(worst < WITHIN, "{worst:?}");
    println!(
        "{version:?}: {kills} kills of a member that makes its cluster; it ran {worst:?} later at worst"
    );
}

pub(super) async fn a_joiner_killed_at_any_time_joins(version: Version) {
    let first = Bed::new(version, "one");
    let mut one = first.run(first.create());
    let (running, mut worst) = (one.running().await, Duration::ZERO);
    for step in 0..STEPS / 2 {
        let bed = Bed::new(version, &format!("two-{step}"));
        let new = NewMember::new(bed.name.clone(), bed.url());
        let added = super::cluster::retried(async || running.members().add_learner(&new).await).await;
        let start = bed.join(&[&first], &running).await;
        let Mode::Existing { credentials, revoked, .. } = &start.mode else { panic!("it joins") };
        bed.data.node.credentials.store(credentials).unwrap();
        bed.data.etcd.store_revoked(revoked).unwrap();
        kill_after(2 * step, &bed, version, first.url().as_str()).await;
        let began = Instant::now();
        let mut joined = bed.run(start.clone());
        let two = joined.running().await;
        worst = worst.max(began.elapsed());
        assert_eq!(two.this().id, added.id, "one member, the one that was added");
        assert_eq!(two.members().list().await.unwrap().len(), 2, "and no ghost");
        super::cluster::retried(async || running.members().remove(added.id).await).await;
        joined.stop().await;
    }
    one.stop().await;
    assert!(worst < WITHIN, "{worst:?}");
    println!("{version:?}: {} kills of a joiner; it ran {worst:?} later at worst", STEPS / 2);
}

pub(super) async fn a_member_killed_at_any_time_while_it_moves_gets_there(version: Version) {
    let mut bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let before = identity(&bed, &node.running().await).await;
    node.stop().await;
    let mut worst = Duration::ZERO;
    for step in 0..STEPS {
        bed.move_to([127, 0, 1, 1 + u8::try_from(step).unwrap()].into());
        kill_after(step, &bed, version, "").await;
        let began = Instant::now();
        let mut node = bed.run(bed.restart());
        let running = node.running().await;
        worst = worst.max(began.elapsed());
        assert_eq!(identity(&bed, &running).await, before);
        is_at_home(&bed, &running).await;
        assert_eq!(running.members().list().await.unwrap().len(), 1);
        node.stop().await;
    }
    assert!(worst < WITHIN, "{worst:?}");
    println!("{version:?}: {STEPS} kills of a member that moves; it ran {worst:?} later at worst");
}
