//! Who is not served, and what does not start.

use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use nodekeel_cluster::consensus::NewMember;
use nodekeel_cluster::pki::{Authority, Leaf, NewAuthority};
use nodekeel_localstorage::pki::Credentials;
use tokio::time::timeout;

use super::bed::{ADDRESS, Bed, Version};
use crate::node::HANG;

pub(super) async fn get(
    bed: &Bed,
    ca: &nodekeel_localstorage::pki::Certificate,
    with: Option<&Credentials>,
) -> Result<(), String> {
    let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(ca.to_pem()));
    if let Some(with) = with {
        tls = tls.identity(Identity::from_pem(with.certificate.to_pem(), with.key.to_pem().as_bytes()));
    }
    let options = ConnectOptions::new().with_tls(tls).with_timeout(Duration::from_secs(5));
    let mut client =
        Client::connect([bed.client_url()], Some(options)).await.map_err(|error| error.to_string())?;
    client.get("/k", None).await.map(drop).map_err(|error| format!("{error:?}"))
}

pub(super) async fn a_revocation_comes_to_the_disk_and_refuses_the_client(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    let authority = Authority::load(running.root()).await.unwrap();
    let ca = authority.certificate();
    let client = authority.issue(&Leaf::client("revoketest".parse().unwrap())).await.unwrap();
    let other = authority.issue(&Leaf::client("stays".parse().unwrap())).await.unwrap();
    get(&bed, ca, Some(&client)).await.unwrap();
    authority.revoke("revoketest").await.unwrap();
    bed.revokes(ca, std::slice::from_ref(&client.certificate));
    let refused = get(&bed, ca, Some(&client)).await;
    assert!(refused.is_err(), "a client that was revoked is refused");
    get(&bed, ca, Some(&other)).await.expect("and no other");
    node.stop().await;
}

pub(super) async fn only_who_has_a_certificate_is_served(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    let authority = Authority::load(running.root()).await.unwrap();
    let ca = authority.certificate();
    assert!(get(&bed, ca, None).await.is_err(), "who has none");
    let mut foreign = NewAuthority::generate().unwrap();
    let client = foreign.issue(&Leaf::client("client".parse().unwrap())).unwrap();
    assert!(get(&bed, ca, Some(&client)).await.is_err(), "who has one of another authority");
    let server = authority.issue(&Leaf::node("server".parse().unwrap(), vec![ADDRESS])).await.unwrap();
    assert!(get(&bed, ca, Some(&server)).await.is_err(), "who may only be a server");
    node.stop().await;
}

pub(super) async fn what_does_not_fit_the_disk_is_refused(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.restart());
    assert!(node.failure().await.contains("no member to go on with"));
    node.stop().await;
    let mut node = bed.run(bed.create());
    node.running().await;
    node.stop().await;
    let mut node = bed.run(bed.restart());
    node.running().await;
    let other = Bed::new(version, "two");
    let mut other_node = other.run(other.create());
    let foreign = bed.join(&[&other], &other_node.running().await).await;
    other_node.stop().await;
    node.stop().await;
    let mut node = bed.run(foreign);
    assert!(node.failure().await.contains("another member or cluster"));
    node.stop().await;
    let mut node = bed.run(bed.restart());
    timeout(HANG, node.running()).await.expect("and nothing of it is lost");
    node.stop().await;
}

pub(super) async fn a_member_that_was_revoked_hears_of_it_and_does_not_start_again(version: Version) {
    let (first, second) = (Bed::new(version, "one"), Bed::new(version, "two"));
    let mut node = first.run(first.create());
    let one = node.running().await;
    one.members().add_learner(&NewMember::new(second.name.clone(), second.url())).await.unwrap();
    let mut joined = second.run(second.join(&[&first], &one).await);
    joined.running().await;
    let authority = Authority::load(one.root()).await.unwrap();
    let revoked = authority.revoke("two").await.unwrap();
    let ca = authority.certificate();
    for bed in [&first, &second] {
        bed.revokes(ca, &revoked);
    }
    joined.stop().await;
    let mut expelled = second.run(second.restart());
    let failure = expelled.failure().await;
    assert!(failure.contains("cert.pem has been revoked"), "neither it nor its client: {failure}");
    expelled.stop().await;
    node.stop().await;
}
