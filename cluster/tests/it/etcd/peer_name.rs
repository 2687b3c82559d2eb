//! Who is served at the peer port: members, and no other certificate of their CA.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KeyRange, Txn, TxnOp};
use nodekeel_cluster::consensus::{
    ClusterAccess, MemberName, NewMember, OpenPeerPort, Peer, StartOptions, UNNAMED_CERTIFICATE,
};
use nodekeel_cluster::node::{DEFAULT_NODE_PREFIX, GoldenTicket, GoldenTicketIssuer, NodeId, TicketParts};
use nodekeel_cluster::pki::{CertificateSpec, SubjectNames, peer_name};
use nodekeel_localstorage::pki::{Certificate, CertificateTemplate, CommonName, Credentials, PrivateKey};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
};
use rstest::rstest;

use super::EtcdVersion::{self, Debian, Newest};
use super::ca_key::give_ca;
use super::cluster::three_members;
use super::etcd_fixture::{EtcdFixture, retried};
use super::kills::{kill_after, kill_moments};
use super::peer_question::ask_peer;
use crate::member_run::MemberRun;

/// What a follower asks for, to be sent the log.
const STREAM: &str = "/raft/stream/message/1";

async fn ask(fixture: &EtcdFixture, with: &Credentials, path: &str) -> std::io::Result<String> {
    ask_peer(SocketAddr::new(fixture.address(), fixture.peer_port()), &with.ca, Some(with), path).await
}

/// Whether the holder of these credentials is answered at the peer port of a running etcd.
async fn is_served(fixture: &EtcdFixture, with: &Credentials) -> bool {
    ask(fixture, with, STREAM).await.is_ok_and(|answer| answer.starts_with("HTTP/1."))
}

fn credentials(fixture: &EtcdFixture) -> Credentials {
    fixture.data.etcd.peer_pki.load_credentials().unwrap().unwrap()
}

/// A certificate as the former release has issued it to the client of a node.
async fn former_client(access: &ClusterAccess, name: &MemberName) -> Credentials {
    let ca = retried(async || access.load_ca().await).await;
    let spec = CertificateSpec::for_client(name.clone());
    retried(async || ca.issue_credentials(&spec).await).await
}

/// The identity of a node: its certificate is its own, as that of each node.
fn node_identity(ca: &Certificate) -> Credentials {
    let key = PrivateKey::generate().unwrap();
    let certificate = CertificateTemplate::default().self_sign(&key).unwrap();
    Credentials { key, certificate, ca: ca.clone() }
}

