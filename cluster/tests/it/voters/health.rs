//! What a node says of itself while its cluster has no majority, no leader, or an alarm, or its disk stalls; and of voters
//! that are silent.

use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{AlarmAction, AlarmOptions, AlarmType};
use nodekeel_cluster::consensus::{MemberId, check_defragment, check_disarm};
use nodekeel_supervisor::{RunnableState, WaitReason};
use rstest::rstest;
use testbed::{PrivateNetwork, ScratchDir};
use tokio::time::sleep;

use self::Role::{Follower, Leader, Lone};
use super::voter::{Voter, get, put, start_all, start_cluster, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::retried;
use crate::member_run::HANG;

/// How soon a node knows that it can't take part.
const TOLD_WITHIN: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);
/// How soon data that differs is known.
const COMPARED_WITHIN: Duration = Duration::from_secs(60);

/// What a voter is when its disk stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Lone,
    Follower,
    Leader,
}

/// What the node says, and its state in the tree.
fn told(voter: &Voter) -> (Option<String>, RunnableState, WaitReason) {
    let condition = voter.node().condition().map(|condition| condition.to_string());
    let (state, waiting_for) =
        voter.status_in_tree().unwrap_or((RunnableState::Waiting, WaitReason::Nothing));
    (condition, state, waiting_for)
}

/// Waits until the node says why it is not well, and returns the time that it took.
async fn wait_told(voter: &Voter, expected: &str) -> Duration {
    let started_at = Instant::now();
    loop {
        let (condition, state, waiting_for) = told(voter);
        let in_tree = matches!(&waiting_for, WaitReason::Condition(reason) if reason.contains(expected));
        if condition.as_ref().is_some_and(|text| text.contains(expected))
            && state == RunnableState::New
            && in_tree
        {
            return started_at.elapsed();
        }
        assert!(started_at.elapsed() < HANG, "{expected}: {condition:?}, {state}, {waiting_for}");
        sleep(POLL).await;
    }
}

async fn assert_told_soon(voter: &Voter, expected: &str) {
    let took = wait_told(voter, expected).await;
    println!("told after {took:?}: {}", voter.node().condition().unwrap_or_default());
    assert!(took < TOLD_WITHIN, "{took:?}");
}

/// Waits until the node, which is well, reports these voters as silent.
async fn assert_degraded_soon(voter: &Voter, silent: &[Voter]) {
    let expected: Vec<_> = silent.iter().map(|voter| voter.peer_url().to_string()).collect();
    let started_at = Instant::now();
    loop {
        let report = voter.access().await.cluster_report();
        let mut found: Vec<_> =
            report.silent_voters().map(|(member, _)| member.peer_urls[0].clone()).collect();
        found.sort();
        if found == expected {
            break;
        }
        assert!(started_at.elapsed() < TOLD_WITHIN, "{found:?}");
        sleep(POLL).await;
    }
    println!("silent voters named after {:?}", started_at.elapsed());
    wait_well(voter).await;
}

async fn wait_well(voter: &Voter) {
    let started_at = Instant::now();
    while told(voter) != (None, RunnableState::Ready, WaitReason::Nothing) {
        assert!(started_at.elapsed() < HANG, "{:?}", told(voter));
        sleep(POLL).await;
    }
}

async fn wait_all_well(voters: &[Voter]) {
    for voter in voters {
        wait_well(voter).await;
    }
}

/// "a, b and c" as a condition names them.
fn addresses(voters: &[Voter]) -> String {
    let all: Vec<String> = voters.iter().map(|voter| voter.address().to_string()).collect();
    all.join(", ")
}

