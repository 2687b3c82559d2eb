//! A whole member, killed with SIGKILL while it creates its cluster or joins one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::{NewMember, Peer, StartMode, StartOptions};
use nodekeel_cluster::pki::SubjectNames;
use rstest::rstest;

use super::EtcdVersion::{self, Debian, Newest};
use super::address_change::{assert_listed_and_certified, member_identity};
use super::etcd_fixture::{EtcdFixture, etcd_member, place_data, retried};
use crate::member_run::MemberRun;

/// The member to kill: lines of its directory, name, address, ports and binary, and the URL of the member
/// that it joins.
const VICTIM_ENV: &str = "NODEKEEL_TEST_VICTIM";

/// The moments of the kill: longer than a new cluster takes, in steps much shorter than any step of the
/// member.
const STEP: Duration = Duration::from_millis(45);
const STEPS: u32 = 16;
/// Every moment, if it is `all`; each second one by default, where the two releases alternate.
const KILLS_ENV: &str = "NODEKEEL_CLUSTER_KILLS";
/// Longest time until a killed member runs after its last start.
const RECOVERY_LIMIT: Duration = Duration::from_secs(10);

/// The moments at which the tests of a release kill.
pub(super) fn kill_moments(version: EtcdVersion) -> impl Iterator<Item = u32> {
    let kills_at_each = std::env::var(KILLS_ENV).is_ok_and(|kills| kills == "all");
    let (first, step) = if kills_at_each { (0, 1) } else { (u32::from(version == EtcdVersion::Newest), 2) };
    (first..STEPS).step_by(step)
}

/// Runs a member until it is killed. Only other tests start it.
#[tokio::test]
#[ignore = "sampled: needs etcd"]
async fn victim() {
    let Ok(text) = std::env::var(VICTIM_ENV) else { return };
    let [directory, name, address, peer_port, binary, first] =
        text.lines().collect::<Vec<_>>().try_into().unwrap();
    let address = address.parse().unwrap();
    let data = place_data(Path::new(directory));
    let peer_port = peer_port.parse().unwrap();
    let consensus = etcd_member(PathBuf::from(binary), peer_port, &[], &data);
    let start = if first.is_empty() {
        StartOptions::new_cluster(name.parse().unwrap(), address)
    } else {
        // The test has written the content of the ticket there.
        let credentials = data.node.credentials.load_credentials().unwrap().unwrap();
        let revoked = data.etcd.load_revocation_list(&credentials.ca).unwrap().unwrap();
        let peers = vec![Peer::new("one".parse().unwrap(), first.parse().unwrap())];
        StartOptions::join_cluster(name.parse().unwrap(), address, peers, Arc::new(credentials), revoked)
    };
    let node = MemberRun::start(&consensus, start);
    std::future::pending::<()>().await;
    node.stop().await;
}

