//! Who may join: one host for each ticket, as a member that has never started elsewhere.

use std::fs;
use std::io::Write as _;
use std::time::Duration;

use nodekeel_cluster::consensus::JoinRefusal;
use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::enrolment::{EnrolmentPhase, FailureReason, StepError};
use rstest::rstest;
use tokio::time::{sleep, timeout};

use super::voter::{Voter, cluster_and_spare, get, put, start_cluster, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::retried;
use crate::member_run::HANG;

/// The refusal of a member that waits for none.
async fn wait_refused(voter: &Voter) -> JoinRefusal {
    match voter.wait_failed().await {
        FailureReason::ActionFailed { source, .. } => match &*source {
            StepError::JoinRefused(refusal) => refusal.clone(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_lost_disk_whose_ticket_was_kept_is_refused_and_no_acknowledged_write_is_lost(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = start_cluster(3, version).await;
    let [one, two, three] = &mut voters[..] else { panic!("three voters") };
    two.stop().await;
    put(one, "/k", "acknowledged by one and three").await;
    three.kill().await;
    three.lose_disk();
    one.stop().await;
    // Two knows nothing of the write; with an empty three it would be a majority.
    two.start();
    three.start();
    let refusal = wait_refused(three).await;
    assert!(matches!(refusal, JoinRefusal::AlreadyStarted { .. }), "{refusal}");
    let text = three.wait_failure_text().await;
    assert!(text.contains("the ticket is used") && text.contains("join it by another ticket"), "{text}");
    assert_ne!(two.node().current_state().phase(), EnrolmentPhase::Running, "two has no majority");
    one.start();
    two.wait_running().await;
    assert_eq!(get(two, "/k").await.as_deref(), Some("acknowledged by one and three"));
    // Nor does it start while there is a leader.
    let refusal = wait_refused(three).await;
    assert!(matches!(refusal, JoinRefusal::AlreadyStarted { .. }), "{refusal}");
    assert!(!three.kill_etcd(), "its etcd was started");

    // As the text says: its member is removed, the node is reset, and joins by another ticket.
    let JoinRefusal::AlreadyStarted { id, .. } = refusal else { panic!("{refusal}") };
    three.stop().await;
    let members = one.access().await.cluster_members();
    retried(async || members.remove_member(id).await).await;
    three.lose_disk();
    three.give_ticket(one).await;
    three.start();
    three.wait_running().await;
    assert_eq!(get(three, "/k").await.as_deref(), Some("acknowledged by one and three"));
    stop_all(&mut voters).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_node_whose_etcd_is_too_new_for_its_cluster_waits_by_name_and_joins_with_another() {
    let (mut voters, mut joiner) = cluster_and_spare(1, Debian).await;
    joiner.give_ticket(&voters[0]).await;
    // The voters would exit at what it proposes.
    joiner.set_etcd(Newest);
    joiner.start();
    joiner.wait_condition("can't join a cluster of etcd 3.4: install etcd 3.4 or 3.5").await;
    assert!(!joiner.kill_etcd(), "its etcd was started");
    assert_eq!(voters[0].access().await.cluster_members().list_members().await.unwrap().len(), 1);
    joiner.stop().await;
    joiner.set_etcd(Debian);
    joiner.start();
    joiner.wait_running().await;
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_with_the_ticket_is_refused_and_the_original_returns(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    voters[2].stop().await;
    voters[2].swap_disks();
    voters[2].start();
    let refusal = wait_refused(&voters[2]).await;
    assert!(matches!(refusal, JoinRefusal::AlreadyStarted { .. }), "{refusal}");
    voters[2].stop().await;
    voters[2].swap_disks();
    voters[2].start();
    voters[2].wait_running().await;
    put(&voters[2], "/k", "by the original").await;
    assert_eq!(get(&voters[0], "/k").await.as_deref(), Some("by the original"));
    stop_all(&mut voters).await;
}

/// A cluster of two, and a host that has a ticket and etcd's first log, and is off. Its member has never published
/// its name, so that the list does not say that it has started.
async fn half_joined(version: EtcdVersion) -> (Vec<Voter>, Voter) {
    let (mut voters, mut joiner) = cluster_and_spare(2, version).await;
    joiner.give_ticket(&voters[0]).await;
    let gate = joiner.hold_etcd();
    joiner.start();
    let mut held = gate.wait_reached().await;
    // It is admitted. Without a leader it can't publish its name: the first voter is one for an election timeout.
    let mut client = voters[0].client().await;
    voters[1].kill().await;
    let leads = async {
        while client.status().await.is_ok_and(|status| status.leader() != 0) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(HANG, leads).await.expect("its etcd has a leader no more");
    held.write_all(b"\n").unwrap();
    joiner.wait_log().await;
    joiner.kill().await;
    joiner.release_etcd(gate);
    voters[1].start();
    voters[1].wait_running().await;
    for voter in &voters {
        put(voter, "/leader", "elected").await;
    }
    let members = voters[1].access().await.cluster_members();
    let members = retried(async || members.list_members().await).await;
    let learner = members.iter().find(|member| member.is_learner).expect("a learner");
    assert_eq!(learner.name, None);
    (voters, joiner)
}

/// As an earlier release has left host and cluster, which made no claims.
async fn forget_claim(cluster: &Voter, host: &Voter) {
    fs::remove_file(host.path("data/etcd/join_claim")).unwrap();
    let claims = KeyRange::prefix("/etcd-joins/");
    let root = cluster.access().await.root_kv();
    retried(async || root.delete(claims.clone()).await).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_host_with_a_ticket_is_refused_and_the_first_completes_its_join(
    #[case] version: EtcdVersion,
) {
    let (mut voters, mut joiner) = half_joined(version).await;
    joiner.swap_disks();
    joiner.start();
    let refusal = wait_refused(&joiner).await;
    assert!(matches!(refusal, JoinRefusal::TicketUsed { .. }), "{refusal}");
    let text = joiner.wait_failure_text().await;
    assert!(text.contains("used by another host") && text.contains("join it by another ticket"), "{text}");
    assert!(!joiner.kill_etcd(), "its etcd was started");
    joiner.stop().await;
    joiner.swap_disks();
    joiner.start();
    joiner.wait_running().await;
    put(&joiner, "/k", "by the first").await;
    assert_eq!(get(&voters[0], "/k").await.as_deref(), Some("by the first"));
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_used_on_a_host_that_is_gone_is_revoked_and_another_joins(#[case] version: EtcdVersion) {
    let (mut voters, mut joiner) = half_joined(version).await;
    joiner.lose_disk();
    joiner.start();
    let refusal = wait_refused(&joiner).await;
    assert!(matches!(refusal, JoinRefusal::TicketUsed { .. }), "{refusal}");
    joiner.stop().await;
    // As the text says.
    let (issuer, url) = (voters[0].node().ticket_issuer().unwrap(), joiner.peer_url());
    retried(async || issuer.revoke_ticket(&url).await).await;
    joiner.lose_disk();
    joiner.give_ticket(&voters[0]).await;
    joiner.start();
    joiner.wait_running().await;
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_join_that_the_first_release_has_started_is_completed_once_an_operator_vouches_for_it(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (mut voters, mut joiner) = half_joined(version).await;
    forget_claim(&voters[0], &joiner).await;
    joiner.start();
    joiner.wait_condition("did not record whether another host has used its ticket").await;
    assert!(!joiner.kill_etcd(), "its etcd was started");
    joiner.stop().await;
    fs::write(joiner.path("data/etcd/join_claim"), "").unwrap();
    joiner.start();
    joiner.wait_running().await;
    put(&joiner, "/k", "by the first release's").await;
    assert_eq!(get(&voters[0], "/k").await.as_deref(), Some("by the first release's"));
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_learner_that_is_removed_is_added_again_until_its_ticket_is_revoked(#[case] version: EtcdVersion) {
    let (mut voters, mut joiner) = cluster_and_spare(2, version).await;
    joiner.give_ticket(&voters[0]).await;
    let members = voters[0].access().await.cluster_members();
    let list = async || members.list_members().await;
    assert_eq!(retried(list).await.len(), 2, "a ticket has taken a place");
    let gate = joiner.hold_etcd();
    joiner.start();
    let mut held = gate.wait_reached().await;
    let learner = retried(list).await.into_iter().find(|member| member.is_learner).unwrap();
    retried(async || members.remove_member(learner.id).await).await;
    // Its etcd may be started several times.
    held.write_all(&[b'\n'; 100]).unwrap();
    joiner.wait_running().await;
    let joined = joiner.access().await.this_member().id;
    assert_ne!(joined, learner.id);
    joiner.stop().await;
    joiner.release_etcd(gate);
    // Its ticket is used: removed again, it stays out.
    retried(async || members.remove_member(joined).await).await;
    joiner.lose_disk();
    joiner.start();
    joiner.wait_condition("its ticket must be unused").await;
    assert!(!joiner.kill_etcd(), "its etcd was started");
    joiner.stop().await;
    joiner.reset();
    joiner.give_ticket(&voters[0]).await;

    // A revoked one is not even answered.
    let (issuer, url) = (voters[0].node().ticket_issuer().unwrap(), joiner.peer_url());
    assert!(issuer.revoke_ticket(&url).await.unwrap());
    sleep(Duration::from_secs(5)).await;
    joiner.start_with(|settings| settings.deadline = Duration::from_secs(5));
    let text = joiner.wait_failure_text().await;
    assert!(text.contains("may be revoked"), "{text}");
    joiner.stop().await;
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_tickets_are_redeemed_and_a_node_that_never_started_blocks_none(
    #[case] version: EtcdVersion,
) {
    let (mut voters, mut lost) = cluster_and_spare(1, version).await;
    let mut joiners = [2, 3].map(|host| Voter::new(&lost.site, host, version));
    lost.give_ticket(&voters[0]).await;
    for joiner in &joiners {
        joiner.give_ticket(&voters[0]).await;
    }
    // It has its place in the cluster, and never starts.
    let gate = lost.hold_etcd();
    lost.start();
    drop(gate.wait_reached().await);
    lost.kill().await;
    lost.release_etcd(gate);
    joiners.iter_mut().for_each(Voter::start);
    let url = lost.peer_url();
    let is_told = || {
        joiners.iter().any(|joiner| {
            joiner.node().condition().is_some_and(|reason| {
                reason.starts_with("waits for its turn: the node at ") && reason.contains(url.as_str())
            })
        })
    };
    let told = async {
        while !is_told() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(HANG, told).await.expect("the lost node is named");
    for joiner in &joiners {
        joiner.wait_running().await;
    }
    // It comes after all, by the same ticket.
    lost.start();
    lost.wait_running().await;
    voters.extend(joiners);
    voters.push(lost);
    let members = voters[0].access().await.cluster_members();
    let members = retried(async || members.list_members().await).await;
    assert!(members.len() == 4 && members.iter().all(|member| !member.is_learner), "{members:?}");
    stop_all(&mut voters).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
async fn several_learners_join_at_once_where_etcd_takes_them() {
    let (mut voters, second) = cluster_and_spare(1, Newest).await;
    voters[0].stop().await;
    let mut joiners =
        vec![2, 3].into_iter().map(|host| Voter::new(&second.site, host, Newest)).collect::<Vec<_>>();
    joiners.push(second);
    for voter in voters.iter_mut().chain(&mut joiners) {
        voter.add_etcd_args(&["--max-learners=3"]);
    }
    voters[0].start();
    voters[0].wait_running().await;
    for joiner in &mut joiners {
        joiner.give_ticket(&voters[0]).await;
        joiner.start();
    }
    for joiner in &joiners {
        joiner.wait_running().await;
    }
    voters.append(&mut joiners);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joiner_waits_for_a_majority_and_names_who_does_not_answer(#[case] version: EtcdVersion) {
    let (mut voters, mut joiner) = cluster_and_spare(2, version).await;
    joiner.give_ticket(&voters[0]).await;
    voters[1].kill().await;
    joiner.start_with(|settings| settings.deadline = Duration::from_secs(8));
    let text = joiner.wait_failure_text().await;
    assert!(text.contains("no majority of the cluster answers"), "{text}");
    assert!(text.contains(voters[1].peer_url().as_str()), "{text}");
    assert!(!joiner.kill_etcd(), "its etcd was started");
    voters[1].start();
    voters[1].wait_running().await;
    joiner.wait_running().await;
    joiner.stop().await;
    stop_all(&mut voters).await;
}
