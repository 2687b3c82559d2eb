//! A member that comes back at another address, and what every member has so that it can.

use std::net::IpAddr;

use nodekeel_localstorage::pki::Credentials;
use nodekeel_localstorage::tree::Etcd;
use tokio::task::spawn_blocking;

use super::backend;
use super::files::{self, Prepared};
use super::members::EtcdMembers;
use crate::consensus::{ConsensusError, Member, MemberName, Membership as _, MembershipError, PeerUrl};
use crate::pki::{Authority, Leaf};

/// Has the member's key certified for its address, unless it is, and this node's client, unless that was done. It can be
/// killed at any step: the next start does what is missing, and what was issued and not stored is of a key that nobody has,
/// or of the member's own.
pub(super) async fn certify(
    authority: &Authority,
    files: &Etcd,
    prepared: Prepared,
    name: &MemberName,
    address: IpAddr,
) -> Result<(), ConsensusError> {
    if prepared.client.is_none() {
        let client = authority.issue(&Leaf::client(name.clone())).await.map_err(ConsensusError::Authority)?;
        store(files, client, files::keep_client).await?;
    }
    if prepared.is_certified_at(address) {
        return Ok(());
    }
    let Credentials { key, ca, .. } = prepared.credentials;
    let leaf = Leaf::member(name.clone(), address);
    let certificate = authority.certify(key.public(), &leaf).await.map_err(ConsensusError::Authority)?;
    // The old certificate stays good: it is of the same key, which nobody else has.
    store(files, Credentials { key, certificate, ca }, files::keep_member).await?;
    tracing::info!(%address, "the member has a certificate of its new address");
    Ok(())
}

async fn store(
    files: &Etcd,
    credentials: Credentials,
    keep: fn(&Etcd, &Credentials) -> Result<(), ConsensusError>,
) -> Result<(), ConsensusError> {
    let files = files.clone();
    let stored = spawn_blocking(move || keep(&files, &credentials)).await;
    stored.map_err(backend("store credentials"))?
}

/// This member, listed where it is reached.
pub(super) async fn listed(members: &EtcdMembers, url: PeerUrl) -> Result<Member, ConsensusError> {
    let this = this(members).await?;
    if this.peer_urls == [url.as_str()] {
        return Ok(this);
    }
    members.move_to(this.id, &url).await.map_err(ConsensusError::Membership)?;
    tracing::info!(%url, "the member is listed at its new address");
    self::this(members).await
}

/// This member, as the list has it.
async fn this(members: &EtcdMembers) -> Result<Member, ConsensusError> {
    let source = |source| ConsensusError::Kv { operation: "ask the member for its number", source };
    let id = members.0.member_id().await.map_err(source)?;
    let listed = members.list().await.map_err(ConsensusError::Membership)?;
    let this = listed.into_iter().find(|member| member.id == id);
    this.ok_or(ConsensusError::Membership(MembershipError::Unknown { id }))
}
