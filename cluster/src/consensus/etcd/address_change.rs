//! A member that restarts at another address, and the credentials that every member has for that.

use nodekeel_localstorage::pki::Credentials;
use nodekeel_localstorage::tree::EtcdDir;
use tokio::task::spawn_blocking;

use super::files::{self, PreparedFiles};
use super::local_member::LocalMember;
use super::members::EtcdMembers;
use super::peer_client::PeerClient;
use crate::consensus::{ClusterMembers as _, ConsensusError, Member, MembershipError, PeerUrl};
use crate::pki::{CertificateSpec, ClusterCa};

/// Certifies the member's key for its address, and issues credentials for this node's client, unless that was
/// done before. It can be killed at any step: the next start does what is missing, and a certificate that was
/// issued and not stored belongs to a key that no longer exists, or to the member's own.
pub(super) async fn ensure_certificates(
    cluster_ca: &ClusterCa,
    member: LocalMember<'_>,
    prepared: PreparedFiles,
) -> Result<(), ConsensusError> {
    let LocalMember { files, name, address, .. } = member;
    // First: with them, the member can connect from its next address before its own certificate names that.
    if prepared.client_credentials.is_none() {
        let spec = CertificateSpec::for_client(name.clone());
        let client = cluster_ca.issue_credentials(&spec).await.map_err(ConsensusError::Ca)?;
        store_credentials(files, client, files::store_client_credentials).await?;
    }
    if prepared.is_certified_at(address) {
        return Ok(());
    }
    let Credentials { key, ca, .. } = prepared.credentials;
    let spec = CertificateSpec::for_member(name.clone(), address);
    let certificate = cluster_ca.certify_key(key.public_key(), &spec).await.map_err(ConsensusError::Ca)?;
    // The old certificate stays valid: it belongs to the same key, which no other member has.
    store_credentials(files, Credentials { key, certificate, ca }, files::store_member_credentials).await?;
    tracing::info!(%address, "the member has a certificate for its new address");
    Ok(())
}

async fn store_credentials(
    files: &EtcdDir,
    credentials: Credentials,
    keep: fn(&EtcdDir, &Credentials) -> Result<(), ConsensusError>,
) -> Result<(), ConsensusError> {
    let files = files.clone();
    let stored = spawn_blocking(move || keep(&files, &credentials)).await;
    stored.map_err(ConsensusError::backend("store credentials"))?
}

/// Refuses to start a member at another address while it still answers at the one of its certificate: this is a
/// copy of its data, and the two would divide its vote, or, where it is alone, its cluster. One that was moved
/// was stopped there before.
pub(super) async fn check_moved(
    prepared: &PreparedFiles,
    member: LocalMember<'_>,
) -> Result<(), ConsensusError> {
    if prepared.is_certified_at(member.address) {
        return Ok(());
    }
    // A certificate that names hosts would be rejected from here.
    let Some(credentials) = &prepared.client_credentials else { return Ok(()) };
    let peers =
        PeerClient::new(credentials).map_err(ConsensusError::backend("use the member's credentials"))?;
    // The certificate names the addresses at which the member was last certified to run.
    for former in prepared.certified_addresses() {
        let url = PeerUrl::new(former, member.config.peer_port);
        if peers.is_answering(member.name.as_str(), &url).await {
            return Err(ConsensusError::RunsElsewhere { name: member.name.clone(), url });
        }
    }
    Ok(())
}

/// This member, listed at its present URL.
pub(super) async fn ensure_listed(members: &EtcdMembers, url: PeerUrl) -> Result<Member, ConsensusError> {
    let this = this_member(members).await?;
    if this.peer_urls == [url.as_str()] {
        return Ok(this);
    }
    // A repeated call sets the same URL, so that a lost answer does no harm.
    members.update_peer_url(this.id, &url).await.map_err(ConsensusError::Membership)?;
    tracing::info!(%url, "the member is listed at its new address");
    self::this_member(members).await
}

/// This member's entry in the list.
async fn this_member(members: &EtcdMembers) -> Result<Member, ConsensusError> {
    let source = |source| ConsensusError::Kv { operation: "read the member's id", source };
    let id = members.kv.member_id().await.map_err(source)?;
    let listed = members.list_members().await.map_err(ConsensusError::Membership)?;
    let this = listed.into_iter().find(|member| member.id == id);
    this.ok_or(ConsensusError::Membership(MembershipError::MemberNotFound { id }))
}
