//! A voter whose disk is an older copy.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use nodekeel_cluster::consensus::MemberStatus;
use rstest::rstest;
use tokio::time::timeout;

use super::EtcdVersion::{self, Debian, Newest};
use super::cluster::three_members;
use super::etcd_fixture::{EtcdFixture, retried};
use crate::member_run::HANG;

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(copied.success());
}

/// Three voters, of which the first and the third have acknowledged `/order`; then the third has an older copy of its data.
/// The second was off, and lacks the order, too. None runs.
async fn restore_third(fixtures: &[EtcdFixture; 3]) {
    let [_, _, third] = fixtures;
    let [(run_one, one), (run_two, two), (run_three, _)] = three_members(fixtures).await;
    let (data, copied) = (third.data.etcd.path(), third.scratch.path().join("copy"));
    run_three.stop().await;
    copy(data, &copied);
    let mut run_three = third.run(third.restart_options());
    let three = run_three.wait_running().await;
    // It has caught up, and so has seen the start; then it is off.
    two.root_kv().get(b"/order").await.unwrap();
    run_two.stop().await;
    retried(async || one.root_kv().put(b"/order", b"paid").await).await;
    assert_eq!(retried(async || three.root_kv().get(b"/order").await).await.unwrap().value, b"paid");
    run_three.stop().await;
    std::fs::remove_dir_all(data).unwrap();
    copy(&copied, data);
    run_one.stop().await;
}

/// The copy of a voter, put back, would form a majority with one that lacks what the voter has acknowledged since.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_restored_copy_of_a_voter_does_not_start_and_nothing_acknowledged_is_lost(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [first, second, third] = &fixtures;
    restore_third(&fixtures).await;
    // Neither etcd runs: the two answer each other before they start.
    let (mut run_three, mut run_two) =
        (third.run(third.restart_options()), second.run(second.restart_options()));
    let failure = run_three.wait_failure().await;
    assert!(failure.contains("the disk of member three is an older copy"), "{failure}");
    assert!(failure.contains("`nodectl reset` here"), "{failure}");
    assert!(!matches!(run_two.status.current_status(), MemberStatus::Running(_)), "a majority of one");
    // The voter that has the write brings it back.
    let mut run_one = first.run(first.restart_options());
    for run in [&mut run_one, &mut run_two] {
        let access = timeout(HANG, run.wait_running()).await.unwrap();
        let order = retried(async || access.root_kv().get(b"/order").await).await;
        assert_eq!(order.expect("the acknowledged write").value, b"paid");
    }
    let failure = run_three.wait_failure().await;
    assert!(failure.contains("is an older copy"), "{failure}");
    for run in [run_one, run_two, run_three] {
        run.stop().await;
    }
}

/// An etcd without its node. It ends with the test.
struct BareEtcd(Child);

impl BareEtcd {
    /// The data and the ports of a member that does not run.
    fn start(fixture: &EtcdFixture) -> BareEtcd {
        let (client, peer) = ("unix://etcd:0", fixture.peer_url());
        let pki = &fixture.data.etcd.peer_pki;
        let mut etcd = Command::new(fixture.binary());
        etcd.current_dir(fixture.data.etcd.path().join("client"));
        etcd.args(["--name", fixture.name.as_str(), "--data-dir"]).arg(fixture.data.etcd.data.path());
        etcd.args(["--listen-client-urls", client, "--advertise-client-urls", client]);
        etcd.args(["--listen-peer-urls", peer.as_str(), "--initial-advertise-peer-urls", peer.as_str()]);
        etcd.arg("--peer-client-cert-auth");
        for (name, file) in [("cert", &pki.certificate), ("key", &pki.key), ("trusted-ca", &pki.ca)] {
            etcd.arg(format!("--peer-{name}-file")).arg(file.path());
        }
        BareEtcd(etcd.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for BareEtcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The same without the check of a start: what the test above would lose.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn etcd_alone_loses_what_was_acknowledged_with_a_restored_copy_of_a_voter(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [_, second, third] = &fixtures;
    restore_third(&fixtures).await;
    let _etcds = [second, third].map(BareEtcd::start);
    let client = second.client().await;
    let order = retried(async || client.kv_client().get("/order", None).await).await;
    assert!(order.kvs().is_empty(), "the schedule loses nothing");
}