#[rstest]
#[ignore = "sampled: needs etcd, ip and root: it makes network namespaces"]
#[case::three_debian(3, Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::three_newest(3, Newest)]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::five_debian(5, Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::five_newest(5, Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn voters_are_not_ready_within_5_s_without_a_majority_and_ready_with_one(
    #[case] count: usize,
    #[case] version: EtcdVersion,
) {
    let mut voters = start_cluster(count, version).await;
    wait_all_well(&voters).await;
    let rest = count / 2;
    // With one voter less than that they are well.
    for dead in &mut voters[rest + 1..] {
        dead.kill().await;
    }
    for voter in &voters[..=rest] {
        assert_degraded_soon(voter, &voters[rest + 1..]).await;
    }
    put(&voters[0], "/k", "with a bare majority").await;
    wait_all_well(&voters[..=rest]).await;
    voters[rest].kill().await;
    let expected = format!(
        "waits for a majority: {rest} of {count} members reachable ({} do not answer)",
        addresses(&voters[rest..])
    );
    for voter in &voters[..rest] {
        assert_told_soon(voter, &expected).await;
    }
    voters[rest].start();
    voters[rest].wait_running().await;
    wait_all_well(&voters[..=rest]).await;
    put(&voters[0], "/k", "again").await;
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_that_is_cut_off_is_not_ready_within_5_s_and_the_others_are(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    wait_all_well(&voters).await;
    for cut in 0..3 {
        // Each once: one of them leads.
        let others: Vec<&Voter> = voters.iter().filter(|voter| voter.host != cut).collect();
        let names = format!("{}, {} do not answer", others[0].address(), others[1].address());
        voters[cut].site.set_connected(cut, false).unwrap();
        assert_told_soon(&voters[cut], &names).await;
        for voter in &others {
            wait_well(voter).await;
        }
        voters[cut].site.set_connected(cut, true).unwrap();
        wait_all_well(&voters).await;
    }
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alarm_takes_readiness_from_every_voter_until_it_is_disarmed(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    wait_all_well(&voters).await;
    let mut client = voters[0].client().await;
    let this = client.status().await.unwrap().header().unwrap().member_id();
    let of_this = || {
        let mut options = AlarmOptions::new();
        options.with_member(this);
        Some(options)
    };
    for (kind, expected) in [
        (AlarmType::Nospace, format!("the store of {} is full (alarm NOSPACE)", voters[0].address())),
        (AlarmType::Corrupt, format!("the data of {} is corrupt (alarm CORRUPT)", voters[0].address())),
    ] {
        client.alarm(AlarmAction::Activate, kind, of_this()).await.unwrap();
        for voter in &voters {
            assert_told_soon(voter, &expected).await;
        }
        if kind == AlarmType::Nospace {
            // It is known again before the node is Running.
            voters[1].stop().await;
            voters[1].start();
            voters[1].wait_running().await;
            let (condition, ..) = told(&voters[1]);
            assert!(condition.as_ref().is_some_and(|text| text.contains(&expected)), "{condition:?}");
        }
        let access = voters[0].access().await;
        let maintenance = access.store_maintenance().unwrap();
        let report = retried(async || {
            let report = access.cluster_report();
            let answer = report.members.iter().all(|member| member.facts.is_some());
            if answer { Ok(report) } else { Err("not all members answer") }
        });
        let report = report.await;
        let (alarms, may_disarm) = voters[0]
            .on_host(async move {
                // With corrupt data, etcd rejects everything.
                let may_maintain = kind == AlarmType::Nospace;
                if may_maintain {
                    let own = MemberId(this);
                    let others = report.members.iter().map(|member| member.member.id).filter(|id| *id != own);
                    for other in others {
                        assert!(check_defragment(&report, other).is_err());
                    }
                    check_defragment(&report, own).unwrap();
                    maintenance.compact().await.unwrap();
                    maintenance.defragment().await.unwrap();
                }
                let alarms = maintenance.list_alarms().await.unwrap();
                let (member, alarm) = &alarms[0];
                let may_disarm = check_disarm(&report, *member, alarm);
                if may_disarm.is_ok() {
                    maintenance.disarm(*member, alarm).await.unwrap();
                }
                (alarms, may_disarm)
            })
            .await;
        assert_eq!((alarms.len(), alarms[0].0.0), (1, this));
        if kind == AlarmType::Corrupt {
            assert!(may_disarm.unwrap_err().contains("remove this member first"));
            client.alarm(AlarmAction::Deactivate, kind, of_this()).await.unwrap();
        }
        wait_all_well(&voters).await;
    }
    stop_all(&mut voters).await;
}

/// A file system on a loop device, which can be frozen.
struct StallingDisk {
    mount: PathBuf,
    _image: ScratchDir,
}

impl StallingDisk {
    fn mount_at(mount: PathBuf) -> StallingDisk {
        let scratch = ScratchDir::new().unwrap();
        let image = scratch.path().join("disk");
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        run("mkfs.ext4", &[OsStr::new("-q"), image.as_ref()]);
        run("mount", &[OsStr::new("-o"), OsStr::new("loop"), image.as_ref(), mount.as_ref()]);
        std::fs::remove_dir(mount.join("lost+found")).unwrap();
        StallingDisk { mount, _image: scratch }
    }

    fn freeze(&self) {
        run("fsfreeze", &[OsStr::new("-f"), self.mount.as_ref()]);
    }

    fn thaw(&self) {
        run("fsfreeze", &[OsStr::new("-u"), self.mount.as_ref()]);
    }
}

impl Drop for StallingDisk {
    fn drop(&mut self) {
        // After a failure it may be frozen, and in use.
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.mount).stderr(Stdio::null()).status();
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
    }
}

fn run(program: &str, args: &[&OsStr]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_voter_whose_data_was_changed_is_found_at_its_start_and_not_started_again(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = start_cluster(3, version).await;
    put(&voters[0], "/account", "balance-AAAA").await;
    wait_all_well(&voters).await;
    // It reads what it has applied, which is in its database once it stops.
    assert_eq!(get(&voters[2], "/account").await.as_deref(), Some("balance-AAAA"));
    voters[2].stop().await;
    let path = voters[2].path("data/etcd/data/member/snap/db");
    let mut db = std::fs::read(&path).unwrap();
    let (old, new) = (b"balance-AAAA", b"balance-ZZZZ");
    let places: Vec<_> = db.windows(old.len()).enumerate().filter(|(_, bytes)| bytes == old).collect();
    let places: Vec<_> = places.into_iter().map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| db[*at..][..new.len()].copy_from_slice(new));
    std::fs::write(&path, db).unwrap();
    voters[2].start();
    // The newest release finds it itself before it serves anything; for the other one, the node does.
    let took = wait_told(&voters[2], "differs from that of").await;
    assert!(took < COMPARED_WITHIN, "{took:?}");
    assert!(voters[2].node().cluster_access().is_err());
    voters[2].stop().await;
    voters[2].start();
    wait_told(&voters[2], "differs from that of").await;
    for voter in &voters[..2] {
        wait_well(voter).await;
        assert_eq!(get(voter, "/account").await.as_deref(), Some("balance-AAAA"));
    }
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "sampled: needs etcd, ip, mkfs.ext4 and root: it mounts a loop device"]
#[case::lone_debian(Lone, Debian)]
#[ignore = "soak: Debian's etcd runs it, too"]
#[case::lone_newest(Lone, Newest)]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::follower_debian(Follower, Debian)]
#[ignore = "sampled: needs go, ip, mkfs.ext4 and root: it mounts a loop device"]
#[case::follower_newest(Follower, Newest)]
#[ignore = "soak: a follower stalls in each run"]
#[case::leader_debian(Leader, Debian)]
#[ignore = "soak: a follower stalls in each run"]
#[case::leader_newest(Leader, Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_whose_disk_stalls_names_it_within_5_s_and_is_well_within_5_s_of_its_return(
    #[case] role: Role,
    #[case] version: EtcdVersion,
) {
    let count = if role == Lone { 1 } else { 3 };
    let site = Arc::new(PrivateNetwork::new(count).unwrap());
    let mut voters: Vec<_> = (0..count).map(|host| Voter::new(&site, host, version)).collect();
    let disks: Vec<_> = voters.iter().map(|voter| StallingDisk::mount_at(voter.path("data"))).collect();
    start_all(&mut voters).await;
    wait_all_well(&voters).await;
    let stalled = match role {
        Lone | Leader => leader_of(&voters).await,
        Follower => (leader_of(&voters).await + 1) % count,
    };
    disks[stalled].freeze();
    assert_told_soon(&voters[stalled], "the disk of etcd stalls").await;
    disks[stalled].thaw();
    let thawed_at = Instant::now();
    wait_well(&voters[stalled]).await;
    println!("{role:?}: well again after {:?}", thawed_at.elapsed());
    assert!(thawed_at.elapsed() < TOLD_WITHIN, "{:?}", thawed_at.elapsed());
    stop_all(&mut voters).await;
}