/// Starts the member, and kills it after a time; its etcd dies with it.
pub(super) async fn kill_after(moment: u32, fixture: &EtcdFixture, version: EtcdVersion, first: &str) {
    let peer_port = fixture.peer_port();
    let (directory, binary) = (fixture.scratch.path().display(), version.binary());
    let (name, address, binary) = (&fixture.name, fixture.address(), binary.display());
    let text = format!("{directory}\n{name}\n{address}\n{peer_port}\n{binary}\n{first}");
    // The last line may be empty.
    let text = if first.is_empty() { text + "\n" } else { text };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "etcd::kills::victim", "--include-ignored"]).env(VICTIM_ENV, text);
    let mut victim: Child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    tokio::time::sleep(STEP * moment).await;
    victim.kill().unwrap();
    victim.wait().unwrap();
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_member_killed_at_any_time_makes_one_cluster(#[values(Debian, Newest)] version: EtcdVersion) {
    let (mut kills, mut worst) = (0, Duration::ZERO);
    for step in kill_moments(version) {
        let fixture = EtcdFixture::new(version, "one");
        let mut authorities = Vec::new();
        // The second kill hits what the first has left.
        for moment in [step, (step * 7 + 3) % STEPS] {
            kill_after(moment, &fixture, version, "").await;
            kills += 1;
            authorities.extend(
                fixture.data.etcd.peer_pki.load_credentials().unwrap().map(|credentials| credentials.ca),
            );
        }
        let started_at = Instant::now();
        let mut node = fixture.run(fixture.bootstrap_options());
        let running = node.wait_running().await;
        worst = worst.max(started_at.elapsed());
        let cluster_ca = running.load_ca().await.unwrap();
        for before in authorities {
            assert_eq!(&before, cluster_ca.ca_certificate(), "the member was certified by another CA");
        }
        let issued = cluster_ca.list_issued().await.unwrap();
        let of_members =
            issued.iter().filter(|issued| !SubjectNames::from_certificate(issued).ip_addresses.is_empty());
        assert_eq!(of_members.count(), 1, "exactly one member certificate is recorded");
        assert_eq!(running.cluster_members().list_members().await.unwrap(), [running.this_member().clone()]);
        node.stop().await;
    }
    assert!(worst < RECOVERY_LIMIT, "{worst:?}");
    println!(
        "{version:?}: {kills} kills of a member that creates its cluster; it ran {worst:?} later at worst"
    );
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_joiner_killed_at_any_time_joins(#[values(Debian, Newest)] version: EtcdVersion) {
    let first = EtcdFixture::new(version, "one");
    let mut one = first.run(first.bootstrap_options());
    let (running, mut kills, mut worst) = (one.wait_running().await, 0, Duration::ZERO);
    // A join takes longer than the creation of a cluster.
    for step in kill_moments(version).step_by(2) {
        let fixture = EtcdFixture::new(version, &format!("two-{step}"));
        let new = NewMember::new(fixture.name.clone(), fixture.peer_url());
        let added = retried(async || running.cluster_members().add_learner(&new).await).await;
        let start = fixture.join_options(&[&first], &running).await;
        let StartMode::ExistingCluster { credentials, revoked, .. } = &start.mode else {
            panic!("not a join")
        };
        fixture.data.node.credentials.store_credentials(credentials).unwrap();
        fixture.data.etcd.store_revocation_list(revoked).unwrap();
        kill_after(step, &fixture, version, first.peer_url().as_str()).await;
        kills += 1;
        let started_at = Instant::now();
        let mut joined = fixture.run(start.clone());
        let two = joined.wait_running().await;
        worst = worst.max(started_at.elapsed());
        assert_eq!(two.this_member().id, added.id, "another member than the added one");
        assert_eq!(two.cluster_members().list_members().await.unwrap().len(), 2, "a stale member");
        retried(async || running.cluster_members().remove_member(added.id).await).await;
        joined.stop().await;
    }
    one.stop().await;
    assert!(worst < RECOVERY_LIMIT, "{worst:?}");
    println!("{version:?}: {kills} kills of a joiner; it ran {worst:?} later at worst");
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_member_killed_at_any_time_during_an_address_change_completes_it(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut fixture = EtcdFixture::new(version, "one");
    let mut node = fixture.run(fixture.bootstrap_options());
    let before = member_identity(&fixture, &node.wait_running().await).await;
    node.stop().await;
    let (mut kills, mut worst) = (0, Duration::ZERO);
    for step in kill_moments(version) {
        kills += 1;
        fixture.move_to([127, 0, 1, 1 + u8::try_from(step).unwrap()].into());
        kill_after(step, &fixture, version, "").await;
        let started_at = Instant::now();
        let mut node = fixture.run(fixture.restart_options());
        let running = node.wait_running().await;
        worst = worst.max(started_at.elapsed());
        assert_eq!(member_identity(&fixture, &running).await, before);
        assert_listed_and_certified(&fixture, &running).await;
        assert_eq!(running.cluster_members().list_members().await.unwrap().len(), 1);
        node.stop().await;
    }
    assert!(worst < RECOVERY_LIMIT, "{worst:?}");
    println!(
        "{version:?}: {kills} kills of a member that changes its address; it ran {worst:?} later at worst"
    );
}
