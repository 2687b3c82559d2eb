//! Rejected clients, and rejected starts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nodekeel_cluster::pki::{CertificateSpec, PendingCa};
use rstest::rstest;
use tokio::time::timeout;

use super::EtcdVersion::{self, Debian, Newest};
use super::cluster::add_member;
use super::etcd_fixture::{EtcdFixture, started_member};
use super::peer_question::ask_peer;
use crate::member_run::HANG;

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_revoked_certificate_is_rejected_once_the_crl_is_on_the_disk(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (fixture, node, running) = started_member(version).await;
    let cluster_ca = running.load_ca().await.unwrap();
    let ca = cluster_ca.ca_certificate();
    let issue = async |name: &str| {
        let spec = CertificateSpec::for_member(name.parse().unwrap(), fixture.address());
        cluster_ca.issue_credentials(&spec).await.unwrap()
    };
    let (client, other) = (issue("revoketest").await, issue("stays").await);
    fixture.ask(&client).await.unwrap();
    cluster_ca.revoke_name("revoketest").await.unwrap();
    fixture.wait_revoked(ca, std::slice::from_ref(&client.certificate));
    let refused = fixture.ask(&client).await;
    assert!(refused.is_err(), "a revoked certificate was served");
    fixture.ask(&other).await.expect("another one is served");
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn only_certificates_of_the_ca_are_served(#[values(Debian, Newest)] version: EtcdVersion) {
    let (fixture, node, running) = started_member(version).await;
    let cluster_ca = running.load_ca().await.unwrap();
    let ca = cluster_ca.ca_certificate();
    let at = (fixture.address(), fixture.peer_port()).into();
    assert!(ask_peer(at, ca, None, "/version").await.is_err(), "one without a certificate was served");
    let mut foreign = PendingCa::generate().unwrap();
    let member = CertificateSpec::for_member("member".parse().unwrap(), fixture.address());
    let member = foreign.issue_credentials(&member).unwrap();
    assert!(ask_peer(at, ca, Some(&member), "/version").await.is_err(), "one of another CA was served");
    let member = CertificateSpec::for_member("member".parse().unwrap(), fixture.address());
    let member = cluster_ca.issue_credentials(&member).await.unwrap();
    fixture.ask(&member).await.expect("one of the CA is served");
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_start_that_does_not_match_the_disk_is_rejected(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixture = EtcdFixture::new(version, "one");
    let mut node = fixture.run(fixture.restart_options());
    assert!(node.wait_failure().await.contains("holds no member's data"));
    node.stop().await;
    let mut node = fixture.run(fixture.bootstrap_options());
    node.wait_running().await;
    node.stop().await;
    let mut node = fixture.run(fixture.restart_options());
    node.wait_running().await;
    let other = EtcdFixture::new(version, "two");
    let mut other_node = other.run(other.bootstrap_options());
    let foreign = fixture.join_options(&[&other], &other_node.wait_running().await).await;
    other_node.stop().await;
    node.stop().await;
    let mut node = fixture.run(foreign);
    assert!(node.wait_failure().await.contains("another member or cluster"));
    node.stop().await;
    let mut node = fixture.run(fixture.restart_options());
    timeout(HANG, node.wait_running()).await.expect("the member still runs");
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_revoked_member_does_not_start_again(#[values(Debian, Newest)] version: EtcdVersion) {
    let (first, node, one) = started_member(version).await;
    let second = EtcdFixture::new(version, "two");
    let mut joined = second.run(add_member(&second, &first, &one).await);
    joined.wait_running().await;
    let cluster_ca = one.load_ca().await.unwrap();
    let revoked = cluster_ca.revoke_name("two").await.unwrap();
    let ca = cluster_ca.ca_certificate();
    for fixture in [&first, &second] {
        fixture.wait_revoked(ca, &revoked);
    }
    joined.stop().await;
    let mut expelled = second.run(second.restart_options());
    let failure = expelled.wait_failure().await;
    assert!(failure.contains("cert.pem is revoked"), "neither the member nor its client: {failure}");
    expelled.stop().await;
    node.stop().await;
}

/// The files below a directory, with their content.
fn content(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(content(&path));
        } else {
            files.insert(path.clone(), std::fs::read(path).unwrap());
        }
    }
    files
}

#[rstest]
#[case::downgrade(Newest, Debian, "was written by etcd 3.7, and etcd can't go back")]
#[case::jump(Debian, Newest, "was written by etcd 3.4, and etcd upgrades by one minor release at a time")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn an_etcd_that_the_data_forbids_does_not_touch_it(
    #[case] writer: EtcdVersion,
    #[case] installed: EtcdVersion,
    #[case] refusal: &str,
) {
    let (mut fixture, node, _running) = started_member(writer).await;
    node.stop().await;
    let directory = fixture.data.etcd.path().to_owned();
    fixture.install(installed);
    // Data of a release without the record is recognised by etcd's own database.
    for has_record in [true, false] {
        if !has_record {
            std::fs::remove_file(directory.join("etcd_version")).unwrap();
        }
        let before = content(&directory);
        let mut node = fixture.run(fixture.restart_options());
        let failure = node.wait_failure().await;
        node.stop().await;
        assert!(failure.contains(refusal), "with a record: {has_record}: {failure}");
        assert!(content(&directory) == before, "the data has changed");
    }
    fixture.install(writer);
    let mut node = fixture.run(fixture.restart_options());
    node.wait_running().await;
    node.stop().await;
}
