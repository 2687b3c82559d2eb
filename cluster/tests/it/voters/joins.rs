//! Who may join: a member without data that the cluster knows as a learner that has never started.

use std::path::PathBuf;
use std::time::Duration;

use nodekeel_cluster::consensus::JoinRefusal;
use nodekeel_cluster::enrolment::{EnrolmentPhase, FailureReason, StepError};
use tokio::time::{sleep, timeout};

use super::voter::{HANG, Voter, cluster_and_spare, start_cluster};

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

/// Reads and writes once there is a leader.
pub(super) async fn put(voter: &Voter, key: &str, value: &str) {
    let putting = async {
        loop {
            if let Ok(kv) = voter.node().root_kv()
                && kv.put(key.as_bytes(), value.as_bytes()).await.is_ok()
            {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(HANG, putting).await.expect("a write in time");
}

pub(super) async fn get(voter: &Voter, key: &str) -> Option<String> {
    let getting = async {
        loop {
            if let Ok(kv) = voter.node().root_kv()
                && let Ok(value) = kv.get(key.as_bytes()).await
            {
                return value.map(|kv| String::from_utf8(kv.value).unwrap());
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(HANG, getting).await.expect("a read in time")
}

pub(super) async fn a_lost_disk_whose_ticket_was_kept_is_refused_and_no_acknowledged_write_is_lost(
    binary: PathBuf,
) {
    let mut voters = start_cluster(3, binary).await;
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
    let members = one.node().cluster_members().unwrap();
    let removing = async {
        while members.remove_member(id).await.is_err() {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(HANG, removing).await.expect("removed in time");
    three.lose_disk();
    three.give_ticket(one).await;
    three.start();
    three.wait_running().await;
    assert_eq!(get(three, "/k").await.as_deref(), Some("acknowledged by one and three"));
    for voter in &mut voters {
        voter.stop().await;
    }
}

pub(super) async fn a_clone_with_the_ticket_is_refused_and_the_original_returns(binary: PathBuf) {
    let mut voters = start_cluster(3, binary).await;
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
    for voter in &mut voters {
        voter.stop().await;
    }
}

pub(super) async fn a_ticket_whose_member_was_removed_is_refused(binary: PathBuf) {
    let (mut voters, mut joiner) = cluster_and_spare(2, binary).await;
    joiner.give_ticket(&voters[0]).await;
    let members = voters[0].node().cluster_members().unwrap();
    let learner = members.list_members().await.unwrap().into_iter().find(|member| member.is_learner).unwrap();
    members.remove_member(learner.id).await.unwrap();
    joiner.start();
    let refusal = wait_refused(&joiner).await;
    assert_eq!(refusal, JoinRefusal::NotListed { url: joiner.peer_url() });
    joiner.stop().await;

    // A revoked one is not even answered.
    let (issuer, url) = (voters[0].node().ticket_issuer().unwrap(), joiner.peer_url());
    assert!(issuer.revoke_ticket(&url).await.unwrap());
    sleep(Duration::from_secs(5)).await;
    joiner.start_with(|settings| settings.deadline = Duration::from_secs(5));
    let text = joiner.wait_failure_text().await;
    assert!(text.contains("may be revoked"), "{text}");
    joiner.stop().await;
    for voter in &mut voters {
        voter.stop().await;
    }
}

pub(super) async fn a_joiner_waits_for_a_majority_and_names_who_does_not_answer(binary: PathBuf) {
    let (mut voters, mut joiner) = cluster_and_spare(2, binary).await;
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
    for voter in &mut voters {
        voter.stop().await;
    }
}
