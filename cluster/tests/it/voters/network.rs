//! What voters need of the network, and what it sees of them.

use std::io::ErrorKind;

use nodekeel_cluster::consensus::DEFAULT_PEER_PORT;
use nodekeel_cluster::pki::CertificateSpec;
use rstest::rstest;
use tokio::net::TcpStream;

use super::voter::{Voter, cluster_and_spare, get, put, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::ask_peer;

/// The port of etcd's clients in earlier releases.
const FORMER_CLIENT_PORT: u16 = 2379;

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip, iptables and root: it makes network namespaces"]
async fn a_node_joins_and_leaves_voters_that_it_reaches_at_the_peer_port_alone(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (mut voters, mut joiner) = cluster_and_spare(2, version).await;
    for host in [&voters[0], &voters[1], &joiner].map(|voter| voter.host) {
        joiner.site.pass_only(host, DEFAULT_PEER_PORT).unwrap();
    }
    joiner.give_ticket(&voters[0]).await;
    joiner.start();
    joiner.wait_running().await;
    put(&joiner, "/k", "by the peer port").await;
    for voter in voters.iter().chain([&joiner]) {
        assert_eq!(get(voter, "/k").await.as_deref(), Some("by the peer port"));
        let report = voter.access().await.cluster_report();
        assert_eq!(report.silent_voters().count(), 0, "{report:?}");
    }
    voters.push(joiner);
    voters[0].stop().await;
    voters[0].start();
    voters[0].wait_running().await;
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_foreign_address_reaches_nothing_of_a_voter_but_its_peer_port(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (mut voters, _) = cluster_and_spare(1, version).await;
    let voter: &Voter = &voters[0];
    assert_eq!(voter.listening_ports().await, [DEFAULT_PEER_PORT].into());
    let refused = TcpStream::connect((voter.address(), FORMER_CLIENT_PORT)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    // The socket is in a directory of this user alone.
    let directory = std::fs::metadata(voter.path("data/etcd/client")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&directory.permissions()) & 0o777, 0o700);
    // There it serves no keys, to no certificate.
    let ca = voter.access().await.load_ca().await.unwrap();
    let spec = CertificateSpec::for_member("thief".parse().unwrap(), voter.address().into());
    let credentials = ca.issue_credentials(&spec).await.unwrap();
    let at = (voter.address(), DEFAULT_PEER_PORT).into();
    let ask = async |path: &str| ask_peer(at, &credentials.ca, Some(&credentials), path).await.unwrap();
    assert!(ask("/version").await.contains("etcdserver"));
    for path in ["/v3/kv/range", "/v2/keys/", "/health", "/metrics"] {
        assert!(ask(path).await.starts_with("HTTP/1.0 404"), "{path}");
    }
    stop_all(&mut voters).await;
}