/// A member's certificate as the release has issued it that gave none a name for peer ports.
fn former_certificate(ca: &Credentials, name: &str, address: IpAddr, key: &PrivateKey) -> Certificate {
    let mut params = CertificateParams::new([name.to_owned(), address.to_string()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let [signer, subject] = [&ca.key, key].map(|key| KeyPair::try_from(key.expose_pkcs8()).unwrap());
    let issuer = Issuer::from_ca_cert_der(&ca.certificate.der_bytes().into(), &signer).unwrap();
    let certificate = Certificate::from_der(params.signed_by(&subject, &issuer).unwrap().der()).unwrap();
    assert!(certificate.is_signed_by(&ca.certificate) && !has_name(&certificate, &ca.certificate));
    certificate
}

fn has_name(certificate: &Certificate, ca: &Certificate) -> bool {
    SubjectNames::from_certificate(certificate).dns_names.contains(&peer_name(ca))
}

/// Turns the store into one of the former release: no peer port requires a name, and no voter has published a certificate with it.
async fn make_store_former(access: &ClusterAccess) {
    let former = Txn::new()
        .then(TxnOp::Delete(KeyRange::single_key("/etcd-ca/peer-name")))
        .then(TxnOp::Delete(KeyRange::prefix("/etcd-ca/seal/voters/")));
    retried(async || access.root_kv().txn(former.clone()).await).await;
}

/// Gives a member the certificate of the former release, which etcd presents from its next connection on.
fn unname(fixture: &EtcdFixture, ca: &Credentials) {
    let mut own = credentials(fixture);
    own.certificate = former_certificate(ca, fixture.name.as_str(), fixture.address(), &own.key);
    fixture.data.etcd.peer_pki.store_credentials(&own).unwrap();
}

/// Turns the disk of a member that is off into one of the former release.
fn make_disk_former(fixture: &EtcdFixture, ca: &Credentials) {
    unname(fixture, ca);
    fs::remove_file(fixture.data.etcd.path().join("peer_name")).unwrap();
}

/// Takes the key from a voter by which it signs, or puts it back: a voter without it keeps its certificate, as one does that is not
/// upgraded yet.
fn set_signing(fixture: &EtcdFixture, may_sign: bool) {
    let [key, spare] = ["voter_key", "spare_key"].map(|name| fixture.data.etcd.path().join(name));
    let (from, to) = if may_sign { (spare, key) } else { (key, spare) };
    fs::rename(from, to).unwrap();
}

/// Waits until the member reports this of its peer port.
async fn wait_port(access: &ClusterAccess, expected: Option<OpenPeerPort>) {
    retried(async || {
        let found = access.cluster_report().open_peer_port;
        if found == expected { Ok(()) } else { Err(found) }
    })
    .await;
}

fn unnamed_members(members: &[&str]) -> Option<OpenPeerPort> {
    let members = members.iter().map(|member| (*member).to_owned()).collect();
    Some(OpenPeerPort::Unnamed { members, silent: BTreeSet::new(), tickets: BTreeSet::new() })
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn peer_ports_of_a_new_cluster_serve_members_alone(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [(first, one), (second, _), (third, three)] = three_members(&fixtures).await;
    let ca = one.load_ca().await.unwrap().ca_certificate().clone();
    let refused = [
        former_client(&one, &fixtures[0].name).await,
        former_client(&one, &"operator".parse().unwrap()).await,
        node_identity(&ca),
    ];
    for fixture in &fixtures {
        assert!(has_name(&credentials(fixture).certificate, &ca));
        for with in &refused {
            for path in [STREAM, "/members", "/version"] {
                assert!(ask(fixture, with, path).await.is_err(), "{}: {path}", fixture.name);
            }
        }
        for member in &fixtures {
            assert!(is_served(fixture, &credentials(member)).await, "{}", fixture.name);
        }
    }
    assert_eq!(three.cluster_report().open_peer_port, None);
    // Nor does a member answer others that waits for a majority, before its etcd runs.
    for run in [first, second, third] {
        run.stop().await;
    }
    let waiting = fixtures[0].run(fixtures[0].restart_options());
    let member = credentials(&fixtures[1]);
    let listed = retried(async || ask(&fixtures[0], &member, "/members").await).await;
    assert!(listed.starts_with("HTTP/1.0 200") && listed.contains("three"), "{listed}");
    for with in &refused {
        assert!(ask(&fixtures[0], with, "/members").await.is_err());
    }
    waiting.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn members_of_the_former_release_are_upgraded_one_by_one_and_then_serve_members_alone(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let ca = give_ca(&fixtures[0]);
    let members = three_members(&fixtures).await;
    let client = former_client(&members[0].1, &fixtures[0].name).await;
    make_store_former(&members[0].1).await;
    for (run, _) in members {
        run.stop().await;
    }
    for fixture in &fixtures {
        make_disk_former(fixture, &ca);
    }
    for fixture in &fixtures[1..] {
        set_signing(fixture, false);
    }
    let mut runs: Vec<Option<MemberRun>> =
        fixtures.iter().map(|fixture| Some(fixture.run(fixture.restart_options()))).collect();
    let mut accesses = Vec::new();
    for run in &mut runs {
        accesses.push(run.as_mut().unwrap().wait_running().await);
    }
    for access in &accesses {
        wait_port(access, unnamed_members(&["two", "three"])).await;
    }
    for fixture in &fixtures {
        assert!(is_served(fixture, &client).await, "the former release serves it");
    }
    // One after the other; a majority writes while one is off.
    let mut restart = async |index: usize, accesses: &mut [ClusterAccess], upgrades: bool| {
        runs[index].take().unwrap().stop().await;
        let others = accesses[(index + 1) % 3].root_kv();
        retried(async || others.put(b"/k", format!("without {index}").as_bytes()).await).await;
        if upgrades {
            set_signing(&fixtures[index], true);
        }
        let mut run = fixtures[index].run(fixtures[index].restart_options());
        accesses[index] = run.wait_running().await;
        runs[index] = Some(run);
        let read = retried(async || accesses[index].root_kv().get(b"/k").await).await.unwrap();
        assert_eq!(read.value, format!("without {index}").as_bytes());
    };
    restart(1, &mut accesses, true).await;
    for access in &accesses {
        wait_port(access, unnamed_members(&["three"])).await;
    }
    restart(2, &mut accesses, true).await;
    for (access, fixture) in accesses.iter().zip(&fixtures) {
        wait_port(access, Some(OpenPeerPort::Restart)).await;
        assert!(has_name(&credentials(fixture).certificate, &ca.certificate));
    }
    // Each requires the name from its next start on, and reaches those that do not yet.
    for index in 0..3 {
        assert!(is_served(&fixtures[index], &client).await, "{index} was not restarted yet");
        restart(index, &mut accesses, false).await;
        assert!(!is_served(&fixtures[index], &client).await, "{index}");
        assert!(is_served(&fixtures[index], &credentials(&fixtures[(index + 1) % 3])).await);
        wait_port(&accesses[index], None).await;
        for access in &accesses {
            retried(async || match access.cluster_report().silent_voters().count() {
                0 => Ok(()),
                silent => Err(silent),
            })
            .await;
        }
    }
    for run in runs.into_iter().flatten() {
        run.stop().await;
    }
}

/// As a voter that went back to the former release and changed its address there.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_voter_that_has_lost_its_published_name_keeps_the_peer_ports_open_until_it_has_it_again(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [one, two, three] = &fixtures;
    let ca = give_ca(one);
    let members = three_members(&fixtures).await;
    make_store_former(&members[0].1).await;
    for (run, _) in members {
        run.stop().await;
    }
    for fixture in &fixtures {
        make_disk_former(fixture, &ca);
    }
    set_signing(three, false);
    let mut runs = fixtures.each_ref().map(|fixture| fixture.run(fixture.restart_options()));
    let first = runs[0].wait_running().await;
    for run in &mut runs[1..] {
        run.wait_running().await;
    }
    wait_port(&first, unnamed_members(&["three"])).await;
    // Its record has the name, and its certificate has not.
    unname(two, &ca);
    let [run_one, run_two, run_three] = runs;
    run_three.stop().await;
    set_signing(three, true);
    let mut run_three = three.run(three.restart_options());
    let third = run_three.wait_running().await;
    for access in [&first, &third] {
        wait_port(access, unnamed_members(&["two"])).await;
    }
    assert_eq!(first.root_kv().get(b"/etcd-ca/peer-name").await.unwrap(), None);
    run_two.stop().await;
    let silent = OpenPeerPort::Unnamed {
        members: BTreeSet::new(),
        silent: ["two".to_owned()].into(),
        tickets: BTreeSet::new(),
    };
    for access in [&first, &third] {
        wait_port(access, Some(silent.clone())).await;
    }
    let mut run_two = two.run(two.restart_options());
    run_two.wait_running().await;
    for access in [&first, &third] {
        wait_port(access, Some(OpenPeerPort::Restart)).await;
    }
    assert!(has_name(&credentials(two).certificate, &ca.certificate));
    for run in [run_one, run_two, run_three] {
        run.stop().await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_voter_whose_certificate_has_no_name_is_not_told_that_it_was_removed_and_finds_back(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let [one, two] = ["one", "two"].map(|name| EtcdFixture::new(version, name));
    let ca = give_ca(&one);
    let mut run_one = one.run(one.bootstrap_options());
    let first = run_one.wait_running().await;
    let new = NewMember::new(two.name.clone(), two.peer_url());
    retried(async || first.cluster_members().add_learner(&new).await).await;
    let mut run_two = two.run(two.join_options(&[&one], &first).await);
    run_two.wait_running().await;
    run_one.stop().await;
    run_two.stop().await;
    unname(&two, &ca);
    let [mut run_one, mut run_two] = [&one, &two].map(|fixture| fixture.run(fixture.restart_options()));
    let reason = format!("waits for {}, which rejects its certificate: {UNNAMED_CERTIFICATE}", one.address());
    run_two.wait_condition(&reason).await;
    let address = two.address();
    let reason = format!(
        "waits for a majority: 1 of 2 members reachable ({address} does not answer); an earlier release issued the certificate of \
         {address}, without the name of a member: if it was not removed, delete `data/cluster/etcd/peer_name` in the data directory \
         here, and restart this node"
    );
    run_one.wait_condition(&reason).await;
    // The one that refuses it stops to, and requires the name again once the other has it.
    run_one.stop().await;
    fs::remove_file(one.data.etcd.path().join("peer_name")).unwrap();
    let mut run_one = one.run(one.restart_options());
    let first = run_one.wait_running().await;
    run_two.wait_running().await;
    wait_port(&first, Some(OpenPeerPort::Restart)).await;
    assert!(has_name(&credentials(&two).certificate, &ca.certificate));
    run_one.stop().await;
    let mut run_one = one.run(one.restart_options());
    wait_port(&run_one.wait_running().await, None).await;
    run_one.stop().await;
    run_two.stop().await;
}

/// Leaves a ticket of the former release for a node at this member's URL.
async fn leave_former_ticket(access: &ClusterAccess, ca: &Credentials, joiner: &EtcdFixture) {
    let (node_key, key) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
    let node = NodeId::from_key(DEFAULT_NODE_PREFIX, &node_key.public_key()).unwrap();
    let mut template = CertificateTemplate::default();
    template.common_name = CommonName::Exact(node.to_string());
    let node_certificate = template.self_sign(&node_key).unwrap();
    let certificate = former_certificate(ca, node.as_str(), joiner.address(), &key);
    let serial: String = certificate.serial_number().iter().map(|byte| format!("{byte:02x}")).collect();
    let issued = format!("/etcd-ca/certs/{}", serial.trim_start_matches("00"));
    access.root_kv().put(issued.as_bytes(), certificate.der_bytes()).await.unwrap();
    let ticket = GoldenTicket::from_parts(TicketParts {
        node_key,
        node_certificate,
        member_credentials: Credentials { key, certificate, ca: ca.certificate.clone() },
        revocation_list: access.load_ca().await.unwrap().revocation_list().await.unwrap(),
        peers: Vec::new(),
        new_member: Peer::new(node.as_str().parse().unwrap(), joiner.peer_url()),
    });
    let key = format!("/golden/{}", joiner.peer_url().as_str().trim_start_matches("https://"));
    let tickets = access.namespaced_kv("cluster", "tickets").unwrap();
    tickets.put(key.as_bytes(), &ticket.unwrap().to_config()).await.unwrap();
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn an_unused_ticket_of_the_former_release_keeps_the_peer_port_open_until_it_is_revoked(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (fixture, joiner) = (EtcdFixture::new(version, "one"), EtcdFixture::new(version, "two"));
    let ca = give_ca(&fixture);
    let mut node = fixture.run(fixture.bootstrap_options());
    let one = node.wait_running().await;
    let url = joiner.peer_url();
    leave_former_ticket(&one, &ca, &joiner).await;
    make_store_former(&one).await;
    node.stop().await;
    make_disk_former(&fixture, &ca);
    let mut node = fixture.run(fixture.restart_options());
    let one = node.wait_running().await;
    let waits = OpenPeerPort::Unnamed {
        members: BTreeSet::new(),
        silent: BTreeSet::new(),
        tickets: [url.clone()].into(),
    };
    wait_port(&one, Some(waits)).await;
    let issuer = GoldenTicketIssuer::new(one.clone(), DEFAULT_NODE_PREFIX).unwrap();
    // A ticket of this release, at another URL, keeps nothing.
    let third = EtcdFixture::new(version, "three");
    issuer.issue_ticket(&third.peer_url()).await.unwrap();
    assert!(issuer.revoke_ticket(&url).await.unwrap());
    wait_port(&one, Some(OpenPeerPort::Restart)).await;
    let client = former_client(&one, &fixture.name).await;
    assert!(is_served(&fixture, &client).await);

    // One that a voter of the former release creates after that is refused by name, also where the port is still open.
    let key = PrivateKey::generate().unwrap();
    let certificate = former_certificate(&ca, "two", joiner.address(), &key);
    let credentials = Credentials { key, certificate, ca: ca.certificate.clone() };
    let new = NewMember::new(joiner.name.clone(), url.clone());
    retried(async || one.cluster_members().add_learner(&new).await).await;
    let revoked = one.load_ca().await.unwrap().revocation_list().await.unwrap();
    let peers = vec![Peer::new(fixture.name.clone(), fixture.peer_url())];
    let (name, address) = (joiner.name.clone(), joiner.address());
    let late = StartOptions::join_cluster(name, address, peers, Arc::new(credentials), revoked);
    let mut joined = joiner.run(late);
    let reason = format!(
        "its ticket was created by an earlier release, and opens no peer port any more: `{}` on a member, and join it by another ticket",
        url.revoke_command()
    );
    joined.wait_condition(&reason).await;
    joined.stop().await;
    node.stop().await;
    let mut node = fixture.run(fixture.restart_options());
    node.wait_running().await;
    assert!(!is_served(&fixture, &client).await);
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_member_killed_at_any_time_while_it_gets_its_name_completes_it(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixture = EtcdFixture::new(version, "one");
    let ca = give_ca(&fixture);
    let mut node = fixture.run(fixture.bootstrap_options());
    let mut access = node.wait_running().await;
    let client = former_client(&access, &fixture.name).await;
    let mut required = 0;
    for step in kill_moments(version) {
        make_store_former(&access).await;
        node.stop().await;
        make_disk_former(&fixture, &ca);
        kill_after(step, &fixture, version, "").await;
        node = fixture.run(fixture.restart_options());
        access = node.wait_running().await;
        let is_required = !is_served(&fixture, &client).await;
        required += u32::from(is_required);
        if !is_required {
            wait_port(&access, Some(OpenPeerPort::Restart)).await;
            node.stop().await;
            node = fixture.run(fixture.restart_options());
            access = node.wait_running().await;
        }
        assert!(!is_served(&fixture, &client).await, "killed at {step}");
        assert!(is_served(&fixture, &credentials(&fixture)).await, "killed at {step}");
    }
    node.stop().await;
    println!("{version:?}: {required} kills after which the next start required the name");
}

/// A bootstrap that the former release has begun is completed with the name, and the port never serves without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_bootstrap_of_the_former_release_is_completed_with_the_name() {
    let fixture = EtcdFixture::new(Newest, "one");
    let ca = give_ca(&fixture);
    let key = PrivateKey::generate().unwrap();
    let certificate = former_certificate(&ca, fixture.name.as_str(), fixture.address(), &key);
    let former = Credentials { key, certificate, ca: ca.certificate.clone() };
    fixture.data.etcd.peer_pki.store_credentials(&former).unwrap();
    let mut node = fixture.run(fixture.bootstrap_options());
    let access = node.wait_running().await;
    assert!(has_name(&credentials(&fixture).certificate, &ca.certificate));
    let client = former_client(&access, &fixture.name).await;
    assert!(!is_served(&fixture, &client).await && !is_served(&fixture, &former).await);
    assert_eq!(access.cluster_report().open_peer_port, None);
    node.stop().await;
}