/// The voter that leads.
async fn leader_of(voters: &[Voter]) -> usize {
    for (index, voter) in voters.iter().enumerate() {
        let status = voter.client().await.status().await.unwrap();
        if status.leader() == status.header().unwrap().member_id() {
            return index;
        }
    }
    panic!("nobody leads");
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_at_its_cold_start_tells_who_is_missing_for_a_majority(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    stop_all(&mut voters).await;
    voters[0].start();
    let expected =
        format!("waits for a majority: 1 of 3 members reachable ({} do not answer)", addresses(&voters[1..]));
    assert_told_soon(&voters[0], &expected).await;
    // For as long as it lasts, whatever the step is called.
    for _ in 0..100 {
        let (condition, ..) = told(&voters[0]);
        assert!(condition.as_ref().is_some_and(|text| text.contains(&expected)), "{condition:?}");
        sleep(POLL).await;
    }
    voters[1].start();
    wait_all_well(&voters[..2]).await;
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_voter_without_credentials_tells_so_whenever_it_is_asked(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = start_cluster(1, version).await;
    stop_all(&mut voters).await;
    std::fs::remove_dir_all(voters[0].path("data/etcd/peer_pki")).unwrap();
    voters[0].start_with(|settings| settings.deadline = Duration::from_secs(2));
    wait_told(&voters[0], "credentials are missing: restore them").await;
    let mut untold = Vec::new();
    for _ in 0..100 {
        let (condition, ..) = told(&voters[0]);
        if !condition.as_ref().is_some_and(|text| text.contains("credentials are missing: restore them")) {
            untold.push(condition);
        }
        sleep(POLL).await;
    }
    assert!(untold.is_empty(), "{} of 100: {untold:?}", untold.len());
    stop_all(&mut voters).await;
}
