//! Keys beside those of `tests/it/golden.rs` that only members with etcd write.

use nodekeel_cluster::consensus::{NewMember, PeerUrl};

use super::etcd_fixture::{ADDRESS, EtcdFixture, EtcdVersion};

/// Members of both releases in one cluster promote each other's learners.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn a_learner_is_announced_under_the_key_of_the_first_release() {
    let fixture = EtcdFixture::new(EtcdVersion::Debian, "one");
    let mut node = fixture.run(fixture.bootstrap_options());
    let running = node.wait_running().await;
    let url = PeerUrl::new(ADDRESS, 11836);
    let new = NewMember::new("two".parse().unwrap(), url.clone());
    let learner = running.cluster_members().add_learner(&new).await.unwrap();
    // As `/etcd-learners/dec6d3f4a49563bf`, with the URL as its value.
    let key = format!("/etcd-learners/{:x}", learner.id.0);
    let announced = running.root_kv().get(key.as_bytes()).await.unwrap().expect("an announcement");
    assert_eq!(announced.value, url.as_str().as_bytes());
    node.stop().await;
}
